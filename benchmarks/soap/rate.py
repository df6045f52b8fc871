"""How many proposals a second a chain makes: one world, from data parallelism, first with nothing known, then on.

    python -m benchmarks.soap.rate [--cases gpt32@8 ...] [--seconds 10] [--output benchmarks/soap/rate.json]

Counted are proposals that were drawn, whether they were refused by their bound, known from before, without a plan, or
simulated; the last are told apart. `cold`: from the start; `warm`: the chain goes on from the best plan with what the
simulator and the bound know by then. Of one world: jumps, which build others, are left out. Times are those of a core
(`time.process_time`), which others that use the machine do not change much.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.collector import without_collector
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.refinement import Worlds
from autopar.request import Request, SearchBudget
from autopar.soap import Budget, Start, refine
from autopar.trace import find_blocks
from benchmarks.facts import facts, write_record
from benchmarks.simulate.run import SMALL
from benchmarks.soap.starts import MODELS, graph_of, mesh_of
from models import gpt

CASES = ("gpt32@8", "wide_resnet@16", "lstm@64", "moe@64", "inception@16")
PROPOSALS = 20_000
NO_LIMIT = 10**13


def measured(case: str, seconds: float) -> dict[str, Any]:
    """One row."""
    name, devices = case.split("@")
    graph, mesh = graph_of(name), mesh_of(int(devices))
    request = Request(mesh, "train", "adamw", NO_LIMIT, (), SearchBudget(), "bf16")
    plan = template_of_graph(graph, mesh, dp=int(devices), precision="bf16", memory_limit=NO_LIMIT)
    worlds = Worlds(graph, find_blocks(graph), request, load_profile(mesh.profile), plan)
    start, row = worlds.start("data parallel", plan), {"case": case, "operators": len(graph.nodes)}
    for phase in ("cold", "warm"):
        begun = time.process_time()
        with without_collector():
            found, report = refine([start], Budget(PROPOSALS, seconds))
        spent = time.process_time() - begun
        row[phase] = {
            "proposals": report.proposals, "simulated": report.simulated, "seconds": round(spent, 2),
            "proposals_per_second": round(report.proposals / spent), "from_ms": report.before_ns / 1e6,
            "simulated_per_second": round(report.simulated / spent), "to_ms": report.after_ns / 1e6,
            "stop_reason": report.stop_reason,
        }  # fmt: skip
        start = Start("the best of before", found.world, replace(found.plan))
    return row


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*CASES])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    MODELS["gpt32"] = gpt, SMALL
    rows = []
    for case in options.cases:
        rows.append(measured(case, options.seconds))
        print(rows[-1], flush=True)
    if options.output:
        write_record(options.output, facts("benchmarks.soap.rate"), {"rows": rows})


if __name__ == "__main__":
    main()
