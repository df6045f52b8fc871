"""Prices for memory: the Lagrangian dual of a network's memory rows.

With a price λ_t ≥ 0 for each row, minimising

    L(λ) = min_x  cost(x) + Σ_t λ_t (usage_t(x) − room_t)

is a cost-function network without rows, whose optimum bounds the constrained one from below, and whose
minimiser is nearly what the constrained problem wants. The best prices are found by cutting planes (Kelley,
1960): every choice x seen gives the cut L(λ) ≤ cost(x) + Σ λ_t (usage_t(x) − room_t), and a linear programme
picks the next prices inside a box around the best so far (a trust region, without which they jump about).
Rows join when a choice first violates them.

Whoever owns a search minimises: `next_network` says what, `learn` takes the outcome.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from autopar.selection.network import Network
from autopar.selection.problem import INFINITE, Int64Array
from autopar.selection.toulbar_worker import Result
from autopar.selection.usage import Usage

Mask = npt.NDArray[np.bool_]
Duals = dict[int, float]
"""λ by row time."""

_ROWS_A_ROUND = 4
_WIDEST_BOX, _CHILD_BOX, _NARROWEST_BOX = 4.0, 2.0, 1.02
_BOX_GROWTH = 1.5
"""The box widens by this power after a better bound; after any other it narrows to its square root."""
_PATIENCE = 3
"""Prices have settled after so many rounds in the narrowest box without a better bound."""
_LARGEST_SUM = 2**45
"""Costs are scaled so that no choice costs more, which leaves a solver that counts in doubles room for prices."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A choice found under some prices."""

    cost: int
    values: Int64Array


class PriceSearch:
    """The state of the dual search: rows, cuts and the best prices, over the values that are allowed."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.usage = Usage(network)
        self.allowed: Mask = np.ones(self.usage.offsets[-1], dtype=np.bool_)
        """Which values of which variables may be chosen, flat as in the timeline."""
        self.lower_bound = 0
        """INFINITE when no choice is allowed at all."""
        self.settled = False
        """Whether more rounds have little to gain."""
        self.prices: Duals = {}
        """Those of the best bound."""
        self._scale = _scale(network)
        self._pairs = {pair: _scaled(matrix, self._scale) for pair, matrix in network.pairs.items()}
        self._unary = np.concatenate([np.zeros(0, np.int64), *network.unary])
        self._rows: dict[int, Int64Array] = {}
        self._seen: list[Seen] = []
        self._trial: Duals = {}
        self._bound = Fraction(0)
        self._box = _WIDEST_BOX
        self._fruitless = 0
        self._is_fresh = True

    @property
    def times(self) -> list[int]:
        """Those at which some choice seen did not fit."""
        return list(self._rows)

    @property
    def rows(self) -> dict[int, Int64Array]:
        """What each value uses at those times, flat."""
        return self._rows

    def most_active(self, count: int) -> list[Seen]:
        """Returns the choices seen that cost least under the best prices, cheapest first."""
        return sorted(self._seen, key=self._priced_cost)[:count]

    def _priced_cost(self, seen: Seen) -> float:
        return seen.cost + sum(self.prices.get(t, 0.0) * excess for t, excess in self.excess(seen).items())

    def restricted(self, allowed: Mask) -> PriceSearch:
        """Returns a search over fewer values that starts from these prices, and knows what was seen of them."""
        other = copy.copy(self)
        other.allowed = allowed
        positions = self.usage.offsets[:-1]
        other._seen = [seen for seen in self._seen if allowed[positions + seen.values].all()]
        other._bound, other._box, other._fruitless, other.settled = Fraction(0), _CHILD_BOX, 0, False
        other._is_fresh = True
        return other

    def next_network(self) -> Network:
        """Returns the network whose unary costs hold the priced usages, and which has no uses.

        Its costs are scaled up where they are small, so that prices may be fractions of them.
        """
        self._trial = self._next_prices() if self._seen and not self._is_fresh else self.prices
        total = self.priced_usages(self._trial)
        # Rounded down by more than float error can have lifted the sum, so that a bound stays a bound.
        total *= self._scale * (1.0 - (len(self._trial) + 3) * 2.0**-52)
        unary = _scaled(self._unary, self._scale)
        priced = unary + np.floor(np.minimum(total, INFINITE)).astype(np.int64)
        # However dear, what is allowed is not forbidden.
        priced = np.where(unary >= INFINITE, INFINITE, np.minimum(priced, INFINITE - 1))
        return self._without_excluded(np.split(priced, self.usage.offsets[1:-1]))

    def _without_excluded(self, unary: list[Int64Array]) -> Network:
        kept = self._kept()
        whole = [len(keep) == len(costs) for keep, costs in zip(kept, unary, strict=True)]
        pairs = {
            (i, j): matrix if whole[i] and whole[j] else matrix[np.ix_(kept[i], kept[j])]
            for (i, j), matrix in self._pairs.items()
        }
        left = [costs[keep] for costs, keep in zip(unary, kept, strict=True)]
        return replace(self.network, unary=left, pairs=pairs, uses=())

    def _kept(self) -> list[Int64Array]:
        return [np.flatnonzero(mask) for mask in np.split(self.allowed, self.usage.offsets[1:-1])]

    def learn(self, result: Result) -> list[int] | None:
        """Takes in the minimum of `next_network`, or a bound on it and a choice near it; returns the choice."""
        infeasible = result["lower_bound"] >= INFINITE
        bound = Fraction(INFINITE) if infeasible else Fraction(result["lower_bound"], self._scale) - self._credit()
        if self._is_fresh:
            self.prices, self._bound = self._trial, bound
        elif bound > self._bound:
            self.prices, self._bound, self._fruitless = self._trial, bound, 0
            self._box = min(_WIDEST_BOX, self._box**_BOX_GROWTH)
        else:
            self._fruitless += self._box <= _NARROWEST_BOX
            self._box = max(_NARROWEST_BOX, math.sqrt(self._box))
        self._is_fresh = False
        self.lower_bound = max(self.lower_bound, math.ceil(bound))
        if result["choice"] is None:
            self.settled = True
            return None
        values = [int(keep[value]) for keep, value in zip(self._kept(), result["choice"], strict=True)]
        self._see(values)
        self.settled = not self._rows or self._fruitless >= _PATIENCE
        return values

    def _credit(self) -> Fraction:
        """Returns Σ λ_t room_t, exactly."""
        return sum((Fraction(p) * self.network.room_at(t) for t, p in self._trial.items()), Fraction(0))

    def _see(self, values: Sequence[int]) -> None:
        cost = self.network.cost(values)
        violated = self.usage.violated_times(values, _ROWS_A_ROUND)
        self._seen = [*self._seen, Seen(cost, np.asarray(values, dtype=np.int64))]
        for row_time in violated:
            if row_time not in self._rows:
                self._rows = {**self._rows, row_time: self.usage.usages_at(row_time)}

    def excess(self, seen: Seen) -> dict[int, int]:
        """Returns usage less room of a choice by row time."""
        taken = self.usage.offsets[:-1] + seen.values
        return {t: int(usages[taken].sum()) - self.network.room_at(t) for t, usages in self._rows.items()}

    def priced_usages(self, prices: Duals) -> npt.NDArray[np.float64]:
        """Returns what each value's usage costs, flat."""
        total = np.zeros(len(self._unary))
        for row_time, price in prices.items():
            total += price * self._rows[row_time]
        return total

    def _next_prices(self) -> Duals:
        """Maximises the least cut over the box around the best prices."""
        from ortools.linear_solver import pywraplp  # lazy: a second to import

        programme = pywraplp.Solver.CreateSolver("GLOP")
        most = float(max(seen.cost for seen in self._seen)) + 1.0
        bound = programme.NumVar(-programme.infinity(), 2.0 * most, "bound")
        variables = {t: programme.NumVar(*self._range(t, most), f"price{t}") for t in self._rows}
        for seen in self._seen:
            excess = self.excess(seen)
            programme.Add(bound <= seen.cost + sum(v * float(excess[t]) for t, v in variables.items()))
        programme.Maximize(bound)
        if programme.Solve() != pywraplp.Solver.OPTIMAL:
            return self.prices
        chosen = {t: v.solution_value() for t, v in variables.items()}
        return {t: price for t, price in chosen.items() if price > 0}

    def _range(self, row_time: int, most: float) -> tuple[float, float]:
        """Returns the box of one price; from zero, as far as all of the room costing what all else does."""
        unit = most / max(1, min(self.network.room_at(t) for t in self._rows))
        centre = self.prices.get(row_time, 0.0)
        spread = unit * (self._box - 1.0) / (_WIDEST_BOX - 1.0)
        return centre / self._box, max(centre * self._box, spread)


def _scale(network: Network) -> int:
    tables = [*network.unary, *network.pairs.values()]
    most = sum(int(table[table < INFINITE].max(initial=0)) for table in tables)
    return max(1, _LARGEST_SUM // max(1, most))


def _scaled(costs: Int64Array, scale: int) -> Int64Array:
    """Returns the costs times the scale; what is forbidden stays so."""
    scaled: Int64Array = np.where(costs >= INFINITE, INFINITE, np.minimum(costs, INFINITE // scale) * scale)
    return scaled
