"""How long a collective takes: measured points where the profile has them, else the best α-β algorithm.

p ranks in n nodes, m of them in each; b bytes; α the cost of a message; β the time of a byte on the
slowest link that a ring crosses. Byte conventions are those of `ir.redistribution.transfer_bytes`.

| collective     | algorithms, of which the cheapest counts |
|----------------|------------------------------------------|
| all_reduce     | ring 2(p−1)α + 2(p−1)/p·bβ; double tree 2⌈log₂p⌉α + 2bβ; hierarchical |
| all_gather, reduce_scatter | ring (p−1)α + (p−1)/p·bβ; hierarchical |
| all_to_all     | pairwise (p−1)α + (p−1)/p·bβ; Bruck ⌈log₂p⌉α + ⌈log₂p⌉/2·bβ; two-level |
| send           | α + bβ |

Hierarchical: reduce-scatter inside the nodes, all-reduce across on 1/m of the bytes, all-gather inside
(BlueConnect, MLSys'19). A ring over several nodes uses the adapters of all its m ranks in a node, so it
crosses at m times one adapter's bandwidth, or at the speed inside the node if that is less (NCCL's channels).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from autopar.cost.profile import CollectivePoints, Link, Profile, interpolate
from autopar.ir.mesh import LogicalMesh, ranks_within_node
from autopar.ir.placement import Axis, Placement
from autopar.ir.redistribution import ItemSize, Step, apply, cheapest_path, transfer_bytes

Shape = tuple[int, ...]
INSIDE, ACROSS = "intra_node", "inter_node"


class Wire(NamedTuple):
    """A link as an algorithm sees it."""

    alpha_ns: float
    ns_per_byte: float


class Group(NamedTuple):
    """The ranks of a collective: `inside` of them in each of `nodes` nodes, and the links of both levels."""

    inside: int
    nodes: int
    near: Wire
    far: Wire

    @property
    def ranks(self) -> int:
        return self.inside * self.nodes

    @property
    def ring(self) -> Wire:
        """What a ring over all ranks sees."""
        if self.nodes == 1:
            return self.near
        return Wire(self.far.alpha_ns, max(self.near.ns_per_byte, self.far.ns_per_byte / self.inside))


@lru_cache(maxsize=1 << 18)
def collective_time_ns(kind: str, num_bytes: int, axis: Axis, devices_per_node: int, profile: Profile) -> int:
    """Nanoseconds of one collective along a mesh axis, while the other groups of the axis do the same.

    `kind`: all_reduce, all_gather, reduce_scatter, all_to_all or send. Zero for no bytes or one rank.
    """
    if num_bytes <= 0 or axis.size <= 1:
        return 0
    group = make_group(axis, devices_per_node, profile)
    measured = _measured(kind, group, profile)
    if measured is None:
        return math.ceil(modelled_ns(kind, num_bytes, group) * _contention(devices_per_node, 1, profile))
    return math.ceil(measured_ns(measured, num_bytes) * _contention(devices_per_node, axis.size, profile))


def make_group(axis: Axis, devices_per_node: int, profile: Profile) -> Group:
    """The ranks along an axis, level by level."""
    inside = ranks_within_node(axis, devices_per_node)
    near, far = (_wire(profile.link(level)) for level in (INSIDE, ACROSS))
    return Group(inside, axis.size // inside, near, far)


def _wire(link: Link) -> Wire:
    return Wire(link.alpha_ns, 1e9 / link.bandwidth)


def _contention(devices_per_node: int, ranks_measured: int, profile: Profile) -> float:
    """How much slower than measured: the ranks of a host share fewer cores, and more of them talk at once."""
    cores = profile.facts.cores
    if cores is None:
        return 1.0
    return max(1.0, devices_per_node / cores) / max(1.0, ranks_measured / cores)


def _measured(kind: str, group: Group, profile: Profile) -> CollectivePoints | None:
    if group.nodes == 1:
        return profile.collectives.get((kind, INSIDE, group.ranks))
    return profile.collectives.get((kind, ACROSS, group.ranks)) if group.inside == 1 else None


def measured_ns(measured: CollectivePoints, num_bytes: int) -> float:
    """Log-log interpolation; below the smallest measured size its time, above the largest its bandwidth."""
    points = measured.points
    if num_bytes <= points[0][0]:
        return points[0][1]
    sizes, times = _logarithms(points)
    return math.exp(interpolate(sizes, times, math.log(num_bytes)))


@lru_cache(maxsize=1024)
def _logarithms(points: tuple[tuple[int, int], ...]) -> tuple[list[float], list[float]]:
    return [math.log(size) for size, _ in points], [math.log(duration) for _, duration in points]


def modelled_ns(kind: str, num_bytes: int, group: Group) -> float:
    """The cheapest algorithm's time by its α-β formula."""
    return min(_ALGORITHMS[kind](num_bytes, group))


def _all_reduce(size: float, group: Group) -> list[float]:
    ring = group.ring
    options = [
        2 * _ring(size, group.ranks, ring),
        2 * _rounds(group.ranks) * ring.alpha_ns + 2 * size * ring.ns_per_byte,
    ]
    if group.inside > 1 and group.nodes > 1:
        across = min(_all_reduce(size / group.inside, group._replace(inside=1)))
        options.append(2 * _ring(size, group.inside, group.near) + across)
    return options


def _all_gather(size: float, group: Group) -> list[float]:
    """Also reduce_scatter, which sends the same messages the other way round."""
    options = [_ring(size, group.ranks, group.ring)]
    if group.inside > 1 and group.nodes > 1:
        across = _ring(size / group.inside, group.nodes, group.far)
        options.append(_ring(size, group.inside, group.near) + across)
    return options


def _all_to_all(size: float, group: Group) -> list[float]:
    slowest = group.near if group.nodes == 1 else group.far
    far_share = (group.ranks - group.inside) / group.ranks
    near_ns = size * (group.inside - 1) / group.ranks * group.near.ns_per_byte
    far_ns = size * far_share * group.far.ns_per_byte
    rounds = _rounds(group.ranks)
    options = [
        (group.ranks - 1) * slowest.alpha_ns + max(near_ns, far_ns),
        rounds * (slowest.alpha_ns + size / 2 * slowest.ns_per_byte),
    ]
    if group.inside > 1 and group.nodes > 1:
        options.append(_ring(size, group.inside, group.near) + _ring(size, group.nodes, group.far))
    return options


def _send(size: float, group: Group) -> list[float]:
    wire = group.near if group.nodes == 1 else group.far
    return [wire.alpha_ns + size * wire.ns_per_byte]


def _ring(size: float, ranks: int, wire: Wire) -> float:
    """p−1 messages of 1/p of the bytes, one after another."""
    return (ranks - 1) * (wire.alpha_ns + size / ranks * wire.ns_per_byte)


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


_ALGORITHMS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _all_gather,
    "all_to_all": _all_to_all,
    "send": _send,
}


# Redistributions ------------------------------------------------------------


def step_time_ns(
    shape: Shape,
    itemsize: ItemSize,
    placement: Placement,
    axes: LogicalMesh,
    step: Step,
    devices_per_node: int,
    profile: Profile,
) -> tuple[int, int]:
    """Nanoseconds (forward, backward) of one step on a tensor of global `shape` that has `placement`."""
    sizes = transfer_bytes(shape, itemsize, placement, axes, step)
    forward, backward = (
        collective_time_ns(transfer.collective, size, axes[step.axis], devices_per_node, profile)
        if transfer.collective
        else 0
        for transfer, size in zip(step.transfers, sizes, strict=True)
    )
    return forward, backward


class Route(NamedTuple):
    """A redistribution's steps and its nanoseconds in each direction."""

    steps: tuple[Step, ...]
    forward_ns: int
    backward_ns: int


@lru_cache(maxsize=1 << 18)
def redistribution(
    shape: Shape,
    itemsize: ItemSize,
    source: Placement,
    target: Placement,
    axes: LogicalMesh,
    devices_per_node: int,
    profile: Profile,
    differentiable: bool = True,
) -> Route | None:
    """The cheapest way from one placement to another by forward plus backward time; None when there is none.

    The backward direction counts only for a differentiable tensor. Memoised.
    """

    def times(placement: Placement, step: Step) -> tuple[int, int]:
        forward, backward = step_time_ns(shape, itemsize, placement, axes, step, devices_per_node, profile)
        return forward, backward if differentiable else 0

    steps = cheapest_path(source, target, lambda placement, step: sum(times(placement, step)))
    if steps is None:
        return None
    forward_ns = backward_ns = 0
    for step in steps:
        forward, backward = times(source, step)
        forward_ns, backward_ns = forward_ns + forward, backward_ns + backward
        source = apply(step, source)
    return Route(steps, forward_ns, backward_ns)


def redistribution_cost(
    shape: Shape,
    itemsize: ItemSize,
    source: Placement,
    target: Placement,
    axes: LogicalMesh,
    devices_per_node: int,
    profile: Profile,
    differentiable: bool = True,
) -> int | None:
    """Nanoseconds of the cheapest redistribution, forward plus backward; None when there is none."""
    route = redistribution(shape, itemsize, source, target, axes, devices_per_node, profile, differentiable)
    return None if route is None else route.forward_ns + route.backward_ns


def path(
    shape: Shape,
    itemsize: ItemSize,
    source: Placement,
    target: Placement,
    axes: LogicalMesh,
    devices_per_node: int,
    profile: Profile,
    differentiable: bool = True,
) -> tuple[Step, ...] | None:
    """The steps of the cheapest redistribution; None when there is none."""
    route = redistribution(shape, itemsize, source, target, axes, devices_per_node, profile, differentiable)
    return None if route is None else route.steps
