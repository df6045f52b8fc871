"""Times several emitted programs of one model on the same gloo ranks of this host, in turns.

All programs are built in the same processes and timed in rounds, each for `STEPS` steps after one to warm up, so that a
drift of the machine hits all alike; a step is zero_grad, train_step and AdamW's step, and takes as long as on the
slowest rank. What other programs used of the machine meanwhile is noted with each turn. Ranks have one thread each.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from autopar import runtime
from benchmarks.accuracy.cpu import busy_seconds
from benchmarks.runtime.run import free_port

STEPS = 2
QUIET, ENOUGH = 0.02, 4  # others' share of the machine in a turn; turns that are so quiet

Build = Callable[[], tuple[nn.Module, Mapping[str, Any]]]
"""A model and a global batch; a function that processes can import."""


class Times(NamedTuple):
    """Of each round: milliseconds a step, the share of the machine that other programs used, and the last loss."""

    ms: list[float]
    others: list[float]
    losses: list[float]

    def median(self) -> float:
        """Over the quiet rounds, or over all where these are few."""
        quiet = [ms for ms, others in zip(self.ms, self.others, strict=True) if others <= QUIET]
        return statistics.median(quiet if len(quiet) >= ENOUGH else self.ms)


class Turn(NamedTuple):
    """One of a program: what `Times` has of each round."""

    ms: float
    others: float
    loss: float


def side_by_side(
    build: Build, sources: Mapping[str, str], world: int, rounds: int, cores: Sequence[int] | None = None
) -> dict[str, Times]:
    """The times of each program, by its name; the first round is left out. cores: that of each rank, if any."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "sources.json").write_text(json.dumps(dict(sources)))
        mp.spawn(_run_rank, (world, free_port(), path, build, rounds, cores), nprocs=world)
        found = json.loads((path / "times.json").read_text())
    return {name: Times(*map(list, zip(*turns[1:], strict=True))) for name, turns in found.items()}


def ratios(one: Times, other: Times) -> list[float]:
    """How many times longer one takes, round by round."""
    return [first / second for first, second in zip(one.ms, other.ms, strict=True)]


def join(rank: int, world: int, port: int, cores: Sequence[int] | None = None) -> None:
    """Makes this process a rank of one thread, on its core where these are given."""
    warnings.simplefilter("ignore")
    if cores is not None:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    torch.manual_seed(0)


def leave() -> None:
    """Ends what `join` began, once all ranks are here."""
    dist.barrier()
    dist.destroy_process_group()


def _run_rank(
    rank: int, world: int, port: int, folder: Path, build: Build, rounds: int, cores: Sequence[int] | None
) -> None:
    from autopar.program import load_source

    join(rank, world, port, cores)
    model, batch = build()
    trainers = {}
    for name, source in json.loads((folder / "sources.json").read_text()).items():
        built = runtime.build(load_source(source).Program)
        built.init_from(model, broadcast=False)
        trainers[name] = built, torch.optim.AdamW(built.parameters(), lr=1e-4)
    times: dict[str, list[Turn]] = {name: [] for name in trainers}
    for _ in range(rounds + 1):
        for name, (built, optimizer) in trainers.items():
            times[name].append(_turn(built, optimizer, batch))
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    leave()


def _turn(built: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any]) -> Turn:
    loss = _step(built, optimizer, batch)
    dist.barrier()
    busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        loss = _step(built, optimizer, batch)
    elapsed, together = torch.tensor([time.perf_counter() - start]), torch.tensor([time.process_time() - own])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    dist.all_reduce(together)
    others = (busy_seconds() - busy - together.item()) / elapsed.item() / (os.cpu_count() or 1)
    return Turn(elapsed.item() / STEPS * 1e3, max(0.0, others), loss.item())


def _step(built: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any]) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = built.train_step(**batch)
    optimizer.step()
    return loss
