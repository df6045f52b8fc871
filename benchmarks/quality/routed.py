"""Mixtures of experts on H100: the plan that is found, and a grid of templates with expert parallelism.

    python -m benchmarks.quality.routed --row mixtral [--search fast] [--within 1.0 | --no-grid] [--output FOLDER]

Rows: Mixtral 8×7B on 64 devices, Qwen3-235B-A22B on 256, the shape of DeepSeek-V3 on 2,048; in the sizes that their
configurations say, without weights. The grid: dp × tp × pp × ep with tp inside a node and ep up to the experts, sent
flat or in two levels, in 1 or 4 chunks, ZeRO 1 and 3, nothing, attention or all computed again. It is played whole
(`experts.best`): what cannot be faster than the plan that was found, by a bound, is not simulated, nor what needs more
memory than there is by far; a count says how many of each. Ends with 1 where a template is faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import autopar
from autopar.rewrites import with_causal_attention
from autopar.trace import trace
from benchmarks.facts import facts, profile_told
from benchmarks.quality.experts.best import best_of
from benchmarks.quality.experts.grid import Expert, Placed
from benchmarks.quality.experts.rewritten import Players

IN_NODE = 8


class Row(NamedTuple):
    """A model's configuration, the devices, and the sequences of a step with the tokens of each."""

    config: Any
    devices: int
    sequences: int
    tokens: int
    experts: int


def _rows() -> dict[str, Row]:
    common: dict[str, Any] = {"use_cache": False}
    mixtral = transformers.MixtralConfig(
        vocab_size=32_000, hidden_size=4_096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, **common,
    )  # fmt: skip
    qwen = transformers.Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=4_096, intermediate_size=12_288, num_hidden_layers=94, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=1_536, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, **common,
    )  # fmt: skip
    deepseek = transformers.DeepseekV3Config(
        vocab_size=129_280, hidden_size=7_168, intermediate_size=18_432, moe_intermediate_size=2_048,
        num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, n_shared_experts=1,
        n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, q_lora_rank=1_536, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=3, **common,
    )  # fmt: skip
    return {
        "mixtral": Row(mixtral, 64, 256, 4_096, 8),
        "qwen3": Row(qwen, 256, 1_024, 4_096, 128),
        "deepseek": Row(deepseek, 2_048, 8_192, 4_096, 256),
    }


def model_of(row: Row, layers: int | None) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """On meta tensors. layers: fewer than the model has, which are searched sooner."""
    config = row.config
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(row.sequences, row.tokens, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def grid(row: Row) -> Iterator[Expert]:
    """Each template."""
    powers = [2**power for power in range(12)]
    for tp, pp in itertools.product(powers[:4], powers[:6]):
        dp = row.devices // (tp * pp)
        if not 1 <= dp <= row.sequences:
            continue
        counts = sorted({max(1, row.sequences // dp // part) for part in (1, 2, 4)} if pp > 1 else {1, 4})
        for ep, zero, again in itertools.product(powers[:9], (1, 3), ("none", "block", "full")):
            if ep > min(dp, row.experts):
                continue
            ways = [("flat", 1)] if ep == 1 else [("flat", 1), ("flat", 4)]
            ways += [("two-level", 1)] if ep * tp > IN_NODE > tp else []
            for (exchange, chunks), count in itertools.product(ways, counts):
                placed = Placed(
                    dp, tp, count, zero, sequence_parallel=tp > 1, ep=ep, exchange=exchange, exchange_chunks=chunks
                )
                yield Expert(placed, pp, recompute=again)


def planned(model: Any, batch: Any, mesh: autopar.Mesh, search: str) -> dict[str, Any]:
    """What the search finds, and the processor time that it takes with tracing."""
    began = time.process_time()
    plan = autopar.parallelize(model, mesh, batch, precision="bf16", search=search, check=False).plan
    kept = plan.stages[len(plan.stages) // 2].storage
    return {
        "processor_s": round(time.process_time() - began, 1),
        "step_ms": round(plan.predicted.step_time_ns / 1e6, 1),
        "step_p99_ms": round((plan.predicted.step_time_p99_ns or 0) / 1e6, 1),
        "peak_gb": round(plan.predicted.peak_bytes / 1e9, 2),
        "limit_gb": round(plan.memory_limit / 1e9, 2),
        "stages": len(plan.stages), "axes": [f"{axis.name}={axis.size}" for axis in plan.stages[0].axes],
        "microbatches": plan.microbatches, "schedule": plan.schedule, "recomputed": len(plan.recompute),
        "experts": sorted({"".join(map(str, one.placement)) for name, one in kept.items() if ".experts." in name}),
        "substitutions": [f"{step.rule} {dict(step.binding)}" for step in plan.substitutions],
        "method": plan.search.method.partition(":")[0],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", choices=[*_rows()], required=True)
    parser.add_argument("--search", default="fast")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--within", type=float, default=1.0, help="plays what may take so many times what was found")
    parser.add_argument("--no-grid", action="store_true")
    parser.add_argument("--found-ms", type=float, help="step of a plan that was found before, in place of a search")
    parser.add_argument("--output", type=Path, help="folder; a file a row")
    options = parser.parse_args()
    row = _rows()[options.row]
    model, batch = model_of(row, options.layers)
    mesh = autopar.Mesh("h100", nodes=row.devices // IN_NODE, devices_per_node=IN_NODE)
    told: dict[str, Any] = {"row": options.row, "layers": row.config.num_hidden_layers}
    told["plan"] = {"step_ms": options.found_ms} if options.found_ms else planned(model, batch, mesh, options.search)
    print(json.dumps(told), flush=True)
    found_ns = round(told["plan"]["step_ms"] * 1e6)
    if not options.no_grid:
        traced = trace(model, batch, compute_dtype=torch.bfloat16)
        graph, _ = with_causal_attention(traced, ())  # as `template_plan` has it
        told["grid"] = best_of(Players(graph, mesh, grid(row)), grid(row), options.within * found_ns)
        print(json.dumps(told["grid"], indent=1))
    if options.output:
        record = {**facts("benchmarks.quality.routed"), "profile": profile_told("h100"), **told}
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{options.row}.json").write_text(json.dumps(record, indent=1) + "\n")
    best = min((one["step_time_ns"] for one in told.get("grid", {"best": ()})["best"]), default=math.inf)
    return int(best < found_ns)


if __name__ == "__main__":
    raise SystemExit(main())
