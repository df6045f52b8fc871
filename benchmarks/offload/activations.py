"""Activations that wait on the host, on two gloo ranks of one thread each: predicted beside measured steps and peaks.

    python -m benchmarks.offload.activations [--cases gpt-small/dp …] [--links 1e9 …] [--rounds 5] [--steps 2] [--page FILE]

Each case is a model and a template of `benchmarks.accuracy.pairs`, planned with and without `offload="activations"`,
under links of several rates, which the profile states and the runtime delays copies to. A round times some steps of
each program between two barriers, in turn; a program's step is the median of the third of its rounds in which others
used least of the cores, and its ratio that of the steps with copies over those without. Peaks are those of torch's own
allocations in one step more (`benchmarks.accuracy.lifetimes`), on the fuller rank; what is on the host is no part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import autopar
from autopar import runtime
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from benchmarks.accuracy.cpu import busy_seconds
from benchmarks.accuracy.lifetimes import live_storages, track
from benchmarks.accuracy.memory import own_shard
from benchmarks.accuracy.pairs import TEMPLATES, WORLD, build_model, traced
from benchmarks.facts import facts
from benchmarks.runtime.run import free_port

CASES = ("gpt-small/dp", "gpt-long/zero3", "llama-small/tp", "bert-small/dp", "wide_resnet-small/zero3")
LINKS = (4e9, 1e9, 2.5e8)
COPY_NS = 20_000


class Program(NamedTuple):
    """A case's program under a link; None without copies."""

    case: str
    link: float | None

    def __str__(self) -> str:
        return self.case if self.link is None else f"{self.case}, {self.link / 1e9:g} GB/s"


class Told(NamedTuple):
    """What a plan predicts: nanoseconds of a step, bytes of a device and of its host."""

    step_ns: int
    peak_bytes: int
    host_bytes: int


def profile_file(folder: Path, link: float | None) -> str:
    """This host's profile with that link."""
    if link is None:
        return "cpu"
    from autopar.cost.profile import profile_to_json

    data = profile_to_json(load_profile("cpu"))
    data["host_memory"] = {
        "capacity_bytes": 2**34, "down_bandwidth": link, "up_bandwidth": link, "copy_ns": COPY_NS, "is_simulated": True,
        "provenance": {"kind": "assumed", "source": "a simulated link of this benchmark", "date": "2026-11-27"},
    }  # fmt: skip
    file = folder / f"cpu-{link:g}.json"
    file.write_text(json.dumps(data))
    return str(file)


def write(program: Program, folder: Path) -> Told:
    """Plans and emits a program."""
    name, _, template = program.case.partition("/")
    mesh = autopar.Mesh(profile_file(folder, program.link), devices_per_node=WORLD)
    offload = "none" if program.link is None else "activations"
    graph, (model, batch) = traced(name), build_model(name)
    plan = template_of_graph(graph, mesh, **TEMPLATES[template], offload=offload)
    source_of(program, folder).write_text(autopar.parallelize(model, mesh, batch, plan=plan, check=False).source)
    told = plan.predicted
    return Told(told.step_time_ns, told.peak_bytes, told.host_bytes or 0)


def source_of(program: Program, folder: Path) -> Path:
    """Where its source lies."""
    return folder / f"{str(program).replace('/', ' ')}.py"


# The ranks ----------------------------------------


class Trainer:
    """A program on this rank."""

    def __init__(self, program: Program, folder: Path) -> None:
        from autopar.program import load_source

        model, batch = build_model(program.case.partition("/")[0])
        self.known = live_storages()
        self.rank = runtime.build(load_source(source_of(program, folder).read_text()).Program)
        self.rank.init_from(model, broadcast=False)
        self.optimizer = torch.optim.AdamW(self.rank.parameters(), lr=1e-4)
        self.shard = own_shard(self.rank, batch)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.rank.train_step(*self.shard, local=True)
        self.optimizer.step()

    def timed(self, steps: int) -> tuple[float, float]:
        """Nanoseconds a step of the slower rank, and others' share of the cores."""
        dist.barrier()
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step()
        elapsed, own = time.perf_counter() - start, time.process_time() - own
        longest, together = torch.tensor([elapsed]), torch.tensor([own])
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        dist.all_reduce(together)
        others = (busy_seconds() - busy - together.item()) / longest.item() / (os.cpu_count() or 1)
        return longest.item() / steps * 1e9, max(0.0, others)

    def peak_bytes(self) -> int:
        peak = torch.tensor([track(self.step, self.known).peak_bytes])
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak.item())


def run_rank(rank: int, port: int, programs: Sequence[Program], folder: Path, rounds: int, steps: int) -> None:
    """Measures all programs, case by case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for case in dict.fromkeys(program.case for program in programs):
        own = [program for program in programs if program.case == case]
        peaks = {}
        for program in own:
            alone = Trainer(program, folder)
            alone.step()
            peaks[program] = alone.peak_bytes()
            del alone
        trainers = {program: Trainer(program, folder) for program in own}
        times: dict[Program, list[tuple[float, float]]] = {program: [] for program in own}
        for trainer in trainers.values():
            trainer.step()
        for _ in range(rounds):
            for program, trainer in trainers.items():
                times[program].append(trainer.timed(steps))
        for program in own:
            found[str(program)] = {"peak_bytes": peaks[program], "times": times[program]}
        if rank == 0:
            print(f"measured {case}", flush=True)
            (folder / "measured.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# The page ----------------------------------------


def step_of(times: Sequence[tuple[float, float]]) -> float:
    """The median of the third of rounds that others disturbed least."""
    quiet = sorted(times, key=lambda pair: pair[1])[: max(1, -(-len(times) // 3))]
    return statistics.median(ns for ns, _ in quiet)


def rows(programs: Sequence[Program], told: dict[Program, Told], measured: dict[str, Any]) -> list[str]:
    """A table in Markdown."""
    lines = [
        "| program | step, predicted | measured | off | × without copies, predicted | measured | off | "
        "peak, predicted | measured | on the host |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for program in programs:
        plain = program._replace(link=None)
        ns, base = (step_of(measured[str(one)]["times"]) for one in (program, plain))
        wanted, ratio, real = told[program].step_ns, told[program].step_ns / told[plain].step_ns, ns / base
        peak = measured[str(program)]["peak_bytes"]
        over = " **above**" if peak > told[program].peak_bytes else ""
        lines.append(
            f"| {program} | {wanted / 1e6:.1f} ms | {ns / 1e6:.1f} ms | {wanted / ns - 1:+.1%} | {ratio:.2f} | "
            f"{real:.2f} | {ratio / real - 1:+.1%} | {told[program].peak_bytes / 1e6:.1f} MB | "
            f"{peak / 1e6:.1f} MB{over} | {told[program].host_bytes / 1e6:.1f} MB |"
        )
    return lines


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--links", nargs="+", type=float, default=LINKS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    programs = [Program(case, link) for case in options.cases for link in (None, *options.links)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = {program: write(program, folder) for program in programs}
        mp.spawn(run_rank, (free_port(), programs, folder, options.rounds, options.steps), nprocs=WORLD)  # type: ignore[no-untyped-call] # torch's
        measured = json.loads((folder / "measured.json").read_text())
    text = "\n".join([*rows(programs, told, measured), "", *(f"{k}: {v}  " for k, v in facts(__spec__.name).items())])
    print(text)
    if options.page:
        options.page.write_text(text + "\n")


if __name__ == "__main__":
    main()
