"""What looking at templates takes of planning, and which plan is taken; Llama-3-8B in bf16 on h100.

    python -m benchmarks.plan_time.templates [--search fast] [--output benchmarks/plan_time/templates]

Processor seconds of one process: of `autopar.parallelize`, and of templates alone; ms a step of what the search found
before templates, with them, and of the plan in the end. Each row in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.facts import facts, write_record

ROWS = ((256, 8192, 8), (128, 4096, 8), (64, 8192, 1), (16, 2048, 1))  # sequences, tokens of each, nodes of eight


def row(sequences: int, tokens: int, nodes: int, search: str) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar import pipeline

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(sequences, tokens, dtype=torch.long)
    found: list[tuple[float, autopar.Plan, autopar.Plan]] = []
    with_templates = pipeline.with_templates

    def timed(graph: Any, searched: autopar.Plan, request: Any) -> autopar.Plan:
        began = time.process_time()
        best = with_templates(graph, searched, request)
        found.append((time.process_time() - began, searched, best))
        return best

    pipeline.with_templates = timed
    mesh = autopar.Mesh("h100", nodes=nodes, devices_per_node=8)
    began = time.process_time()
    batch = {"input_ids": ids, "labels": ids.clone()}
    plan = autopar.parallelize(model, mesh, batch, precision="bf16", search=search).plan
    seconds = time.process_time() - began
    ((of_templates, searched, best),) = found
    looked, told = [row for row in best.search.tried if row.template is not None], best.search.method.partition(":")[0]
    return {
        "request": f"{sequences} × {tokens:,} on {nodes * 8}",
        "searched_ms": round(searched.predicted.step_time_ns / 1e6, 1),
        "with_templates_ms": round(best.predicted.step_time_ns / 1e6, 1),
        "best": told if told.startswith("template") else "what was searched",
        "planned_ms": round(plan.predicted.step_time_ns / 1e6, 1),
        "looked_at": len(looked),
        "played": sum(row.step_time_ns is not None for row in looked),
        "seconds": round(seconds, 1),
        "of_templates": round(of_templates, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", default="fast")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--row", type=int, nargs=3)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row(*options.row, options.search)))
        return
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.plan_time.templates", "--search", options.search]
    rows = []
    for sizes in ROWS:
        done = subprocess.run([*command, "--row", *map(str, sizes)], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(rows[-1], flush=True)
    text = "\n".join(("| " + " | ".join(rows[0]) + " | share |", "|---" * (len(rows[0]) + 1) + "|", *map(_cells, rows)))
    if options.output:
        write_record(options.output, facts("benchmarks.plan_time.templates"), {"rows": rows}, text)


def _cells(found: dict[str, Any]) -> str:
    share = f"{found['of_templates'] / found['seconds']:.0%}"
    return "| " + " | ".join([*map(str, found.values()), share]) + " |"


if __name__ == "__main__":
    main()
