"""Tracked memory against predicted where sequences are split; and a sequence that data parallelism has no room for.

    python -m benchmarks.accuracy.contexts [--models gpt …] [--output benchmarks/accuracy]

Run from the root of the repository. One sequence, on two and four gloo ranks, in each way that attention runs. Measured
is the peak of the fullest rank in a whole step (with AdamW), after a first step (`benchmarks.accuracy.memory`). Last,
of four sequences, under a limit of two thirds of what ZeRO-3 over four data-parallel ranks needs for one each, those
are refused, and context parallelism trains, one sequence at a time. Writes contexts.json and contexts.md, and ends with
status 1 where a rank takes a byte more than was predicted, or sends others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError
from autopar.program import model_state
from autopar.template import CONTEXTS
from benchmarks.accuracy.memory import measure_rank
from benchmarks.facts import facts, write_record
from models import gpt, llama
from tests.rank_pool import pool

LENGTH = 768
Built = tuple[nn.Module, dict[str, Tensor]]


def _own(module: Any, **sizes: Any) -> Callable[[int], Built]:
    def make(batch: int) -> Built:
        config = module.Config(num_layers=2, hidden_size=64, seq_len=LENGTH, batch_size=batch, num_heads=4, **sizes)
        return module.build(config), module.example_inputs(config)

    return make


def _windows(batch: int) -> Built:
    """Each position sees a hundred."""
    config = transformers.MistralConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192,
        vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, sliding_window=100,
    )  # fmt: skip
    tokens = torch.randint(0, 256, (batch, LENGTH))
    return transformers.AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens.clone()}


def _sinks(batch: int) -> Built:
    """Every other layer sees a hundred, the others all before, beside sinks; each token goes to two of four experts."""
    config = transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, sliding_window=100, head_dim=16,
        num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    tokens = torch.randint(0, 256, (batch, LENGTH))
    return transformers.AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens.clone()}


MODELS: dict[str, Callable[[int], Built]] = {
    "gpt": _own(gpt),
    "llama": _own(llama, num_kv_heads=2),
    "hf_mistral": _windows,
    "hf_gpt_oss": _sinks,
}


def build(name: str, batch: int) -> Built:
    torch.manual_seed(0)
    return MODELS[name](batch)


def measured(name: str, choices: dict[str, Any], limit: int | None = None, sequences: int = 1) -> dict[str, Any]:
    """A row: a template that is run, or that is refused under a limit."""
    model, batch = build(name, sequences)
    mesh = autopar.Mesh("cpu", devices_per_node=choices.get("cp", 1) * choices.get("dp", 1))
    row = {
        "model": name,
        "template": ", ".join(f"{key}={value}" for key, value in choices.items()),
        "limit": limit,
        "sequences": sequences,
    }
    try:
        plan = autopar.template_plan(model, mesh, batch, memory_limit=limit, check=False, **choices)
    except InfeasibleError as error:
        return {**row, "refused": str(error).partition("\n")[0]}
    program = autopar.parallelize(model, mesh, batch, plan=plan, check=False)
    results = pool(mesh.num_devices).run(measure_rank, program.source, model_state(model) or {}, batch)
    predicted = program.plan.predicted
    found = max(results, key=lambda result: result[0].peak_bytes)[0]
    return {
        **row, "predicted": predicted.peak_bytes, "measured": found.peak_bytes,
        "error": round(predicted.peak_bytes / found.peak_bytes - 1, 4),
        "bytes_equal": results[0][1] == {kind: size for kind, size in predicted.comm_bytes.items() if size},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    asked = [(name, {"cp": cp, "context": way}) for name in options.models for cp in (2, 4) for way in CONTEXTS]
    rows = [_told(measured(name, choices)) for name, choices in asked]
    name, alone = options.models[0], {"dp": 4, "zero": 3}
    rows.append(_told(measured(name, alone, sequences=4)))
    limit = rows[-1]["predicted"] * 2 // 3
    rows.append(_told(measured(name, alone, limit, 4)))
    split = {"cp": 4, "zero": 3, "microbatches": 4}
    rows += [_told(measured(name, {**split, "context": way}, limit, 4)) for way in CONTEXTS]
    run = [row for row in rows if "measured" in row]
    wrong = [row for row in run if row["measured"] > row["predicted"] or not row["bytes_equal"]]
    print(f"{len(wrong)} of {len(run)} take more, or send others, than predicted")
    if options.output:
        columns = [
            "model",
            "sequences",
            "template",
            "limit",
            "predicted",
            "measured",
            "error",
            "bytes_equal",
            "refused",
        ]
        lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
        told = facts("benchmarks.accuracy.contexts")
        write_record(options.output / "contexts", told, {"rows": rows}, "\n".join(lines))
    return int(bool(wrong))


def _told(row: dict[str, Any]) -> dict[str, Any]:
    print(row, flush=True)
    return row


if __name__ == "__main__":
    raise SystemExit(main())
