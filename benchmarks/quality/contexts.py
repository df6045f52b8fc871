"""Llama-3-8B at 131,072 tokens a sequence on 64 H100: the plan that is found, and a grid of templates, run whole.

    python -m benchmarks.quality.contexts [--search default] [--within 1.0] [--output benchmarks/quality/contexts]

The grid: dp × tp × pp × cp = 64 with tp inside a node, as many microbatches as stages want or as there are samples,
each way of attention over split sequences, ZeRO 0, 1 and 3 where something is sharded, and each kind of recomputation.
It is played whole (`experts.best`): what cannot be faster than the plan that was found, by a bound, is not simulated,
nor what needs more memory than there is by far; a count says how many of each. Ends with 1 where a template is faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.template import CONTEXTS
from autopar.trace import trace
from benchmarks.facts import facts, profile_told, write_record
from benchmarks.quality.experts.best import best_of
from benchmarks.quality.experts.grid import Expert, Placed
from benchmarks.quality.experts.rewritten import Players
from models import llama

TOKENS, DEVICES, IN_NODE = 131_072, 64, 8
MESH = autopar.Mesh("h100", nodes=DEVICES // IN_NODE, devices_per_node=IN_NODE)


def model_of(sequences: int) -> tuple[torch.nn.Module, Any]:
    """On meta tensors, in the sizes of Llama 3 8B."""
    config = llama.Config(
        128256, TOKENS, 32, 4096, num_heads=32, num_kv_heads=8, mlp_size=14336, rope_base=500_000.0,
        batch_size=sequences,
    )  # fmt: skip
    with torch.device("meta"):
        return llama.build(config), llama.example_inputs(config)


def grid(sequences: int) -> Iterator[Expert]:
    """Each template."""
    sizes = [2**power for power in range(7)]
    for tp, pp, cp in itertools.product(sizes[:4], sizes[:4], sizes):
        dp = DEVICES // (tp * pp * cp)
        if dp < 1 or dp > sequences or dp * tp * pp * cp != DEVICES:
            continue
        counts = sorted({sequences // dp, 1} if pp == 1 else {sequences // dp})
        zeros = (0, 1, 3) if dp * cp > 1 else (0,)
        ways = CONTEXTS if cp > 1 else CONTEXTS[:1]
        for again, zero, way, count in itertools.product(("none", "block", "full"), zeros, ways, counts):
            yield Expert(Placed(dp, tp, count, zero, cp=cp, context=way), pp, recompute=again)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", default="default")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--within", type=float, default=1.0, help="plays what may take so many times what was found")
    parser.add_argument("--no-grid", action="store_true")
    parser.add_argument("--found-ms", type=float, help="step of a plan that was found before, in place of a search")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    plan = {"step_ms": options.found_ms} if options.found_ms else planned(options.sequences, options.search)
    found: dict[str, Any] = {"sequences": options.sequences, "plan": plan}
    print(json.dumps(found["plan"]), flush=True)
    found_ns = round(found["plan"]["step_ms"] * 1e6)
    if not options.no_grid:
        graph = trace(*model_of(options.sequences), compute_dtype=torch.bfloat16)
        every = [*grid(options.sequences)]
        found["grid"] = best_of(Players(graph, MESH, every), every, options.within * found_ns)
        print(json.dumps(found["grid"], indent=1))
    if options.output:
        told = {**facts("benchmarks.quality.contexts"), "profile": profile_told("h100")}
        write_record(options.output, told, found, text_of(found))
    best = min((one["step_time_ns"] for one in found.get("grid", {"best": ()})["best"]), default=math.inf)
    return int(best < found_ns)


def text_of(found: dict[str, Any]) -> str:
    """For people: what was found, and what there is in the grid."""
    told = [f"{name}: {value}  " for name, value in found["plan"].items() if name != "looked_at"]
    grid = found.get("grid", {})
    return "\n".join(told + [f"grid, {name}: {value}  " for name, value in grid.items()])


def planned(sequences: int, search: str) -> dict[str, Any]:
    """What the search finds, and the processor time that it takes."""
    began = time.process_time()
    model, batch = model_of(sequences)
    plan = autopar.parallelize(model, MESH, batch, precision="bf16", search=search, check=False).plan
    return {
        "seconds": round(time.process_time() - began, 1),
        "step_ms": round(plan.predicted.step_time_ns / 1e6, 1),
        "peak_gb": round(plan.predicted.peak_bytes / 1e9, 2),
        "stages": len(plan.stages),
        "axes": [str(axis) for axis in plan.stages[0].axes],
        "microbatches": plan.microbatches,
        "substitutions": sorted({step.rule for step in plan.substitutions}),
        "method": plan.search.method.partition(":")[0],
        "looked_at": [
            f"{row.template}: {row.step_time_ns or row.infeasible}" for row in plan.search.tried if row.template
        ],
    }


if __name__ == "__main__":
    raise SystemExit(main())
