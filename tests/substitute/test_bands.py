"""Masks that are sliding windows are found, of long sequences too, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from autopar.contexts import for_sequences
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.rewrites import with_causal_attention
from autopar.substitute.bands import over_windows, with_windows
from autopar.trace import trace

LENGTH = 16


def _window(rows: Tensor, columns: Tensor, size: int) -> Tensor:
    return (columns <= rows) & (columns > rows - size)


def _breaks(positions: Tensor) -> Tensor:
    """As transformers numbers packed documents."""
    before = torch.cat([positions[:, :1] - 1, positions], -1)
    return (torch.diff(before, dim=-1) != 1).cumsum(-1)


class Masked(nn.Module):
    """Attention under what a function makes of places (rows, columns) and of positions that are given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.project, self.kind = nn.Linear(8, 24), kind

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(query, key, value, self.mask(positions)).square().mean()

    def mask(self, positions: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        rows, columns = places[:, None], places
        given = positions[:, None, :, None], positions[:, None, None]
        numbers = _breaks(positions)
        same = numbers[:, None, :, None] == numbers[:, None, None]
        others = _breaks(positions * positions)
        masks = {
            "window": lambda: _window(rows, columns, 5),
            "one key": lambda: _window(rows, columns, 1),
            "documents": lambda: _window(rows, columns, 5) & same,
            "by positions": lambda: _window(*given, 5) & same,
            "causal": lambda: columns <= rows,
            "both sides": lambda: (columns - rows).abs() < 5,
            "ahead": lambda: (columns <= rows + 1) & (columns > rows - 5),
            "blocks": lambda: (columns <= rows) & (columns // 4 == rows // 4),
            "positions alone": lambda: _window(*given, 5),
            "other documents": lambda: _window(*given, 5) & (given[0] // 4 == given[1] // 4),
            "shifted documents": lambda: _window(*given, 5) & (numbers[:, None, :, None] == numbers[:, None, None] + 1),
            "breaks of others": lambda: _window(*given, 5) & (others[:, None, :, None] == others[:, None, None]),
            "packed": lambda: _window(*given, LENGTH) & same,
        }
        return masks[self.kind]()


def _graph(kind: str) -> Graph:
    positions = (torch.arange(LENGTH) % 7).expand(2, -1).contiguous()
    return trace(Masked(kind), (torch.randn(2, LENGTH, 8), positions))


@pytest.mark.parametrize(
    ("kind", "window", "operands"), [("window", 5, 3), ("one key", 1, 3), ("documents", 5, 4), ("by positions", 5, 4)]
)
def test_a_window_is_told(kind: str, window: int, operands: int) -> None:
    graph = _graph(kind)
    told = with_windows(graph, over_windows(graph))
    (node,) = (node for node in told.nodes if node.op == "autopar.window_attention.default")
    assert dict(node.kwargs)["window"] == window and len(node.operands) == operands
    assert not any(tensor.shape[-2:] == (LENGTH, LENGTH) for tensor in _used(told))


@pytest.mark.parametrize(
    "kind",
    [
        "causal",
        "both sides",
        "ahead",
        "blocks",
        "positions alone",
        "other documents",
        "shifted documents",
        "breaks of others",
        "packed",
    ],
)
def test_what_is_no_window_stays(kind: str) -> None:
    graph = _graph(kind)
    assert over_windows(graph) == ()
    (name,) = (node.name for node in graph.nodes if "attention" in node.op)
    with pytest.raises(PlanError, match="a mask that is a window"):
        with_windows(graph, [name])


def _used(graph: Graph) -> list[Any]:
    return [graph.tensors[name] for node in graph.nodes for name in (*node.operands, *node.results)]


@pytest.mark.parametrize("is_packed", [False, True])
def test_no_mask_of_a_long_sequence_is_left(is_packed: bool) -> None:
    """131,072 tokens: a mask of all pairs has 17 GB."""
    length = 131_072
    config = transformers.MistralConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=128, max_position_embeddings=length, use_cache=False, sliding_window=4_096,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.AutoModelForCausalLM.from_config(config), torch.zeros(1, length, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids} | ({"position_ids": ids.clone()} if is_packed else {})
    told, steps = for_sequences(trace(model, batch))
    assert "window-attention" in [step.rule for step in steps]
    assert max(tensor.num_elements for tensor in _used(told)) < length**2 // 64


@pytest.mark.parametrize(
    ("length", "window", "is_told"), [(2_048, 1_024, True), (2_048, 1_025, False), (512, 8, False)]
)
def test_narrow_windows_are_told_wherever_sequences_are_long(length: int, window: int, is_told: bool) -> None:
    config = transformers.MistralConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=128, max_position_embeddings=length, use_cache=False, sliding_window=window,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.AutoModelForCausalLM.from_config(config), torch.zeros(2, length, dtype=torch.int64)
    _, steps = with_causal_attention(trace(model, {"input_ids": ids, "labels": ids}), ())
    assert [step.rule for step in steps] == ["window-attention"] * is_told
