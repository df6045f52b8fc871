"""Measured on CPU ranks: what the SOAP search gained over the plan of ILP and DP.

    python -m benchmarks.soap.measured [--cases gpt@2 gpt@4 inception@2 lstm@4] [--rounds 15]

gpt is planned in one stage, as it is where `Constraint(stages=1)` asks for it: there, the sum of all costs does not
see that gradients are summed while the backward pass goes on, and that a tensor parallel block's sums are waited for.
Plans are for this host's own `cpu` profile (measured at its first use), with the default budget but `--proposals`; the
two programs of a case are timed in turns (`benchmarks.side_by_side`). Written to measured.json with command, machine
and date: predicted and measured milliseconds a step, and how many times longer the first takes, round by round.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.pipeline import placed
from autopar.profiler import load_profile
from autopar.refinement import refined
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks, trace
from benchmarks.facts import facts, write_record
from benchmarks.side_by_side import ratios, side_by_side
from models import gpt, inception, lstm, unet

HERE = Path(__file__).parent
IN_ONE_STAGE = {"gpt": (autopar.Constraint(stages=1),)}
MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (gpt, gpt.Config(num_layers=4, hidden_size=256)),
    "inception": (inception, inception.Config(image_size=64, width=0.25, batch_size=4)),
    "lstm": (lstm, lstm.Config(vocab_size=4000, seq_len=8, hidden_size=512, batch_size=16)),
    "unet": (unet, unet.Config(image_size=16, base_channels=32)),
}


def build(name: str) -> tuple[torch.nn.Module, Any]:
    """The model and its batch."""
    torch.manual_seed(0)
    module, config = MODELS[name]
    return module.build(config), module.example_inputs(config)


def measured(case: str, rounds: int, proposals: int) -> dict[str, Any]:
    """One row."""
    name, _, ranks = case.partition("@")
    model, batch = build(name)
    mesh, graph = autopar.Mesh("cpu", devices_per_node=int(ranks)), trace(model, batch)
    budget = SearchBudget(20.0, proposals=proposals, refine_seconds=60.0)
    request = Request(mesh, "train", "adamw", None, IN_ONE_STAGE.get(name, ()), budget)
    first = placed(graph, request)
    plans = {"placed": first, "refined": refined(graph, find_blocks(graph), request, load_profile("cpu"), first)}
    sources = {way: autopar.parallelize(model, mesh, batch, plan=plan).source for way, plan in plans.items()}
    times = side_by_side(partial(build, name), sources, mesh.num_devices, rounds)
    longer, report = ratios(times["placed"], times["refined"]), plans["refined"].search.refinement
    return {
        "case": case,
        "predicted_ms": {way: plan.predicted.step_time_ns / 1e6 for way, plan in plans.items()},
        "breakdown": {way: asdict(plan.predicted.breakdown) for way, plan in plans.items()},
        "measured_ms": {way: found.median() for way, found in times.items()},
        "predicted_ratio": plans["placed"].predicted.step_time_ns / plans["refined"].predicted.step_time_ns,
        "measured_ratio": statistics.median(longer),
        "range": [min(longer), max(longer)],
        "quartiles": statistics.quantiles(longer, n=4),
        "others": {way: statistics.median(found.others) for way, found in times.items()},
        "moves": [asdict(move) for move in report.moves] if report else [],
        "stop_reason": report.stop_reason if report else "not refined",
    }


def main() -> None:
    """Measures the cases, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["gpt@2", "gpt@4", "inception@2", "lstm@4"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--proposals", type=int, default=2_000)
    options = parser.parse_args()
    rows = []
    for case in options.cases:
        rows.append(measured(case, options.rounds, options.proposals))
        print({key: rows[-1][key] for key in ("case", "predicted_ms", "measured_ms", "predicted_ratio",
                                              "measured_ratio", "quartiles")}, flush=True)  # fmt: skip
    write_record(HERE / "measured", facts("benchmarks.soap.measured"), {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
