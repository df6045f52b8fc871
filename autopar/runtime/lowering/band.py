"""Attention of a band: each query sees so many of the last keys, itself included; and what ranks need of it.

    the keys of the queries themselves    blocks as long as the window, all at once: a triangle each, and of the block
                                          before what the triangle leaves, which is a triangle from behind
    keys before them                      all that every query sees, and a triangle from behind

so that kernels that know causal attention compute it without a mask, and not what nobody sees. A triangle from behind
is a causal one of queries and keys in the other order. Documents are told by numbers: queries see keys of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime.lowering.halo import Range, chunk, overlap
from autopar.runtime.lowering.parts import (
    AttentionPart,
    PartCall,
    PartQueries,
    ScoreSums,
    merge_part,
    part_gradients,
    part_over,
)


class Band(NamedTuple):
    """What does not change from part to part. documents: (batch, positions) numbers of all positions, or None."""

    window: int
    scale: float
    documents: Tensor | None = None


class BandPiece(NamedTuple):
    """So many queries from one on, by their place among those that are here, and so many keys; of so many blocks, each
    a window after the one before. causal: a triangle; is_behind: one from behind."""

    query: int
    key: int
    queries: int
    keys: int
    causal: bool = False
    is_behind: bool = False
    blocks: int = 1


@cache
def needed_keys(length: int, ranks: int, window: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """For each rank that splits positions, those that it has, and those whose keys its queries see."""
    held = tuple(chunk(length, ranks, rank) for rank in range(ranks))
    return held, tuple((max(0, begin - window + 1), end) if begin < end else (begin, end) for begin, end in held)


@cache
def passed_keys(length: int, ranks: int, window: int) -> tuple[tuple[Range, ...], ...]:
    """In each step of a ring, the positions that each rank sends to the next: what that sees of a block that came so
    far. As many steps as there is a rank that sees something."""
    held, needed = needed_keys(length, ranks, window)
    nothing, steps = (0, 0), list[tuple[Range, ...]]()
    for step in range(ranks - 1):
        sent = [
            overlap(held[rank - step], needed[rank + 1]) if rank >= step and rank + 1 < ranks else nothing
            for rank in range(ranks)
        ]
        if not any(end > begin for begin, end in sent):
            break
        steps.append(tuple(sent))
    return tuple(steps)


def seen_pairs(queries: Range, keys: Range, window: int) -> int:
    """How many pairs of a query and a key that it sees there are."""

    def not_after(begin: int, end: int) -> int:  # pairs of a key that is no later than its query
        corners = begin - keys[0], end - keys[0], begin - keys[1], end - keys[1]
        one, two, three, four = (max(0, side) * (max(0, side) + 1) // 2 for side in corners)
        return two - one - four + three

    begin, end = queries
    return not_after(begin, end) - not_after(begin - window, end - window)


# Pieces ----------------------------------------


def band_pieces(queries: Range, keys: Range, window: int) -> Iterator[BandPiece]:
    """What queries see of keys: of those before them, of their own, or of both in a row."""
    begin, end = queries
    if begin == end:
        return
    if keys[1] > begin:
        for piece in _own_pieces(end - begin, window):
            yield piece._replace(key=piece.key + begin - keys[0])
    before = keys[0], min(keys[1], begin)
    for piece in _pieces_before(queries, before, window) if before[0] < before[1] else ():
        yield piece


def _own_pieces(count: int, window: int) -> Iterator[BandPiece]:
    """Of the keys of the queries themselves, all of them here."""
    if window >= count:
        yield BandPiece(0, 0, count, count, causal=True)
        return
    blocks = count // window
    yield BandPiece(0, 0, window, window, causal=True, blocks=blocks)
    if blocks > 1 and window > 1:
        yield BandPiece(window, 1, window - 1, window - 1, causal=True, is_behind=True, blocks=blocks - 1)
    done = blocks * window
    if done < count:
        yield BandPiece(done, done, count - done, count - done, causal=True)
        for piece in _pieces_before((done, count), (done - window + 1, done), window):
            yield piece._replace(query=piece.query + done, key=piece.key + done - window + 1)


def _pieces_before(queries: Range, keys: Range, window: int) -> Iterator[BandPiece]:
    """Of keys before all queries: what every query sees at once, and the triangle that is left."""
    begin, end = queries
    first, last = keys
    whole = min(max(begin, first + window), end)  # queries up to it see all
    if whole > begin:
        yield BandPiece(0, 0, whole - begin, last - first)
    stop = min(end, last + window - 1)  # those from it on see none
    if stop > whole:
        yield BandPiece(whole - begin, stop - window - first, stop - whole, last - (stop - window))
    if stop > whole + 1:
        count = stop - whole - 1
        yield BandPiece(whole - begin, whole - window + 1 - first, count, count, causal=True, is_behind=True)


# Computed ----------------------------------------


def add_band(whole: AttentionPart, query: Tensor, queries: Range, key: Tensor, value: Tensor, keys: Range,
             band: Band) -> None:  # fmt: skip
    """Puts what queries (batch, heads, positions, width) see of keys, of so many positions each, to their result."""
    for piece in band_pieces(queries, keys, band.window):
        seen = _cut(key, piece, False, band), _cut(value, piece, False, band)
        part = part_over(_cut(query, piece, True, band), *seen, _call(piece, queries, keys, band))
        new = [x.flip(2) if piece.is_behind else x for x in (part.result, *part.sums)]
        result, top, total = (_in_blocks(x, piece) for x in new)
        old = [_blocks(x, piece, True, band) for x in (whole.result, *whole.sums)]
        merge_part(AttentionPart(old[0], ScoreSums(old[1], old[2])), AttentionPart(result, ScoreSums(top, total)))


def add_band_gradients(totals: tuple[Tensor, Tensor, Tensor], own: PartQueries, queries: Range, key: Tensor,
                       value: Tensor, keys: Range, band: Band) -> None:  # fmt: skip
    """Adds the gradients of these queries, keys and values to totals that are as large."""
    for piece in band_pieces(queries, keys, band.window):
        query, out, grad, top, total = (
            _cut(x, piece, True, band) for x in (own.query, own.out, own.grad, own.sums.top, own.sums.total)
        )
        some = PartQueries(query, out, grad, ScoreSums(top, total))
        sides = _cut(key, piece, False, band), _cut(value, piece, False, band)
        found = part_gradients(some, *sides, _call(piece, queries, keys, band))
        for into, part, is_query in zip(totals, found, (True, False, False), strict=True):
            part = part.flip(2) if piece.is_behind else part
            _blocks(into, piece, is_query, band).add_(_in_blocks(part, piece))


def _call(piece: BandPiece, queries: Range, keys: Range, band: Band) -> PartCall:
    if band.documents is None:
        return PartCall(piece.causal, band.scale)
    sides = (band.documents[:, None, begin:end] for begin, end in (queries, keys))
    own = tuple(_cut(x, piece, is_query, band)[:, 0] for x, is_query in zip(sides, (True, False), strict=True))
    return PartCall(piece.causal, band.scale, documents=(own[0], own[1]))


def _blocks(x: Tensor, piece: BandPiece, is_query: bool, band: Band) -> Tensor:
    """A view of (batch, heads, positions, …) by blocks: (batch, blocks, heads, positions of each, …)."""
    begin, count = (piece.query, piece.queries) if is_query else (piece.key, piece.keys)
    if piece.blocks == 1:
        return x.narrow(2, begin, count).unsqueeze(1)
    found = x.narrow(2, begin, (piece.blocks - 1) * band.window + count).unfold(2, count, band.window)
    return found.movedim((2, -1), (1, 3))


def _in_blocks(x: Tensor, piece: BandPiece) -> Tensor:
    """What was computed of blocks beside samples, as `_blocks` has it."""
    return x.view(x.size(0) // piece.blocks, piece.blocks, *x.shape[1:])


def _cut(x: Tensor, piece: BandPiece, is_query: bool, band: Band) -> Tensor:
    """The positions of a piece, blocks beside samples; in the other order, where that is computed from behind."""
    found = _blocks(x, piece, is_query, band).flatten(0, 1)
    return torch.flip(found, (2,)) if piece.is_behind else found
