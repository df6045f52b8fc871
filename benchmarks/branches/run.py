"""Whether branches side by side pay: plans found with and without them, predicted, and on CPU ranks measured.

    python -m benchmarks.branches.run [--rounds 200] [--first]

Both are found by the default search; without, the pass that puts operators beside each other leaves plans as they are.
Where the mesh is this host's, both programs are timed in turns, a step each, on ranks of one thread and one core: a
step takes as long as on the slower rank. `--first`: ranks come before all else that runs on the machine (a real-time
schedule, which takes rights), so that programs of others, which may hold up one rank and not the other, stay out of it.
Written to results.json and results.md with command, machine and date.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import autopar
from benchmarks.facts import facts, write_record
from benchmarks.runtime.run import free_port
from benchmarks.side_by_side import join, leave
from models import inception, two_towers

HERE = Path(__file__).parent
CORES = (0, 1)


class Case(NamedTuple):
    """Inference of a batch on two devices of a node."""

    module: ModuleType
    config: Any
    profile: str

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.module.__name__.removeprefix('models.')}, batch of {self.config.batch_size}, 2 {self.profile}"

    def build(self) -> tuple[torch.nn.Module, Mapping[str, Any]]:
        """The model and its batch."""
        torch.manual_seed(0)
        return self.module.build(self.config).eval(), self.module.example_inputs(self.config)


CASES = (
    *(Case(two_towers, two_towers.large(size), "cpu") for size in (1, 4, 8, 16)),
    Case(inception, inception.inception_v3(1), "cpu"),
    *(Case(two_towers, two_towers.large(size), "h100") for size in (4, 64)),
    Case(inception, inception.inception_v3(1), "h100"),
)


def found(case: Case) -> dict[str, autopar.PlannedProgram]:
    """The programs of the best plans with branches and without."""
    with torch.device("meta"):
        model, batch = case.build()
    mesh = autopar.Mesh(case.profile, devices_per_node=2)
    programs = {"with": autopar.parallelize(model, mesh, batch, mode="inference", check=False)}
    with mock.patch("autopar.passes.branch.with_branches", lambda graph, plan, *others: plan):
        programs["without"] = autopar.parallelize(model, mesh, batch, mode="inference", check=False)
    return programs


def measured(number: int, sources: Mapping[str, str], rounds: int, first: bool) -> dict[str, list[float]]:
    """Milliseconds of each program's steps."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "sources.json").write_text(json.dumps(dict(sources)))
        mp.spawn(_run_rank, (free_port(), number, place, rounds, first), nprocs=len(CORES))
        times: dict[str, list[float]] = json.loads((place / "times.json").read_text())
    return times


def _run_rank(rank: int, port: int, number: int, place: Path, rounds: int, first: bool) -> None:
    from autopar import runtime
    from autopar.program import load_source

    join(rank, len(CORES), port, CORES)
    model, batch = CASES[number].build()
    programs = {}
    for name, source in json.loads((place / "sources.json").read_text()).items():
        programs[name] = runtime.build(load_source(source).Program)
        programs[name].init_from(model, broadcast=False)
    if first:
        for task in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(task), os.SCHED_RR, os.sched_param(10))
    times: dict[str, list[float]] = {name: [] for name in programs}
    with torch.no_grad():
        for _ in range(rounds):
            for name, program in programs.items():
                times[name].append(_step_ms(program, batch))
    if rank == 0:
        (place / "times.json").write_text(json.dumps(times))
    leave()


def _step_ms(program: Any, batch: Mapping[str, Any]) -> float:
    """Of the second of two steps, on the slower rank."""
    program(**batch)
    dist.barrier()
    start = time.perf_counter()
    program(**batch)
    elapsed = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item() * 1e3


def row(number: int, rounds: int, first: bool) -> dict[str, Any]:
    """Of one case: the steps, how many times longer one without branches takes, and quartiles of what was measured."""
    case, programs = CASES[number], found(CASES[number])
    predicted = {name: program.plan.predicted.step_time_ns / 1e6 for name, program in programs.items()}
    told: dict[str, Any] = {
        "case": case.name, "forks": len(programs["with"].plan.stage.forks), "predicted_ms": predicted,
        "predicted_ratio": predicted["without"] / predicted["with"],
    }  # fmt: skip
    if case.profile == "cpu" and told["forks"]:
        times = measured(number, {name: program.source for name, program in programs.items()}, rounds, first)
        longer = [one / other for one, other in zip(times["without"], times["with"], strict=True)]
        told["measured_ms"] = {name: statistics.median(ms) for name, ms in times.items()}
        told["measured_ratio"] = statistics.median(longer)
        told["quartiles"] = statistics.quantiles(longer, n=4)
    return told


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [
        "Inference; ms a step without branches → with them, and how many times longer without takes.", "",
        "| model | forks | predicted | ratio | measured, median | ratio, quartiles |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for told in rows:
        ends = ["", ""]
        if "measured_ms" in told:
            low, _, high = told["quartiles"]
            ends = [_arrow(told["measured_ms"]), f"{told['measured_ratio']:.3f} ({low:.3f} … {high:.3f})"]
        cells = [
            told["case"],
            str(told["forks"]),
            _arrow(told["predicted_ms"]),
            f"{told['predicted_ratio']:.3f}",
            *ends,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _arrow(ms: Mapping[str, float]) -> str:
    return f"{ms['without']:.3f} → {ms['with']:.3f}"


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first", action="store_true")
    options = parser.parse_args()
    rows = []
    for number in range(len(CASES)):
        rows.append(row(number, options.rounds, options.first))
        print(json.dumps(rows[-1]), flush=True)
    write_record(HERE / "results", facts("benchmarks.branches.run"), {"rows": rows}, table(rows))


if __name__ == "__main__":
    main()
