"""How long a full simulation takes: a 32-layer GPT on 8 devices, and a GPT-175B on 1,024 in data, tensor and stages.

    python -m benchmarks.simulate.run [--repeats 15] [--output benchmarks/simulate/results.json]

Timed is everything from a plan and the graph of one microbatch to step time, breakdown and peak memory: lowering, every
pass of every stage, and memory over time; on one core, nothing kept from one run to the next but what is known of the
graph whatever the plan. `wall_ms` is the fastest of the repeats, `cpu_ms` the least processor time (other programs on
the machine slow the former down), `median_ms` the median wall time. Limits: 50 ms and 2 s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import Timeline, simulate
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from models import gpt

SMALL = gpt.Config(51200, 1024, num_layers=32, hidden_size=2560, num_heads=32, batch_size=64)
LARGE = gpt.Config(51200, 2048, num_layers=96, hidden_size=12288, num_heads=96, batch_size=1536)
SMALL_LIMIT_MS, LARGE_LIMIT_MS = 50.0, 2000.0
SMALL_PLANS: list[dict[str, Any]] = [
    {"dp": 4, "tp": 2},
    {"dp": 8, "zero": 3},
    {"dp": 4, "tp": 2, "microbatches": 4},
    {"dp": 2, "tp": 2, "pp": 2, "microbatches": 8},
]
LARGE_PLANS: list[dict[str, Any]] = [
    {"dp": 16, "tp": 8, "pp": 8, "microbatches": 96, "recompute": "full"},
    {"dp": 8, "tp": 8, "pp": 16, "microbatches": 192, "recompute": "full"},
    {"dp": 16, "tp": 8, "pp": 8, "microbatches": 96, "recompute": "full", "schedule": "interleaved"},
]


def main() -> None:
    """Measures every row and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    repeats = options.repeats
    rows = [
        *_rows("GPT, 32 layers", SMALL, autopar.Mesh("a100", 1, 8), SMALL_PLANS, SMALL_LIMIT_MS, repeats),
        *_rows(
            "GPT-175B, 96 layers", LARGE, autopar.Mesh("a100", 128, 8), LARGE_PLANS, LARGE_LIMIT_MS, options.repeats
        ),
    ]
    if options.output:
        write_record(options.output, facts("benchmarks.simulate.run"), {"rows": rows})


def _rows(
    model: str, config: gpt.Config, mesh: autopar.Mesh, plans: list[dict[str, Any]], limit_ms: float, repeats: int
) -> list[dict[str, Any]]:
    with torch.device("meta"):
        graph = trace(gpt.build(config), gpt.example_inputs(config))
    return [_row(model, graph, mesh, choices, limit_ms, repeats) for choices in plans]


def _row(
    model: str, graph: Graph, mesh: autopar.Mesh, choices: dict[str, Any], limit_ms: float, repeats: int
) -> dict[str, Any]:
    """One plan's simulation; its memory limit is lifted, since its time and not its fit is the question."""
    plan = template_of_graph(graph, mesh, **choices, memory_limit=10**13)
    part = divided_graph(graph, plan.microbatches)
    walls, cpus, timeline = _timed(part, plan, repeats)
    row = {
        "model": model, "mesh": str(mesh), "plan": choices, "limit_ms": limit_ms,
        "wall_ms": round(min(walls), 1), "median_ms": round(statistics.median(walls), 1), "cpu_ms": round(min(cpus), 1),
        "tasks": sum(len(piece.tasks) for lane in timeline.lanes for piece in lane.pieces),
        "step_time_ns": timeline.step_time_ns, "peak_bytes": timeline.peak_bytes,
    }  # fmt: skip
    within = "within" if row["wall_ms"] <= limit_ms else "ABOVE"
    print(f"{model} on {mesh}, {choices}: {row['wall_ms']} ms ({row['cpu_ms']} ms of a core), {within} {limit_ms:g} ms")
    return row


def _timed(graph: Graph, plan: Plan, repeats: int) -> tuple[list[float], list[float], Timeline]:
    """Wall and processor times in ms, and the last result."""
    profile = load_profile(plan.mesh.profile)
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        timeline = simulate(graph, plan, profile)
        assert timeline.peak_bytes > 0 and sum(vars(timeline.breakdown).values()) == timeline.step_time_ns
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    return walls, cpus, timeline


if __name__ == "__main__":
    main()
