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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost import Profile
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.mesh import LogicalMesh, Mesh
from autopar.ir.plan import Plan
from autopar.microbatch import one_microbatch_plan, over_microbatches
from autopar.planning import Part, Place, Request
from autopar.simulate import Timeline, predict, simulate
from autopar.simulate.segments import block_times_ns
from autopar.staging import cut, stages_of_sizes

SPLITS = ("equal", "speed")


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
    """A template on several kinds of devices: stages of equal axes, each on neighbouring ranks of one kind."""

    part: Part
    axes: LogicalMesh
    chunks: int  # stages a submesh
    schedule: str
    block_paths: Sequence[str]
    request: Request
    profiles: Mapping[str, Profile]

    @property
    def mesh(self) -> Mesh:
        """All devices."""
        return self.request.mesh

    @cached_property
    def ranks(self) -> list[range]:
        """Of each stage. Raises MeshError where one would mix kinds."""
        size = math.prod(axis.size for axis in self.axes)
        parts = [range(first, first + size) for first in range(0, self.mesh.num_devices, size)]
        return sorted(parts, key=lambda ranks: -self.profile_of(ranks).usable_bytes) * self.chunks

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
        room = sum(self.limits) // self.chunks
        budget, found = self.request.budget, {}
        for ranks in self.ranks:
            name = self.mesh.group_of(ranks).profile
            if name not in found:
                request = replace(self.request, mesh=self.mesh.part(ranks), memory_limit=max(self.limits))
                place = Place(self.part, self.axes, request, self.profile_of(ranks))
                found[name] = place.placements.plan(room, budget.seconds, budget.seed, budget.gap)
        return found

    @cached_property
    def times_ns(self) -> list[list[int]]:
        """Of each stage for each block."""
        graph = self.part.graph
        by_kind = {
            name: block_times_ns(graph, plan, self.profiles[name], self.block_paths)
            for name, plan in self.alone.items()
        }
        return [by_kind[self.mesh.group_of(ranks).profile] for ranks in self.ranks]

    def plan(self, split: str) -> Plan:
        """Stages of equally many blocks, or by speed; of the latter, one that does not fit gets a block less.

        Raises PlanError for another word or where blocks cannot be shared out so, InfeasibleError when nothing fits.
        """
        if split not in SPLITS:
            raise PlanError(f'expected split as "equal" or "speed", found {split!r}')
        count = len(self.times_ns[0])
        most = [count] * len(self.ranks)
        sizes = sizes_by_speed(self.times_ns, most) if split == "speed" else self._equal(count)
        while sizes is not None:
            plan, timeline = self._of_sizes(sizes)
            over = self._over(timeline)
            if not over:
                return plan
            if split == "equal":
                break
            most = [min(limit, size - 1) if stage in over else limit
                    for stage, (limit, size) in enumerate(zip(most, sizes, strict=True))]  # fmt: skip
            sizes = sizes_by_speed(self.times_ns, most)
        raise InfeasibleError(
            f"found no plan of {len(self.ranks)} stages within "
            f"{' and '.join(f'{limit:,}' for limit in dict.fromkeys(self.limits))} bytes a device of {self.mesh}; use "
            "zero, recompute, more microbatches or more devices"
        )

    def _equal(self, count: int) -> tuple[int, ...]:
        if not count or count % len(self.ranks):
            raise PlanError(
                f"expected a number of repeated blocks that {len(self.ranks)} stages divide equally, found {count}; "
                'choose a number of stages that divides it, or split="speed"'
            )
        return (count // len(self.ranks),) * len(self.ranks)

    def _of_sizes(self, sizes: Sequence[int]) -> tuple[Plan, Timeline]:
        part, whole = self.part, self.part.whole
        stated = {
            name: over_microbatches(whole, plan, part.types, part.microbatches) if part.types else plan
            for name, plan in self.alone.items()
        }
        plans = [stated[self.mesh.group_of(ranks).profile] for ranks in self.ranks]
        members = stages_of_sizes(whole, self.block_paths, sizes)
        firsts = [ranks.start for ranks in self.ranks]
        plan = cut(whole, plans, members, firsts, self.schedule, self.mesh, self.profiles)
        sources = {
            f"{name} {block}": source for name, own in self.alone.items() for block, source in own.sources.items()
        }
        timeline = simulate(part.graph, one_microbatch_plan(plan), self.profiles)
        return replace(plan, predicted=predict(timeline), sources=sources), timeline

    def _over(self, timeline: Timeline) -> set[int]:
        """The stages whose devices hold more than they can."""
        limits = {ranks.start: limit for ranks, limit in zip(self.ranks, self.limits, strict=True)}
        full = {lane.ranks.start for lane in timeline.lanes if lane.peak_bytes > limits[lane.ranks.start]}
        return {stage for stage, ranks in enumerate(self.ranks) if ranks.start in full}
