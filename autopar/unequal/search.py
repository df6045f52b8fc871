"""Descends over stages of one kind of device each: their axes, microbatches, what is computed again, the schedule.

From the best of equal axes down: one of these is changed while that is faster, the schedule once nothing else is.
Placements do not depend on it, so that another one is a simulation more, no solve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from autopar.clock import Clock
from autopar.cost import Profile
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.constraint import may_run, pinned
from autopar.ir.graph import Graph
from autopar.ir.mesh import DeviceGroup, LogicalMesh, Mesh, logical_meshes
from autopar.ir.outline import Outline, sizes_text
from autopar.ir.plan import Plan, SearchReport
from autopar.ir.schedule import PLAIN, SCHEDULES
from autopar.ir.stages import check_schedule
from autopar.ir.tried import Tried
from autopar.microbatch import divisible
from autopar.planning import divided
from autopar.progress import Report, reporting
from autopar.request import Request
from autopar.template import template_recompute
from autopar.trace import Blocks
from autopar.tunables import MOST_A_STAGE, UNEQUAL_CHUNKS
from autopar.unequal.stages import UnequalStages


@dataclass(frozen=True)
class UnequalSetting:
    """The axes of each kind's stages, the number of microbatches, what is recomputed, the schedule."""

    axes: tuple[tuple[str, LogicalMesh], ...]
    microbatches: int
    recompute: str
    schedule: str = PLAIN

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {sizes_text(axes)}" for kind, axes in self.axes)
        again = "" if self.recompute == "none" else f", recompute {self.recompute}"
        again += "" if self.schedule == PLAIN else f", {self.schedule}"
        return f"stages of {kinds} in {self.microbatches} microbatches{again}"


_Best = tuple[int, UnequalSetting]
"""Nanoseconds a step, and of what."""


class UnequalSearch:
    """Descends from the best of equal axes: one kind's axes, or the microbatches, are changed while that is faster."""

    def __init__(
        self, graph: Graph, blocks: Blocks, request: Request, profiles: Mapping[str, Profile], clock: Clock,
        note: Callable[[Tried], None],
    ) -> None:  # fmt: skip
        """note: takes a row of the report for each setting."""
        self.graph, self.blocks, self.profiles, self.clock, self.note = graph, blocks, profiles, clock, note
        self.request = replace(request, budget=replace(request.budget, seconds=clock.left_s))
        self.paths = tuple(path for group in self.blocks.paths for path in group)
        self.shapes = {group.profile: _stage_shapes(group) for group in self.request.mesh.groups}
        self.divided = cache(lambda count: divided(self.graph, self.blocks, count))
        self.known: dict[Hashable, Plan] = {}
        self.tried: dict[UnequalSetting, Plan | None] = {}
        self.refusals: list[Exception] = []
        self.ended = "no neighbour is faster"

    def run(self, report: Report) -> list[tuple[UnequalSetting, Plan]]:
        """The plans that were found. Raises InfeasibleError when none fits."""
        best = self._start(report)
        for schedules in ([], self.schedules):
            before: _Best | None = None
            while best is not None and best != before:
                before = best
                for setting in self._neighbours(best[1], schedules):
                    best = self._better(best, setting, report)
        if best is None:
            raise self.refusals[0] if self.refusals else InfeasibleError("expected time to try a plan, found none")
        return [(setting, plan) for setting, plan in self.tried.items() if plan is not None]

    @cached_property
    def schedules(self) -> list[str]:
        """Those that constraints allow, the plain one first. Raises PlanError where none is."""
        rules = self.request.constraints
        named = [(row.name, row.has_chunks, self._chunks(row.name)) for row in SCHEDULES.values()]
        found = [name for name, has, chunks in named if has == (chunks > 1) and may_run(rules, name, chunks)]
        if not found:
            raise PlanError(
                f"expected a schedule with as many chunks as constraints pin, found none for "
                f"{pinned(rules, 'chunks')} chunks with schedule {pinned(rules, 'schedule')!r}; relax one of them"
            )
        return sorted(found, key=PLAIN.__ne__)

    def _start(self, report: Report) -> _Best | None:
        """The best of equal axes on all kinds, each in more microbatches for as long as that is faster."""
        best: _Best | None = None
        for recompute in ("none", "full"):
            for axes in self._alike():
                last: int | None = None
                for count in self._counts(self._num_stages(axes)):
                    setting = UnequalSetting(tuple(axes.items()), count, recompute, self.schedules[0])
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

    def _num_stages(self, axes: Mapping[str, LogicalMesh]) -> int:
        return sum(
            group.num_devices // math.prod(axis.size for axis in axes[group.profile])
            for group in self.request.mesh.groups
        )

    def _counts(self, stages: int) -> list[int]:
        """Microbatches that the batch divides into, from as many as there are stages on."""
        pinned = [c.microbatches for c in self.request.constraints if c.microbatches is not None]
        powers = [1 << n for n in range(12) if stages <= 1 << n <= MOST_A_STAGE * stages]
        return [n for n in pinned or powers if divisible(self.graph, n)]

    def _neighbours(self, setting: UnequalSetting, schedules: Sequence[str]) -> Iterator[UnequalSetting]:
        axes_of = dict(setting.axes)
        for kind, shapes in self.shapes.items():
            for axes in shapes:
                yield replace(setting, axes=tuple({**axes_of, kind: axes}.items()))
        for count in self._counts(self._num_stages(axes_of)):
            yield replace(setting, microbatches=count)
        for recompute in ("none", "block", "full"):
            yield replace(setting, recompute=recompute)
        stages = self._num_stages(axes_of)
        for schedule in schedules:  # in as many microbatches, or as few more as it is made for
            counts = [setting.microbatches, *(n for n in self._counts(stages) if n > setting.microbatches)]
            able = [count for count in counts if SCHEDULES[schedule].takes(count, stages)]
            yield replace(setting, schedule=schedule, microbatches=(able or counts)[0])

    def _better(self, best: _Best | None, setting: UnequalSetting, report: Report) -> _Best | None:
        """The better of the best so far and a setting, unless it was tried, or the clock has ended."""
        if setting in self.tried:
            return best
        if best is not None and self.clock.is_over:
            self.ended = self.clock.stop_reason
            return best
        plan = self.tried[setting] = self._planned(setting)
        step_ns = None if plan is None else plan.predicted.step_time_ns
        report(f"{setting}: {'does not fit' if step_ns is None else f'{step_ns / 1e6:.3f} ms'}")
        if plan is None or (best is not None and plan.predicted.step_time_ns >= best[0]):
            return best
        return plan.predicted.step_time_ns, setting

    def _planned(self, setting: UnequalSetting) -> Plan | None:
        try:
            stages = self._stages(setting)
            firsts = [ranks.start for ranks in stages.ranks]
            again = stages.request.recompute
            check_schedule(setting.schedule, firsts, setting.microbatches, again, has_branches=False)
            plan = stages.plan("speed")
        except (InfeasibleError, PlanError) as error:
            self.refusals.append(error)
            self.note(Tried(setting=str(setting), infeasible=str(error)))
            return None
        self.note(Tried(setting=str(setting), step_time_ns=plan.predicted.step_time_ns))
        return plan

    def _chunks(self, schedule: str) -> int:
        """Stages a submesh."""
        asked = pinned(self.request.constraints, "chunks") or UNEQUAL_CHUNKS
        return asked if SCHEDULES[schedule].has_chunks else 1

    def _stages(self, setting: UnequalSetting) -> UnequalStages:
        again = template_recompute(self.graph, self.paths, setting.recompute)
        return UnequalStages(
            self.divided(setting.microbatches), dict(setting.axes), self._chunks(setting.schedule), setting.schedule,
            self.paths, self.request.recomputing(again), self.profiles, self.known,
        )  # fmt: skip

    def reported(self, setting: UnequalSetting, plan: Plan) -> Plan:
        """The plan with how it was found."""
        plan = replace(plan, search=replace(plan.search, seconds=round(self.clock.passed_s, 3)))
        return _reported(self._stages(setting), plan, f"{self.ended} after {len(self.tried)} settings")


def searched_kinds(
    graph: Graph, blocks: Blocks, request: Request, profiles: Mapping[str, Profile], clock: Clock,
    note: Callable[[Tried], None], progress: Report | None,
) -> list[tuple[Plan, Callable[[], Plan]]]:  # fmt: skip
    """Plans that fit, each with what says more of it. note: takes a row of the report for each setting. Raises
    InfeasibleError when none fits."""
    search = UnequalSearch(graph, blocks, request, profiles, clock, note)
    with reporting(progress, len(search.shapes) * max(map(len, search.shapes.values()))) as report:
        found = search.run(report)
    return [(plan, partial(search.reported, setting, plan)) for setting, plan in found]


def unequal_in(
    graph: Graph, blocks: Blocks, outline: Outline, request: Request, profiles: Mapping[str, Profile]
) -> tuple[Plan, Callable[[], Plan]]:
    """The best plan of a graph in stages of which all are on the axes of an outline, and what says more of it. Raises
    InfeasibleError where none fits."""
    axes = {group.profile: outline.axes for group in request.mesh.groups}
    paths = [path for group in blocks.paths for path in group]
    stages = UnequalStages(divided(graph, blocks, outline.microbatches), axes, 1, PLAIN, paths, request, profiles)
    plan = stages.plan("speed")
    return plan, partial(_reported, stages, plan, "near the best plan of the model's own graph")


def _reported(stages: UnequalStages, plan: Plan, why: str) -> Plan:
    """The plan with how it was found."""
    report = SearchReport(
        method="stages of unequal devices by speed, descent over axes and microbatches, intra-op ILP",
        cost_ns=plan.predicted.step_time_ns,
        lower_bound_ns=stages.least_step_ns,
        stop_reason=why,
        seconds=plan.search.seconds,
        seed=stages.request.budget.seed,
    )
    return replace(plan, search=report)


def _stage_shapes(group: DeviceGroup) -> list[LogicalMesh]:
    """The axes that a stage of a kind may have: those of each part of a node, or of whole nodes, that divides all."""
    found: dict[LogicalMesh, None] = {}
    for size in range(1, group.num_devices + 1):
        is_part = group.devices_per_node % size == 0 or size % group.devices_per_node == 0
        if is_part and group.num_devices % size == 0:
            nodes = max(1, size // group.devices_per_node)
            found |= dict.fromkeys(logical_meshes(Mesh(group.profile, nodes, size // nodes)))
    return sorted(found, key=lambda axes: (-math.prod(axis.size for axis in axes), len(axes)))
