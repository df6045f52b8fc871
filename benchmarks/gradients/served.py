"""Gradients that are summed over servers, or by all-reduce: predicted, and on ranks of this host; see `run`.

Each process has a link of its own, of so many megabytes a second in each direction, which what it sends and receives
occupies one after the other: of an all-reduce 2(n−1)/n of its bytes, of a sum over servers what it pushes and pulls,
and what others do. Nothing is waited for less long than that takes. Both programs take turns in the same processes, as
in `benchmarks.side_by_side`; servers are processes beside them.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from autopar import runtime as rt
from autopar.program import load_source
from autopar.runtime import comm
from autopar.runtime.servers import SummingGroup
from benchmarks.runtime.run import free_port
from benchmarks.side_by_side import STEPS, Build, Times, Turn, _step


class Link:
    """Of this process: when each direction is free."""

    def __init__(self, bytes_a_second: float) -> None:
        self.bytes_a_second, self._out, self._in = bytes_a_second, 0.0, 0.0

    def at(self, sent: float, received: float) -> float:
        """When so many bytes have gone both ways, of what starts now."""
        now = time.perf_counter()
        self._out = max(now, self._out) + sent / self.bytes_a_second
        self._in = max(now, self._in) + received / self.bytes_a_second
        return max(self._out, self._in)


class Delayed:
    """A collective that ends no earlier than its link lets it."""

    def __init__(self, work: Any, at: float) -> None:
        self._work, self._at = work, at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))


def slow_down(bytes_a_second: float) -> None:
    """From here on, sums of this process go over such a link."""
    link, start = Link(bytes_a_second), comm.start_all_reduce
    push, pull = SummingGroup._push, SummingGroup._pull

    def start_delayed(buffer: Tensor, axis: comm.Axis) -> comm.Wait:
        size = 2 * (axis.size - 1) / axis.size * buffer.nbytes
        at, wait = link.at(size, size), start(buffer, axis)

        def waited() -> None:
            wait()
            time.sleep(max(0.0, at - time.perf_counter()))

        return waited

    def sizes(group: SummingGroup, lengths: list[int], itemsize: int) -> tuple[int, int]:
        """Of a piece, bytes of what a process has summed by others, and of what it sums for others."""
        own, is_worker = lengths[group.index], group.index < group.workers
        return itemsize * (sum(lengths) - own) * is_worker, itemsize * own * (group.workers - is_worker)

    def pushed(group: SummingGroup, data: Tensor | None, lengths: list[int], dtype: torch.dtype) -> Any:
        given, taken = sizes(group, lengths, dtype.itemsize)
        at, (work, received) = link.at(given, taken), push(group, data, lengths, dtype)
        return Delayed(work, at), received

    def pulled(group: SummingGroup, data: Tensor | None, received: Tensor, lengths: list[int]) -> Any:
        given, taken = sizes(group, lengths, received.element_size())
        at, (work, sent) = link.at(taken, given), pull(group, data, received, lengths)
        return Delayed(work, at), sent

    comm.start_all_reduce = start_delayed
    SummingGroup._push, SummingGroup._pull = pushed, pulled  # type: ignore[method-assign] # delayed


def served_side_by_side(
    build: Build, sources: Mapping[str, str], workers: int, servers: int, rounds: int, bytes_a_second: float
) -> dict[str, Times]:
    """The times of each program, by its name, of which the first has servers; the first round is left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "sources.json").write_text(json.dumps(dict(sources)))
        world = workers + servers
        mp.spawn(_run, (world, free_port(), path, build, rounds, bytes_a_second), nprocs=world)
        found = json.loads((path / "times.json").read_text())
    return {name: Times(*map(list, zip(*turns[1:], strict=True))) for name, turns in found.items()}


def _run(
    rank: int, world: int, port: int, folder: Path, build: Callable[[], Any], rounds: int, bytes_a_second: float
) -> None:  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rt.keep_freed_memory()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    sources = json.loads((folder / "sources.json").read_text())
    programs = {name: load_source(text).Program for name, text in sources.items()}
    slow_down(bytes_a_second)
    if rt.is_server(next(iter(programs.values()))):
        rt.serve(next(iter(programs.values())))
        return
    model, batch = build()
    trainers = {}
    for name, program in programs.items():
        built = rt.build(program)
        built.init_from(model, broadcast=False)
        trainers[name] = built, torch.optim.AdamW(built.parameters(), lr=1e-4)
    times: dict[str, list[Turn]] = {name: [] for name in trainers}
    for _ in range(rounds + 1):
        for name, (built, optimizer) in trainers.items():
            dist.barrier()
            start, loss = time.perf_counter(), torch.tensor(0.0)
            for _ in range(STEPS):
                loss = _step(built, optimizer, batch)
            elapsed = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            times[name].append(Turn(elapsed.item() / STEPS * 1e3, 0.0, loss.item()))
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()
