"""A place traded against memory: placements on the hull of time against memory, each with as little computed again as
fits.

    placements        the hull of what costs least where nothing is computed again, and of what does where all is
    computed again    ever more, block by block, along ladders from nothing to all (`zero.ladders`)
    of each           the first rung that fits

Which placements and rungs there are does not depend on the limit: what fits with a tighter one is found with a looser
one, too, so that more memory gives no slower plan. All are played: what is gathered and reduced may hide, so that what
costs a little more may be the fastest, where memory is no concern, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.errors import InfeasibleError
from autopar.intraop import TradeOff, TradeOffs
from autopar.ir.plan import Plan, SearchReport
from autopar.planning import Place
from autopar.simulate import Incremental, predict
from autopar.tunables import BESIDE_FASTEST, MOST_BESIDE, ONE_STAGE_HALVINGS, SOLVE_SHARE

Rung = tuple[Any, ...]
"""Of a ladder: what is computed again, as in `Plan.recompute`, or whatever else spares memory (`copied`)."""


@dataclass(eq=False)
class TradedPlace:
    """there: with nothing computed again, or what constraints pin. ladders: what else may be, each from that on; all
    end with what takes least memory. seconds: of work for each place. best_ns: a step that is known.

    found: what fits, and is near the fastest.
    """

    there: Place
    ladders: Sequence[Sequence[Rung]]
    simulator: Incremental
    seconds: float
    best_ns: float
    found: list[Plan] = field(default_factory=list)
    _played: dict[tuple[int, Rung], Plan] = field(default_factory=dict)

    def plans(self) -> list[Plan]:
        """Those that fit and are near the fastest, that first."""
        is_bound = self._look_at(self._hull(self.there), self.ladders[0][0])
        if is_bound and self.ladders[0][1:]:
            self._look_at(self._hull(self._smallest), self.ladders[0][-1])
            if not self.found:
                self._look_at(self._within_the_limit(), self.ladders[0][-1])
        near = [plan for plan in self.found if plan.predicted.step_time_ns <= self._near_ns]
        return sorted(near, key=_step_ns)[:MOST_BESIDE]

    @property
    def _near_ns(self) -> float:
        return BESIDE_FASTEST * self.best_ns

    def _look_at(self, placed: Iterator[Plan], again: Rung) -> bool:
        """Takes those that fit, and others with what makes them fit computed again: whether there are such that are
        near the fastest. again: what is, where they are compared; of those that are slower and larger than others no
        more is looked at."""
        is_bound, least_bytes = False, math.inf
        for compared in sorted((self._with(plan, again) for plan in placed), key=_step_ns):
            plan = self._with(compared, self.ladders[0][0])
            if plan.predicted.step_time_ns > self._near_ns:
                continue
            if self._fits(plan):
                self._take(plan)
                continue
            is_bound = True
            if compared.predicted.peak_bytes < least_bytes:
                least_bytes = compared.predicted.peak_bytes
                self._climb(plan)
        return is_bound

    def _climb(self, plan: Plan) -> None:
        """Takes these placements with as little computed again as makes them fit: by every ladder, where the first
        leads near the fastest."""
        for ladder in self.ladders:
            found = self._first_that_fits(plan, ladder[1:])
            if found is None:
                break
            self._take(found)

    def _first_that_fits(self, plan: Plan, ladder: Sequence[Rung]) -> Plan | None:
        """By bisection: each rung takes less memory than the one before, and more time. The last, in which all ladders
        end, says whether any fits."""
        if not ladder or not self._fits(self._with(plan, ladder[-1])):
            return None
        found, low, high = None, 0, len(ladder)
        while low < high:
            middle = (low + high) // 2
            tried = self._with(plan, ladder[middle])
            if tried.predicted.step_time_ns > self._near_ns:
                high = middle
            elif self._fits(tried):
                found, high = tried, middle
            else:
                low = middle + 1
        return found

    def _fits(self, plan: Plan) -> bool:
        return plan.predicted.peak_bytes <= plan.memory_limit

    def _take(self, plan: Plan) -> None:
        self.found.append(plan)
        self.best_ns = min(self.best_ns, plan.predicted.step_time_ns)

    def _with(self, plan: Plan, again: Rung) -> Plan:
        """The placements with this computed again, played once."""
        key = id(plan.stages), again  # what is kept has them, so that no others get their place
        if key not in self._played:
            plan = self._sparing(plan, again)
            self._played[key] = replace(plan, predicted=predict(self.simulator.timeline(plan)))
        return self._played[key]

    def _sparing(self, plan: Plan, again: Rung) -> Plan:
        """The plan with this computed again."""
        return replace(plan, recompute=again)

    # Placements ----------------------------------------

    @cached_property
    def _smallest(self) -> Place:
        """With all computed again."""
        return self.there.recomputing(self.ladders[0][-1])

    def _hull(self, there: Place) -> Iterator[Plan]:
        """Placements between the fastest and those of least memory, where nothing else is computed again."""
        budget = there.request.budget
        curve = there.placements.trade_offs(1, SOLVE_SHARE * self.seconds, budget.seed)
        with suppress(InfeasibleError):
            for choice in _points(curve):
                yield self._placed(there, choice)

    def _placed(self, there: Place, choice: TradeOff) -> Plan:
        placements, budget = there.placements, there.request.budget
        known = placements.unlimited(SOLVE_SHARE * self.seconds, budget.seed, budget.gap)
        is_fastest = choice.cost_ns <= known.cost
        report = SearchReport(
            method="intra-op ILP, time against memory",
            cost_ns=choice.cost_ns,
            lower_bound_ns=int(known.lower_bound),
            stop_reason=known.stop_reason if is_fastest else "a point of the hull",
            seconds=0.0,
            seed=budget.seed,
        )
        plan = placements.placed(replace(placements.draft, search=report), there.part.graph, choice.choice)
        return replace(plan, choices=placements.explained(choice.choice))

    def _within_the_limit(self) -> Iterator[Plan]:
        """The best of those that fit with all computed again, where none on the hull does."""
        with suppress(InfeasibleError):
            yield self._smallest.fit(self.seconds)


def _points(curve: TradeOffs) -> list[TradeOff]:
    """Some of the hull, the fastest first."""
    fastest = curve.fastest()
    found = [fastest, curve.smallest(fastest)]
    for _ in range(ONE_STAGE_HALVINGS):
        between = [curve.between(fast, small) for fast, small in itertools.pairwise(found)]
        every = [point for pair in zip(found, between, strict=False) for point in pair] + found[-1:]
        found = [point for point in every if point is not None]
    return found


def _step_ns(plan: Plan) -> int:
    return plan.predicted.step_time_ns
