"""How a tensor goes from the ranks of one stage to those of another: who sends which part of its own to whom.

Both sides cut the tensor into boxes, one a rank, by their own axes. Where a box of one side meets a box of the other
is a *tile*; each receiver that wants a tile gets it from one of the ranks that hold it.

    sender [S(0)] on 2 ranks   receiver [S(0) I] on 3 × 2 ranks   tiles
    |  0  |  1  |              | 2 3 | 4 5 | 6 7 |                |   |  |  |   |

Equal sides: rank k sends what it has to rank k, whatever its type; summands stay summands. Others: only slices and
whole values travel (S and I, or R where there is no gradient), which need no more than to be put in place. The gradient
of S is S and that of I is I, so it goes back by the same rule with the sides swapped.
A rank that is on both sides and holds what it wants keeps it: a move to itself, which costs no link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import AxisType, local_slices, parse_placement

Range = tuple[int, int]
Box = tuple[Range, ...]
"""From where to where a part of a tensor reaches in each dim."""


class Side(NamedTuple):
    """Who holds a tensor, and how: global ranks in row-major order over axes of these sizes (outer first)."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    types: tuple[AxisType, ...]

    @classmethod
    def of(cls, first_rank: int, sizes: Sequence[int], placement: str) -> Side:
        """The side of neighbouring ranks, with the placement as text: Side.of(4, (2, 2), "S(0) I")."""
        ranks = tuple(range(first_rank, first_rank + math.prod(sizes)))
        return cls(ranks, tuple(sizes), parse_placement(placement, len(sizes)))


class PeerMove(NamedTuple):
    """A part of this rank's own local tensor that goes to, or comes from, a peer (a global rank)."""

    peer: int
    slices: tuple[slice, ...]

    @property
    def num_elements(self) -> int:
        """How many elements travel."""
        return math.prod(part.stop - part.start for part in self.slices)


@dataclass(frozen=True, slots=True)
class Crossing:
    """The moves of every rank. Two ranks have at most one move between them, so that nothing but the tensor's name
    is needed to match what is sent with what is received."""

    sent: dict[int, tuple[PeerMove, ...]]
    received: dict[int, tuple[PeerMove, ...]]

    def sends(self, rank: int) -> tuple[PeerMove, ...]:
        """What the rank sends: parts of its tensor as the sending side holds it."""
        return self.sent.get(rank, ())

    def receives(self, rank: int) -> tuple[PeerMove, ...]:
        """What the rank receives: together all of its tensor as the receiving side wants it."""
        return self.received.get(rank, ())


@lru_cache(maxsize=1 << 14)
def crossing(shape: tuple[int, ...], sender: Side, receiver: Side) -> Crossing:
    """The routing of a tensor of this global shape. Every rank finds the same.

    Of the ranks that hold a tile, the one that has the fewest elements to send so far sends it; larger tiles are given
    out first. So no two ranks that hold the same part differ by more than one tile in what they send.
    Raises ProgramError for sides that differ and hold summands.
    """
    if (sender.sizes, sender.types) == (receiver.sizes, receiver.types):
        return _rank_to_rank(shape, sender, receiver)
    _check(sender, receiver)
    holders, wanters = _boxes(shape, sender), _boxes(shape, receiver)
    load = dict.fromkeys(sender.ranks, 0)
    moves: list[tuple[int, int, Box]] = []
    wanted = [(tile, here, rank) for tile, here, there in _tiles(holders, wanters) for rank in wanters[there]]
    for tile, here, rank in sorted(wanted, key=lambda item: -_volume(item[0])):
        by = rank if rank in holders[here] else min(holders[here], key=load.__getitem__)
        load[by] += _volume(tile) if by != rank else 0
        moves.append((by, rank, tile))
    return _crossing(shape, sender, receiver, moves)


def _check(sender: Side, receiver: Side) -> None:
    for side in (sender, receiver):
        if any(type_.kind == "P" for type_ in side.types):
            raise ProgramError(
                f"expected slices or whole values between ranks of unequal axes, found "
                f"{' '.join(map(str, sender.types))} on {sender.sizes} to {' '.join(map(str, receiver.types))} "
                f"on {receiver.sizes}"
            )


def _rank_to_rank(shape: tuple[int, ...], sender: Side, receiver: Side) -> Crossing:
    parts = [_relative(box, box) for box in _box_of_each(shape, sender)]
    rows = [row for row in zip(sender.ranks, receiver.ranks, parts, strict=True) if PeerMove(0, row[2]).num_elements]
    return Crossing(
        {by: (PeerMove(to, part),) for by, to, part in rows},
        {to: (PeerMove(by, part),) for by, to, part in rows},
    )


def _crossing(shape: tuple[int, ...], sender: Side, receiver: Side, moves: Sequence[tuple[int, int, Box]]) -> Crossing:
    """Moves (from, to, tile) in the order of ranks, in terms of what each rank holds."""
    here = dict(zip(sender.ranks, _box_of_each(shape, sender), strict=True))
    there = dict(zip(receiver.ranks, _box_of_each(shape, receiver), strict=True))
    sent: dict[int, list[PeerMove]] = {}
    received: dict[int, list[PeerMove]] = {}
    for by, to, tile in sorted(moves):
        sent.setdefault(by, []).append(PeerMove(to, _relative(tile, here[by])))
        received.setdefault(to, []).append(PeerMove(by, _relative(tile, there[to])))
    return Crossing(
        {rank: tuple(own) for rank, own in sent.items()}, {rank: tuple(own) for rank, own in received.items()}
    )


@lru_cache(maxsize=1 << 10)
def _box_of_each(shape: tuple[int, ...], side: Side) -> list[Box]:
    """What each rank of a side holds, in the side's order."""
    rows = [[Axis("", size, index, None) for index in range(size)] for size in side.sizes]
    return [
        tuple((part.start, part.stop) for part in local_slices(shape, side.types, axes))
        for axes in itertools.product(*rows)
    ]


def _boxes(shape: tuple[int, ...], side: Side) -> dict[Box, list[int]]:
    """The ranks that hold each box that is not empty."""
    found: dict[Box, list[int]] = {}
    for rank, box in zip(side.ranks, _box_of_each(shape, side), strict=True):
        if _volume(box):
            found.setdefault(box, []).append(rank)
    return found


def _tiles(holders: dict[Box, list[int]], wanters: dict[Box, list[int]]) -> Iterator[tuple[Box, Box, Box]]:
    """Each tile with the two boxes that it lies in.

    Boxes of a side are a grid: all combinations of the ranges that it cuts each dim into. So tiles are combinations of
    the ranges that meet, dim by dim.
    """
    if not holders or not wanters:
        return
    meeting = [
        _meeting(sorted(set(first)), sorted(set(second)))
        for first, second in zip(zip(*holders, strict=True), zip(*wanters, strict=True), strict=True)
    ]
    for parts in itertools.product(*meeting):
        here, there = tuple(first for first, _ in parts), tuple(second for _, second in parts)
        tile = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in parts)
        yield tile, here, there


def _meeting(first: Sequence[Range], second: Sequence[Range]) -> list[tuple[Range, Range]]:
    """The pairs of ranges that overlap, out of two sorted lists of disjoint ranges."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        (a, b), (c, d) = first[i], second[j]
        if max(a, c) < min(b, d):
            found.append((first[i], second[j]))
        i, j = i + (b <= d), j + (d <= b)
    return found


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _relative(tile: Box, box: Box) -> tuple[slice, ...]:
    """Where a tile lies in the tensor of a rank that holds the box."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(tile, box, strict=True))
