"""The closed loop on this host: a plan is traced, its profile learns from that, and the step is predicted again.

    python -m benchmarks.loop.run [--models MODEL ...] [--profiles NAME ...] [--rounds 3]

For each model (module:config) on one rank, pairs of runs at the same time, one to learn from and one to hold the next
prediction against: what the host does besides makes both slower. A step is what the rank spends of a processor. `error`
is the median over pairs of the error of the profile before any run, `error again` that of a profile that has learned
from the one run of a pair, against the other.

Profiles are the host's own, and copies of it that are wrong about memory-bound operators, products, what a call costs,
or the optimizer. `of another` is the error for a model after a run of the model above it in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import autopar
from autopar.cli import load_model
from autopar.cost.profile import Profile, profile_from_json, profile_to_json
from autopar.observed.kineto import RankTrace, read_traces
from autopar.observed.learning import learned
from autopar.observed.measured import measured
from autopar.profiler import load_profile
from autopar.program import PlannedProgram
from benchmarks.facts import facts

HERE = Path(__file__).parent
MODELS = ("models.gpt:Config", "models.llama:Config", "models.wide_resnet:Config")
PRODUCTS = ("matmul", "attention", "convolution")


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


@cache
def planned(model: str, profile: Path) -> PlannedProgram:
    """The model on one rank."""
    module, inputs = load_model(model)
    mesh = autopar.Mesh(str(profile), devices_per_node=1)
    plan = autopar.template_plan(module, mesh, inputs, check=False)
    return autopar.parallelize(module, mesh, inputs, plan=plan, check=False)


def traced(folder: Path, into: Sequence[Path], steps: int) -> list[list[RankTrace]]:
    """Traced runs of the folder's program at the same time."""
    command = [sys.executable, "-m", "autopar.runtime.recording", str(folder), "--steps", str(steps), "--into"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen([*command, str(path)], env=environment, **quiet) for path in into]
    if any(list(map(subprocess.Popen.wait, started))):
        raise SystemExit(f"{command} failed")
    return [read_traces(path) for path in into]


def pairs(model: str, profile: Path, folder: Path, rounds: int, steps: int) -> list[Pair]:
    """One after the other."""
    out = planned(model, profile).save_traced(folder / "out")
    both = [
        traced(out, [folder / f"taught_{number}", folder / f"held_out_{number}"], steps) for number in range(rounds)
    ]
    return [Pair(taught, measured(held_out, range(1)).step_ns) for taught, held_out in both]


def taught(profile: Path, model: str, traces: Sequence[RankTrace], folder: Path) -> Path:
    """The profile that has learned from a run, as if the plan had been made with it."""
    expected = json.loads((planned(model, profile).save_traced(folder / "told") / "expected.json").read_text())
    own = [replace(trace, expected=expected) for trace in traces]
    found = learned(profile_from_json(json.loads(profile.read_text()), str(profile)), own, date.today().isoformat())
    return _written(folder / f"{profile.stem}_{traces[0].path.parent.name}.json", profile_to_json(found.profile))


def _written(path: Path, data: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def wrong(host: Profile, name: str, folder: Path) -> Path:
    """The profile of that name."""
    data = json.loads(json.dumps(profile_to_json(host)))
    PROFILES[name](data)
    return _written(folder / f"{name.replace(' ', '_')}.json", data)


def error(model: str, profile: Path, pair: Pair) -> float:
    """The step that is predicted over that of the run that none has learned from, less 1."""
    return planned(model, profile).plan.predicted.step_time_ns / pair.held_out_ns - 1


def rows(models: Sequence[str], names: Sequence[str], rounds: int, steps: int, folder: Path) -> Iterator[str]:
    """A line for each model and profile."""
    host = load_profile("cpu")
    profiles = {name: wrong(host, name, folder) for name in names}
    above: dict[str, list[Path]] = {}
    for number, model in enumerate(models):
        place = folder / str(number)
        seen = pairs(model, wrong(host, "as it is", folder), place, rounds, steps)
        for name, profile in profiles.items():
            after = [taught(profile, model, pair.taught, place) for pair in seen]
            before = statistics.median(error(model, profile, pair) for pair in seen)
            again = statistics.median(abs(error(model, one, pair)) for one, pair in zip(after, seen, strict=True))
            other = [abs(error(model, one, pair)) for one in above.get(name, []) for pair in seen]
            yield _row(model, name, seen, before, again, other)
            above[name] = after


def _row(model: str, name: str, seen: Sequence[Pair], before: float, again: float, other: Sequence[float]) -> str:
    steps = sorted(pair.held_out_ns for pair in seen)
    spread = f"{steps[0] / 1e6:.2f} to {steps[-1] / 1e6:.2f}"
    told = "not wrong" if abs(before) <= 0.10 else "yes" if again <= abs(before) / 2 else "NO"
    another = f"{statistics.median(other):.1%}" if other else ""
    return f"| {model} | {name} | {spread} | {before:+.1%} | {again:.1%} | {told} | {another} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--profiles", nargs="*", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    told = facts("benchmarks.loop.run")
    print(f"`{told['command']}`, {told['machine']}, {told['date']}\n")
    print("| model | profile | steps held against, ms | error | error again | halved | of another |")
    print("|---|---|---:|---:|---:|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(options.models, options.profiles, options.rounds, options.steps, Path(folder)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
