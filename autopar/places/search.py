"""Over logical meshes in ever more microbatches, one stage: a plan within the limit, and what time trades for memory.

    place = (graph of one microbatch, logical mesh)     placements by ILP, with ZeRO storage → simulated → fits?
    places that may have a faster plan                  traded against memory (`places.traded`)

In as few microbatches as have a plan that fits with nothing computed again. Where none has one, or memory keeps the
fastest from being chosen, those of more microbatches compete, too, as long as that gets better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

from autopar.clock import Clock, ends, is_interrupted
from autopar.collector import cached_method
from autopar.cost import Profile
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.mesh import logical_meshes
from autopar.ir.outline import sizes_text
from autopar.ir.plan import Plan
from autopar.ir.recompute import again_text
from autopar.ir.tried import Tried
from autopar.places.traded import TradedPlace
from autopar.planning import Place, divided, microbatch_counts
from autopar.progress import Report, reporting
from autopar.request import Request
from autopar.simulate import Incremental
from autopar.trace import Blocks
from autopar.tunables import LEAST_SOLVE_S
from autopar.zero import Modules, ladders, pinned_modules, priced_levels, recomputable

Found = tuple[Place, Plan]
Fit = Callable[[Place, float], list[Plan]]
"""Plans in a place that are found in so many seconds, the best first. Raises InfeasibleError."""


class PlaceSearch:
    """Over places: logical meshes, in ever more microbatches until something fits."""

    def __init__(
        self, graph: Graph, blocks: Blocks, request: Request, profile: Profile, clock: Clock,
        note: Callable[[Tried], None], progress: Report | None, than_ns: float | None, has_plan: bool,
        gain_ns: Callable[[Place, Plan], int] = lambda there, plan: 0,
    ) -> None:  # fmt: skip
        """note: takes a row of the report for each place. than_ns: a step that is known, None for none; what cannot be
        faster is left out. has_plan: of this graph or another, so that an interrupt may end the search with none.
        gain_ns: what a plan in a place may gain yet by what is tried with plans that are nearly the fastest."""
        self.graph, self.blocks, self.profile, self.clock = graph, blocks, profile, clock
        self.note, self.progress, self.has_plan, self.gain_ns = note, progress, has_plan, gain_ns
        self.best_ns, self.is_known = (math.inf, False) if than_ns is None else (than_ns, True)
        self.options = recomputable(graph, self._paths)
        self.pinned = pinned_modules(self.options, request.constraints)
        self.request = request.recomputing(self.pinned or ())
        self.places: list[Place] = []

    @property
    def _paths(self) -> list[str]:
        return [path for paths in self.blocks.paths for path in paths]

    def run(self) -> list[Found]:
        """Plans that fit."""
        found: list[Found] = []
        for count in microbatch_counts(self.graph, self.request):
            before_ns, here = self.best_ns, self._places(count)
            plans = self._candidates(here, lambda there, seconds: [self._fitting(there, seconds)])
            found += plans
            if ends(bool(found or self.has_plan)):
                break
            found += [] if self._is_over else self._traded(here)
            self._forget()
            is_better = self.best_ns < before_ns or not found
            if self._is_over:
                self.note(Tried(setting="place", infeasible="the work that there is for one stage was done"))
                break
            if not here or not is_better or (plans and _is_unlimited(*min(plans, key=_step_ns))):
                break
        return found

    def _places(self, count: int) -> list[Place]:
        """Those that may have a faster plan than is known."""
        part = divided(self.graph, self.blocks, count)
        meshes, shared = logical_meshes(self.request.mesh), self.profile.shared_by(self.request.mesh.devices_per_node)
        simulator = Incremental(part.graph, shared)
        here = [Place(part, axes, self.request, self.profile, by_factors=True, simulator=simulator) for axes in meshes]
        here = [there for there in here if self._may_be_faster(there)]
        self.places += [replace(there, simulator=None) for there in here]  # which knows much
        return here

    def _forget(self) -> None:
        """What is known of places in one number of microbatches is of no use in others."""
        vars(self).pop("_known__tradable", None)

    @property
    def _is_over(self) -> bool:
        """Whether the work that there is for this is done. Without a plan from elsewhere there is no such limit."""
        return self.is_known and self.clock.is_over

    def _may_be_faster(self, there: Place) -> bool:
        return there.may_be_faster(self.best_ns)

    def _fitting(self, there: Place, seconds: float) -> Plan:
        """The best plan that fits with nothing else computed again. Raises InfeasibleError."""
        for again, what in ((True, "whatever is computed again"), (False, "with nothing computed again")):
            least = self._tradable(there).least_bytes(again)
            if least > there.limit_bytes:
                raise InfeasibleError(f"needs about {least:,} bytes a device at least, {what}")
        return there.fit(seconds)

    @cached_method
    def _tradable(self, there: Place) -> TradedPlace:
        assert there.simulator is not None, "places of a search are given one"
        return TradedPlace(
            there, self._ladders, there.simulator, self.request.budget.seconds, self.best_ns,
            partial(self.gain_ns, there), self.request.budget.substitutions, self.is_known,
        )  # fmt: skip

    def _traded(self, here: Sequence[Place]) -> list[Found]:
        """Of what may be faster, as fast as it is within the limit, with as little computed again as that takes."""
        if not here:
            return []

        def fit(there: Place, seconds: float) -> list[Plan]:
            tradable = self._tradable(there)
            tradable.seconds, tradable.best_ns = seconds, self.best_ns
            return tradable.plans()

        return self._candidates([there for there in here if self._may_be_faster(there)], fit)

    @cached_property
    def _ladders(self) -> list[list[Modules]]:
        """What may be computed again."""
        if self.request.mode != "train" or self.pinned is not None:
            return [[self.request.recompute]]
        shared = self.profile.shared_by(self.request.mesh.devices_per_node)
        return ladders(priced_levels(self.graph, self._paths, shared), self.options.attention)

    def _candidates(self, places: Sequence[Place], fit: Fit) -> list[Found]:
        """The plans of all places that have one."""
        found: list[Found] = []
        with reporting(self.progress, len(places)) as report:
            for number, there in enumerate(places):
                if (is_interrupted() and found) or self._is_over:
                    break
                seconds = max(LEAST_SOLVE_S, self.clock.left_s / (len(places) - number))
                for plan in self._in_place(there, fit, seconds, report):
                    found.append((there, plan))
                    self.best_ns = min(self.best_ns, plan.predicted.step_time_ns)
        return found

    def _in_place(self, there: Place, fit: Fit, seconds: float, report: Report) -> list[Plan]:
        """The plans in one place, the best noted in a row, or why there is none."""
        clock, plans, row = Clock.of(seconds), list[Plan](), Tried()
        try:
            plans = fit(there, seconds)
        except InfeasibleError as error:
            row = Tried(infeasible=str(error))
        if plans or row.infeasible:
            row = _row(plans[0]) if plans else row
            self._note(there, row, round(clock.passed_s, 3), report)
        return plans

    def _note(self, there: Place, row: Tried, passed_s: float, report: Report) -> None:
        count, mesh = there.part.microbatches, sizes_text(there.axes)
        self.note(replace(row, mesh=mesh, microbatches=count, seconds=passed_s))
        what = "no plan found that fits" if row.step_time_ns is None else f"{row.step_time_ns / 1e6:.3f} ms"
        what += f", {row.recompute} recomputed" if row.recompute else ""
        report(f"mesh {mesh}{f' in {count} microbatches' if count > 1 else ''}: {what} ({passed_s} s)")

    def smallest(self) -> list[Place]:
        """All places, with all blocks computed again where the search may do so."""
        least = self._ladders[0][-1]
        return [there.recomputing(least) for there in self.places] if self._ladders[0][1:] else self.places


def _row(plan: Plan) -> Tried:
    told = plan.predicted
    return Tried(
        step_time_ns=told.step_time_ns, peak_bytes=told.peak_bytes, solve_seconds=plan.search.seconds,
        recompute=again_text(plan.recompute) or None,
    )  # fmt: skip


def _step_ns(found: Found) -> int:
    return found[1].predicted.step_time_ns


def _is_unlimited(there: Place, plan: Plan) -> bool:
    """Whether the place's plan would be no cheaper without a limit of memory, as far as the search can say."""
    budget = there.request.budget
    free_ns = there.placements.unlimited_cost_ns(LEAST_SOLVE_S, budget.seed, budget.gap)
    return plan.search.cost_ns * (1 - budget.gap) <= free_ns
