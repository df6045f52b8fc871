"""Llama-3-8B at 131,072 tokens a sequence on 64 H100: the plan that is found, and a grid of templates, run whole.

    python -m benchmarks.quality.contexts [--search default] [--output benchmarks/quality/contexts]

The grid: dp × tp × pp × cp = 64 with tp inside a node, as many microbatches as stages want or as there are samples,
each way of attention over split sequences, ZeRO 0, 1 and 3 where something is sharded, and each kind of recomputation.
Every row is a `template_plan`, solved and simulated like the plan. Rows that are known from a run before, by their
options, are taken from the record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.pipeline import template_of_graph
from autopar.template import CONTEXTS
from autopar.trace import trace
from benchmarks.facts import facts, profile_told, write_record
from models import llama

TOKENS, DEVICES, IN_NODE = 131_072, 64, 8


def model_of(sequences: int) -> tuple[torch.nn.Module, Any]:
    """On meta tensors, in the sizes of Llama 3 8B."""
    config = llama.Config(
        128256, TOKENS, 32, 4096, num_heads=32, num_kv_heads=8, mlp_size=14336, rope_base=500_000.0,
        batch_size=sequences,
    )  # fmt: skip
    with torch.device("meta"):
        return llama.build(config), llama.example_inputs(config)


def grid(sequences: int, only: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """The options of each template that is wanted."""
    sizes = [2**power for power in range(7)]
    for tp, pp, cp in itertools.product(sizes[:4], sizes[:4], sizes):
        dp = DEVICES // (tp * pp * cp)
        if dp < 1 or dp > sequences or dp * tp * pp * cp != DEVICES:
            continue
        counts = sorted({sequences // dp, 1} if pp == 1 else {sequences // dp})
        zeros = (0, 1, 3) if dp * cp > 1 else (0,)
        ways = CONTEXTS if cp > 1 else CONTEXTS[:1]
        for recompute, zero, way, count in itertools.product(("none", "block", "full"), zeros, ways, counts):
            options = {
                "dp": dp, "tp": tp, "pp": pp, "cp": cp, "context": way, "zero": zero, "recompute": recompute,
                "microbatches": count,
            }  # fmt: skip
            if only(options):
                yield options


def name_of(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


def template_row(graph: Any, mesh: autopar.Mesh, options: dict[str, Any]) -> dict[str, Any]:
    began = time.process_time()
    try:
        plan = template_of_graph(graph, mesh, precision="bf16", **options)
        found = {"step_ms": round(plan.predicted.step_time_ns / 1e6, 1), "peak_gb": plan.predicted.peak_bytes / 1e9}
    except AutoparError as error:
        found = {"refused": str(error).partition("\n")[0][:160]}
    return {"template": name_of(options), **found, "seconds": round(time.process_time() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", default="default")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--zero", type=int, nargs="*", default=[0, 1, 3], help="a part of the grid")
    parser.add_argument("--pp", type=int, nargs="*", default=[1, 2, 4, 8], help="a part of the grid")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    record = options.output.with_suffix(".json") if options.output else None
    known = json.loads(record.read_text()) if record and record.exists() else {}
    found: dict[str, Any] = {"sequences": options.sequences, "plan": planned(options.sequences, options.search)}
    print(json.dumps(found["plan"]), flush=True)
    wanted = list(grid(options.sequences, lambda one: one["zero"] in options.zero and one["pp"] in options.pp))
    found["rows"] = (
        [] if options.plan_only else rows_of(wanted, options.sequences, known.get("rows", []), record, found)
    )
    best = min((row["step_ms"] for row in found["rows"] if "step_ms" in row), default=None)
    told = {**facts("benchmarks.quality.contexts"), "profile": profile_told("h100")}
    text = f"plan: {found['plan']}  \nbest template: {best} ms of {len(found['rows'])}"
    print(text)
    if options.output:
        write_record(options.output, told, found, text + "\n\n" + table(found["rows"]))
    return int(best is not None and best < found["plan"]["step_ms"])


def planned(sequences: int, search: str) -> dict[str, Any]:
    """What the search finds, and the processor time that it takes."""
    began = time.process_time()
    model, batch = model_of(sequences)
    mesh = autopar.Mesh("h100", nodes=DEVICES // IN_NODE, devices_per_node=IN_NODE)
    plan = autopar.parallelize(model, mesh, batch, precision="bf16", search=search, check=False).plan
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


def rows_of(
    wanted: list[dict[str, Any]], sequences: int, known: list[Any], record: Path | None, found: dict[str, Any]
) -> list[Any]:
    """A row for each template; written as they come."""
    graph = trace(*model_of(sequences), compute_dtype=torch.bfloat16)
    mesh = autopar.Mesh("h100", nodes=DEVICES // IN_NODE, devices_per_node=IN_NODE)
    by_name = {row["template"]: row for row in known}
    rows = []
    for options in wanted:
        row = by_name.get(name_of(options)) or template_row(graph, mesh, options)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if record is not None:
            record.write_text(json.dumps({**found, "rows": rows}))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The fastest first."""
    lines = ["| template | ms a step | peak GB |", "|---|---|---|"]
    ordered = sorted(rows, key=lambda row: row.get("step_ms", float("inf")))
    return "\n".join(
        lines + [f"| {row['template']} | {row.get('step_ms', '–')} | {row.get('peak_gb', 0):.1f} |" for row in ordered]
    )


if __name__ == "__main__":
    raise SystemExit(main())
