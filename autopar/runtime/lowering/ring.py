"""Attention in a ring: blocks of keys and values pass from rank to rank while the block at hand is computed.

Of n ranks, rank r computes over block r − s in step s, sends that to rank r + 1, and receives block r − s − 1: no rank
holds more than two blocks of others (Ring Attention, Liu et al. 2023). Backward, blocks go round again, and each one's
gradients follow it, a step behind, and one further to be at home.

Causal, a block is two mirrored halves, as the queries are. Of another rank's block a rank then sees one half, or half
of its queries see all: as much in each step, on all ranks. Under a mask, blocks that no query of the rank sees are
passed on without computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.lowering.halo import chunk
from autopar.runtime.lowering.halves import block_rows, spans_of
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
from autopar.runtime.lowering.spread import Spread
from autopar.runtime.lowering.statistics import widen

__all__ = ["RingAttention"]


class _KeyBlock(NamedTuple):
    """Keys and values of a rank, one after the other in memory: (batch, heads, positions, width)."""

    flat: Tensor
    key: Tensor
    value: Tensor


class _SeenKeys(NamedTuple):
    """Which of the queries here see which keys of a block, and how."""

    rows: slice
    keys: slice
    call: PartCall


class RingAttention(torch.autograd.Function):
    """Saves what is at home on this rank, and the sums of what it computes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spread: Spread) -> Tensor:
        """All of them (batch, heads, this rank's positions, width); the mask is of all keys."""
        view = _view_under(mask, spread)
        part = _attend(spread.away(query), _own_block(key, value, spread), view)
        out = spread.home(part.result.to(query.dtype))
        kept = part.sums if mask is not None else (part.sums.top + part.sums.total.log(),)
        ctx.save_for_backward(query, key, value, out, mask, *kept)
        ctx.view = view._replace(mask=None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of queries, keys and values, at home."""
        query, key, value, out, mask, *sums = ctx.saved_tensors
        view: _BlockView = ctx.view._replace(mask=mask)
        spread, block = view.spread, _own_block(key, value, view.spread)
        whole = ScoreSums(sums[0], sums[1] if len(sums) > 1 else torch.ones_like(sums[0]))
        query, out, grad = (spread.away(x) for x in (query, out, grad))
        own, gradients = _gradients(PartQueries(query, out, grad, whole), block, view)
        return spread.home(own), spread.home(gradients.key), spread.home(gradients.value), None, None


def _attend(query: Tensor, own: _KeyBlock, view: _BlockView) -> AttentionPart:
    """The result of the queries that are here over all keys."""
    whole, spread = empty_part(query, own.value.size(3)), view.spread
    for index, block in _passing(own, spread):
        key, value = spread.each_head(block.key), spread.each_head(block.value)
        for rows, keys, call in view.of(index, query.size(2), key.size(2)):
            add_part(whole, rows, part_over(query[:, :, rows], key[:, :, keys], value[:, :, keys], call))
    return whole


def _gradients(queries: PartQueries, own: _KeyBlock, view: _BlockView) -> tuple[Tensor, _KeyBlock]:
    """Of the queries that are here, and of the keys and values at home."""
    spread, total = view.spread, torch.zeros_like(widen(queries.query))
    coming: tuple[comm.Wait, _KeyBlock] | None = None
    for index, block in _passing(own, spread):
        made = _block(torch.zeros_like(block.flat), own.key, own.value, block.key.size(2))
        key, value = spread.each_head(block.key), spread.each_head(block.value)
        for rows, keys, call in view.of(index, total.size(2), key.size(2)):
            found = part_gradients(queries.of(rows), key[:, :, keys], value[:, :, keys], call)
            total[:, :, rows] += found[0]
            made.key[:, :, keys] += spread.of_heads(found[1])
            made.value[:, :, keys] += spread.of_heads(found[2])
        if coming is not None:  # what ranks before found for this block
            coming[0]()
            made.flat.add_(coming[1].flat)
        coming = _passed_on(made, index, own, spread)
    assert coming is not None, "an axis has ranks"
    coming[0]()
    return total.to(queries.query.dtype), coming[1]


# Blocks ----------------------------------------


def _own_block(key: Tensor, value: Tensor, spread: Spread) -> _KeyBlock:
    """What this rank begins with."""
    key, value = spread.away(key), spread.away(value)
    return _block(torch.cat([key.reshape(-1), value.reshape(-1)]), key, value, key.size(2))


def _block(flat: Tensor, key: Tensor, value: Tensor, rows: int) -> _KeyBlock:
    """So many rows in flat memory, like those of other keys and values."""
    shapes = [(*x.shape[:2], rows, x.size(3)) for x in (key, value)]
    size = key.size(0) * key.size(1) * rows * key.size(3)
    return _KeyBlock(flat, flat[:size].view(shapes[0]), flat[size:].view(shapes[1]))


def _empty_block(index: int, like: _KeyBlock, spread: Spread) -> _KeyBlock:
    """Room for the block of a rank."""
    rows = block_rows(spread.lengths[1], spread.ranks, index, spread.causal)
    each = like.key.size(0) * like.key.size(1) * (like.key.size(3) + like.value.size(3))
    return _block(like.flat.new_empty(rows * each), like.key, like.value, rows)


def _passing(own: _KeyBlock, spread: Spread) -> Iterator[tuple[int, _KeyBlock]]:
    """The blocks of all ranks, this rank's first; the next one is under way while one is worked on."""
    block = own
    for step in range(spread.ranks):
        index = (spread.rank - step) % spread.ranks
        is_last = step == spread.ranks - 1
        coming = None if is_last else _passed_on(block, index, own, spread)
        yield index, block
        if coming is not None:
            coming[0]()
            block = coming[1]


def _passed_on(block: _KeyBlock, index: int, own: _KeyBlock, spread: Spread) -> tuple[comm.Wait, _KeyBlock]:
    """Starts to send what belongs to the block of a rank, and to receive as much of the rank before it."""
    if spread.axis is None:
        return lambda: None, block
    coming = _empty_block((index - 1) % spread.ranks, own, spread)
    return comm.start_pass_on(coming.flat, block.flat, spread.axis), coming


# What is seen ----------------------------------------


class _BlockView(NamedTuple):
    """What queries of this rank see of each block. seen: by block, whether a mask leaves anything of it."""

    spread: Spread
    mask: Tensor | None
    seen: tuple[bool, ...]

    def of(self, index: int, queries: int, keys: int) -> Iterator[_SeenKeys]:
        """Of the block of a rank, with so many keys: nothing, or one piece."""
        found = self._piece(index, queries, keys)
        if self.seen[index] and found.rows.start < found.rows.stop and found.keys.start < found.keys.stop:
            yield found

    def _piece(self, index: int, queries: int, keys: int) -> _SeenKeys:
        own, call = self.spread.rank, PartCall(False, self.spread.scale, self._columns(index))
        rows, every = slice(0, queries), slice(0, keys)
        if not self.spread.causal:
            return _SeenKeys(rows, every, call)
        if index == own:
            return _SeenKeys(rows, every, call._replace(causal=True))
        if index < own:
            return _SeenKeys(rows, slice(0, self._half(index)), call)
        return _SeenKeys(slice(self._half(own), queries), every, call)

    def _columns(self, index: int) -> Tensor | None:
        """The mask's part for a block."""
        if self.mask is None:
            return None
        return self.mask[..., slice(*chunk(self.spread.lengths[1], self.spread.ranks, index))]

    def _half(self, rank: int) -> int:
        """How long the half from the front is that a rank computes."""
        ((begin, end),) = spans_of(self.spread.lengths[0], self.spread.ranks, (rank,))
        return end - begin


def _view_under(mask: Tensor | None, spread: Spread) -> _BlockView:
    """Looks once at the mask, for all blocks together: a GPU is waited for."""
    ranks = range(spread.ranks)
    if mask is None:
        return _BlockView(spread, None, (True,) * len(ranks))
    view = _BlockView(spread, mask, ())
    parts = [x for x in map(view._columns, ranks) if x is not None]
    seen = torch.stack([(x if x.dtype == torch.bool else x > -math.inf).any() for x in parts])
    return view._replace(seen=tuple(seen.tolist()))
