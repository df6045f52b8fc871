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
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from autopar import interrupt
from autopar.cost import Profile
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DeviceGroup, LogicalMesh, Mesh, logical_meshes
from autopar.ir.plan import Plan, SearchReport
from autopar.ir.schedule import PLAIN
from autopar.microbatch import divisible
from autopar.planning import DividedGraph, Place, Request, divided
from autopar.progress import Report, reporting
from autopar.simulate import Timeline, predict, simulate
from autopar.simulate.segments import block_times_ns
from autopar.staging import cut, stages_of_sizes
from autopar.template import check_split, template_recompute
from autopar.trace import Blocks


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
        return sorted(parts, key=lambda ranks: -self.profile_of(ranks).usable_bytes) * self.chunks

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

    def _solved(self, ranks: range) -> Plan:
        mesh, axes, profile = self.mesh.part(ranks), self.axes[self.kind(ranks)], self.profile_of(ranks)
        limit = self.request.memory_limit or profile.usable_bytes
        room = sum(self.limits) // self.chunks
        key = mesh, axes, limit, room, self.part.microbatches, self.request.recompute
        if key not in self.known:
            place = Place(self.part, axes, replace(self.request, mesh=mesh, memory_limit=limit), profile)
            budget = self.request.budget
            self.known[key] = place.placements.plan(room, budget.seconds, budget.seed, budget.gap)
        return self.known[key]

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

    def plan(self, split: str) -> Plan:
        """Stages of equally many blocks, or by speed; of the latter, one that does not fit gets a block less.

        Raises PlanError for another word or where blocks cannot be shared out so, InfeasibleError when nothing fits.
        """
        check_split(split)
        count = len(self.times_ns[0])
        most = [count] * len(self.ranks)
        sizes = sizes_by_speed(self.times_ns, most) if split == "speed" else self._equal(count)
        over: dict[int, int] = {}
        while sizes is not None:
            plan, timeline = self._of_sizes(sizes)
            over = self._over(timeline)
            if not over:
                return plan
            most = [min(limit, size - 1) if stage in over else limit
                    for stage, (limit, size) in enumerate(zip(most, sizes, strict=True))]  # fmt: skip
            sizes = sizes_by_speed(self.times_ns, most) if split == "speed" else None
        raise self._does_not_fit(over)

    def _does_not_fit(self, over: Mapping[int, int]) -> InfeasibleError:
        needs = [
            f"stage {stage} on ranks {self.ranks[stage].start} to {self.ranks[stage].stop - 1} would hold {size:,} of "
            f"{self.limits[stage]:,}"
            for stage, size in over.items()
        ]
        return InfeasibleError(
            f"found no plan of {len(self.ranks)} stages within the bytes of each device of {self.mesh}: of the last "
            f"one tried, {', '.join(needs) or 'no stage could have a block'}; use zero, recompute, more microbatches "
            "or more devices"
        )

    def _equal(self, count: int) -> tuple[int, ...]:
        if not count or count % len(self.ranks):
            raise PlanError(
                f"expected a number of repeated blocks that {len(self.ranks)} stages divide equally, found {count}; "
                'choose a number of stages that divides it, or split="speed"'
            )
        return (count // len(self.ranks),) * len(self.ranks)

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


# The search ----------------------------------------


@dataclass(frozen=True)
class _UnequalSetting:
    """What is searched: the axes of each kind's stages, the number of microbatches, what is recomputed."""

    axes: tuple[tuple[str, LogicalMesh], ...]
    microbatches: int
    recompute: str


_Best = tuple[int, _UnequalSetting]
"""Nanoseconds a step, and of what."""


class _UnequalSearch:
    """Descends from the best of equal axes: one kind's axes, or the microbatches, are changed while that is faster."""

    def __init__(self, graph: Graph, blocks: Blocks, request: Request, profiles: Mapping[str, Profile]) -> None:
        self.graph, self.blocks, self.request, self.profiles = graph, blocks, request, profiles
        self.paths = tuple(path for group in blocks.paths for path in group)
        self.deadline = time.monotonic() + request.budget.seconds
        self.shapes = {group.profile: _stage_shapes(request.mesh, group) for group in request.mesh.groups}
        self.divided = cache(lambda count: divided(graph, blocks, count))
        self.known: dict[Hashable, Plan] = {}
        self.tried: dict[_UnequalSetting, Plan | None] = {}
        self.refusals: list[Exception] = []

    def run(self, report: Report) -> Plan:
        """The fastest plan that was found. Raises InfeasibleError when none fits."""
        best = self._start(report)
        while best is not None:
            before = best
            for setting in self._neighbours(best[1]):
                best = self._better(best, setting, report)
            if best == before:
                break
        if best is None:
            raise self.refusals[0] if self.refusals else InfeasibleError("expected time to try a plan, found none")
        plan = self.tried[best[1]]
        assert plan is not None
        return replace(plan, search=self._report(plan))

    def _start(self, report: Report) -> _Best | None:
        """The best of equal axes on all kinds, each in more microbatches for as long as that is faster."""
        best: _Best | None = None
        for recompute in ("none", "full"):
            for kinds in self._alike():
                last: int | None = None
                for count in self._counts(self._num_stages(kinds)):
                    setting = _UnequalSetting(tuple(kinds.items()), count, recompute)
                    best, plan = self._better(best, setting, report), self.tried.get(setting)
                    if plan is not None and last is not None and plan.predicted.step_time_ns > last:
                        break
                    last = last if plan is None else plan.predicted.step_time_ns
            if best is not None:
                break
        return best

    def _alike(self) -> list[dict[str, LogicalMesh]]:
        """Axes that stages of every kind may have; where there are none, the largest of each."""
        first, *others = self.shapes.values()
        shared = [axes for axes in first if all(axes in shapes for shapes in others)]
        return [dict.fromkeys(self.shapes, axes) for axes in shared] or [
            {kind: shapes[0] for kind, shapes in self.shapes.items()}
        ]

    def _num_stages(self, kinds: Mapping[str, LogicalMesh]) -> int:
        return sum(
            group.num_devices // math.prod(axis.size for axis in kinds[group.profile])
            for group in self.request.mesh.groups
        )

    def _counts(self, stages: int) -> list[int]:
        """Microbatches that the batch divides into, from as many as there are stages to eight times that."""
        pinned = [c.microbatches for c in self.request.constraints if c.microbatches is not None]
        powers = [1 << n for n in range(12) if stages <= 1 << n <= 8 * stages]
        return [n for n in pinned or powers if divisible(self.graph, n)]

    def _neighbours(self, setting: _UnequalSetting) -> Iterator[_UnequalSetting]:
        kinds = dict(setting.axes)
        for kind, shapes in self.shapes.items():
            for axes in shapes:
                yield replace(setting, axes=tuple({**kinds, kind: axes}.items()))
        for count in self._counts(self._num_stages(kinds)):
            yield replace(setting, microbatches=count)
        for recompute in ("none", "block", "full"):
            yield replace(setting, recompute=recompute)

    def _better(self, best: _Best | None, setting: _UnequalSetting, report: Report) -> _Best | None:
        """The better of the best so far and a setting, unless it was tried, or time is over."""
        if setting in self.tried or (best is not None and (time.monotonic() > self.deadline or interrupt.is_asked())):
            return best
        plan = self.tried[setting] = self._planned(setting)
        found = "does not fit" if plan is None else f"{plan.predicted.step_time_ns / 1e6:.3f} ms"
        report(f"{_shown(setting)}: {found}")
        if plan is None or (best is not None and plan.predicted.step_time_ns >= best[0]):
            return best
        return plan.predicted.step_time_ns, setting

    def _planned(self, setting: _UnequalSetting) -> Plan | None:
        try:
            again = template_recompute(self.graph, self.paths, setting.recompute)
            request = replace(self.request, recompute=again)
            part = self.divided(setting.microbatches)
            stages = UnequalStages(
                part, dict(setting.axes), 1, PLAIN, self.paths, request, self.profiles, self.known
            )  # fmt: skip
            return stages.plan("speed")
        except (InfeasibleError, PlanError) as error:
            self.refusals.append(error)
            return None

    def _report(self, plan: Plan) -> SearchReport:
        over = time.monotonic() > self.deadline or interrupt.is_asked()
        rows = [
            {"setting": _shown(setting), "step_time_ns": None if tried is None else tried.predicted.step_time_ns}
            for setting, tried in self.tried.items()
        ]
        return SearchReport(
            method="stages of unequal devices by speed, descent over axes and microbatches, intra-op ILP",
            cost_ns=plan.predicted.step_time_ns,
            stop_reason=f"{'time is over' if over else 'no neighbour is faster'} after {len(rows)} settings, no bound",
            seconds=round(time.monotonic() - self.deadline + self.request.budget.seconds, 3),
            seed=self.request.budget.seed,
            tried=tuple(rows),
        )


def best_unequal_plan(
    graph: Graph, blocks: Blocks, request: Request, profiles: Mapping[str, Profile], progress: Report | None
) -> Plan:
    """The fastest plan found for a mesh of several kinds of devices. Raises InfeasibleError when none fits."""
    search = _UnequalSearch(graph, blocks, request, profiles)
    with reporting(progress, len(search.shapes) * max(map(len, search.shapes.values()))) as report:
        return search.run(report)


def _stage_shapes(mesh: Mesh, group: DeviceGroup) -> list[LogicalMesh]:
    """The axes that a stage of a kind may have: those of each part of a node, or of whole nodes, that divides all."""
    found: dict[LogicalMesh, None] = {}
    for size in range(1, group.num_devices + 1):
        is_part = group.devices_per_node % size == 0 or size % group.devices_per_node == 0
        if is_part and group.num_devices % size == 0:
            nodes = max(1, size // group.devices_per_node)
            found |= dict.fromkeys(logical_meshes(Mesh(group.profile, nodes, size // nodes)))
    return sorted(found, key=lambda axes: (-math.prod(axis.size for axis in axes), len(axes)))


def _shown(setting: _UnequalSetting) -> str:
    kinds = ", ".join(f"{kind} {'x'.join(str(axis.size) for axis in axes) or '1'}" for kind, axes in setting.axes)
    again = "" if setting.recompute == "none" else f", recompute {setting.recompute}"
    return f"stages of {kinds} in {setting.microbatches} microbatches{again}"
