"""The (model, plan) pairs that predictions are checked on: two ranks, five families of models, several sizes.

`PAIRS` lists them by name, "gpt-s zero3". A plan is a template of `autopar.template_plan` or, as "searched", what
`autopar.parallelize` finds, which mixes placements from operator to operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from models import gpt, llama, moe, wide_resnet

WORLD = 2
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "microbatches": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "searched": {},
}

Built = tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True)
class Pair:
    """A model of `MODELS` under a plan of `PLANS`."""

    model: str
    plan: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.plan}"


def _bert(layers: int, hidden: int, heads: int, vocabulary: int, batch: int, length: int) -> Built:
    import transformers  # type: ignore[import-not-found, unused-ignore] # of the test extra

    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=heads,
        vocab_size=vocabulary, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    ids, labels = (torch.randint(0, vocabulary, (batch, length)) for _ in range(2))
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": labels}


def _own(module: Any, **sizes: Any) -> Callable[[], Built]:
    def build() -> Built:
        config = module.Config(**sizes)
        return module.build(config), module.example_inputs(config)

    return build


MODELS: dict[str, Callable[[], Built]] = {
    "gpt-s": _own(gpt, vocab_size=512, seq_len=128, num_layers=2, hidden_size=128, num_heads=4, batch_size=8),
    "gpt-m": _own(gpt, vocab_size=2048, seq_len=128, num_layers=4, hidden_size=256, num_heads=8, batch_size=8),
    "gpt-l": _own(gpt, vocab_size=8192, seq_len=256, num_layers=4, hidden_size=512, num_heads=8, batch_size=4),
    "llama-s": _own(
        llama, vocab_size=1024, seq_len=128, num_layers=2, hidden_size=192, num_heads=6, num_kv_heads=2, mlp_size=512
    ),
    "llama-m": _own(
        llama, vocab_size=4096, seq_len=128, num_layers=4, hidden_size=384, num_heads=8, num_kv_heads=4, mlp_size=1024,
        batch_size=4,
    ),
    "moe-s": _own(moe, vocab_size=512, seq_len=64, num_layers=2, hidden_size=128, num_heads=4, num_experts=4),
    "moe-m": _own(moe, vocab_size=2048, seq_len=128, num_layers=4, hidden_size=256, num_heads=8, num_experts=4),
    "wide_resnet-s": _own(wide_resnet, depths=(1, 1), base_channels=16, width_factor=2, image_size=32, batch_size=16),
    "wide_resnet-m": _own(
        wide_resnet, depths=(2, 2, 2), base_channels=16, width_factor=4, image_size=32, batch_size=16
    ),
    "bert-s": lambda: _bert(2, 128, 4, 1024, batch=8, length=64),
    "bert-m": lambda: _bert(4, 256, 8, 4096, batch=8, length=128),
}  # fmt: skip

_TRANSFORMER = ("dp", "zero1", "zero2", "zero3", "tp", "sp", "searched")
_OTHER = ("dp", "zero2", "zero3", "tp", "searched")
_PLANS_OF: dict[str, tuple[str, ...]] = {
    "gpt-s": _TRANSFORMER,
    "gpt-m": _TRANSFORMER,
    "gpt-l": ("dp", "zero3", "tp", "searched"),
    "llama-s": ("dp", "zero1", "zero3", "tp", "sp", "searched"),
    "llama-m": ("dp", "zero3", "tp", "searched"),
    "moe-s": _OTHER,
    "moe-m": ("dp", "zero3", "tp", "searched"),
    "wide_resnet-s": ("dp", "zero1", "zero3", "tp", "searched"),
    "wide_resnet-m": ("dp", "zero3", "tp", "searched"),
    "bert-s": ("dp", "zero2", "zero3", "tp", "sp", "searched"),
    "bert-m": ("dp", "zero3", "tp", "searched"),
}

PAIRS: tuple[Pair, ...] = tuple(Pair(model, plan) for model, plans in _PLANS_OF.items() for plan in plans)


def build(model: str) -> Built:
    """A model of `MODELS` with random weights and its global batch; the same for the same name."""
    torch.manual_seed(0)
    return MODELS[model]()


def program(pair: Pair, built: Built, mesh: autopar.Mesh | None = None) -> autopar.Program:
    """Plans and emits the pair's program."""
    model, batch = built
    mesh = mesh or autopar.Mesh("cpu", devices_per_node=WORLD)
    choices = PLANS[pair.plan]
    plan = autopar.template_plan(model, mesh, batch, **choices) if choices else None
    return autopar.parallelize(model, mesh, batch, plan=plan)
