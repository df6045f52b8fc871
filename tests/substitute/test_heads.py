"""Heads that a model repeats for the queries of a group are read once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.lowering import heads as lowered
from autopar.runtime.lowering.heads import grouped_attention
from autopar.runtime.mesh import Axis
from autopar.substitute.heads import with_grouped_heads
from autopar.trace import trace
from autopar.trace.interpreter import run_graph


class Repeating(nn.Module):
    """Attention of grouped heads as decoders of transformers write it."""

    def __init__(self, group: int, interleaved: bool = False) -> None:
        super().__init__()
        self.group, self.interleaved = group, interleaved

    def repeated(self, x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        if self.interleaved:  # head 1 follows head 0: no groups of neighbours
            return x[:, None].expand(batch, self.group, heads, length, width).reshape(batch, -1, length, width)
        return x[:, :, None].expand(batch, heads, self.group, length, width).reshape(batch, -1, length, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, self.repeated(key), self.repeated(value), mask, scale=0.3)


def inputs(queries: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, queries, 4, generator=generator)
    key, value = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(2))
    return {"query": query, "key": key, "value": value, "mask": torch.rand(2, 1, queries, 5, generator=generator) < 0.8}


@pytest.mark.parametrize("queries", [1, 3])
def test_each_head_is_read_once_and_computes_the_same(queries: int) -> None:
    graph = trace(Repeating(2), inputs(queries), mode="inference")
    told = with_grouped_heads(graph)
    (attention,) = told.nodes
    assert dict(attention.kwargs) == {"scale": 0.3, "enable_gqa": True}
    assert [told.tensors[name].shape for name in attention.operands[1:3]] == [(2, 3, 5, 4)] * 2
    found, expected = (run_graph(one, {}, inputs(queries))[graph.outputs[0]] for one in (told, graph))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("queries", [1, 3])
def test_heads_that_are_no_groups_of_neighbours_stay_as_they_are(queries: int) -> None:
    graph = trace(Repeating(2, interleaved=True), inputs(queries), mode="inference")
    assert with_grouped_heads(graph) is graph


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_queries_of_a_group_are_those_of_its_head(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs' kernel shares heads by itself; where another device's does not, queries and mask are folded."""
    given = inputs(3)
    if device == "cuda":  # what other devices compute, here
        monkeypatch.setattr(lowered, "_SHARES", ())
    for mask in (given["mask"], given["mask"][0, 0], torch.rand(2, 6, 3, 5) < 0.9, None):
        own = None if mask is None else mask | (torch.arange(5) == 0)
        found = grouped_attention(given["query"], given["key"], given["value"], own, scale=0.3)
        repeated = [given[name].repeat_interleave(2, 1) for name in ("key", "value")]
        torch.testing.assert_close(found, F.scaled_dot_product_attention(given["query"], *repeated, own, scale=0.3))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("masked_heads", [1, 6])
def test_ranks_that_split_queries_alone_take_the_heads_of_these(ranks: int, heads: int, masked_heads: int) -> None:
    """Of six query heads: whole groups, parts of one, and two of different groups."""
    query, key, value = torch.randn(2, 6, 1, 4), torch.randn(2, heads, 5, 4), torch.randn(2, heads, 5, 3)
    mask = torch.randn(2, masked_heads, 1, 5)
    repeated = [x.repeat_interleave(6 // heads, 1) for x in (key, value)]
    expected = F.scaled_dot_product_attention(query, *repeated, mask)
    parts = []
    for rank in range(ranks):
        axis = Axis("tp", ranks, rank, None)
        own = slice(rank * 6 // ranks, (rank + 1) * 6 // ranks)
        given = mask if masked_heads == 1 else mask[:, own]
        parts.append(grouped_attention(query[:, own], key, value, given, heads=(6, 6 // heads, (axis,))))
    torch.testing.assert_close(torch.cat(parts, 1), expected)
