"""Heads that a model repeats for the queries of a group are read once where each sequence has one query."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.lowering.heads import one_query_attention
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


def test_one_query_reads_each_head_once_and_computes_the_same() -> None:
    graph = trace(Repeating(2), inputs(1), mode="inference")
    told = with_grouped_heads(graph)
    (attention,) = told.nodes
    assert dict(attention.kwargs) == {"scale": 0.3, "enable_gqa": True}
    assert [told.tensors[name].shape for name in attention.operands[1:3]] == [(2, 3, 5, 4)] * 2
    found, expected = (run_graph(one, {}, inputs(1))[graph.outputs[0]] for one in (told, graph))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("module", "queries"), [(Repeating(2), 3), (Repeating(2, interleaved=True), 1)])
def test_other_attention_stays_as_it_is(module: nn.Module, queries: int) -> None:
    graph = trace(module, inputs(queries), mode="inference")
    assert with_grouped_heads(graph) is graph


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
        parts.append(one_query_attention(query[:, own], key, value, given, heads=(6, 6 // heads, (axis,))))
    torch.testing.assert_close(torch.cat(parts, 1), expected)
