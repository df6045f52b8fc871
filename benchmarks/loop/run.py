"""The closed loop on this host: a plan is traced, its profile learns from that, and the step is predicted again.

    python -m benchmarks.loop.run [--models MODEL ...] [--layouts NAME ...] [--profiles NAME ...] [--rounds 3]

For each model (module:config) and layout, pairs of runs, one to learn from and one to hold the next prediction against.
`error` is the median over pairs of the error of the profile before any run, `error again` that of a profile that has
learned from the one run of a pair, against the other.

What else the host does is kept out. One rank: a step is what it spends of a processor, and both runs of a pair take
place at the same time. Several ranks: a step is what passes until the last one ends; the ranks are in the real-time
class (where the system allows it), so that no other program has their cores, and twice as many runs as rounds follow
each other. The speed of a shared host changes between them, and of its cores each by itself: a pair is two runs whose
ranks had all done in a step what it takes of a processor after the same time, to within a tenth, each run in one pair
at most. So are pairs of one rank. That rule knows of no prediction.

Profiles are the host's own, and copies of it that are wrong about memory-bound operators, products, what a call costs,
or the optimizer. `of another` is the error for a model after a run of the model above it in the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import autopar
from autopar.cli import load_model
from autopar.cost.profile import Profile, profile_from_json, profile_to_json
from autopar.ir.plan import Plan
from autopar.observed.kineto import RankTrace, read_traces
from autopar.observed.learning import learned
from autopar.observed.measured import measured
from autopar.profiler import load_profile
from autopar.program import PlannedProgram
from benchmarks.facts import facts

HERE = Path(__file__).parent
MODELS = ("models.gpt:Config", "models.llama:Config", "models.wide_resnet:Config")
PRODUCTS = ("matmul", "attention", "convolution")
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "dp 2": {"dp": 2},
    "tp 2": {"tp": 2},
    "zero 3 on 2": {"dp": 2, "zero": 3},
    "pp 2": {"pp": 2, "microbatches": 2},
    "dp 4": {"dp": 4},
    "dp 2, tp 2": {"dp": 2, "tp": 2},
}
EVEN = 1.1  # the most by which processor times of a step may differ within a pair


def _slow_curves(data: dict[str, Any], times: float, is_meant: Any) -> None:
    for item in data["operators"]:
        if is_meant(item["family"]):
            for side in ("forward", "backward"):
                item[side] = [[work, share / times] for work, share in item[side]]


def as_it_is(data: dict[str, Any]) -> None:
    """The host's own."""


def slow_memory(data: dict[str, Any]) -> None:
    """Operators that move memory take three times as long as they do."""
    _slow_curves(data, 3.0, lambda family: family not in (*PRODUCTS, "optimizer"))


def fast_products(data: dict[str, Any]) -> None:
    """Products and convolutions take half as long as they do."""
    _slow_curves(data, 0.5, lambda family: family in PRODUCTS)
    for table in data["tables"]:  # rates are nanoseconds
        table["rates"] = [rate / 2 for rate in table["rates"]]


def dear_calls(data: dict[str, Any]) -> None:
    """Each call and each view costs 60 µs more than it does."""
    for name in ("launch_ns", "view_ns"):
        data["facts"][name] = [ns + 60_000 for ns in data["facts"][name]]
    for item in data["operators"]:
        item["call_ns"] = item.get("call_ns") and [ns + 60_000 for ns in item["call_ns"]]


def slow_update(data: dict[str, Any]) -> None:
    """The optimizer takes four times as long as it does."""
    _slow_curves(data, 4.0, lambda family: family == "optimizer")
    data["runtime"]["optimizer_ns"] = [4 * ns for ns in data["runtime"]["optimizer_ns"]]


PROFILES = {one.__name__.replace("_", " "): one for one in (
    as_it_is, slow_memory, fast_products, dear_calls, slow_update
)}  # fmt: skip


class Pair(NamedTuple):
    """A run to learn from, and the step of the run beside it, in ns."""

    taught: list[RankTrace]
    held_out_ns: int


class Setup(NamedTuple):
    """A model and how it is laid out."""

    model: str
    layout: str

    @property
    def num_ranks(self) -> int:
        """Of the layout."""
        given = LAYOUTS[self.layout]
        return math.prod(given.get(name, 1) for name in ("dp", "tp", "pp"))


@cache
def template(setup: Setup) -> Plan:
    """The layout's plan under the host's own profile."""
    module, inputs = load_model(setup.model)
    mesh = autopar.Mesh("cpu", devices_per_node=setup.num_ranks)
    return autopar.template_plan(module, mesh, inputs, check=False, **LAYOUTS[setup.layout])


@cache
def planned(setup: Setup, profile: Path) -> PlannedProgram:
    """The same plan under another profile."""
    data = json.loads(template(setup).to_json())
    data["mesh"] = [[str(profile), *shape] for _, *shape in data["mesh"]]
    module, inputs = load_model(setup.model)
    mesh = autopar.Mesh(str(profile), devices_per_node=setup.num_ranks)
    return autopar.parallelize(module, mesh, inputs, plan=Plan.from_json(json.dumps(data)), check=False)


def started(folder: Path, num_ranks: int, into: Path, steps: int) -> subprocess.Popen[bytes]:
    """A traced run of the folder's program."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    what = ["-m", "autopar.runtime.recording", str(folder), "--steps", str(steps), "--into", str(into)]
    command = [sys.executable, *(ranks if num_ranks > 1 else []), *what]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    alone = _take_cores if num_ranks > 1 else None
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=alone, **quiet)


def _take_cores() -> None:
    """Puts the process, and those that it starts, before all others of the host, where that is allowed."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def ended(run: subprocess.Popen[bytes], into: Path) -> list[RankTrace]:
    """The traces of a run."""
    if run.wait():
        raise SystemExit(f"{run.args} failed")
    return read_traces(into)


class Run(NamedTuple):
    """A traced run, and what a step of it took of a processor until the last rank had done, and passed, in ns."""

    number: int
    traces: list[RankTrace]
    busy_ns: int
    step_ns: int


def runs(setup: Setup, out: Path, folder: Path, count: int, steps: int) -> list[Run]:
    """So many, one after the other."""
    found = []
    for number in range(count):
        into = folder / str(number) / "taught"
        traces = ended(started(out, setup.num_ranks, into, steps), into)
        told = measured(traces, range(setup.num_ranks))
        found.append(Run(number, traces, told.last_busy_ns, told.step_ns))
    return found


def evenly_paired(done: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Pairs of runs that took nearly the same of a processor, the earlier one first; each run is in one at most."""
    left = sorted(done, key=lambda run: run.busy_ns)
    while len(left) > 1:
        one, other = left[:2]
        if other.busy_ns > EVEN * one.busy_ns:
            left = left[1:]
            continue
        first, second = sorted((one, other), key=lambda run: run.number)
        yield first, second
        left = left[2:]


def pairs(setup: Setup, profile: Path, folder: Path, rounds: int, steps: int) -> list[Pair]:
    """Of one rank, two runs at the same time each; of several, those out of twice as many runs as rounds in which the
    host had one speed."""
    out = planned(setup, profile).save_traced(folder / "out")
    if setup.num_ranks == 1:
        both = [_beside_each_other(out, folder / str(number), steps) for number in range(2 * rounds)]
        even = [pair for pair in both if _is_even(*pair)][:rounds]
        if not even:
            raise SystemExit(f"no two runs of {setup} at the same time took the same of a processor; try again")
        return [Pair(taught, measured(held_out, range(1)).step_ns) for taught, held_out in even]
    done = runs(setup, out, folder, 2 * rounds, steps)
    print(f"<!-- {setup.model}, {setup.layout}: {_speeds(done)} -->", flush=True)
    found = [Pair(one.traces, other.step_ns) for one, other in evenly_paired(done)]
    if not found:
        raise SystemExit(f"no two runs of {setup} took the same of a processor: {_speeds(done)}; try again")
    return found


def _speeds(done: Sequence[Run]) -> str:
    return ", ".join(f"{run.busy_ns / 1e6:.1f} of a processor in {run.step_ns / 1e6:.1f} ms" for run in done)


def _is_even(*both: list[RankTrace]) -> bool:
    fast, slow = sorted(measured(traces, range(1)).last_busy_ns for traces in both)
    return slow <= EVEN * fast


def _beside_each_other(out: Path, folder: Path, steps: int) -> tuple[list[RankTrace], list[RankTrace]]:
    into = folder / "taught", folder / "held_out"
    both = [started(out, 1, path, steps) for path in into]
    taught, held_out = map(ended, both, into)
    return taught, held_out


def taught(profile: Path, setup: Setup, traces: Sequence[RankTrace], folder: Path) -> Path:
    """The profile that has learned from a run, as if the plan had been made with it."""
    expected = json.loads((planned(setup, profile).save_traced(folder / "told") / "expected.json").read_text())
    own = [replace(trace, expected=expected) for trace in traces]
    found = learned(profile_from_json(json.loads(profile.read_text()), str(profile)), own, date.today().isoformat())
    run = "_".join(traces[0].path.parent.parts[-2:])
    return _written(folder / f"{profile.stem}_{run}.json", profile_to_json(found.profile))


def _written(path: Path, data: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def wrong(host: Profile, name: str, folder: Path) -> Path:
    """The profile of that name."""
    data = json.loads(json.dumps(profile_to_json(host)))
    PROFILES[name](data)
    return _written(folder / f"{name.replace(' ', '_')}.json", data)


def error(setup: Setup, profile: Path, pair: Pair) -> float:
    """The step that is predicted over that of the run that none has learned from, less 1."""
    timeline = planned(setup, profile).plan.timeline()  # what a file of a plan says was predicted under another profile
    return timeline.step_time_ns / pair.held_out_ns - 1


def rows(setups: Sequence[Setup], names: Sequence[str], rounds: int, steps: int, folder: Path) -> Iterator[str]:
    """A line for each model, layout and profile."""
    host = load_profile("cpu")
    profiles = {name: wrong(host, name, folder) for name in names}
    above: dict[tuple[str, str], list[Path]] = {}
    for number, setup in enumerate(setups):
        place = folder / str(number)
        seen = pairs(setup, wrong(host, "as it is", folder), place, rounds, steps)
        for name, profile in profiles.items():
            after = [taught(profile, setup, pair.taught, place) for pair in seen]
            before = statistics.median(error(setup, profile, pair) for pair in seen)
            again = statistics.median(abs(error(setup, one, pair)) for one, pair in zip(after, seen, strict=True))
            known = above.get((setup.layout, name), [])
            other = [abs(error(setup, one, pair)) for one in known for pair in seen]
            yield _row(setup, name, seen, before, again, other)
            above[setup.layout, name] = after


def _row(setup: Setup, name: str, seen: Sequence[Pair], before: float, again: float, other: Sequence[float]) -> str:
    steps = sorted(pair.held_out_ns for pair in seen)
    spread = f"{steps[0] / 1e6:.2f} to {steps[-1] / 1e6:.2f}"
    told = "not wrong" if abs(before) <= 0.10 else "yes" if again <= abs(before) / 2 else "NO"
    another = f"{statistics.median(other):.1%}" if other else ""
    return f"| {setup.model} | {setup.layout} | {name} | {spread} | {before:+.1%} | {again:.1%} | {told} | {another} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--profiles", nargs="*", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    told = facts("benchmarks.loop.run")
    print(f"`{told['command']}`, {told['machine']}, {told['date']}\n")
    print("| model | layout | profile | steps held against, ms | error | error again | halved | of another |")
    print("|---|---|---|---:|---:|---:|---|---:|")
    setups = [Setup(model, layout) for layout in options.layouts for model in options.models]
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(setups, options.profiles, options.rounds, options.steps, Path(folder)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
