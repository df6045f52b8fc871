"""Attention with sinks is found where it is written out, of long sequences too, and nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autopar.contexts import for_sequences
from autopar.errors import PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph
from autopar.rewrites import with_causal_attention
from autopar.substitute.sinks import over_sinks, with_sinks
from autopar.trace import trace

LENGTH, SINKS = 16, "autopar.sink_attention.default"


class Written(nn.Module):
    """Attention with sinks by hand, in one point otherwise than gpt-oss has it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.project, self.kind = nn.Linear(8, 24), kind
        self.sinks, self.rows = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(2, 3)
        scores = scores if self.kind == "not scaled" else scores * 0.5
        scores = self.cat(scores + self.mask())
        greatest = scores.amax(2 if self.kind == "other maximum" else -1, keepdim=True)
        scores = scores if self.kind == "no maximum" else scores - greatest
        weights = scores.softmax(2 if self.kind == "softmax of queries" else -1)
        weights = weights[..., 1:] if self.kind == "without the first" else weights[..., :-1]
        if self.kind == "dropout":
            weights = nn.functional.dropout(weights, 0.5)
        return (weights @ value).square().mean()

    def cat(self, scores: Tensor) -> Tensor:
        sinks = self.rows.view(1, 1, -1, 1) if self.kind == "a sink a query" else self.sinks.view(1, -1, 1, 1)
        parts = [scores, sinks.expand(*scores.shape[:-1], 1)]
        return torch.cat(parts[::-1] if self.kind == "sinks first" else parts, -1)

    def mask(self) -> Tensor:
        places = torch.arange(LENGTH)
        seen = places <= places[:, None]
        if self.kind == "window":
            seen = seen & (places > places[:, None] - 5)
        if self.kind == "both sides":
            seen = (places - places[:, None]).abs() < 5
        shown, hidden = float(self.kind == "shown by one"), -1.0 if self.kind == "hardly hidden" else -3e38
        wide = seen[None, None].expand(3, 1, -1, -1)
        return torch.where(wide, torch.tensor(shown), torch.tensor(hidden))


def _graph(kind: str) -> Graph:
    return trace(Written(kind), (torch.randn(3, LENGTH, 8),))


@pytest.mark.parametrize(
    ("kind", "window", "scale"),
    [("as it is", 16, 0.5), ("window", 5, 0.5), ("not scaled", 16, 1.0), ("no maximum", 16, 0.5)],
)
def test_sinks_are_told(kind: str, window: int, scale: float) -> None:
    graph = _graph(kind)
    told = with_sinks(graph, over_sinks(graph))
    (node,) = (node for node in told.nodes if node.op == SINKS)
    assert (dict(node.kwargs)["window"], dict(node.kwargs)["scale"]) == (window, scale)
    assert told.tensors[node.operands[3]].shape == (2,)
    assert not any(tensor.shape[-2:] == (LENGTH, LENGTH) for tensor in _used(told))


@pytest.mark.parametrize(
    "kind",
    [
        "other maximum",
        "softmax of queries",
        "without the first",
        "dropout",
        "a sink a query",
        "sinks first",
        "both sides",
        "shown by one",
        "hardly hidden",
    ],
)
def test_what_has_no_such_sinks_stays(kind: str) -> None:
    graph = _graph(kind)
    assert over_sinks(graph) == ()
    with pytest.raises(PlanError, match="attention with sinks under a window"):
        with_sinks(graph, [graph.nodes[-1].name])


def _used(graph: Graph) -> list[Any]:
    return [graph.tensors[name] for node in graph.nodes for name in (*node.operands, *node.results)]


def _of_gpt_oss(length: int) -> transformers.GptOssConfig:
    """Small; the first layer sees a window, the second all."""
    return transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=128, max_position_embeddings=length, use_cache=False, sliding_window=128, head_dim=16,
        num_local_experts=2, num_experts_per_tok=1, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip


def test_no_scores_of_a_long_sequence_are_left() -> None:
    """131,072 tokens: the scores of one head and sample have 69 GB; half of the layers see all of them."""
    length = 131_072
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(_of_gpt_oss(length))
        ids = torch.zeros(1, length, dtype=torch.int64)
    told, steps = for_sequences(trace(model, {"input_ids": ids, "labels": ids}))
    assert "sink-attention" in [step.rule for step in steps]
    windows = [dict(node.kwargs)["window"] for node in told.nodes if node.op == SINKS]
    assert windows == [128, length]
    assert max(tensor.num_elements for tensor in _used(told)) < length**2 // 64


@pytest.mark.parametrize(("length", "is_told"), [(2_048, True), (512, False)])
def test_they_are_told_wherever_sequences_are_long(length: int, is_told: bool) -> None:
    """Split or not: scores of 8,192 tokens in all heads take more than a device has."""
    config = _of_gpt_oss(length)
    with torch.device("meta"):
        model, ids = transformers.AutoModelForCausalLM.from_config(config), torch.zeros(2, length, dtype=torch.int64)
    graph = trace(model, {"input_ids": ids, "labels": ids})
    told, steps = with_causal_attention(graph, ())
    assert [step.rule for step in steps] == ["sink-attention"] * is_told
    assert any(tensor.shape[-2:] == (length, length) for tensor in _used(told)) is not is_told
    names = [node.results[0] for node in graph.nodes if node.name in over_sinks(graph)]
    kept, _ = with_causal_attention(graph, [Constraint(names[0], ("R",), what="tensor")])
    assert sum(node.op == SINKS for node in kept.nodes) == is_told  # what a constraint speaks of stays
