"""Plays a step of ranks that branches make unlike: a lane for each kind of rank, side by side.

All lanes have the same passes and the same collectives between branches; in these they meet. One that ranks of other
lanes take part in starts when the last of them is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from autopar.cost import Profile
from autopar.ir.branches import axis_position, coordinates_of, unlike_ranks
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate.engine import Carried
from autopar.simulate.meeting import Meeting
from autopar.simulate.passes import turns
from autopar.simulate.player import Meet, Pass, PassKind, Player, Standing
from autopar.simulate.program import Prices, lower_stages
from autopar.simulate.schedule import Progress, Submesh, lane_of, pass_kind
from autopar.simulate.timeline import Timeline


def play_apart(graph: Graph, plan: Plan, profile: Profile, sums_early: bool) -> Timeline:
    """One step of a plan of one stage that has branches; a lane stands for its first rank and those like it."""
    lanes = _Lanes(graph, plan, profile, sums_early)
    try:
        lanes.run()
    finally:
        lanes.meeting.close()
    return lanes.timeline()


class _Lanes:
    def __init__(self, graph: Graph, plan: Plan, profile: Profile, sums_early: bool) -> None:
        self.plan, self.trains = plan, plan.mode == "train" and graph.loss is not None
        ranks = unlike_ranks(plan)
        places = [coordinates_of(plan, rank) for rank in ranks]
        axes = [axis_position(plan.axes, name) for name in places[0]]
        self.meeting = Meeting(axes, [tuple(place.values()) for place in places])
        prices: Prices = {}
        programs = [lower_stages(graph, plan, [profile], rank, prices)[0] for rank in ranks]
        self.stages = [Progress(Player(program, profile, self.trains, sums_early)) for program in programs]
        self.submeshes = [Submesh(range(rank, rank + 1), [0]) for rank in ranks]
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
            self._known[key] = self.meeting.play(begins, plays)
        for submesh, stage, begin, done in zip(self.submeshes, self.stages, begins, self._known[key], strict=True):
            submesh.take(done, begin, label)
            stage.take(done, begin)

    def timeline(self) -> Timeline:
        """What was played; of lanes that end together, the breakdown is that of the one that computes longest."""
        makespan = max(submesh.end_ns for submesh in self.submeshes)
        lanes = tuple(lane_of(submesh, makespan) for submesh in self.submeshes)
        ends = [submesh.end_ns for submesh in self.submeshes]
        last = lanes[max(range(len(lanes)), key=lambda n: (ends[n], lanes[n].breakdown.compute_ns))]
        most = max(lanes, key=lambda lane: sum(lane.comm_bytes.values()))
        return Timeline(lanes, makespan, last.breakdown, last.exposed, most.comm_bytes)


def _played(player: Player, state: tuple[PassKind, Carried, Standing], meet: Meet) -> Pass:
    return player.played(*state, meet)
