"""Mixtral 8×7B on 64 H100 under a power law, against the plan that is found for balanced routing, under the same law.

    python -m benchmarks.routing.mixtral [--exponent 1.2] [--search default] [--layers 32] [-o FILE]

Both are searched alike; the one found for balanced routing is then predicted under the power law. Time is simulated.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from benchmarks.facts import facts, profile_told


def mixtral(tokens: int, length: int, layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Mixtral 8×7B (its published configuration) in bfloat16, without weights, and so many tokens a step."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=32_000, hidden_size=4_096, intermediate_size=14_336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
        ids = torch.zeros(tokens // length, length, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def told(plan: autopar.Plan) -> dict[str, Any]:
    """What is printed of a plan."""
    predicted = plan.predicted
    stage = plan.stages[0]
    return {
        "mesh": " x ".join(f"{axis.name}={axis.size}" for axis in stage.axes), "stages": len(plan.stages),
        "microbatches": plan.microbatches, "schedule": plan.schedule,
        "step_ms": predicted.step_time_ns / 1e6, "step_p99_ms": (predicted.step_time_p99_ns or 0) / 1e6,
        "peak_GB": predicted.peak_bytes / 1e9, "fits_GB": plan.memory_limit / 1e9,
        "experts": sorted({
            "".join(map(str, kept.placement)) for one in plan.stages for name, kept in one.storage.items()
            if ".experts." in name and ".gate_up" in name
        }),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exponent", type=float, default=1.2)
    parser.add_argument("--tokens", type=int, default=2**20, help="of a step, on all devices")
    parser.add_argument("--length", type=int, default=4_096)
    parser.add_argument("--layers", type=int, default=32, help="fewer are searched sooner")
    parser.add_argument("--search", default="default")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    model, batch = mixtral(options.tokens, options.length, options.layers)
    mesh, law = autopar.Mesh("h100", nodes=8, devices_per_node=8), autopar.Routing.power_law(options.exponent)
    given: dict[str, Any] = {"precision": "bf16", "search": options.search, "check": False}
    rows: dict[str, Any] = {}
    plans = {}
    for name, routing in (("balanced", autopar.Routing.balanced()), ("power law", law)):
        begin, work = time.time(), time.process_time()
        plans[name] = autopar.parallelize(model, mesh, batch, routing=routing, **given).plan
        rows[f"planned for {name}"] = told(plans[name]) | {
            "seconds": round(time.time() - begin, 1),
            "processor_s": round(time.process_time() - work, 1),
        }
        print(name, json.dumps(rows[f"planned for {name}"]), flush=True)
    under = autopar.parallelize(model, mesh, batch, plan=plans["balanced"], routing=law, **given).plan
    rows["planned for balanced, under the power law"] = told(under)
    rows["under the power law"] = told(plans["power law"])
    for name, row in rows.items():
        print(f"{name.ljust(44)} {row['step_ms']:9.1f} ms, p99 {row['step_p99_ms']:9.1f} ms, {row['peak_GB']:.1f} GB")
    gain = under.predicted.step_time_p99_ns / plans["power law"].predicted.step_time_p99_ns - 1
    print(f"the plan for the power law is {gain:.1%} faster at the 99th percentile")
    if options.output:
        record = {**facts("benchmarks.routing.mixtral"), "profile": profile_told("h100"), "rows": rows}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
