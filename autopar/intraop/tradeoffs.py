"""Time against memory on one submesh: the choices that are best under some price of memory.

    minimise   cost(x) + λ · usage(x)          usage = stored state + in_flight · saved activations

For each λ ≥ 0 that is a problem without a memory limit, which is easy. Its optima are the lower convex hull of all
(usage, cost). Between two of them, the slope of the chord finds the one that is farthest below the chord.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.clock import Clock
from autopar.intraop.builder import Built
from autopar.selection.evaluator import evaluate
from autopar.selection.problem import INFINITE, Int64Array
from autopar.selection.solver import solve

_DEAR = 1_000
"""Times all time over all memory: at this price memory is about all that counts."""


@dataclass(frozen=True)
class TradeOff:
    """One choice: ns a step, and bytes a device of stored state and of saved activations of one microbatch."""

    choice: tuple[int, ...]
    cost_ns: int
    state_bytes: int
    activation_bytes: int

    def usage_bytes(self, in_flight: int) -> int:
        """Bytes with so many microbatches in flight."""
        return self.state_bytes + in_flight * self.activation_bytes


@dataclass(frozen=True, eq=False)
class TradeOffs:
    """The hull of one problem. in_flight: how many microbatches' activations count. work_s: what each solve may do.

    Raises InfeasibleError when none was found in that.
    """

    built: Built
    in_flight: int
    work_s: float = 10.0
    seed: int = 0

    def fastest(self) -> TradeOff:
        """The choice of least time, whatever it takes."""
        return self._under(0.0)

    def smallest(self, fastest: TradeOff) -> TradeOff:
        """About the choice of least memory."""
        return self._under(_DEAR * fastest.cost_ns / max(1, fastest.usage_bytes(self.in_flight)))

    def between(self, fast: TradeOff, small: TradeOff) -> TradeOff | None:
        """A choice on the hull between two; None where there is none, and the chord is the hull."""
        most, least = fast.usage_bytes(self.in_flight), small.usage_bytes(self.in_flight)
        if most <= least:
            return None
        found = self._under((small.cost_ns - fast.cost_ns) / (most - least))
        return found if most > found.usage_bytes(self.in_flight) > least else None

    def _under(self, price: float) -> TradeOff:
        """The best choice when a byte costs so many ns."""
        problem = self.built.problem
        usages = [
            usage * (self.in_flight if variable.kind == "node" else 1)
            for usage, variable in zip(problem.usages, self.built.variables, strict=True)
        ]
        costs = [_plus(cost, usage, price) for cost, usage in zip(problem.costs, usages, strict=True)]
        priced = replace(problem, costs=costs, usage_limit=None)
        return self._read(solve(priced, seed=self.seed, clock=Clock.of(self.work_s)).choice)

    def _read(self, choice: Sequence[int]) -> TradeOff:
        state = saved = 0
        for variable, usage, option in zip(self.built.variables, self.built.problem.usages, choice, strict=True):
            if variable.kind == "node":
                saved += int(usage[option])
            else:
                state += int(usage[option])
        cost = evaluate(replace(self.built.problem, usage_limit=None), choice).cost
        return TradeOff(tuple(choice), int(cost), state, saved)


def _plus(cost: Int64Array, usage: Int64Array, price: float) -> Int64Array:
    """Costs with the usage's price; what is forbidden stays so."""
    total = cost + np.rint(usage * price).astype(np.int64)
    priced: Int64Array = np.where(cost >= INFINITE, INFINITE, np.minimum(total, INFINITE - 1))
    return priced
