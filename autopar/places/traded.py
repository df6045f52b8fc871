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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.collector import cached_method
from autopar.errors import InfeasibleError
from autopar.intraop import TradeOff, TradeOffs
from autopar.ir.plan import Plan, SearchReport
from autopar.planning import Place
from autopar.simulate import Incremental, predict
from autopar.tunables import BESIDE_FASTEST, LEAST_SOLVE_S, MOST_BESIDE, ONE_STAGE_HALVINGS, SOLVE_SHARE, USAGE_ABOVE

Rung = tuple[Any, ...]
"""Of a ladder: what is computed again, as in `Plan.recompute`, or whatever else spares memory (`copied`)."""


@dataclass(eq=False)
class TradedPlace:
    """there: with nothing computed again, or what constraints pin. ladders: what else may be, each from that on; all
    end with what takes least memory. seconds: of work for each place. best_ns: a step that is known. gain_ns: what a
    plan may gain yet (in branches, say), beside which it is looked for; wants_one: one is, if it is near. is_beside: a
    plan is known from elsewhere, so that what fits between points of the hull is not worth its search.

    found: what fits, and is near the fastest.
    """

    there: Place
    ladders: Sequence[Sequence[Rung]]
    simulator: Incremental
    seconds: float
    best_ns: float
    gain_ns: Callable[[Plan], int] = lambda plan: 0
    wants_one: bool = False
    is_beside: bool = False
    found: list[Plan] = field(default_factory=list)
    _played: dict[tuple[int, Rung], Plan] = field(default_factory=dict)

    def plans(self) -> list[Plan]:
        """Those that fit and are near the fastest, that first."""
        if self.least_bytes(True) > self.there.limit_bytes:
            return []
        is_bound = self._look_at(self._hull(self.there), self.ladders[0][0])
        if is_bound and self.ladders[0][1:]:
            self._look_at(self._hull(self._smallest), self.ladders[0][-1])
            if not self.found and not self.is_beside:
                self._look_at(self._within_the_limit(), self.ladders[0][-1])
        near = [plan for plan in self.found if plan.predicted.step_time_ns <= self._near_ns]
        return sorted(near, key=_step_ns)[:MOST_BESIDE]

    @cached_method
    def least_bytes(self, again: bool) -> int:
        """About what a plan needs at least, by the peak of about the smallest placements; 0 where the fastest may fit,
        or none were found. again: with all computed again that may be."""
        budget = self.there.request.budget
        fastest = self.there.placements.unlimited(LEAST_SOLVE_S, budget.seed, budget.gap)
        if fastest.peak_usage <= self.there.limit_bytes:
            return 0
        there, rung = (self._smallest, self.ladders[0][-1]) if again else (self.there, self.ladders[0][0])
        with suppress(InfeasibleError):
            plan = self._with(self._placed(there, self._ends(there)[1]), rung)
            return int(plan.predicted.peak_bytes / USAGE_ABOVE)
        return 0

    @property
    def _near_ns(self) -> float:
        return BESIDE_FASTEST * self.best_ns

    def _look_at(self, placed: Iterator[Plan], again: Rung) -> bool:
        """Takes those that fit, and others with what makes them fit computed again: whether there are such that may be
        the fastest. again: what is, where they are compared; of those that are slower and larger than others no more is
        looked at."""
        is_bound, least_bytes = False, math.inf
        for compared in sorted((self._with(plan, again) for plan in placed), key=_step_ns):
            plan = self._with(compared, self.ladders[0][0])
            if plan.predicted.step_time_ns > self._near_ns:
                continue
            if self._fits(plan):
                self._take(plan)
            elif plan.predicted.step_time_ns <= (most_ns := self._most_ns(plan)):
                is_bound = True
                if compared.predicted.peak_bytes < least_bytes:
                    least_bytes = compared.predicted.peak_bytes
                    self._climb(plan, most_ns)
        return is_bound

    def _most_ns(self, plan: Plan) -> float:
        """What a plan may take with more computed again."""
        if self.wants_one and not self.found:
            return self._near_ns
        return min(self._near_ns, self.best_ns + self.gain_ns(plan))

    def _climb(self, plan: Plan, most_ns: float) -> None:
        """Takes these placements with as little computed again as makes them fit: by every ladder, where the first
        leads to what takes no longer than that."""
        for ladder in self.ladders:
            found = self._first_that_fits(plan, ladder[1:], most_ns)
            if found is None:
                break
            self._take(found)

    def _first_that_fits(self, plan: Plan, ladder: Sequence[Rung], most_ns: float) -> Plan | None:
        """Each rung takes less memory than the one before, by about as much as others, and more time: so it is looked
        for where a line through what does not fit and what does says, and half-way where that was far off. The last,
        in which all ladders end, says whether any fits; none does that takes no longer than `most_ns` where something
        before takes longer and does not."""
        if not ladder or not self._fits(found := self._with(plan, ladder[-1])):
            return None
        low, high, by_line = 0, len(ladder) - 1, True
        above, below = self._above_bytes(plan), self._above_bytes(found)
        while low < high:
            likely = low - 1 - (low - 1 - high) * above // max(1, above - below) if by_line else (low + high) // 2
            middle, length = min(max(low, likely), high - 1), high - low
            tried = self._with(plan, ladder[middle])
            if self._fits(tried):
                found, high, below = tried, middle, self._above_bytes(tried)
            elif tried.predicted.step_time_ns > most_ns:
                return None
            else:
                low, above = middle + 1, self._above_bytes(tried)
            by_line = not by_line or high - low <= length // 2
        return found if found.predicted.step_time_ns <= most_ns else None

    def _above_bytes(self, plan: Plan) -> int:
        """By how much its peak is above the limit."""
        return plan.predicted.peak_bytes - plan.memory_limit

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
        """With all computed again that may be."""
        return self.there.recomputing(self.ladders[0][-1]) if self.ladders[0][1:] else self.there

    def _hull(self, there: Place) -> Iterator[Plan]:
        """Placements between the fastest and those of least memory, where nothing else is computed again."""
        with suppress(InfeasibleError):
            for choice in _points(self._curve(there), *self._ends(there)):
                yield self._placed(there, choice)

    def _curve(self, there: Place) -> TradeOffs:
        return there.placements.trade_offs(1, SOLVE_SHARE * self.seconds, there.request.budget.seed)

    @cached_method
    def _ends(self, there: Place) -> tuple[TradeOff, TradeOff]:
        """The fastest placements, and about those of least memory."""
        curve = self._curve(there)
        fastest = curve.fastest()
        return fastest, curve.smallest(fastest)

    @cached_method
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


def _points(curve: TradeOffs, fastest: TradeOff, smallest: TradeOff) -> list[TradeOff]:
    """Some of the hull between its ends, the fastest first."""
    found = [fastest, smallest]
    for _ in range(ONE_STAGE_HALVINGS):
        between = [curve.between(fast, small) for fast, small in itertools.pairwise(found)]
        every = [point for pair in zip(found, between, strict=False) for point in pair] + found[-1:]
        found = [point for point in every if point is not None]
    return found


def _step_ns(plan: Plan) -> int:
    return plan.predicted.step_time_ns
