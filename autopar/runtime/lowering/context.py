"""Attention whose sequence is split over an axis: queries stay, keys and values come from all ranks.

`lowering.parts` puts the result together, so torch's kernels compute each part, and no rank makes scores of all keys.
Keys and values are gathered, or pass from rank to rank (`lowering.ring`). What came from others is not kept: the
backward pass has it come again, and brings the gradients of keys and values home. Under a causal mask each rank
computes mirrored halves (`lowering.halves`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import pieces
from autopar.runtime.lowering.halves import mirrored, neighbours, spans_of
from autopar.runtime.lowering.parts import (
    AttentionPart,
    PartCall,
    PartQueries,
    ScoreSums,
    add_part,
    empty_part,
    part_gradients,
    part_over,
)
from autopar.runtime.lowering.ring import RingAttention
from autopar.runtime.lowering.spread import Spread
from autopar.runtime.mesh import Axis

__all__ = ["context_attention"]


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, lengths: tuple[int, int],
    axis: Axis | None, *, mask: Tensor | None = None, ring: bool = False,
) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention` of ([batch], heads, length, width), all of them split along length over `axis`.

    `lengths` are those of all queries and of all keys; where `causal`, they are one. Query heads may be a multiple of
    the heads of keys and values. ring: keys and values pass from rank to rank; there, a mask may have this rank's
    queries and all keys, and axis is None where it has all queries. Every rank must call it, even one without a query.
    """
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    spread = Spread(axis, lengths, causal, scale, query.size(-3) // key.size(-3) if key.size(-3) else 1)
    operands = [x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value)]
    function, further = (RingAttention, [mask]) if ring else (_ContextAttention, [])
    result: Tensor = function.apply(*operands, *further, spread)  # type: ignore[no-untyped-call]
    return result if query.dim() == 4 else result.squeeze(0)


class _ContextAttention(torch.autograd.Function):
    """Saves what is at home on this rank, and the sums of what it computes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spread: Spread) -> Tensor:
        part = _attend(spread.away(query), *_whole(key, value, spread), spread)
        out, lse = spread.home(part.result.to(query.dtype)), part.sums.top + part.sums.total.log()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.spread = spread
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        spread, wanted = ctx.spread, ctx.needs_input_grad
        query, out, grad = (spread.away(x) for x in (query, out, grad))
        queries = PartQueries(query, out, grad, ScoreSums(lse, torch.ones_like(lse)))
        own, *others = _gradients(queries, *_whole(key, value, spread), spread)
        summed = [_summed(other, spread) if wanted[n] else None for n, other in enumerate(others, 1)]
        return spread.home(own) if wanted[0] else None, *summed, None


def _whole(key: Tensor, value: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
    assert spread.axis is not None, "without ranks nothing is gathered"
    key, value = (pieces.gather(x, 2, spread.axis, spread.lengths[1]) for x in (key, value))
    return spread.each_head(key), spread.each_head(value)


def _summed(grad: Tensor, spread: Spread) -> Tensor:
    """This rank's part of the sum over ranks, and over the query heads that share a head."""
    assert spread.axis is not None, "without ranks nothing is gathered"
    return pieces.reduce_scatter(spread.of_heads(grad), 2, spread.axis)


def _attend(query: Tensor, key: Tensor, value: Tensor, spread: Spread) -> AttentionPart:
    """The result of the queries that are here over all keys."""
    whole = empty_part(query, value.size(3))
    for rows, seen in _queries(query, spread):
        for keys, call in seen:
            add_part(whole, rows, part_over(query[:, :, rows], key[:, :, keys], value[:, :, keys], call))
    return whole


def _queries(query: Tensor, spread: Spread) -> Iterator[tuple[slice, list[tuple[slice, PartCall]]]]:
    """Rows of the queries that are here, with what they see: parts of the keys, and whether these are causal."""
    first = 0
    halves = mirrored(spread.ranks, spread.rank) if spread.causal else neighbours(spread.rank)
    one, triangle = PartCall(False, spread.scale), PartCall(True, spread.scale)
    for begin, end in spans_of(spread.lengths[0], spread.ranks, halves):
        rows, first = slice(first, first + end - begin), first + end - begin
        parts = [(slice(begin, end), triangle), (slice(0, begin), one)] if spread.causal else [(slice(None), one)]
        if end > begin:
            yield rows, parts if begin else parts[:1]


def _gradients(queries: PartQueries, key: Tensor, value: Tensor, spread: Spread) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries that are here, and their part of those of all keys and values."""
    whole = torch.zeros_like(queries.query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, seen in _queries(queries.query, spread):
        for keys, call in seen:
            found = part_gradients(queries.of(rows), key[:, :, keys], value[:, :, keys], call)
            for total, where, part in zip(whole, (rows, keys, keys), found, strict=True):
                total[:, :, where] += part
    return whole
