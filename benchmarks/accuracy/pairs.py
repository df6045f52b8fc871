"""The (model, plan) pairs whose predicted time, bytes and memory are compared with runs on two gloo ranks.

    python -m benchmarks.accuracy.pairs        # lists them

Six kinds of plan by `template_plan`, also in microbatches and with recomputation ("full", "block", "selective"), two
more ("mixed": matrices of the MLPs or experts split, everything else data parallel; "spatial": rows of images split) by
`parallelize` with constraints. Sizes are such that a step of a rank takes some tenths of a second on one thread, and
its memory tens to hundreds of MB, so that small constant overheads do not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import autopar
from autopar import Constraint, pipeline
from autopar.ir.graph import Graph
from autopar.program import PlannedProgram
from autopar.trace import trace
from models import gpt, llama, moe, wide_resnet

Batch = dict[str, Tensor]
WORLD = 2


class Pair(NamedTuple):
    """A model of MODELS in a plan of PLANS."""

    model: str
    plan: str

    def __str__(self) -> str:
        return f"{self.model}/{self.plan}"


# Models ----------------------------------------


def _own(module: Any, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    def make() -> tuple[nn.Module, Batch]:
        config = module.Config(**sizes)
        return module.build(config), module.example_inputs(config)

    return make


def _bert(batch_size: int, seq_len: int, vocab_size: int, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    def make() -> tuple[nn.Module, Batch]:
        import transformers

        config = transformers.BertConfig(
            vocab_size=vocab_size, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
        )
        ids, labels = torch.randint(0, vocab_size, (2, batch_size, seq_len))
        return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": labels}

    return make


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt-small": _own(gpt, vocab_size=2048, seq_len=128, num_layers=4, hidden_size=256, num_heads=8, batch_size=8),
    "gpt-wide": _own(gpt, vocab_size=4096, seq_len=128, num_layers=2, hidden_size=512, num_heads=8, batch_size=8),
    "gpt-long": _own(
        gpt, vocab_size=1024, seq_len=512, num_layers=6, hidden_size=128, num_heads=4, batch_size=4, tie_head=True
    ),
    "llama-small": _own(
        llama, vocab_size=2048, seq_len=128, num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=2, mlp_size=704,
        batch_size=8,
    ),
    "llama-wide": _own(
        llama, vocab_size=8000, seq_len=128, num_layers=2, hidden_size=512, num_heads=8, num_kv_heads=4, mlp_size=1408,
        batch_size=4,
    ),
    "moe-small": _own(
        moe, vocab_size=2048, seq_len=128, num_layers=4, hidden_size=192, num_heads=6, num_experts=4, batch_size=8
    ),
    "moe-wide": _own(
        moe, vocab_size=1024, seq_len=128, num_layers=2, hidden_size=384, num_heads=6, num_experts=8, batch_size=8
    ),
    "wide_resnet-small": _own(
        wide_resnet, depths=(1, 1, 1), base_channels=16, width_factor=4, image_size=32, batch_size=16
    ),
    "wide_resnet-wide": _own(
        wide_resnet, depths=(1, 1), base_channels=64, width_factor=2, bottleneck=True, image_size=32, batch_size=8
    ),
    "bert-small": _bert(
        8, 128, 2048, num_hidden_layers=4, hidden_size=256, intermediate_size=1024, num_attention_heads=8
    ),
    "bert-wide": _bert(
        4, 128, 8000, num_hidden_layers=2, hidden_size=512, intermediate_size=2048, num_attention_heads=8
    ),
}  # fmt: skip


@cache
def build_model(name: str) -> tuple[nn.Module, Batch]:
    """A model of MODELS with random weights, and its global batch; the same for the same name."""
    torch.manual_seed(0)
    return MODELS[name]()


@cache
def traced(name: str) -> Graph:
    """The model's graph on its batch."""
    return trace(*build_model(name))


# Plans ----------------------------------------

TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "dp": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "dp-microbatches": {"dp": 2, "microbatches": 2},
    "zero2-microbatches": {"dp": 2, "zero": 2, "microbatches": 2},
    "zero3-microbatches": {"dp": 2, "zero": 3, "microbatches": 2},
    "tp-microbatches": {"tp": 2, "microbatches": 4},
    "dp-full": {"dp": 2, "recompute": "full"},
    "dp-block": {"dp": 2, "recompute": "block"},
    "zero3-full": {"dp": 2, "zero": 3, "recompute": "full"},
    "zero3-block-microbatches": {"dp": 2, "zero": 3, "recompute": "block", "microbatches": 2},
    "tp-block": {"tp": 2, "recompute": "block"},
    "dp-selective": {"dp": 2, "recompute": "selective"},
    "zero3-selective-microbatches": {"dp": 2, "zero": 3, "recompute": "selective", "microbatches": 2},
    "sp-selective": {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    "sp-full": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
}
#: parameters that "mixed" splits; the other matrices are used whole, on samples that are split
SPLIT_WHEN_MIXED = {
    "gpt": "layers.*.mlp.*",
    "llama": "layers.*.mlp.*",
    "moe": "layers.*.mlp.*",
    "bert": "*.layer.*e.dense.*",  # intermediate.dense; and output.dense, which follows it
    "wide_resnet": "blocks.1.*",
}
PLANS = (*TEMPLATES, "mixed", "spatial")


def _family(model: str) -> str:
    return model.partition("-")[0]


def _constraints(pair: Pair) -> tuple[Constraint, ...]:
    if pair.plan == "spatial":
        return (
            Constraint("images", ("S(2)",), what="input"),
            Constraint("*conv*.weight", ("R",), what="used"),
            Constraint(microbatches=1, stages=1),
        )
    split = SPLIT_WHEN_MIXED[_family(pair.model)]
    return (
        Constraint("*", ("S(0)",), what="input"),
        Constraint(split, ("S",), what="used", min_dims=2),
        Constraint(microbatches=1, stages=1),
    )


def plan_pair(pair: Pair, profile: str = "cpu") -> PlannedProgram:
    """The pair's program for two devices of a cost profile, by its name or the path of its file."""
    model, batch = build_model(pair.model)
    mesh = autopar.Mesh(profile, devices_per_node=WORLD)
    with mock.patch.object(pipeline, "trace", lambda *_, **__: traced(pair.model)):
        if pair.plan not in TEMPLATES:
            return autopar.parallelize(model, mesh, batch, constraints=_constraints(pair))
        plan = autopar.template_plan(model, mesh, batch, **TEMPLATES[pair.plan])
        return autopar.parallelize(model, mesh, batch, plan=plan)


# Pairs ----------------------------------------


def _pairs(model: str, plans: str) -> tuple[Pair, ...]:
    return tuple(Pair(model, plan) for plan in plans.split())


PAIRS = (
    *_pairs("gpt-small", "dp zero1 zero2 zero3 tp sp mixed dp-microbatches dp-full zero3-full tp-block"),
    *_pairs("gpt-small", "zero3-selective-microbatches sp-selective"),
    *_pairs("gpt-wide", "dp zero1 zero3 tp sp zero2-microbatches sp-full"),
    *_pairs("gpt-long", "dp zero3 tp sp tp-microbatches dp-full dp-block"),
    *_pairs("llama-small", "dp zero1 zero2 zero3 tp sp mixed zero3-microbatches dp-full tp-block dp-selective"),
    *_pairs("llama-wide", "dp zero2 zero3 tp sp dp-block zero3-full"),
    *_pairs("moe-small", "dp zero1 zero3 tp mixed zero2-microbatches dp-full zero3-block-microbatches dp-selective"),
    *_pairs("moe-wide", "dp zero2 zero3 tp mixed zero3-full"),
    *_pairs("wide_resnet-small", "dp zero1 zero3 tp spatial mixed dp-full"),
    *_pairs("wide_resnet-wide", "dp zero2 zero3 tp zero3-full"),
    *_pairs("bert-small", "dp zero1 zero3 tp sp mixed dp-microbatches dp-full zero3-full"),
    *_pairs("bert-wide", "dp zero2 zero3 tp sp sp-full tp-block"),
)

if __name__ == "__main__":
    print(*PAIRS, sep="\n")
