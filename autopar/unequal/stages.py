"""Plans by hand for unequal devices: no stage mixes kinds, each is planned for its own, blocks are shared out by speed.

    for each kind: placements of the whole model on a stage's axes    `planning.Place`
    blocks of each stage                                              `sizes_by_speed`, as long as each fits
    one plan of all stages                                            `staging.cut`, simulated with all profiles

Stages are in the order of their devices' memory, the largest first, since the first holds most microbatches in flight.
Links between kinds are those of the slower of both (`cost.crossing`): data sheets say what an adapter reaches, and both
are on the way.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cost import Profile
from autopar.errors import InfeasibleError
from autopar.ir.mesh import LogicalMesh, Mesh
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES
from autopar.planning import DividedGraph, Place
from autopar.refusal import devices_hold_more
from autopar.request import Request
from autopar.simulate import Timeline, predict, simulate
from autopar.simulate.alone import block_times_ns
from autopar.staging import cut, even_sizes, stages_of_sizes
from autopar.template import check_split


def sizes_by_speed(times_ns: Sequence[Sequence[int]], most: Sequence[int]) -> tuple[int, ...] | None:
    """How many of a chain of blocks each stage takes, so that the slowest stage is as fast as can be.

    times_ns: of each stage for each block, in order. most: blocks that a stage can take. Each takes one at least. Of
    equal choices, that with fewer blocks in earlier stages. None where it is not possible. Dynamic programming over
    (stages, blocks).
    """
    count = len(times_ns[0])
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for times, limit in zip(times_ns, most, strict=True):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for done, (slowest, sizes) in best.items():
            for size in range(1, min(limit, count - done) + 1):
                option = max(slowest, sum(times[done : done + size])), (*sizes, size)
                if done + size not in found or option < found[done + size]:
                    found[done + size] = option
        best = found
    return best[count][1] if count in best else None


@dataclass(frozen=True, eq=False)
class UnequalStages:
    """Stages on several kinds of devices: each on neighbouring ranks of one kind, on the axes of that kind's stages."""

    part: DividedGraph
    axes: Mapping[str, LogicalMesh]
    chunks: int  # stages a submesh
    schedule: str
    block_paths: Sequence[str]
    request: Request
    profiles: Mapping[str, Profile]
    known: dict[Hashable, Plan] = field(default_factory=dict)  # placements of a kind that were solved before

    @property
    def mesh(self) -> Mesh:
        """All devices."""
        return self.request.mesh

    @cached_property
    def ranks(self) -> list[range]:
        """Of each stage. Raises MeshError where one would mix kinds."""
        parts: list[range] = []
        while (first := parts[-1].stop if parts else 0) < self.mesh.num_devices:
            group = self.mesh.group_of(range(first, first + 1))
            parts.append(range(first, first + math.prod(axis.size for axis in self.axes[group.profile])))
        submeshes = sorted(parts, key=lambda ranks: -self.profile_of(ranks).usable_bytes)
        return SCHEDULES[self.schedule].in_turn(submeshes, self.chunks)

    def kind(self, ranks: range) -> str:
        """The name of the devices of neighbouring ranks."""
        return self.mesh.group_of(ranks).profile

    def profile_of(self, ranks: range) -> Profile:
        """The profile of a stage's devices, as so many of a node share it."""
        group = self.mesh.group_of(ranks)
        return self.profiles[group.profile].shared_by(group.devices_per_node)

    @cached_property
    def limits(self) -> list[int]:
        """Bytes that a device of each stage may hold."""
        return [self.request.memory_limit or self.profile_of(ranks).usable_bytes for ranks in self.ranks]

    @cached_property
    def alone(self) -> dict[str, Plan]:
        """By kind, the plan of one microbatch of the whole model on a stage's axes.

        It may take as much memory as all submeshes have: each stage runs a part of it.
        """
        return {self.kind(ranks): self._solved(ranks) for ranks in self.ranks}

    def _place(self, ranks: range) -> Place:
        """The problem of the whole model on a stage's axes."""
        profile = self.profile_of(ranks)
        limit = self.request.memory_limit or profile.usable_bytes
        request = replace(self.request, mesh=self.mesh.part(ranks), memory_limit=limit)
        return Place(self.part, self.axes[self.kind(ranks)], request, profile)

    def _solved(self, ranks: range) -> Plan:
        mesh, axes = self.mesh.part(ranks), self.axes[self.kind(ranks)]
        limit = self.request.memory_limit or self.profile_of(ranks).usable_bytes
        room = sum(self.limits) // self.chunks
        key = mesh, axes, limit, room, self.part.microbatches, self.request.recompute
        if key not in self.known:
            budget = self.request.budget
            self.known[key] = self._place(ranks).placements.plan(room, budget.seconds, budget.seed, budget.gap)
        return self.known[key]

    @cached_property
    def least_step_ns(self) -> int:
        """What a step takes at least on these axes, whichever operators each submesh runs.

        By duality: with weights w that add up to one, max over submeshes of their time ≥ Σ w · time of each
        ≥ Σ over operators of the least w · time on a submesh. Weights are as the speeds of submeshes. Where ranks share
        cores, those that wait leave theirs to others: none is as slow as all at once.
        """
        kinds = {self.kind(ranks): ranks for ranks in self.ranks}
        found = {kind: self._place(ranks).work_ns(self.profiles[kind]) for kind, ranks in kinds.items()}
        works = [found[self.kind(ranks)] for ranks in dict.fromkeys(self.ranks)]
        speeds = [1 / max(1, sum(work.values())) for work in works]
        weights = [speed / sum(speeds) for speed in speeds]
        scaled = [[weight * ns for ns in work.values()] for weight, work in zip(weights, works, strict=True)]
        return int(sum(map(min, zip(*scaled, strict=True))))

    @cached_property
    def times_ns(self) -> list[list[int]]:
        """Of each stage for each block."""
        found = {}
        for ranks in self.ranks:
            name = self.kind(ranks)
            if name not in found:
                plan, profile = self.alone[name], self.profile_of(ranks)
                found[name] = block_times_ns(self.part.graph, plan, profile, self.block_paths)
        return [found[self.kind(ranks)] for ranks in self.ranks]

    def plan(self, split: str, given: tuple[int, ...] | None = None) -> Plan:
        """Stages of as many blocks as are given; or equally many, or by speed: of the latter, one that does not fit
        gets a block less.

        Raises PlanError for another word or where blocks cannot be shared out so, InfeasibleError when nothing fits.
        """
        check_split(split)
        count = len(self.times_ns[0])
        most = [count] * len(self.ranks)
        is_free = given is None and split == "speed"
        sizes = sizes_by_speed(self.times_ns, most) if is_free else given or self._equal()
        over: dict[int, int] = {}
        while sizes is not None:
            plan, timeline = self._of_sizes(sizes)
            over = self._over(timeline)
            if not over:
                return plan
            most = [min(limit, size - 1) if stage in over else limit
                    for stage, (limit, size) in enumerate(zip(most, sizes, strict=True))]  # fmt: skip
            sizes = sizes_by_speed(self.times_ns, most) if is_free else None
        raise self._does_not_fit(over)

    def _does_not_fit(self, over: Mapping[int, int]) -> InfeasibleError:
        needs = [
            f"stage {stage} on ranks {self.ranks[stage].start} to {self.ranks[stage].stop - 1} would hold {size:,} of "
            f"{self.limits[stage]:,}"
            for stage, size in over.items()
        ]
        needs = [f"of the last one tried, {one}" for one in needs[:1]] + needs[1:] or ["no stage could have a block"]
        what = f"plan of {len(self.ranks)} stages"
        return devices_hold_more(what, self.mesh, needs, "zero, recompute, more microbatches")

    def _equal(self) -> tuple[int, ...]:
        submeshes, profile = len(self.ranks) // self.chunks, self.profile_of(self.ranks[0])
        return even_sizes(self.part.graph, self.block_paths, submeshes, self.chunks, profile, self.schedule)

    def _of_sizes(self, sizes: Sequence[int]) -> tuple[Plan, Timeline]:
        graph = self.part.graph
        plans = [self.alone[self.kind(ranks)] for ranks in self.ranks]
        members = stages_of_sizes(graph, self.block_paths, sizes)
        firsts = [ranks.start for ranks in self.ranks]
        plan = cut(graph, plans, members, firsts, self.schedule, self.mesh, self.profiles)
        sources = {
            f"{name} {block}": source for name, own in self.alone.items() for block, source in own.sources.items()
        }
        timeline = simulate(graph, plan, self.profiles)
        limit = max(self.limits)
        return replace(plan, predicted=predict(timeline), sources=sources, memory_limit=limit), timeline

    def _over(self, timeline: Timeline) -> dict[int, int]:
        """The stages whose devices hold more bytes than they can, with these."""
        peaks = {lane.ranks.start: lane.peak_bytes for lane in timeline.lanes}
        held = [peaks[ranks.start] for ranks in self.ranks]
        return {stage: size for stage, size in enumerate(held) if size > self.limits[stage]}
