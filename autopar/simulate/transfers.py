"""What stages send each other: tensors forward, their gradients backward, and the gradients of tied parameters.

Rank k of a stage sends to rank k of another whose axes are equally long; the transfer is across nodes when any of these
pairs is. Between others, who sends what is the runtime's routing (`cost.crossing`), and the busiest rank counts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cost import Profile, Runtime, collective_time_ns
from autopar.cost.collectives import sends_time_ns
from autopar.cost.crossing import Parcel, crossing_time_ns, sent_bytes, side
from autopar.cost.profile import ACROSS, INSIDE
from autopar.ir.graph import Graph
from autopar.ir.placement import Axis, R, Type, local_shape
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Step, apply, transfer_bytes
from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, FORWARD
from autopar.ir.stages import gradients_back, leaving_placement, maker_of, tied_tensors
from autopar.runtime.arrivals import Turn
from autopar.runtime.crossing import Side, crossing
from autopar.simulate.parted import PartedStage


class Transfer(NamedTuple):
    """What a stage sends to another after a pass; `link` is "" between stages of one submesh, where nothing travels.

    sent_bytes: of each of its ranks. arriving_bytes: what a receiving rank has taken for it when all is there.
    held_bytes: what the sender keeps until it has left, beside what its stage keeps anyway.
    """

    target: int
    direction: str
    names: tuple[str, ...]
    sent_bytes: tuple[int, ...]
    link: str
    duration_ns: int
    arriving_bytes: int
    held_bytes: int

    @property
    def messages(self) -> list[int]:
        """Bytes of each message of the busiest rank, if they are alike."""
        return [max(self.sent_bytes) // len(self.names)] * len(self.names)


class Tie(NamedTuple):
    """A tensor that several stages keep, and the all-reduce that sums its gradient over them.

    inside: where they keep it unequally, the bytes of each stage's collectives around that.
    """

    tensor: str
    stages: tuple[int, ...]
    num_bytes: int
    link: str
    duration_ns: int
    inside: Mapping[int, Counter[str]]


@dataclass(frozen=True)
class Transfers:
    """By stage and direction: what it sends, how many transfers it waits for, and what memory these take.

    runtimes: of each stage's ranks.
    """

    sent: dict[tuple[int, str], list[Transfer]]
    awaited: dict[tuple[int, str], int]
    arriving_bytes: dict[tuple[int, str], int]
    messages: dict[tuple[int, str], int] = field(default_factory=dict)  # that travel to it
    runtimes: Sequence[Runtime | None] = ()

    def of(self, turn: Turn) -> list[Transfer]:
        """What a turn sends when its pass has ended."""
        return self.sent.get(way_of(turn), [])

    def num_awaited(self, turn: Turn) -> int:
        """How many transfers a turn waits for."""
        return self.awaited.get(way_of(turn), 0)

    def around_ns(self, turn: Turn) -> int:
        """What a turn takes of its ranks' threads beside its pass: the schedule's part, and to send and to receive."""
        runtime = self.runtimes[turn.stage]
        if runtime is None:
            return 0
        return runtime.around_pass_ns(self._messages(turn), self.messages.get(way_of(turn), 0))

    def carrying_ns(self, turn: Turn) -> int:
        """What the network's threads take for what a turn sends."""
        runtime = self.runtimes[turn.stage]
        return runtime.carrying_ns(self._messages(turn)) if runtime is not None else 0

    def _messages(self, turn: Turn) -> list[int]:
        return [size for one in self.of(turn) if one.link for size in one.messages]

    def expected_bytes(self, turn: Turn) -> int:
        """Of what a turn receives."""
        return self.arriving_bytes.get(way_of(turn), 0)


def way_of(turn: Turn) -> tuple[int, str]:
    """A turn's stage, and whether it reads and sends forward or backward. The second part of a backward pass does
    neither: under its name nothing is found."""
    return turn.stage, BACKWARD if turn.direction == BACKWARD_INPUT else turn.direction


def find_transfers(graph: Graph, plan: Plan, stages: Sequence[PartedStage], profiles: Sequence[Profile]) -> Transfers:
    """Everything that travels between stages in a microbatch. profiles: of each stage's devices."""
    found = Transfers({}, {}, {}, {}, [profile.runtime if len(plan.stages) > 1 else None for profile in profiles])
    if len(plan.stages) == 1:
        return found
    kept = [stage.kept for stage in stages]
    for target, receiver in enumerate(stages):
        makers = {name: maker_of(graph, plan, target, name) for name in receiver.receives}
        for source in range(target):
            names = tuple(name for name, maker in makers.items() if maker == source)
            trained = tuple(name for name in names if name in gradients_back(graph, plan)[target])
            for sending, receiving, direction, what in (
                (source, target, FORWARD, names), (target, source, BACKWARD, trained)
            ):  # fmt: skip
                if what:
                    is_forward = direction == FORWARD
                    routes = [_route(graph, plan, source, target, name, is_forward) for name in what]
                    sizes, link, duration = _sending(plan, sending, receiving, routes, profiles)
                    arriving = sum(route.arriving_bytes for route in routes)
                    is_copied = not routes[0].is_rank_to_rank
                    named = zip(what, routes, strict=True)
                    held = sum(route.local_bytes for name, route in named if not is_forward or name not in kept[source])
                    held = max(sizes) if is_copied else held
                    transfer = Transfer(receiving, direction, what, sizes, link, duration, arriving, held)
                    found.sent.setdefault((sending, direction), []).append(transfer)
                    key = receiving, direction
                    found.awaited[key] = found.awaited.get(key, 0) + 1
                    found.arriving_bytes[key] = found.arriving_bytes.get(key, 0) + arriving
                    found.messages[key] = found.messages.get(key, 0) + (len(what) if link else 0)
    return found


class _StageRoute(NamedTuple):
    """A tensor between two stages: its shape, bytes an element, and both sides; the first one sends."""

    shape: tuple[int, ...]
    itemsize: int
    sender: Side
    receiver: Side

    @property
    def is_rank_to_rank(self) -> bool:
        return self.sender.sizes == self.receiver.sizes

    @property
    def local_bytes(self) -> int:
        """What the sender's first rank has, which has no shorter slices than the others."""
        return self._bytes_of(self.sender)

    def bytes_by_rank(self) -> list[int]:
        """What each of the sender's ranks has; the last one's slices are the shortest."""
        last = tuple(size - 1 for size in self.sender.sizes)
        if self._bytes_of(self.sender, last) == self.local_bytes:
            return [self.local_bytes] * len(self.sender.ranks)
        places = itertools.product(*(range(size) for size in self.sender.sizes))
        return [self._bytes_of(self.sender, place) for place in places]

    @property
    def arriving_bytes(self) -> int:
        """What the receiver's first rank takes: the tensor, and the parts of it that come by themselves."""
        whole = self._bytes_of(self.receiver)
        first = self.receiver.ranks[0]
        moves = () if self.is_rank_to_rank else crossing(self.shape, self.sender, self.receiver).receives(first)
        parts = [move.num_elements * self.itemsize for move in moves if move.peer != first]
        return whole + sum(size for size in parts if size < whole)

    def _bytes_of(self, side: Side, place: tuple[int, ...] = ()) -> int:
        """What the rank of these coordinates has, the first one without any."""
        axes = [Axis("", size, 0) for size in side.sizes]
        types = [Type(type_.kind, type_.dim) for type_ in side.types]  # type: ignore[arg-type] # one of S, R, I, P
        coordinate = place or (0,) * len(axes)
        return math.prod(local_shape(self.shape, tuple(types), tuple(axes), coordinate)) * self.itemsize


def _route(graph: Graph, plan: Plan, source: int, target: int, name: str, is_forward: bool) -> _StageRoute:
    """The route of a tensor from the stage `source` to `target`, or of its gradient back."""
    maker, reader, tensor = plan.stages[source], plan.stages[target], graph.tensors[name]
    leaving = side(maker.ranks, maker.axes, leaving_placement(graph, plan, target, name))
    arriving = side(reader.ranks, reader.axes, reader.inputs[name])
    return _StageRoute(
        graph.made_shape(name), tensor.itemsize, *((leaving, arriving) if is_forward else (arriving, leaving))
    )


def _sending(
    plan: Plan, source: int, target: int, routes: Sequence[_StageRoute], profiles: Sequence[Profile]
) -> tuple[tuple[int, ...], str, int]:
    """Bytes that each rank sends, the link that the busiest does on, and nanoseconds."""
    if routes[0].is_rank_to_rank:
        by_rank = tuple(map(sum, zip(*(route.bytes_by_rank() for route in routes), strict=True)))
    if plan.stages[source].first_rank == plan.stages[target].first_rank and routes[0].is_rank_to_rank:
        return by_rank, "", 0
    if routes[0].is_rank_to_rank:
        size, level = max(by_rank), _level(plan, (source, target))
        times = (sends_time_ns(1, size, level, _per_node(plan), profiles[stage]) for stage in (source, target))
        return by_rank, f"send {level}", max(times)
    parcels = [Parcel(crossing(route.shape, route.sender, route.receiver), route.itemsize) for route in routes]
    level, duration = crossing_time_ns(parcels, plan.mesh, (profiles[source], profiles[target]))
    sent = sent_bytes(parcels)
    by_rank = tuple(sent.get(rank, 0) for rank in plan.stages[source].ranks)
    return by_rank, f"send {level}" if level else "", duration


def _per_node(plan: Plan) -> int:
    return max(group.devices_per_node for group in plan.mesh.groups)


def _level(plan: Plan, stages: Sequence[int]) -> str:
    """The level of link that joins equal ranks of stages."""
    groups = zip(*(plan.stages[stage].ranks for stage in stages), strict=False)
    inside = all(len({plan.mesh.node_of(rank) for rank in group}) == 1 for group in groups)
    return INSIDE if inside else ACROSS


# Tied parameters ----------------------------------------


def find_ties(graph: Graph, plan: Plan, profiles: Sequence[Profile]) -> list[Tie]:
    """The gradients that are summed over stages, once a step.

    Stages that keep a tensor alike sum rank by rank. Of others, the first ranks sum whole gradients, which each submesh
    gathers before and spreads behind that (`runtime.pipeline_state`); spreading is taken to last as long as gathering
    from equal parts.
    """
    found = []
    for tensor, stages in tied_tensors(graph, plan).items():
        alone = {plan.stages[stage].first_rank: stage for stage in reversed(stages)}
        apart = tuple(sorted(alone.values()))
        if len(apart) > 1:
            kept = {(tuple(_sizes(plan, stage)), plan.stages[stage].storage[tensor].placement) for stage in apart}
            alike = len(kept) == 1
            size, link, duration = _summed(graph, plan, tensor, apart, alike, profiles)
            if not alike:
                whole = graph.tensors[tensor].num_elements * graph.kept(tensor).itemsize
                duration += 2 * max(_gathered_ns(plan, stage, whole, profiles[stage]) for stage in apart)
            inside = {} if alike else {stage: _inside_bytes(graph, plan, stage, tensor) for stage in apart}
            found.append(Tie(tensor, stages, size, link, duration, inside))
    return found


def _sizes(plan: Plan, stage: int) -> list[int]:
    return [axis.size for axis in plan.stages[stage].axes]


def _summed(
    graph: Graph, plan: Plan, tensor: str, stages: Sequence[int], alike: bool, profiles: Sequence[Profile]
) -> tuple[int, str, int]:
    """Bytes, link and nanoseconds of an all-reduce over the equal ranks of stages, or of the whole over the first."""
    first, shape = plan.stages[stages[0]], graph.tensors[tensor].shape
    local = local_shape(shape, first.storage[tensor].placement, first.axes) if alike else shape
    size, level = math.prod(local) * graph.kept(tensor).itemsize, _level(plan, stages)
    per_node = max(_per_node(plan), len(stages))  # one link level joins them all
    axis = Axis("stages", len(stages), 1 if level == INSIDE else per_node)
    return size, level, max(collective_time_ns("all_reduce", size, axis, per_node, profiles[s]) for s in stages)


def _inside_bytes(graph: Graph, plan: Plan, index: int, name: str) -> Counter[str]:
    """What a rank of a stage hands to collectives to gather a whole, axis by axis from the inner out, and to spread it
    again."""
    stage, shape, itemsize = plan.stages[index], graph.tensors[name].shape, graph.kept(name).itemsize
    placement, found = stage.storage[name].placement, Counter[str]()
    for position, axis in reversed(list(enumerate(stage.axes))):
        if axis.size == 1:
            continue
        found["broadcast"] += math.prod(shape) * itemsize
        if placement[position].kind == "S":
            step = Step(position, placement[position], R)
            found["all_gather"] += transfer_bytes(shape, itemsize, placement, stage.axes, step)[0]
            placement = apply(step, placement)
    return found


def _gathered_ns(plan: Plan, stage: int, num_bytes: int, profile: Profile) -> int:
    """Of a tensor that every rank of a stage has an equal part of."""
    ranks = plan.stages[stage].ranks
    per_node = plan.mesh.part(ranks).devices_per_node
    return collective_time_ns("all_gather", num_bytes, Axis("stage", len(ranks), 1), per_node, profile)
