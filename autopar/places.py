"""Plans of one stage over all logical meshes, in ever more microbatches until something fits (Alpa §4).

    place = (graph of one microbatch, logical mesh)     placements by ILP, with ZeRO storage → simulated → fits?

In as few microbatches as have a plan that fits. Where none has one, or memory keeps the fastest from being chosen,
plans that compute blocks again compete (`zero.recomputation`), with those of twice the microbatches, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autopar.clock import Clock, ends, is_interrupted
from autopar.cost import Profile
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.mesh import logical_meshes
from autopar.ir.outline import sizes_text
from autopar.ir.plan import Plan
from autopar.ir.recompute import again_text
from autopar.ir.tried import Tried
from autopar.planning import Place, divided, microbatch_counts
from autopar.progress import Report, reporting
from autopar.request import Request
from autopar.trace import Blocks
from autopar.tunables import LEAST_SOLVE_S, MOST_HIDDEN
from autopar.zero import Modules, Recomputable, fit_with_recomputation, joined, pinned_modules, recomputable

Found = tuple[Place, Plan]
Fit = Callable[[Place, float], Plan]
"""The best plan in a place that is found in so many seconds. Raises InfeasibleError."""


class PlaceSearch:
    """Over places: logical meshes, in ever more microbatches until something fits."""

    def __init__(
        self, graph: Graph, blocks: Blocks, request: Request, profile: Profile, clock: Clock,
        note: Callable[[Tried], None], progress: Report | None, than_ns: float | None, has_plan: bool,
    ) -> None:  # fmt: skip
        """note: takes a row of the report for each place. than_ns: a step that is known, None for none; what cannot be
        faster is left out. has_plan: of this graph or another, so that an interrupt may end the search with none."""
        self.graph, self.blocks, self.profile, self.clock = graph, blocks, profile, clock
        self.note, self.progress, self.than_ns, self.has_plan = note, progress, than_ns, has_plan
        options = recomputable(graph, self._paths)
        self.request = request.recomputing(pinned_modules(options, request.constraints) or ())
        is_open = request.mode == "train" and all(rule.recompute is None for rule in request.constraints)
        self.again = options if is_open else recomputable(graph, ())
        self.places: list[Place] = []

    @property
    def _paths(self) -> list[str]:
        return [path for paths in self.blocks.paths for path in paths]

    def run(self) -> list[Found]:
        """Plans that fit."""
        found: list[Found] = []
        for count in microbatch_counts(self.graph, self.request):
            here = self._places(count)
            plans, is_second = self._candidates(here, Place.fit), bool(found)
            fits_at_once = bool(plans)
            if ends(bool(found or plans or self.has_plan)):
                return found + plans
            asked = _to_recompute(here, plans) if self.again.full else []
            plans += self._candidates(asked, partial(_fit_recomputed, self.again)) if asked else []
            found += plans
            if fits_at_once or is_second or not here:
                break
        return found

    def _places(self, count: int) -> list[Place]:
        """Those that may have a faster plan than is known."""
        part = divided(self.graph, self.blocks, count)
        meshes = logical_meshes(self.request.mesh)
        here = [Place(part, axes, self.request, self.profile) for axes in meshes]
        here = [there for there in here if self.than_ns is None or may_be_faster(there, self.than_ns)]
        self.places += here
        return here

    def _candidates(self, places: Sequence[Place], fit: Fit) -> list[Found]:
        """The plans of all places that have one."""
        found: list[Found] = []
        with reporting(self.progress, len(places)) as report:
            for number, there in enumerate(places):
                if is_interrupted() and found:
                    break
                seconds = max(LEAST_SOLVE_S, self.clock.left_s / (len(places) - number))
                plan = self._candidate(there, fit, seconds, report)
                found += [(there, plan)] if plan is not None else []
        return found

    def _candidate(self, there: Place, fit: Fit, seconds: float, report: Report) -> Plan | None:
        """The plan in one place, noted in a row; None when none was found that fits."""
        count, clock, plan, row = there.part.microbatches, Clock.of(seconds), None, Tried()
        try:
            plan = fit(there, seconds)
            told = plan.predicted
            row = Tried(
                step_time_ns=told.step_time_ns, peak_bytes=told.peak_bytes, solve_seconds=plan.search.seconds,
                recompute=again_text(plan.recompute) or None,
            )  # fmt: skip
        except InfeasibleError as error:
            row = Tried(infeasible=str(error))
        mesh, passed_s = sizes_text(there.axes), round(clock.passed_s, 3)
        self.note(replace(row, mesh=mesh, microbatches=count, seconds=passed_s))
        what = f"{plan.predicted.step_time_ns / 1e6:.3f} ms" if plan is not None else "no plan found that fits"
        what += f", {again_text(plan.recompute)} recomputed" if plan is not None and plan.recompute else ""
        report(f"mesh {mesh}{f' in {count} microbatches' if count > 1 else ''}: {what} ({passed_s} s)")
        return plan

    def smallest(self) -> list[Place]:
        """All places, with all blocks computed again where the search may do so."""
        return [there.recomputing(joined(self.again.full)) for there in self.places] if self.again.full else self.places


def may_be_faster(there: Place, than_ns: float) -> bool:
    """Whether a step could be shorter there if all that stored tensors are gathered and reduced for hid: the bound of
    the placements that cost least without a limit of memory."""
    budget = there.request.budget
    return there.placements.least_step_ns(LEAST_SOLVE_S, budget.seed, budget.gap) <= than_ns * MOST_HIDDEN


def _to_recompute(places: list[Place], fitting: list[Found]) -> list[Place]:
    """Where to compute blocks again: everywhere if nothing fits without; in the fastest place if memory limits that."""
    if not fitting:
        return places
    there, plan = min(fitting, key=lambda item: item[1].predicted.step_time_ns)
    return [] if _is_unlimited(there, plan) else [there]


def _is_unlimited(there: Place, plan: Plan) -> bool:
    """Whether the place's plan would be no cheaper without a limit of memory, as far as the search can say."""
    budget = there.request.budget
    free_ns = there.placements.unlimited_cost_ns(LEAST_SOLVE_S, budget.seed, budget.gap)
    return plan.search.cost_ns * (1 - budget.gap) <= free_ns


def _fit_recomputed(again: Recomputable, there: Place, seconds: float) -> Plan:
    """The best plan of a place that computes blocks again."""

    def fit(modules: Modules) -> Plan:
        return there.recomputing(modules).fit(seconds / 2)

    def rescore(plan: Plan, modules: Modules) -> Plan:
        return there.scored(replace(plan, recompute=modules))

    return there.scored(fit_with_recomputation(again, fit, rescore))
