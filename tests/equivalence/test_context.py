"""Sequences that are split over ranks: planned by hand, run, and equal to one device; nothing is silently otherwise."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.ops.context import CONTEXT_ATTENTION
from models import gpt, llama
from tests.equivalence.hard import Tensors, assert_equal, operands_of, template

pytestmark = pytest.mark.ranks
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 128, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def hugging_face(config: Any, length: int) -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, 128, (2, length))
    labels = tokens.clone()
    labels[0, :5] = -100  # ranks hold unequal counts
    return model, {"input_ids": tokens, "labels": labels}


@cache
def built(name: str, length: int = 16) -> tuple[nn.Module, Tensors]:
    """A small model, and a batch of two sequences."""
    torch.manual_seed(0)
    if name == "hf_llama":
        return hugging_face(transformers.LlamaConfig(**SIZES), length)
    if name == "hf_qwen3":
        return hugging_face(transformers.Qwen3Config(head_dim=8, **SIZES), length)
    module: Any = {"gpt": gpt, "llama": llama}[name]
    config = module.Config(batch_size=2, seq_len=length, num_heads=4, hidden_size=32)
    return module.build(config), module.example_inputs(config)


CASES = [
    ("gpt", 16, {"cp": 2}),
    ("gpt", 15, {"cp": 4}),  # 4, 4, 4 and 3 positions
    ("llama", 16, {"cp": 4}),
    ("llama", 14, {"cp": 2, "tp": 2}),
    ("gpt", 16, {"cp": 2, "dp": 2, "zero": 3}),
    ("hf_llama", 16, {"cp": 2, "dp": 2}),
    ("hf_qwen3", 16, {"cp": 2, "zero": 3}),
    ("hf_llama", 15, {"cp": 2, "tp": 2, "recompute": "full"}),
]


@pytest.mark.parametrize("context", ["gather", "heads"])
@pytest.mark.parametrize(("name", "length", "choices"), CASES, ids=str)
def test_a_split_sequence_computes_the_same(name: str, length: int, choices: dict[str, Any], context: str) -> None:
    model, batch = built(name, length)
    assert_equal(model, batch, template(model, batch, context=context, **choices))
