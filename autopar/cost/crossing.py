"""What it costs that a tensor goes from the ranks of one stage to those of another, and in which placements it goes.

The routing is the runtime's (`runtime.crossing`). All messages of a crossing leave at once; it lasts as long as the
rank that sends or receives most needs for its own, inside the node and across nodes apart, since these are other wires:

    max over ranks and levels of σ + kα + bβ        k messages of b bytes in all, see `cost.collectives`

Between devices of two kinds the slower link of the two counts: both adapters are on the way.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.cost.collectives import Route, redistribution, sends_time_ns
from autopar.cost.profile import ACROSS, INSIDE, Profile
from autopar.cost.routes import routes
from autopar.ir.mesh import LogicalMesh, Mesh
from autopar.ir.placement import I, Placement, R, S, Shape, leaves_none_empty, local_shape
from autopar.runtime.crossing import Crossing, Side, crossing
from autopar.runtime.placement import parse_type


class End(NamedTuple):
    """The ranks of a stage, its axes without the microbatches', and the profile of its devices."""

    ranks: range
    axes: LogicalMesh
    profile: Profile


class Parcel(NamedTuple):
    """Tensors of so many bytes an element that are routed alike."""

    route: Crossing
    itemsize: int


def side(ranks: range, axes: LogicalMesh, placement: Placement) -> Side:
    """A stage's ranks as the runtime's routing sees them."""
    return Side(tuple(ranks), tuple(axis.size for axis in axes), tuple(parse_type(str(type_)) for type_ in placement))


def sent_bytes(parcels: Iterable[Parcel]) -> dict[int, int]:
    """The bytes that each rank sends to others."""
    found: dict[int, int] = {}
    for route, itemsize in parcels:
        for rank, moves in route.sent.items():
            sent = sum(move.num_elements for move in moves if move.peer != rank) * itemsize
            found[rank] = found.get(rank, 0) + sent
    return found


def crossing_time_ns(parcels: Sequence[Parcel], mesh: Mesh, profiles: Sequence[Profile]) -> tuple[str, int]:
    """The level of link that the parcels take longest on ("" where nothing travels), and nanoseconds.

    profiles: of the devices on both sides.
    """
    per_node = max(group.devices_per_node for group in mesh.groups)
    nodes = _nodes(mesh)
    loads: dict[tuple[int, bool, str], tuple[int, int]] = {}
    for route, itemsize in parcels:
        for rank, moves in route.sent.items():
            for move in (move for move in moves if move.peer != rank):
                level = INSIDE if nodes[rank] == nodes[move.peer] else ACROSS
                for key in ((rank, True, level), (move.peer, False, level)):
                    messages, size = loads.get(key, (0, 0))
                    loads[key] = messages + 1, size + move.num_elements * itemsize
    heaviest = {(level, *load) for (_, _, level), load in loads.items()}
    times = [
        (max(sends_time_ns(messages, size, level, per_node, profile) for profile in profiles), level)
        for level, messages, size in sorted(heaviest)
    ]
    duration, level = max(times, default=(0, ""))
    return level, duration


@lru_cache(maxsize=64)
def _nodes(mesh: Mesh) -> list[int]:
    """The node of each rank."""
    return [mesh.node_of(rank) for rank in range(mesh.num_devices)]


# Which placements ----------------------------------------


MOST_ROUTED = 32
"""Pairs of placements whose crossing is routed, of those that may be best by what each rank must get."""


class Handover(NamedTuple):
    """The placement that a tensor leaves in, the one that it arrives in, and nanoseconds both ways with what is
    redistributed on both sides."""

    leaving: Placement
    arriving: Placement
    duration_ns: int


@lru_cache(maxsize=1 << 12)
def cheapest_handover(
    shape: Shape, itemsize: int, differentiable: bool, made: Placement, wanted: tuple[Placement, ...],
    maker: End, reader: End, mesh: Mesh,
) -> Handover | None:  # fmt: skip
    """The best way for a tensor of one microbatch from the placement it is made in to those it is read in.

    A tensor that several ranks hold, or want, whole may travel in slices that are gathered where it arrives, and its
    gradient the same way back: a redistribution like any other. So the fast links inside a node can do what the slow
    ones across would (Alpa's local all-gather), where the sum of all times says that this is faster.
    Routed are the `MOST_ROUTED` pairs of placements that a bound leaves as the best. None where it cannot leave.
    """
    if [axis.size for axis in maker.axes] == [axis.size for axis in reader.axes]:
        return _rank_to_rank(shape, itemsize, differentiable, made, wanted, maker, reader, mesh)
    leaving = {p: _ways_ns(shape, itemsize, differentiable, [(made, p)], maker, mesh)
               for p in _able(shape, differentiable, maker)}  # fmt: skip
    arriving = {p: _ways_ns(shape, itemsize, differentiable, [(p, w) for w in wanted], reader, mesh)
                for p in _able(shape, differentiable, reader)}  # fmt: skip
    pairs = [
        (before + after + _least_ns(shape, itemsize, differentiable, maker, first, reader, last, mesh), number, before
         + after, first, last)
        for number, ((first, before), (last, after)) in enumerate(itertools.product(leaving.items(), arriving.items()))
        if before is not None and after is not None
    ]  # fmt: skip
    best: Handover | None = None
    for least, _, around, first, last in heapq.nsmallest(MOST_ROUTED, pairs):
        if best is not None and least >= best.duration_ns:
            break
        duration = around + _both_ways_ns(shape, itemsize, differentiable, maker, first, reader, last, mesh)
        if best is None or duration < best.duration_ns:
            best = Handover(first, last, duration)
    return best


def _least_ns(
    shape: Shape, itemsize: int, differentiable: bool, maker: End, first: Placement, reader: End, last: Placement,
    mesh: Mesh,
) -> int:  # fmt: skip
    """What a crossing takes at least, both ways: each rank gets what it is to hold, in one message on the best link."""
    if max(maker.ranks.start, reader.ranks.start) < min(maker.ranks.stop, reader.ranks.stop):
        return 0  # a rank on both sides may have it already
    nodes, per_node = _nodes(mesh), max(group.devices_per_node for group in mesh.groups)
    apart = {nodes[rank] for rank in maker.ranks}.isdisjoint(nodes[rank] for rank in reader.ranks)
    levels, total = ((ACROSS,) if apart else (INSIDE, ACROSS)), 0
    for end, placement in ((reader, last), (maker, first))[: 2 if differentiable else 1]:
        size = math.prod(local_shape(shape, placement, end.axes)) * itemsize
        total += min(
            max(sends_time_ns(1, size, level, per_node, own.profile) for own in (maker, reader)) for level in levels
        )
    return total


def _rank_to_rank(
    shape: Shape, itemsize: int, differentiable: bool, made: Placement, wanted: tuple[Placement, ...],
    maker: End, reader: End, mesh: Mesh,
) -> Handover | None:  # fmt: skip
    """Between axes that are equally long, any placement will do, if it is the same on both sides."""
    best: Handover | None = None
    for placement in dict.fromkeys((made, *wanted, *_able(shape, differentiable, maker))):
        before = _ways_ns(shape, itemsize, differentiable, [(made, placement)], maker, mesh)
        after = _ways_ns(shape, itemsize, differentiable, [(placement, w) for w in wanted], reader, mesh)
        if before is None or after is None:
            continue
        sent = _both_ways_ns(shape, itemsize, differentiable, maker, placement, reader, placement, mesh)
        if best is None or before + after + sent < best.duration_ns:
            best = Handover(placement, placement, before + after + sent)
    return best


def _able(shape: Shape, differentiable: bool, end: End) -> list[Placement]:
    """The placements that may travel, each rank with a part; whole ones first."""
    types = [I if differentiable else R, *(S(dim) for dim, size in enumerate(shape) if size > 1)]
    found = itertools.product(types, repeat=len(end.axes))
    return [placement for placement in found if leaves_none_empty(shape, placement, end.axes)]


def _ways_ns(
    shape: Shape, itemsize: int, differentiable: bool, ways: Iterable[tuple[Placement, Placement]], end: End,
    mesh: Mesh,
) -> int | None:  # fmt: skip
    """Nanoseconds, both ways, of all redistributions on one side; None where one does not exist."""
    total = 0
    for source, target in ways:
        route = way(shape, itemsize, differentiable, source, target, end, mesh)
        if route is None:
            return None
        total += route.forward_ns + route.backward_ns
    return total


def way(
    shape: Shape, itemsize: int, differentiable: bool, source: Placement, target: Placement, end: End, mesh: Mesh
) -> Route | None:
    """The cheapest redistribution on one side."""
    per_node = mesh.part(end.ranks).devices_per_node
    table = routes(shape, itemsize, end.axes, per_node, end.profile, differentiable)
    if source in table and target in table:
        return table.route(source, target)
    return redistribution(shape, itemsize, source, target, end.axes, per_node, end.profile, differentiable)


def _both_ways_ns(
    shape: Shape, itemsize: int, differentiable: bool, maker: End, first: Placement, reader: End, last: Placement,
    mesh: Mesh,
) -> int:  # fmt: skip
    ends = side(maker.ranks, maker.axes, first), side(reader.ranks, reader.axes, last)
    profiles = maker.profile, reader.profile
    _, forward = crossing_time_ns([Parcel(crossing(shape, *ends), itemsize)], mesh, profiles)
    if not differentiable:
        return forward
    return forward + crossing_time_ns([Parcel(crossing(shape, *reversed(ends)), itemsize)], mesh, profiles)[1]
