"""Graphs and placements are chosen together: what is fastest on one device need not be what is fastest sharded
(Unger et al., Unity, 2022).

    setting = (logical mesh, stages, microbatches)
    the model's own graph       planned in all settings
    each equal graph            planned in the best setting of that plan
    the fastest of these        planned in the next best settings, too; in all where it is much faster than the own one
    taken                       of the plans within RESOLUTION of the fastest, the one of the fewest substitutions

Settings near the best of one graph are good for an equal graph, of which most is the same. So planning several graphs
takes little more than planning one; but where much of a step is saved, another setting may be the best.
`SearchBudget.everywhere` plans each graph in all settings instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from autopar import interrupt
from autopar.cost import Profile
from autopar.errors import InfeasibleError, PlanError
from autopar.interop.submeshes import logical_shapes
from autopar.ir.graph import Graph
from autopar.ir.mesh import logical_meshes
from autopar.ir.plan import GraphPlan, Plan, Rewriting, rule_counts
from autopar.microbatch import axes_of_parts
from autopar.planning import Place, Request, divided, plan_in, sizes_text
from autopar.rewrites import Rewrites
from autopar.staged import staged_plan_near
from autopar.substitute import GraphCandidate
from autopar.substitute.backtracking import RESOLUTION
from autopar.trace import Blocks, find_blocks

NEAR = 1.1
"""Settings in which a plan takes so many times the best one's step are near enough for an equal graph to be better."""
_MOST_SETTINGS = 3
NEARBY_S = 6.0
"""Seconds, from the begin of the search for equal graphs, after which planning of no more of them begins; the fastest
on one device is planned in any case: where finding it took that long, leaving it out would leave all to chance."""


class SearchSetting(NamedTuple):
    """Where plans are looked for: the logical shape of a stage by its sizes, such as "2x4", the numbers of stages and
    of microbatches."""

    mesh: str
    stages: int
    microbatches: int

    def __str__(self) -> str:
        text = f"mesh {self.mesh}" if self.stages == 1 else f"{self.stages} stages of {self.mesh}"
        return text if self.microbatches == 1 else f"{text} in {self.microbatches} microbatches"


def settings_near(plan: Plan) -> list[SearchSetting]:
    """The setting of a plan and the next best that fitted when it was looked for, the best first.

    Stages that differ are no setting: then the next best with equal ones comes first.
    """
    own = setting_of(plan)
    rows = [row for row in plan.search.tried if _fits(row, plan.memory_limit)]
    others = sorted(
        (row["step_time_ns"], SearchSetting(row["mesh"], row.get("stages", 1), row["microbatches"])) for row in rows
    )
    near = [setting for step_ns, setting in others if step_ns <= NEAR * plan.predicted.step_time_ns]
    if own is None:
        return list(dict.fromkeys(near or [setting for _, setting in others[:1]]))[:_MOST_SETTINGS]
    return list(dict.fromkeys((own, *near)))[:_MOST_SETTINGS]


def setting_of(plan: Plan) -> SearchSetting | None:
    """The setting of a plan; None where its stages differ in shape."""
    shapes = {sizes_text(axes) for axes in axes_of_parts(plan)}
    submeshes = len({stage.first_rank for stage in plan.stages})
    return SearchSetting(shapes.pop(), submeshes, plan.microbatches) if len(shapes) == 1 else None


def _fits(row: Mapping[str, Any], limit: int) -> bool:
    known = {"mesh", "microbatches", "step_time_ns"} <= row.keys()
    return known and " + " not in row["mesh"] and row.get("peak_bytes", 0) <= limit


def planned_near(graph: Graph, plan: Plan, setting: SearchSetting, request: Request, profile: Profile) -> Plan | None:
    """The fastest plan of a graph in a setting; None where there is none that fits.

    plan: of an equal graph; its recomputation is taken, and operators run beside each other where some of its do.
    """
    blocks = find_blocks(graph, request.constraints)
    try:
        if setting.stages > 1:
            size = request.mesh.num_devices // setting.stages
            return staged_plan_near(graph, blocks, request, profile, size, setting.mesh, setting.microbatches)
        return _planned_as_one(graph, blocks, plan, setting, request, profile)
    except (InfeasibleError, PlanError):  # it may not be cut into so many stages or microbatches
        return None


def _planned_as_one(
    graph: Graph, blocks: Blocks, plan: Plan, setting: SearchSetting, request: Request, profile: Profile
) -> Plan | None:
    part = divided(graph, blocks, setting.microbatches)
    again = replace(request, recompute=plan.recompute)
    mesh = request.mesh
    every = [*logical_meshes(mesh), *logical_shapes(mesh.num_devices, mesh.devices_per_node)]
    shapes = [axes for axes in every if sizes_text(axes) == setting.mesh]
    if not shapes:
        return None
    return plan_in(Place(part, shapes[0], again, profile), NEARBY_S)


# The choice ----------------------------------------


class PlannedGraph(NamedTuple):
    """A graph with the substitutions that make it, where it was planned, and the plan; None where nothing fitted."""

    candidate: GraphCandidate
    setting: SearchSetting | None
    plan: Plan | None

    @property
    def step_ns(self) -> float:
        """Predicted; endless without a plan."""
        return math.inf if self.plan is None else self.plan.predicted.step_time_ns


def entries_near(
    given: PlannedGraph, candidates: Sequence[GraphCandidate], settings: Sequence[SearchSetting],
    plan_in_setting: Callable[[GraphCandidate, SearchSetting], Plan | None], is_over: Callable[[], bool],
) -> list[PlannedGraph]:  # fmt: skip
    """What was planned, that of the model's own graph first: every graph in the first setting, and the fastest of those
    that substitutions make in the others, unless it is far from the given one."""
    found = list[PlannedGraph]()
    for candidate in candidates if settings else ():
        if not (is_over() if found else interrupt.is_asked()):
            found.append(PlannedGraph(candidate, settings[0], plan_in_setting(candidate, settings[0])))
    best = min(found, key=_step_ns, default=None)
    for setting in settings[1:] if best is not None and best.step_ns <= NEAR * given.step_ns else ():
        if best is not None and not is_over():
            found.append(PlannedGraph(best.candidate, setting, plan_in_setting(best.candidate, setting)))
    return [given, *found]


def much_faster(entries: Sequence[PlannedGraph]) -> GraphCandidate | None:
    """The graph of the fastest plan where that is so much faster than the model's own, which comes first, that settings
    near its best say little."""
    given, best = entries[0], min(entries, key=_step_ns)
    return best.candidate if best.step_ns * NEAR < given.step_ns else None


def taken(entries: Sequence[PlannedGraph]) -> PlannedGraph:
    """Of the plans that a profile cannot tell from the fastest, the one of the fewest substitutions, the fastest of
    these.

    Predicted steps are sums of a profile's times, which differ by RESOLUTION when they are measured again: a
    substitution that gains less may as well lose. The model as it was written needs no reason.
    """
    most = min(map(_step_ns, entries)) * (1 + RESOLUTION)
    return min(
        (entry for entry in entries if entry.step_ns <= most),
        key=lambda entry: (len(entry.candidate.steps), entry.step_ns),
    )


def _step_ns(entry: PlannedGraph) -> float:
    return entry.step_ns


def reported(entries: Sequence[PlannedGraph], best: PlannedGraph, found: Rewrites, seconds: float) -> Plan:
    """The plan of the graph that is taken, which says what else was looked at, and why that lost."""
    given = entries[0].plan
    assert best.plan is not None and given is not None, "the model's own graph has a plan"
    rows = tuple(_row(entry, best) for entry in entries)
    report = Rewriting(found.seen, found.stop, round(seconds, 3), rows)
    tried = given.search.tried
    if best.plan is not given and best.setting is not None:
        predicted = best.plan.predicted
        own = {"step_time_ns": predicted.step_time_ns, "peak_bytes": predicted.peak_bytes}
        tried = (*tried, {**best.setting._asdict(), "schedule": best.plan.schedule, **own})
    search = replace(best.plan.search, tried=tried, rewriting=report)
    return replace(best.plan, substitutions=best.candidate.steps, search=search)


def _row(entry: PlannedGraph, best: PlannedGraph) -> GraphPlan:
    mesh, stages, microbatches = entry.setting or SearchSetting("", 0, 0)
    step_ns = None if entry.plan is None else entry.plan.predicted.step_time_ns
    rules, outcome = rule_counts(entry.candidate.steps), _outcome(entry, best)
    return GraphPlan(rules, entry.candidate.cost_ns, mesh, stages, microbatches, step_ns, outcome)


def _outcome(entry: PlannedGraph, best: PlannedGraph) -> str:
    if entry is best:
        return "taken"
    if entry.plan is None:
        return "nothing found that fits"
    if entry.step_ns > best.step_ns:
        return f"slower by {entry.step_ns / best.step_ns - 1:.1%}"
    return f"faster by {1 - entry.step_ns / best.step_ns:.1%}, which a profile cannot tell apart"
