"""Mirrored halves: of causal attention over a split sequence, the last positions have most to do.

Each rank computes one half of a rank's queries from the front and one from the back: these are sent there, and the
results home. A half is of a rank's own positions; halves are numbered along the sequence, two a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.lowering.halo import Range, chunk
from autopar.runtime.mesh import Axis

Deal = Callable[[int], tuple[int, int]]  # the two halves of each rank


def neighbours(rank: int) -> tuple[int, int]:
    """The halves of a rank's own positions, among those of all ranks in order."""
    return 2 * rank, 2 * rank + 1


def mirrored(ranks: int, rank: int) -> tuple[int, int]:
    """One half from the front and one from the back: under a causal mask, each rank has as much to do then."""
    return rank, 2 * ranks - 1 - rank


def spans_of(length: int, ranks: int, halves: Sequence[int]) -> tuple[Range, ...]:
    """The positions of halves."""
    found = []
    for half in halves:
        begin, end = chunk(length, ranks, half // 2)
        middle = begin + (end - begin + 1) // 2
        found.append((middle, end) if half % 2 else (begin, middle))
    return tuple(found)


def sent_rows(length: int, ranks: int) -> tuple[list[int], list[int]]:
    """The positions that each rank sends where mirrored halves are computed, and where results come home."""

    def left(halves: tuple[int, int], others: tuple[int, int]) -> int:
        return sum(end - begin for begin, end in spans_of(length, ranks, [h for h in halves if h not in others]))

    pairs = [(neighbours(rank), mirrored(ranks, rank)) for rank in range(ranks)]
    return [left(own, away) for own, away in pairs], [left(away, own) for own, away in pairs]


def block_rows(length: int, ranks: int, rank: int, is_causal: bool) -> int:
    """How many keys are a rank's block: its own, or where that is causal, those of its mirrored halves."""
    halves = mirrored(ranks, rank) if is_causal else neighbours(rank)
    return sum(end - begin for begin, end in spans_of(length, ranks, halves))


def away(x: Tensor, length: int, axis: Axis) -> Tensor:
    """The halves that this rank computes, out of those that ranks have at home."""
    return _dealt(x, length, axis, neighbours, partial(mirrored, axis.size))


def home(x: Tensor, length: int, axis: Axis) -> Tensor:
    """The halves at home, out of those that ranks computed."""
    return _dealt(x, length, axis, partial(mirrored, axis.size), neighbours)


def _dealt(x: Tensor, length: int, axis: Axis, before: Deal, after: Deal) -> Tensor:
    """Halves (batch, heads, positions, width) of each rank, out of those that it had; positions are outside of heads in
    memory, as projections make them."""
    wanted = after(axis.index)
    rows = [end - begin for begin, end in spans_of(length, axis.size, range(2 * axis.size))]
    found = dict(zip(before(axis.index), torch.split(x, [rows[half] for half in before(axis.index)], 2), strict=True))
    sent = [[half for half in after(rank) if half in found and rank != axis.index] for rank in range(axis.size)]
    come = [[half for half in before(rank) if half in wanted and rank != axis.index] for rank in range(axis.size)]
    one = x.size(0) * x.size(1) * x.size(3)
    receives, sends = ([one * sum(rows[half] for half in halves) for halves in way] for way in (come, sent))
    buffer = torch.cat([x.new_empty(0), *(found[half].reshape(-1) for halves in sent for half in halves)])
    output = x.new_empty(sum(receives))
    comm.exchange(output, receives, buffer, sends, axis)
    arrived = [half for halves in come for half in halves]
    for half, part in zip(arrived, torch.split(output, [one * rows[half] for half in arrived]), strict=True):
        found[half] = part.view(*x.shape[:2], rows[half], x.size(3))
    result = x.new_empty((x.size(0), sum(rows[half] for half in wanted), x.size(1), x.size(3))).transpose(1, 2)
    return result.copy_(torch.cat([found[half] for half in wanted], 2))
