"""Attention over a sliding window: each query sees so many of the last keys; of long sequences, without a mask.

Where ranks split the sequence, each needs the keys of the positions before its own that its first queries see, of as
many ranks as that takes: of the one before alone, where a part is as long as the window. They are fetched before all
is computed, or pass from rank to rank while what is here is computed: in as many steps as the window reaches, and of a
block no more than the next rank sees. As many bytes either way. What came from others is not kept: the backward pass
has it come again, and sends the gradients of keys and values straight home.

A head may have a sink (gpt-oss; StreamingLLM): a learned score beside those of the keys, with no value. Its column is
never made, since it scales a result over the keys alone, and adds to the sums that backward passes read:

    out = softmax over keys · exp(lse) / (exp(lse) + exp(sink))       lse' = log(exp(lse) + exp(sink))
    ∂sink = −Σ exp(sink − lse') · (out · ∂out)                        over samples and queries
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.lowering.band import Band, add_band, add_band_gradients, needed_keys, passed_keys
from autopar.runtime.lowering.halo import Range, fetched, given_back
from autopar.runtime.lowering.parts import PartQueries, ScoreSums, empty_part
from autopar.runtime.lowering.spread import Spread
from autopar.runtime.lowering.statistics import widen
from autopar.runtime.mesh import Axis

__all__ = ["window_attention"]


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, length: int, axis: Axis | None, *,
    documents: Tensor | None = None, sinks: Tensor | None = None, ring: bool = False,
) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention` of (batch, heads, length, width) where position i sees those from i − window + 1
    up to itself, of its own document: all of them split along length over `axis`, None where this rank has all.

    Query heads may be a multiple of the heads of keys and values. documents: a number for each of all positions (batch,
    length). sinks: a score for each query head (heads,), whose weight goes nowhere. ring: keys and values pass from
    rank to rank. Every rank must call it, even one without a query.
    """
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    group = query.size(1) // key.size(1) if key.size(1) else 1
    spread = Spread(axis, (length, length), False, scale, group)
    told = _WindowCall(spread, min(window, length), ring and axis is not None)
    result: Tensor = _WindowAttention.apply(query, key, value, documents, sinks, told)  # type: ignore[no-untyped-call]
    return result


class _WindowCall(NamedTuple):
    """What does not change from pass to pass."""

    spread: Spread
    window: int
    is_ring: bool

    @property
    def ranges(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        return needed_keys(self.spread.lengths[0], self.spread.ranks, self.window)

    @property
    def own(self) -> Range:
        """The positions of this rank."""
        return self.ranges[0][self.spread.rank]

    def band(self, documents: Tensor | None) -> Band:
        return Band(self.window, self.spread.scale, documents)


class _WindowAttention(torch.autograd.Function):
    """Saves what is at home on this rank, and the sums of what it computes."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, sinks: Tensor | None,
        told: _WindowCall,
    ) -> Tensor:  # fmt: skip
        whole, band = empty_part(query, value.size(3)), told.band(documents)
        for keys, one, other in _blocks(key, value, told):
            sides = told.spread.each_head(one), told.spread.each_head(other)
            add_band(whole, query, told.own, *sides, keys, band)
        lse = whole.sums.top + whole.sums.total.log()
        lse = lse if sinks is None else _with_sinks(whole.result, lse, sinks)
        out = torch.empty_like(query) if query.size(3) == value.size(3) else query.new_empty(whole.result.shape)
        out.copy_(whole.result)
        ctx.save_for_backward(query, key, value, out, documents, sinks, lse)
        ctx.told = told
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, documents, sinks, lse = ctx.saved_tensors
        own = PartQueries(query, out, grad, ScoreSums(lse, torch.ones_like(lse)))
        found = _ring_gradients if ctx.told.is_ring else _fetched_gradients
        of_sinks = None if sinks is None else _sink_gradient(own, sinks)
        return *found(own, key, value, ctx.told.band(documents), ctx.told), None, of_sinks, None


def _with_sinks(result: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scales the result over keys, in place, by the share of the weights that sinks leave; the sums with these."""
    scores = widen(sinks)[:, None]
    result.mul_((lse - scores).sigmoid().unsqueeze(-1))
    return torch.logaddexp(lse, scores)


def _sink_gradient(own: PartQueries, sinks: Tensor) -> Tensor:
    """Of the scores of sinks: the result does not have them, only their share of the weights."""
    weights = (widen(sinks)[:, None] - own.sums.top).exp_()
    return weights.mul_((widen(own.grad) * own.out).sum(-1)).sum((0, 2)).neg_().to(sinks.dtype)


Gradients = tuple[Tensor, Tensor, Tensor]


def _fetched_gradients(own: PartQueries, key: Tensor, value: Tensor, band: Band, told: _WindowCall) -> Gradients:
    ((keys, one, other),) = _blocks(key, value, told)
    total = torch.zeros_like(own.query)
    first, second = _made(own, total, (one, other), keys, band, told)
    axis, (held, needed) = told.spread.axis, told.ranges
    if axis is None or held == needed:
        return total, first, second
    return total, given_back(first, 2, axis, held, needed), given_back(second, 2, axis, held, needed)


def _ring_gradients(own: PartQueries, key: Tensor, value: Tensor, band: Band, told: _WindowCall) -> Gradients:
    """Gradients of others' keys are sent home as soon as they are made, and added in the order of how far they come."""
    total, axis = torch.zeros_like(own.query), told.spread.axis
    assert axis is not None, "a ring has ranks"
    at_home = torch.zeros_like(key), torch.zeros_like(value)
    coming: Callable[[], None] = _nothing
    for distance, (keys, one, other) in enumerate(_blocks(key, value, told)):
        made = _made(own, total, (one, other), keys, band, told)
        if distance == 0:
            for into, part in zip(at_home, made, strict=True):
                into.add_(part)
            continue
        coming()
        coming = _sent_home(made, at_home, distance, axis, told)
    coming()
    return total, *at_home


def _made(
    own: PartQueries, total: Tensor, sides: tuple[Tensor, Tensor], keys: Range, band: Band, told: _WindowCall
) -> tuple[Tensor, Tensor]:
    """The gradients of some keys and values, and that of the queries added up."""
    heads = told.spread.each_head(sides[0]), told.spread.each_head(sides[1])
    made = torch.zeros_like(heads[0]), torch.zeros_like(heads[1])
    add_band_gradients((total, *made), own, told.own, *heads, keys, band)
    return told.spread.of_heads(made[0]), told.spread.of_heads(made[1])


def _sent_home(
    made: tuple[Tensor, Tensor], at_home: tuple[Tensor, Tensor], distance: int, axis: Axis, told: _WindowCall
) -> Callable[[], None]:
    """Starts to send gradients to the rank so far before, whose keys they are of; returns what adds those that come."""
    step, begin = passed_keys(told.spread.lengths[0], axis.size, told.window)[distance - 1], told.own[0]
    reader = axis.index + distance  # sees what the rank before it was sent last
    first, last = step[reader - 1] if reader < axis.size else (begin, begin)
    sent = torch.cat([x.reshape(-1) for x in made])
    shapes = [(*x.shape[:2], last - first, x.size(3)) for x in at_home]
    sizes = [math.prod(shape) for shape in shapes]
    output = sent.new_empty(sum(sizes))
    wait = comm.start_pass_on(output, sent, axis, -distance)

    def add() -> None:
        wait()
        for into, part, shape in zip(at_home, torch.split(output, sizes), shapes, strict=True):
            into.narrow(2, first - begin, last - first).add_(part.view(shape))

    return add


def _nothing() -> None:
    pass


# What is here, or comes ----------------------------------------


def _blocks(key: Tensor, value: Tensor, told: _WindowCall) -> Iterator[tuple[Range, Tensor, Tensor]]:
    """Keys and values with the positions that they are of: all that this rank needs at once; or its own first, and one
    block after another, the next of which is under way while one is worked on."""
    axis, (held, needed) = told.spread.axis, told.ranges
    if axis is None or held == needed:
        yield told.own, key, value
    elif told.is_ring:
        yield from _passing(key, value, axis, told)
    else:
        yield needed[axis.index], fetched(key, 2, axis, held, needed), fetched(value, 2, axis, held, needed)


def _passing(key: Tensor, value: Tensor, axis: Axis, told: _WindowCall) -> Iterator[tuple[Range, Tensor, Tensor]]:
    rows, have = told.own, (key, value)
    for sent in passed_keys(told.spread.lengths[0], axis.size, told.window):
        begin, end = sent[axis.index]
        parts = [x.narrow(2, begin - rows[0] if end > begin else 0, end - begin) for x in have]
        buffer = torch.cat([x.reshape(-1) for x in parts])
        come = sent[axis.index - 1] if axis.index else (0, 0)
        shapes = [(*x.shape[:2], come[1] - come[0], x.size(3)) for x in have]
        sizes = [math.prod(shape) for shape in shapes]
        output = buffer.new_empty(sum(sizes))
        wait = comm.start_pass_on(output, buffer, axis)
        yield rows, have[0], have[1]
        wait()
        one, other = (x.view(shape) for x, shape in zip(torch.split(output, sizes), shapes, strict=True))
        rows, have = come, (one, other)
    yield rows, have[0], have[1]
