"""Prices for memory: the Lagrangian dual of a network's memory rows.

With a price λ_t ≥ 0 for each row, minimising

    L(λ) = min_x  cost(x) + Σ_t λ_t (usage_t(x) − room_t)

is a cost-function network without rows, whose optimum bounds the constrained one from below, and whose
minimiser is nearly what the constrained problem wants. The best prices are found by cutting planes: every
choice x seen gives the cut L(λ) ≤ cost(x) + Σ λ_t (usage_t(x) − room_t), and a linear programme picks the
next prices inside a box around the best so far (a trust region, without which they jump about). Rows join
when a choice first violates them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from autopar.intraop.network import Network
from autopar.intraop.problem import INFINITE, Int64Array
from autopar.intraop.rows import UsageSweep
from autopar.intraop.timeline import Timeline
from autopar.intraop.toulbar_worker import Result

Prices = dict[int, float]
"""λ by row time."""
Minimiser = Callable[[Network], Result]
"""Minimises a network without rows: a choice if it has one, and a lower bound."""

_ROUNDING = 1 - 2.0**-45
"""Priced usages are taken this much lower, so that float error cannot lift a bound."""
_ROWS_A_ROUND = 4
_WIDEST_BOX, _NARROWEST_BOX = 4.0, 1.02


@dataclass(frozen=True)
class _Seen:
    """A choice found under some prices."""

    cost: int
    values: Int64Array


class PriceSearch:
    """The state of the dual search: rows, cuts, the best prices, and the best feasible choice met."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.lower_bound = 0
        self.prices: Prices = {}
        self.best_values: list[int] | None = None
        self.best_cost = INFINITE
        self._sweep = UsageSweep(network)
        self._timeline = Timeline(network)
        self._unary = np.concatenate(list(network.unary))
        self._rows: dict[int, Int64Array] = {}
        self._seen: list[_Seen] = []
        self._box = _WIDEST_BOX

    def run(self, minimise: Minimiser, deadline: float, rounds: int) -> None:
        """Searches for better prices until the deadline, the rounds, or the prices settle."""
        trial: Prices = {}
        for _ in range(rounds):
            if time.monotonic() >= deadline or not self.evaluate(trial, minimise):
                return
            if self._settled(trial):
                return
            trial = self._next_prices()

    def evaluate(self, prices: Prices, minimise: Minimiser) -> bool:
        """Minimises under prices and learns from the outcome; False when that gave no choice."""
        result = minimise(self.priced_network(prices))
        bound = result["lower_bound"] - math.floor(self._credit(prices))
        improved = bound > self.lower_bound or not self._seen
        self.lower_bound = max(self.lower_bound, bound)
        if improved:
            self.prices = prices
        else:
            self._box = max(_NARROWEST_BOX, math.sqrt(self._box))
        if result["choice"] is None:
            return False
        self._learn(result["choice"])
        return True

    def priced_network(self, prices: Prices) -> Network:
        """Returns the network whose unary costs hold the priced usages, and which has no uses."""
        total = np.zeros(len(self._unary))
        for row_time, price in prices.items():
            total += price * self._rows[row_time]
        priced = self._unary + np.floor(np.minimum(total * _ROUNDING, INFINITE)).astype(np.int64)
        priced = np.where(self._unary >= INFINITE, INFINITE, np.minimum(priced, INFINITE))
        return replace(self.network, unary=np.split(priced, self._sweep.offsets[1:-1]), uses=())

    def _credit(self, prices: Prices) -> Fraction:
        """Returns Σ λ_t room_t, exactly."""
        return sum((Fraction(p) * self.network.room_at(t) for t, p in prices.items()), Fraction(0))

    def _learn(self, values: list[int]) -> None:
        cost = cost_of(self.network, values)
        self._seen.append(_Seen(cost, np.asarray(values, dtype=np.int64)))
        violated = self._timeline.violated_times(values, _ROWS_A_ROUND)
        if not violated and cost < self.best_cost:
            self.best_cost, self.best_values = cost, values
        for row_time in violated:
            if row_time not in self._rows:
                _, usages = next(self._sweep.vectors([row_time]))
                self._rows[row_time] = usages.copy()

    def _settled(self, trial: Prices) -> bool:
        """Whether the cuts leave nothing to gain: the last choice's cut meets the bound."""
        cuts = self._cuts()
        now = min(cost + sum(trial.get(t, 0.0) * e for t, e in excess.items()) for cost, excess in cuts)
        return self._box <= _NARROWEST_BOX and now <= self.lower_bound * (1 + 1e-6)

    def _cuts(self) -> list[tuple[int, dict[int, int]]]:
        """Returns (cost, usage − room by row time) of every choice seen."""
        positions = self._sweep.offsets[:-1]
        cuts = []
        for seen in self._seen:
            taken = positions + seen.values
            excess = {t: int(u[taken].sum()) - self.network.room_at(t) for t, u in self._rows.items()}
            cuts.append((seen.cost, excess))
        return cuts

    def _next_prices(self) -> Prices:
        """Maximises the least cut over the box around the best prices."""
        from ortools.linear_solver import pywraplp  # lazy: a second to import

        programme = pywraplp.Solver.CreateSolver("GLOP")
        bound = programme.NumVar(-programme.infinity(), 2.0 * self._most(), "bound")
        unit = self._price_unit()
        variables = {t: programme.NumVar(*self._range(t, unit), f"price{t}") for t in self._rows}
        for cost, excess in self._cuts():
            programme.Add(bound <= cost + sum(v * float(excess[t]) for t, v in variables.items()))
        programme.Maximize(bound)
        if programme.Solve() != pywraplp.Solver.OPTIMAL:
            return self.prices
        chosen = {t: v.solution_value() for t, v in variables.items()}
        return {t: price for t, price in chosen.items() if price > 0}

    def _most(self) -> float:
        return float(max(seen.cost for seen in self._seen)) + 1.0

    def _price_unit(self) -> float:
        """A price at which the tightest row's whole room costs as much as the dearest choice seen."""
        return self._most() / max(1, min(self.network.room_at(t) for t in self._rows)) if self._rows else 0.0

    def _range(self, row_time: int, unit: float) -> tuple[float, float]:
        centre = self.prices.get(row_time, 0.0)
        spread = unit * (self._box - 1.0) / (_WIDEST_BOX - 1.0)
        return centre / self._box, max(centre * self._box, spread)


def cost_of(network: Network, values: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """Returns Σ unary + Σ pairs of a choice of values, at most INFINITE."""
    terms = [int(costs[value]) for costs, value in zip(network.unary, values, strict=True)]
    terms.extend(int(matrix[values[i], values[j]]) for (i, j), matrix in network.pairs.items())
    return INFINITE if max(terms, default=0) >= INFINITE else min(sum(terms), INFINITE)
