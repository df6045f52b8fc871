"""Measured on CPU ranks: the joint choice of graph and sharding beside substituting first and sharding afterwards.

    python -m benchmarks.substitution.joint_ranks [--cases gpt2-one-sample@cpu:4 …] [--rounds 15] [--seconds 8]

Planned as in `joint`, with this host's profile; the two programs are timed in turns (`benchmarks.side_by_side`). How
long that takes is said before: models of `joint` that are meant for GPUs take minutes a round here. Written to
joint_ranks.json with command, machine and date: predicted and measured milliseconds, and how many times longer
substitute-then-shard takes, round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopar
from benchmarks.facts import facts, write_record
from benchmarks.side_by_side import STEPS, ratios, side_by_side
from benchmarks.substitution.joint import MODELS, chosen_plans

HERE = Path(__file__).parent


def build(name: str) -> tuple[torch.nn.Module, Any]:
    """The model and its batch."""
    torch.manual_seed(0)
    return MODELS[name]()


def measured(case: str, rounds: int, seconds: float) -> dict[str, Any]:
    """One row."""
    name = case.partition("@")[0]
    model, batch = build(name)
    plans = chosen_plans(case, seconds)
    mesh = plans["jointly"].mesh
    programs = {
        way: autopar.parallelize(model, mesh, batch, plan=plan) for way, plan in plans.items() if way != "as it is"
    }
    step_s = sum(plan.predicted.step_time_ns for way, plan in plans.items() if way in programs) / 1e9
    print(f"{case}: about {rounds * (STEPS + 1) * step_s:.0f} s of steps, as predicted", flush=True)
    times = side_by_side(
        partial(build, name), {way: program.source for way, program in programs.items()}, mesh.num_devices, rounds
    )
    longer = ratios(times["then"], times["jointly"])
    return {
        "case": case,
        "predicted_ms": {way: plan.predicted.step_time_ns / 1e6 for way, plan in plans.items()},
        "measured_ms": {way: found.median() for way, found in times.items()},
        "substitutions": {way: [step.rule for step in plan.substitutions] for way, plan in plans.items()},
        "predicted_ratio": plans["then"].predicted.step_time_ns / plans["jointly"].predicted.step_time_ns,
        "measured_ratio": statistics.median(longer),
        "range": [min(longer), max(longer)],
        "quartiles": statistics.quantiles(longer, n=4),
        "others": {way: statistics.median(found.others) for way, found in times.items()},
    }


def main() -> None:
    """Measures the cases, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["gpt2-one-sample@cpu:4", "lora-weight@cpu:4"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    rows = [measured(case, options.rounds, options.seconds) for case in options.cases]
    told = facts("benchmarks.substitution.joint_ranks")
    write_record(HERE / "joint_ranks", told, {"rounds": options.rounds, "rows": rows})
    for row in rows:
        print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
