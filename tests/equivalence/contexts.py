"""Models whose sequences are split, in every way that attention runs then, proved equal to one device.

`python -m tests.equivalence.contexts --output benchmarks/equivalence` proves all of them and writes the table; the
tests take a sample. Attention is causal (of Gemma and gpt-oss, every other layer over a sliding window; of the latter
with sinks, and written out), full, or of packed documents: of Hugging Face's models those that positions tell apart, of
ours a mask of blocks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar
from autopar.emit import emit
from autopar.errors import AutoparError, InternalError
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from autopar.profiler.host import cpu_model
from autopar.rewrites import graph_of
from autopar.template import CONTEXTS
from autopar.trace import trace
from models import gpt, llama
from tests.equivalence.harness import differences, run_rank, run_single
from tests.equivalence.pipelines import wrong_bytes
from tests.rank_pool import pool

LENGTH, DOCUMENT, BATCH = 18, 7, 4  # neither halves of four ranks nor documents are even
MASKS = ("causal", "full", "packed")
_PP: dict[str, Any] = {"pp": 2, "microbatches": 2}
PLANS: dict[str, dict[str, Any]] = {
    "cp2": {"cp": 2},
    "cp2_zero3": {"cp": 2, "zero": 3},
    "cp4": {"cp": 4},
    "cp_tp": {"cp": 2, "tp": 2},
    "cp_dp": {"cp": 2, "dp": 2},
    "cp_pp": {"cp": 2, **_PP},
    "cp_dp_zero3": {"cp": 2, "dp": 2, "zero": 3},
}

LARGE_PLANS: dict[str, dict[str, Any]] = {
    "cp2_tp2_dp2": {"cp": 2, "tp": 2, "dp": 2},
    "cp4_dp2_zero3": {"cp": 4, "dp": 2, "zero": 3},
    "cp2_tp2_pp2": {"cp": 2, "tp": 2, **_PP},
}
"""On eight ranks."""

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 128, "max_position_embeddings": 64, "use_cache": False, "head_dim": 8,
}  # fmt: skip
_WINDOWS: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_SINKS: dict[str, Any] = {
    "attn_implementation": "eager", "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "hf_llama": (transformers.LlamaConfig, {}),
    "hf_qwen3": (transformers.Qwen3Config, {}),
    "hf_gemma3": (transformers.Gemma3TextConfig, _WINDOWS),
    "hf_gpt_oss": (transformers.GptOssConfig, _WINDOWS | _SINKS),
}
MODELS = ("gpt", "llama", *_CONFIGS)


class Case(NamedTuple):
    """A model under a mask, in a plan, and how its attention runs."""

    model: str
    mask: str
    plan: str
    context: str


@contextmanager
def attending(mask: str) -> Iterator[None]:
    """While inside, attention that a model calls causal, and that has no mask, is full or of documents."""
    torchs = F.scaled_dot_product_attention

    def call(*operands: Any, is_causal: bool = False, **options: Any) -> Tensor:
        if mask == "packed" and is_causal:
            ends = torch.arange(operands[0].size(-2)) // DOCUMENT
            positions = torch.arange(operands[0].size(-2))
            seen = (ends[:, None] == ends) & (positions[:, None] >= positions)
            return torchs(*operands, attn_mask=seen, **options)
        return torchs(*operands, **{**options, "attn_mask": None} if mask == "full" else options, is_causal=False)

    with mock.patch.object(F, "scaled_dot_product_attention", call):
        yield


@cache
def built(model: str, mask: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of two blocks, and a batch."""
    torch.manual_seed(0)
    if model not in _CONFIGS:
        module: Any = {"gpt": gpt, "llama": llama}[model]
        config = module.Config(batch_size=BATCH, seq_len=LENGTH, num_heads=4, hidden_size=32, num_layers=2)
        return module.build(config), module.example_inputs(config)
    made, more = _CONFIGS[model]
    tokens = torch.randint(0, 128, (BATCH, LENGTH))
    labels = tokens.clone()
    labels[0, :5] = -100  # ranks hold unequal counts
    batch = {"input_ids": tokens, "labels": labels}
    if mask == "packed":
        batch["position_ids"] = (torch.arange(LENGTH) % DOCUMENT).expand(BATCH, -1).contiguous()
    return transformers.AutoModelForCausalLM.from_config(made(**_SIZES, **more)), batch


def _patched(model: str, mask: str) -> Any:
    is_told = mask == "causal" or (mask == "packed" and model in _CONFIGS)  # by the model itself
    return nullcontext() if is_told else attending(mask)


@cache
def graph(model: str, mask: str) -> Graph:
    """The model's graph on its batch."""
    with _patched(model, mask):
        return trace(*built(model, mask))


@cache
def single(model: str, mask: str) -> Any:
    """What the model computes on one device, in one step and in three of SGD."""
    with _patched(model, mask):
        return run_single(*built(model, mask), ("sgd",))


def faults(case: Case) -> list[str]:
    """Runs the plan on gloo ranks. What is out of tolerance, or not as predicted, one line each."""
    options = {**PLANS, **LARGE_PLANS}[case.plan]
    world = 1
    for name in ("dp", "cp", "tp", "pp"):
        world *= options.get(name, 1)
    mesh, whole = autopar.Mesh("cpu", devices_per_node=world), graph(case.model, case.mask)
    chosen = template_of_graph(whole, mesh, context=case.context, **options)
    planned = graph_of(chosen, whole)
    source = emit(planned, chosen)
    found = [] if ("ring=True" in source) == (case.context == "ring") else ["attention runs in another way"]
    model, batch = built(case.model, case.mask)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(world).run(run_rank, source, state, batch, ("sgd",))
    found += differences(single(case.model, case.mask), results[0])
    if len({(loss.item(), norm.item()) for loss, _, norm, *_ in results}) > 1:
        found.append("ranks disagree about the loss or the norm")
    return found + wrong_bytes(chosen, planned, [result[4] for result in results])


def outcome(case: Case) -> tuple[str, str]:
    """ "equal", "no such plan", or "WRONG", and why."""
    try:
        found = faults(case)
    except InternalError as error:
        return "WRONG", str(error)
    except AutoparError as error:
        return "no such plan", str(error)
    except Exception as error:  # goes into the table, and the others are still run
        return "WRONG", f"{type(error).__name__}: {error}"
    return ("WRONG", "; ".join(found)) if found else ("equal", "")


def cases() -> Iterator[Case]:
    """All of them; on eight ranks, each model in one way and mask after another."""
    for number, (model, plan) in enumerate(itertools.product(MODELS, LARGE_PLANS)):
        yield Case(model, _masks(model)[number % len(_masks(model))], plan, CONTEXTS[(number // 3 + 1) % 3])
    for context, model in itertools.product(("ring", "heads", "gather"), MODELS):
        yield from (Case(model, *rest, context) for rest in itertools.product(_masks(model), PLANS))


def _masks(model: str) -> tuple[str, ...]:
    """Attention that is written out is as its model has it."""
    return ("causal", "packed") if model == "hf_gpt_oss" else MASKS


def main() -> int:
    """Proves each model under each mask in each plan and way; prints a line each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--masks", nargs="*", default=[*MASKS])
    parser.add_argument("--plans", nargs="*", default=[*PLANS, *LARGE_PLANS])
    parser.add_argument("--contexts", nargs="*", default=[*CONTEXTS])
    parser.add_argument("--every", type=int, default=1, help="of these, in their order, one in so many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--output", type=Path, help="folder for the table")
    options = parser.parse_args()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    asked = (options.models, options.masks, options.plans, options.contexts)
    rows, started = dict[Case, str](), time.monotonic()
    every = [case for case in cases() if all(value in wanted for value, wanted in zip(case, asked, strict=True))]
    for case in every[options.first :: options.every]:
        rows[case], why = outcome(case)
        print(f"{' '.join(case)}: {rows[case]}{f' ({why})' if why else ''}", flush=True)
        if options.output:  # as far as it has come
            (options.output / "contexts.md").write_text(_text(rows, time.monotonic() - started), encoding="utf-8")
    wrong = sum(found == "WRONG" for found in rows.values())
    print(f"{wrong} wrong of {len(rows)}")
    return int(wrong > 0)


def _text(rows: dict[Case, str], seconds: float) -> str:
    facts = {
        "command": " ".join(["python -m tests.equivalence.contexts", *sys.argv[1:]]),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "date": date.today().isoformat(),
        "seconds": f"{seconds:.0f}",
        "equal": "loss within 1e-5, each gradient, the clipped norm and weights after three SGD steps within 1e-4 "
        "(relative, float32), the same loss and norm on every rank, bytes of each collective exactly as predicted",
        "rows": ", ".join(f"{count} {found}" for found, count in sorted(Counter(rows.values()).items())),
    }
    lines = [*(f"{key}: {value}  " for key, value in facts.items()), ""]
    lines += [f"| model | mask | plan | {' | '.join(CONTEXTS)} |", "|---" * (len(CONTEXTS) + 3) + "|"]
    for model, mask, plan in dict.fromkeys(case[:3] for case in rows):
        cells = [rows.get(Case(model, mask, plan, context), "") for context in CONTEXTS]
        lines.append(f"| {model} | {mask} | {plan} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
