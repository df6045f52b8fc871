"""Plays a step of unequal ranks that work on one batch together: a lane for each kind of rank, in lockstep.

All lanes run the same program, each on its own share of the batch and at the speed of its own devices. Collectives over
an axis that joins different lanes *meet*: they start when the last lane is there, and take as long as the slowest one's
links do. When that is follows from the lanes' passes, which wait for it: a pass is played with the times found so far
until none moves. Times only grow, and each round settles at least the first that was not settled yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.shares import alike_ranks, seen_from
from autopar.simulate.passes import turns
from autopar.simulate.player import Pass, PassKind, Player
from autopar.simulate.program import Bucket, Item, Program, Transmission, lower_stages
from autopar.simulate.schedule import Progress, Submesh, lane_of, pass_kind
from autopar.simulate.timeline import Timeline

SENT = ("forward", "backward", "inner", "inner_backward")


def play_together(graph: Graph, plan: Plan, profiles: Mapping[str, Profile], sums_early: bool) -> Timeline:
    """One step of a plan of one stage on ranks that differ. profiles: by the mesh's names for its devices."""
    lanes = _Lanes(graph, plan, profiles, sums_early)
    lanes.run()
    return lanes.timeline()


class _Lanes:
    def __init__(self, graph: Graph, plan: Plan, profiles: Mapping[str, Profile], sums_early: bool) -> None:
        self.plan, self.trains = plan, plan.mode == "train" and graph.loss is not None
        self.submeshes = [Submesh(ranks, [number]) for number, ranks in enumerate(alike_ranks(plan.mesh, plan.axes))]
        self.meeting = _meeting_axes(plan, [submesh.ranks for submesh in self.submeshes])
        programs, own = [], []
        for submesh in self.submeshes:
            group = plan.mesh.group_of(submesh.ranks)
            own.append(profiles[group.profile].shared_by(group.devices_per_node))
            part = Mesh(group.profile, plan.mesh.nodes, group.devices_per_node)
            seen = replace(plan, mesh=part, axes=seen_from(plan.axes, submesh.ranks.start))
            programs += lower_stages(graph, seen, own[-1:])
        _agree(programs, self.meeting)
        self.stages = [
            Progress(Player(program, profile, self.trains, sums_early, self.meeting))
            for program, profile in zip(programs, own, strict=True)
        ]

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
        """A pass of each lane, whose common collectives start together."""
        meetings: tuple[int, ...] = ()
        while True:
            done = [self._played(lane, kind, meetings) for lane, kind in enumerate(kinds)]
            starts = ([self.submeshes[lane].free_ns + start for start in own.met] for lane, own in enumerate(done))
            found = tuple(map(max, zip(*starts, strict=True)))
            if found == meetings:
                break
            meetings = found
        for submesh, stage, own in zip(self.submeshes, self.stages, done, strict=True):
            begin = submesh.free_ns
            submesh.take(own, begin, label)
            stage.take(own, begin)

    def _played(self, lane: int, kind: PassKind, meetings: Sequence[int]) -> Pass:
        begin = self.submeshes[lane].free_ns
        carried = self.submeshes[lane].carried(begin)._replace(meetings=tuple(time - begin for time in meetings))
        return self.stages[lane].player.play(kind, carried, self.stages[lane].at(begin))

    def timeline(self) -> Timeline:
        """What was played; of lanes that end together, the breakdown is that of the one that computes longest."""
        makespan = max(submesh.end_ns for submesh in self.submeshes)
        lanes = tuple(lane_of(submesh, makespan) for submesh in self.submeshes)
        ends = [(own.end_ns, lane.breakdown.compute_ns) for own, lane in zip(self.submeshes, lanes, strict=True)]
        last = lanes[ends.index(max(ends))]
        most = max(lanes, key=lambda lane: sum(lane.comm_bytes.values()))
        return Timeline(lanes, makespan, last.breakdown, last.exposed, most.comm_bytes)


def _meeting_axes(plan: Plan, lanes: Sequence[range]) -> frozenset[int]:
    """The axes (by position) along which ranks of different lanes are neighbours."""
    lane_of_rank = {rank: number for number, ranks in enumerate(lanes) for rank in ranks}
    found = set()
    for position, axis in enumerate(plan.axes):
        for rank, lane in lane_of_rank.items():
            first = rank - rank // axis.stride % axis.size * axis.stride
            if lane_of_rank[first] != lane:
                found.add(position)
    return frozenset(found)


def _agree(programs: Sequence[Program], meeting: frozenset[int]) -> None:
    """Makes what lanes send each other last as long on all of them: as long as on the slowest."""
    for items in zip(*(program.items for program in programs), strict=True):
        for field in SENT:
            _agree_on(items, field, meeting)
    for name in ("gathers", "reductions"):
        for buckets in zip(*(getattr(program, name) for program in programs), strict=True):
            _agree_on(buckets, "transmissions", meeting)


def _agree_on(owners: Sequence[Item] | Sequence[Bucket], field: str, meeting: frozenset[int]) -> None:
    columns = zip(*(getattr(owner, field) for owner in owners), strict=True)
    longest = [max(sent.duration_ns for sent in column) for column in columns]
    for owner in owners:
        own: Sequence[Transmission] = getattr(owner, field)
        agreed = (
            sent._replace(duration_ns=duration) if sent.axis in meeting else sent
            for sent, duration in zip(own, longest, strict=True)
        )
        setattr(owner, field, tuple(agreed))
