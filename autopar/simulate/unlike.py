"""Plays a step of ranks that are unlike: a lane for each kind of rank, side by side.

Ranks are unlike where branches have some run what others leave out (`ir.branches`), and where they have other devices
or other shares of a batch (`ir.shares`). All lanes have the same passes, and the same collectives over the axes that
join them. In these they *meet*: such a collective starts when the last lane is ready, and takes as long as on the
slowest.

When lanes meet depends on nothing but how they met before. So each plays a pass with what is known of the others, again
and again until nobody is there at another time: the first time that they meet is right after one round, the next one
after two at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from autopar.cost import Profile
from autopar.errors import PlanError
from autopar.ir.branches import axis_position, coordinates_of, unlike_ranks
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.schedule import turns
from autopar.ir.shares import alike_ranks, seen_from
from autopar.simulate.engine import Carried
from autopar.simulate.lowering import devices_per_node
from autopar.simulate.overlap import Overlap
from autopar.simulate.parted import PartedStage, stage_in_one
from autopar.simulate.passes import Meet, Pass, PassKind, Standing
from autopar.simulate.schedule import StageProgress, Submesh, lane_of, pass_kind
from autopar.simulate.sending import OtherLane
from autopar.simulate.timeline import Timeline


@dataclass(frozen=True)
class UnlikeLane:
    """Ranks that do the same, on devices of one kind."""

    ranks: range
    player: PartedStage


Keys = Mapping[int, Sequence[tuple[int, ...]]]
"""By the position of an axis in the logical mesh, a key for each lane: lanes with one key take part in the same
collectives over that axis. Over other axes no lane meets another."""

Starts = dict[tuple[int, int], int]
"""By axis and number of a collective over it: from when on a lane could start it."""

Result = TypeVar("Result")


def play_unlike(graph: Graph, plan: Plan, profiles: Mapping[str, Profile], overlap: Overlap) -> Timeline:
    """One step of a plan of one stage on ranks that are unlike. profiles: by the mesh's names for its devices."""
    lanes, keys = (lanes_of_branches if plan.stage.forks else lanes_of_shares)(graph, plan, profiles, overlap)
    step = _UnlikeStep(graph, plan, lanes, keys)
    step.run()
    return step.timeline()


class _UnlikeStep:
    def __init__(self, graph: Graph, plan: Plan, lanes: Sequence[UnlikeLane], keys: Keys) -> None:
        self.plan, self.trains = plan, plan.mode == "train" and graph.loss is not None
        self._keys = keys
        self.submeshes = [Submesh(lane.ranks, [number]) for number, lane in enumerate(lanes)]
        self.stages = [StageProgress(lane.player) for lane in lanes]
        self._known: dict[Any, list[Pass]] = {}

    def run(self) -> None:
        """The whole step, pass by pass on all lanes."""
        self._play([PassKind("begin")] * len(self.stages), "")
        (order,) = turns(self.plan.schedule, [[0]], self.plan.microbatches, self.trains)
        for turn in order:
            kinds = [pass_kind(turn, stage, self.plan.microbatches) for stage in self.stages]
            self._play(kinds, f" #{turn.microbatch}" if self.plan.microbatches > 1 else "")
        if self.trains:
            self._play([PassKind("optimizer")] * len(self.stages), "")

    def _play(self, kinds: Sequence[PassKind], label: str) -> None:
        begins = [submesh.free_ns for submesh in self.submeshes]
        states = [
            stage.player.state(kind, submesh.carried(begin), stage.at(begin))
            for stage, submesh, kind, begin in zip(self.stages, self.submeshes, kinds, begins, strict=True)
        ]
        key = tuple(states), tuple(begin - begins[0] for begin in begins)
        if key not in self._known:
            plays = [partial(_played, stage.player, state) for stage, state in zip(self.stages, states, strict=True)]
            self._known[key] = played_together(self._keys, begins, plays)
        for submesh, stage, begin, done in zip(self.submeshes, self.stages, begins, self._known[key], strict=True):
            submesh.take(done, begin, label)
            stage.take(done, begin)

    def timeline(self) -> Timeline:
        """What was played; of lanes that end together, the breakdown is that of the one that computes longest."""
        makespan = max(submesh.end_ns for submesh in self.submeshes)
        held = [stage.player.residents for stage in self.stages]
        lanes = tuple(lane_of(submesh, makespan, own) for submesh, own in zip(self.submeshes, held, strict=True))
        ends = [submesh.end_ns for submesh in self.submeshes]
        last = lanes[max(range(len(lanes)), key=lambda n: (ends[n], lanes[n].breakdown.compute_ns))]
        most = max(lanes, key=lambda lane: sum(lane.comm_bytes.values()))
        return Timeline(lanes, makespan, last.breakdown, last.exposed, most.comm_bytes)


def _played(player: PartedStage, state: tuple[PassKind, Carried, Standing], meet: Meet) -> Pass:
    return player.played(*state, meet=meet)


# Meeting ----------------------------------------


def played_together(
    keys: Keys, begins: Sequence[int], plays: Sequence[Callable[[Meet], Result]]
) -> list[Result]:  # fmt: skip
    """What each lane's play returns, which counts its times from its own begin.

    Raises PlanError where lanes wait for each other in unlike collectives, as ranks would for ever.
    """
    there: list[Starts] = [{} for _ in plays]
    found: list[Result | None] = [None] * len(plays)
    rounds, is_settled = 0, False
    while not is_settled:
        is_settled, rounds = True, rounds + 1
        for lane, (begin, play) in enumerate(zip(begins, plays, strict=True)):
            meeting = _Meeting(keys, there, lane, begin)
            found[lane] = play(meeting)
            is_settled = is_settled and meeting.own == there[lane]
            there[lane] = meeting.own
        if rounds > 1 + sum(map(len, there)):  # each round settles one of them at least, if they do not go round
            raise _unlike(next(iter(there[0]), (0, 0))[0])
    for axis, own in keys.items():
        for key in set(own):
            counts = {sum(at[0] == axis for at in there[n]) for n, other in enumerate(own) if other == key}
            if len(counts) > 1:
                raise _unlike(axis)
    return [one for one in found if one is not None]


class _Meeting:
    """When a lane could start each of its collectives with others, and when all of them can, as far as is known."""

    def __init__(self, keys: Keys, there: Sequence[Starts], lane: int, begin: int) -> None:
        self._begin, self._numbers, self.own = begin, dict.fromkeys(keys, 0), Starts()
        self._others = {
            axis: [there[n] for n, key in enumerate(own) if key == own[lane] and n != lane]
            for axis, own in keys.items()
        }

    def __call__(self, axis: int, start: int) -> int:
        if axis not in self._numbers:
            return start
        self._numbers[axis] += 1
        at, own = (axis, self._numbers[axis]), self._begin + start
        self.own[at] = own
        return max([own, *(other.get(at, own) for other in self._others[axis])]) - self._begin


def _unlike(axis: int) -> PlanError:
    return PlanError(
        "expected ranks that take part in the same collectives in the same order, found some that wait for "
        f"others in one over axis {axis} which the others do not reach: this is a fault of autopar's"
    )


# Lanes ----------------------------------------


def lanes_of_branches(
    graph: Graph, plan: Plan, profiles: Mapping[str, Profile], overlap: Overlap
) -> tuple[list[UnlikeLane], Keys]:  # fmt: skip
    """A lane for the first of each set of ranks that run the same operators; it stands for those like it."""
    ranks, (profile,) = unlike_ranks(plan.stage), profiles.values()
    shared = profile.shared_by(plan.mesh.devices_per_node)
    places = [coordinates_of(plan.stage, rank) for rank in ranks]
    lanes = [
        UnlikeLane(range(rank, rank + 1), stage_in_one(graph, plan, shared, overlap, place))
        for rank, place in zip(ranks, places, strict=True)
    ]
    keys = {
        axis_position(plan.stage.axes, name): [
            tuple(n for other, n in place.items() if other != name) for place in places
        ]
        for name in places[0]
    }
    return lanes, keys


def lanes_of_shares(
    graph: Graph, plan: Plan, profiles: Mapping[str, Profile], overlap: Overlap
) -> tuple[list[UnlikeLane], Keys]:  # fmt: skip
    """A lane for neighbouring ranks of one kind with equal shares; what they send each other lasts as long on all."""
    every = alike_ranks(plan.mesh, plan.stage.axes)
    joined, seen, sending = _joining_axes(plan, every), list[Plan](), list[OtherLane]()
    for ranks in every:
        group = plan.mesh.group_of(ranks)
        profile = profiles[group.profile].shared_by(group.devices_per_node)
        part = Mesh(group.profile, plan.mesh.nodes, group.devices_per_node)
        seen.append(replace(plan, mesh=part).placed(axes=seen_from(plan.stage.axes, ranks.start)))
        sending.append(OtherLane(seen[-1].stage.axes, devices_per_node(seen[-1], 0), profile, joined))
    lanes = [
        UnlikeLane(ranks, stage_in_one(graph, own, lane.profile, overlap, None, [*sending[:n], *sending[n + 1 :]]))
        for n, (ranks, own, lane) in enumerate(zip(every, seen, sending, strict=True))
    ]
    return lanes, {axis: [()] * len(lanes) for axis in joined}


def _joining_axes(plan: Plan, lanes: Sequence[range]) -> frozenset[int]:
    """The axes (by position) along which ranks of different lanes are neighbours."""
    lane_of_rank = {rank: number for number, ranks in enumerate(lanes) for rank in ranks}
    found = set()
    for position, axis in enumerate(plan.stage.axes):
        for rank, lane in lane_of_rank.items():
            first = rank - rank // axis.stride % axis.size * axis.stride
            if lane_of_rank[first] != lane:
                found.add(position)
    return frozenset(found)
