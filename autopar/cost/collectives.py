"""How long a collective takes: measured points where the profile has them, else the best α-β algorithm.

p ranks in n nodes, m of them in each; b bytes; σ the cost of starting a collective; α the cost of a message; β the
time of a byte on the slowest link that a ring crosses; γ the time in which a rank passes once over a byte of its own.
Byte conventions are those of `ir.redistribution.transfer_bytes`.

| collective     | algorithms, of which the cheapest counts |
|----------------|------------------------------------------|
| all_reduce     | ring σ + 2(p−1)α + 2(p−1)/p·bβ + bγ; double tree σ + 2⌈log₂p⌉α + 2bβ + bγ; of nodes; hierarchical |
| all_gather, reduce_scatter | ring σ + (p−1)α + (p−1)/p·bβ + bγ/2; hierarchical |
| all_to_all     | pairwise σ + (p−1)α + (p−1)/p·bβ; Bruck σ + ⌈log₂p⌉α + ⌈log₂p⌉/2·bβ; two-level |
| servers        | a sum over spare hosts: `cost.servers` |
| ring           | to the next rank in k messages, p−1 or as far as a window reaches: of each σ + α + b/k·β |
| send           | σ + α + bβ; k messages to several ranks σ + kα + bβ |

Inside a node, where groups of other sizes were measured, those of next fewer and next more ranks count instead of a
formula (`_likened_ns`).

A link may have two protocols, as NCCL's do: one of cheap messages, one of full bandwidth. Each algorithm takes the
better one at its size.

Tree of nodes (NCCL's, so of GPUs): a chain of a node's ranks hangs from each, so σ + 2⌈log₂n⌉α + 2(m−1) messages of the
near link, and the greater of an all-reduce among the ranks of a node, as measured there, and 2b/m·β across, since what
a node has added up goes on while the next bytes are added. Of two nodes each sends every byte across once, half of them
as a leaf of either tree: b/m·β.

Hierarchical: reduce-scatter inside the nodes, all-reduce across on 1/m of the bytes, all-gather inside
(BlueConnect, MLSys'19), as NCCL has it; gloo's rings and trees know no nodes, where a plan sums gradients by levels
itself (`sum_ns`). Two-level all-to-all: inside the nodes, then between the ranks of equal place (TUTEL,
MLSys'23).
A ring over several nodes uses the adapters of all its m ranks in a node, so it crosses at m times one adapter's
bandwidth, or at the speed inside the node if that is less (NCCL's channels).

Where a rank stops until a collective has ended, it waits for the others besides, the longer the longer all of them have
computed since they met: `waits_along`, where the profile has measured it.

The groups along a mesh axis do the same at the same time, so together they use every device of a node. Where the
devices of a node share its adapters, each has its part of their bandwidth (`Link.node_bandwidth`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from autopar.cost.profile import ACROSS, INSIDE, LEVELS, CollectivePoints, Link, Profile, Waits, interpolate
from autopar.cost.seen import Ratios, in_order, log_factor
from autopar.cost.servers import SERVED, served_sum_ns
from autopar.ir.mesh import LogicalMesh, ranks_within_node
from autopar.ir.placement import Axis, Placement, Shape
from autopar.ir.redistribution import (
    ItemSize,
    Step,
    apply,
    cheapest_path,
    gradient_collectives,
    transfer_bytes,
)


class Wire(NamedTuple):
    """One protocol of a link: nanoseconds a message and a byte."""

    alpha_ns: float
    ns_per_byte: float


class Level(NamedTuple):
    """A link level as an algorithm sees it: its protocols, the cost of starting, and of a rank's own pass a byte."""

    wires: tuple[Wire, ...]
    start_ns: float = 0.0
    pass_ns_per_byte: float = 0.0

    def time_ns(self, messages: int, size: float, passed: float = 0.0) -> float:
        """So many messages one after another of `size` bytes in all, and a pass over `passed` bytes."""
        sent = min(messages * wire.alpha_ns + size * wire.ns_per_byte for wire in self.wires)
        return self.start_ns + sent + passed * self.pass_ns_per_byte


class Group(NamedTuple):
    """The ranks of a collective: `inside` of them in each of `nodes` nodes, and the links of both levels."""

    inside: int
    nodes: int
    near: Level
    far: Level

    @property
    def ranks(self) -> int:
        return self.inside * self.nodes

    @property
    def ring(self) -> Level:
        """What a ring over all ranks sees."""
        return self.near if self.nodes == 1 else _ring_across(self.inside, self.near, self.far)


@lru_cache(maxsize=1024)
def _ring_across(inside: int, near: Level, far: Level) -> Level:
    """Messages wait for the far level; bytes go through `inside` adapters, at most as fast as the near level."""
    least = min(wire.ns_per_byte for wire in near.wires)
    wires = tuple(Wire(wire.alpha_ns, max(least, wire.ns_per_byte / inside)) for wire in far.wires)
    return Level(wires, far.start_ns, near.pass_ns_per_byte)


@lru_cache(maxsize=1 << 18)
def collective_time_ns(kind: str, num_bytes: int, axis: Axis, devices_per_node: int, profile: Profile) -> int:
    """Nanoseconds of one collective of the table along a mesh axis, while the other groups of the axis do the same.

    `kind`: all_reduce, all_gather, reduce_scatter, all_to_all, exchange (an all-to-all of sizes that are known when it
    runs), ring or send. Zero for no bytes or one rank.
    """
    priced = priced_collective_ns(kind, num_bytes, axis, devices_per_node, profile)
    if not (priced and profile.seen.collectives):
        return priced
    points = _seen_ratios(kind, axis, devices_per_node, profile)
    return round(priced * math.exp(log_factor(points, math.log(num_bytes))))


def _seen_ratios(kind: str, axis: Axis, devices_per_node: int, profile: Profile) -> Ratios:
    """How much longer a collective along such an axis was seen to take than it is priced, by bytes (`cost.seen`)."""
    key = kind, axis.size, ranks_within_node(axis, devices_per_node), profile.ranks_sharing
    known = profile.seen_ratios.get((*key, devices_per_node))
    if known is None:
        own = [
            item for item in profile.seen.collectives
            if (item.collective, item.ranks, item.inside, item.ranks_sharing) == key
        ]  # fmt: skip
        prices = [priced_collective_ns(kind, item.num_bytes, axis, devices_per_node, profile) for item in own]
        known = in_order(
            (math.log(item.num_bytes), math.log(max(item.duration_ns, 1) / priced))
            for item, priced in zip(own, prices, strict=True) if priced
        )  # fmt: skip
        profile.seen_ratios[*key, devices_per_node] = known
    return known


@lru_cache(maxsize=1 << 18)
def priced_collective_ns(kind: str, num_bytes: int, axis: Axis, devices_per_node: int, profile: Profile) -> int:
    """The same, whatever runs have shown."""
    kind = "all_to_all" if kind == "exchange" else kind
    if num_bytes <= 0 or axis.size <= 1:
        return 0
    if kind == SERVED:
        return _served_ns(num_bytes, axis, devices_per_node, profile)
    if kind == "ring":
        return _ring_steps_ns(num_bytes, axis, devices_per_node, profile)
    return _group_time_ns(kind, num_bytes, make_group(axis, devices_per_node, profile), devices_per_node, profile)


def _served_ns(num_bytes: int, axis: Axis, devices_per_node: int, profile: Profile) -> int:
    assert profile.servers is not None, "sums go over the servers of a mesh that has some"
    inside = ranks_within_node(axis, devices_per_node)
    far = _level(profile.link(ACROSS), max(2, axis.size // inside), devices_per_node)
    wires = [(wire.alpha_ns, wire.ns_per_byte) for wire in far.wires]
    passed = far.pass_ns_per_byte or 1e9 / profile.facts.memory_bandwidth
    found = served_sum_ns(num_bytes, axis.size, inside, profile.servers, wires, far.start_ns, passed)
    return math.ceil(found * _contention(devices_per_node, 1, profile))


def _ring_steps_ns(num_bytes: int, axis: Axis, devices_per_node: int, profile: Profile, steps: int = 0) -> int:
    """All ranks of a ring send to the next at a time, and wait for the slowest link. steps: fewer than come round."""
    if num_bytes <= 0 or axis.size <= 1:
        return 0
    steps = steps or axis.size - 1
    level = INSIDE if ranks_within_node(axis, devices_per_node) == axis.size else ACROSS
    return steps * sends_time_ns(1, -(-num_bytes // steps), level, devices_per_node, profile)


def beside_compute_ns(
    kind: str, num_bytes: int, compute_ns: int, axis: Axis, devices_per_node: int, profile: Profile, share: float = 0.0,
    messages: int = 0,
) -> int:  # fmt: skip
    """Nanoseconds that an operator takes longer for what it sends while it computes: of p equal parts all but the last
    take as long as what is sent meanwhile, if that is more, and longer than alone as the profile says. share: of the
    computing, that goes on meanwhile, where it is another. messages: of a ring that stops before it has come round."""
    level = INSIDE if ranks_within_node(axis, devices_per_node) == axis.size else ACROSS
    if messages:
        sent_ns = _ring_steps_ns(num_bytes, axis, devices_per_node, profile, messages)
    else:
        sent_ns = collective_time_ns(kind, num_bytes, axis, devices_per_node, profile)
    sent = sent_ns * profile.beside_compute(level)
    parts = compute_ns * (share or (axis.size - 1) / axis.size)
    slowed = parts + sent * (1 - 1 / profile.slowdowns.get(level, 1.0))
    return math.ceil(max(sent, slowed) - parts)


def _group_time_ns(kind: str, num_bytes: int, group: Group, devices_per_node: int, profile: Profile) -> int:
    measured = _measured(kind, group, profile)
    if measured is None:
        found = _likened_ns(kind, num_bytes, group, profile) or modelled_ns(kind, num_bytes, group, profile)
        return math.ceil(found * _contention(devices_per_node, 1, profile))
    return math.ceil(measured_ns(measured, num_bytes) * _contention(devices_per_node, group.ranks, profile))


@lru_cache(maxsize=1 << 16)
def sends_time_ns(messages: int, num_bytes: int, level: str, devices_per_node: int, profile: Profile) -> int:
    """Nanoseconds of several messages of one rank to others, of so many bytes in all, that are started together.

    level: of the link between the ranks. Modelled messages are started once; measured ones each cost an empty one.
    """
    near, far = (_level(profile.link(name), 2, devices_per_node) for name in LEVELS)
    pair = Group(2, 1, near, far) if level == INSIDE else Group(1, 2, near, far)
    one, empty = (_group_time_ns("send", size, pair, devices_per_node, profile) for size in (num_bytes, 1))
    is_measured = ("send", level, 2) in profile.collectives
    return one + (messages - 1) * (empty if is_measured else max(0, empty - math.ceil(profile.link(level).start_ns)))


def make_group(axis: Axis, devices_per_node: int, profile: Profile) -> Group:
    """The ranks along an axis, level by level."""
    inside = ranks_within_node(axis, devices_per_node)
    near = _level(profile.link(INSIDE), inside, devices_per_node)
    return Group(inside, axis.size // inside, near, _level(profile.link(ACROSS), axis.size // inside, devices_per_node))


@lru_cache(maxsize=1024)
def _level(link: Link, ranks: int, devices_per_node: int) -> Level:
    """The link's protocols for a group of so many ranks, while all devices of the nodes talk."""
    rates = [(link.alpha_ns, link.bandwidth_of(ranks))]
    if link.low_latency is not None:
        rates.append((link.low_latency.alpha_ns, link.low_latency.share * rates[0][1]))
    share = math.inf if link.node_bandwidth is None else link.node_bandwidth / devices_per_node
    wires = tuple(Wire(alpha, 1e9 / min(rate, share)) for alpha, rate in rates)
    return Level(wires, link.start_ns, 1e9 / link.pass_bandwidth if link.pass_bandwidth else 0.0)


def _contention(devices_per_node: int, ranks_measured: int, profile: Profile) -> float:
    """How much slower than measured: the ranks of a host share fewer cores, and more of them talk at once.

    The ranks of a stage are some of a host's: the profile says with how many they share it.
    """
    cores = profile.facts.cores
    if cores is None:
        return 1.0
    return max(1.0, max(devices_per_node, profile.ranks_sharing) / cores) / max(1.0, ranks_measured / cores)


def _measured(kind: str, group: Group, profile: Profile) -> CollectivePoints | None:
    if group.nodes == 1:
        return profile.collectives.get((kind, INSIDE, group.ranks))
    return profile.collectives.get((kind, ACROSS, group.ranks)) if group.inside == 1 else None


def _likened_ns(kind: str, num_bytes: int, group: Group, profile: Profile) -> float | None:
    """As long as measured groups of fewer and of more ranks inside a node take, between them by (p−1)/p; None where no
    group was measured, or groups are too unlike since they share cores.

    Beyond the largest group by (p−1)/p, too, and the messages that the ring or the tree has more.
    """
    known = sorted(ranks for op, level, ranks in profile.collectives if (op, level) == (kind, INSIDE))
    if group.nodes > 1 or not known or profile.facts.cores is not None:
        return None
    right = min(max(1, bisect_left(known, group.ranks)), len(known) - 1)
    fewer, more = known[max(0, right - 1)], known[right]
    low, high = (measured_ns(profile.collectives[kind, INSIDE, ranks], num_bytes) for ranks in (fewer, more))
    if fewer < group.ranks < more:
        share = (_sent(group.ranks) - _sent(fewer)) / (_sent(more) - _sent(fewer))
        return (1 - share) * low + share * high
    nearest, ns = (more, high) if group.ranks > more else (fewer, low)
    messages = max(0, _messages(kind, group.ranks) - _messages(kind, nearest))
    return ns * _sent(group.ranks) / _sent(nearest) + messages * min(wire.alpha_ns for wire in group.near.wires)


def _sent(ranks: int) -> float:
    """The part of the bytes that each rank of a ring sends."""
    return (ranks - 1) / ranks


def _messages(kind: str, ranks: int) -> int:
    """Messages one after another, of a tree for all-reduce, else of a ring."""
    return 2 * _rounds(ranks) if kind == "all_reduce" else ranks - 1


@lru_cache(maxsize=1024)
def waits_along(axis: Axis, devices_per_node: int, profile: Profile) -> Waits | None:
    """How long the ranks along an axis wait for each other where a collective stops them; None where nothing is known.

    Of as many ranks as were measured, or the nearest number of them, as much slower as their collectives are.
    """
    inside = ranks_within_node(axis, devices_per_node)
    level, ranks = (INSIDE if inside == axis.size else ACROSS), axis.size
    known = [waits for (at, _), waits in profile.waits.items() if at == level]
    if ranks == 1 or not known:
        return None
    nearest = min(known, key=lambda waits: (abs(waits.ranks - ranks), waits.ranks))
    return nearest.slowed(_contention(devices_per_node, nearest.ranks, profile))


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


def modelled_ns(kind: str, num_bytes: int, group: Group, profile: Profile) -> float:
    """The cheapest algorithm's time by its α-β formula; parts inside a node as the profile has measured them."""
    options = _ALGORITHMS[kind](num_bytes, group)
    if profile.device_type != "cuda" and kind != "all_to_all":
        options = options[:1]
    if kind == "all_reduce" and (group.inside == 1 or group.nodes == 1 or profile.device_type != "cuda"):
        options.append(group.ring.time_ns(2 * _rounds(group.ranks), 2 * num_bytes, num_bytes))
    elif kind == "all_reduce":
        node = group._replace(nodes=1)
        measured = _measured(kind, node, profile)
        within = measured_ns(measured, num_bytes) if measured else modelled_ns(kind, num_bytes, node, profile)
        options.append(_tree_of_nodes(num_bytes, group, within))
    return min(options)


def _tree_of_nodes(size: float, group: Group, within_ns: float) -> float:
    """within_ns: an all-reduce among the ranks of a node, which goes on beside what is sent across."""
    sent = (1 if group.nodes == 2 else 2) * size / group.inside
    chains = group.near.wires[0], group.near.wires[-1]  # of the full protocol, and of the cheap one where there is one
    return group.far.start_ns + min(
        2 * _rounds(group.nodes) * wire.alpha_ns + 2 * (group.inside - 1) * chain.alpha_ns
        + max(within_ns, sent * wire.ns_per_byte)
        for wire, chain in zip(group.far.wires, chains, strict=False)
    )  # fmt: skip


def _all_reduce(size: float, group: Group) -> list[float]:
    """Without trees over all ranks (`modelled_ns`)."""
    ring, ranks = group.ring, group.ranks
    options = [ring.time_ns(2 * (ranks - 1), 2 * (ranks - 1) / ranks * size, size)]
    if group.inside > 1 and group.nodes > 1:
        inside, across = group.inside, group._replace(inside=1)
        tree = across.ring.time_ns(2 * _rounds(group.nodes), 2 * size / inside, size / inside)
        options.append(2 * _ring(size, inside, group.near) + min(tree, *_all_reduce(size / inside, across)))
    return options


def _all_gather(size: float, group: Group) -> list[float]:
    """Also reduce_scatter, which sends the same messages the other way round."""
    options = [_ring(size, group.ranks, group.ring)]
    if group.inside > 1 and group.nodes > 1:
        across = _ring(size / group.inside, group.nodes, group.far)
        options.append(_ring(size, group.inside, group.near) + across)
    return options


def _all_to_all(size: float, group: Group) -> list[float]:
    slowest, others = (group.near if group.nodes == 1 else group.far), group.ranks - group.inside
    rounds = _rounds(group.ranks)
    near_ns = group.near.time_ns(group.inside - 1, size * (group.inside - 1) / group.ranks)
    options = [
        max(near_ns, slowest.time_ns(group.ranks - 1, size * (others or group.inside - 1) / group.ranks)),
        slowest.time_ns(rounds, rounds * size / 2),
    ]
    if group.inside > 1 and group.nodes > 1:
        steps = ((group.inside, group.near), (group.nodes, group.far))
        options.append(sum(level.time_ns(ranks - 1, (ranks - 1) / ranks * size) for ranks, level in steps))
    return options


def _send(size: float, group: Group) -> list[float]:
    return [(group.near if group.nodes == 1 else group.far).time_ns(1, size)]


def _ring(size: float, ranks: int, level: Level) -> float:
    """p−1 messages of 1/p of the bytes, one after another."""
    return level.time_ns(ranks - 1, (ranks - 1) / ranks * size, size / 2)


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


@lru_cache(maxsize=1 << 16)
def sum_ns(
    steps: tuple[Step, ...], num_bytes: int, axes: LogicalMesh, devices_per_node: int, profile: Profile
) -> int:  # fmt: skip
    """Nanoseconds of the sum at the begin of a gradient's way home, of so many bytes: by levels, or along one axis
    after another, as the last of its steps say."""
    last = [step for step in steps if (step.before.kind, step.after.kind) == ("I", "R")]
    sent = gradient_collectives(last, [(0, num_bytes)] * len(last), axes)
    return sum(
        collective_time_ns(one.collective, one.num_bytes, axes[one.axis], devices_per_node, profile) for one in sent
    )


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
