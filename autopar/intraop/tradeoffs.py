"""Time against memory on one submesh: the choices that are best under some price of memory.

    minimise   cost(x) + λ · usage(x)          usage = stored state + in_flight · saved activations

For each λ ≥ 0 that is a problem without a memory limit, which is easy. Its optima are the lower convex hull of all
(usage, cost); between two neighbours the next λ is the slope of the chord, where the hull is farthest below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.intraop.builder import Built
from autopar.intraop.evaluator import evaluate
from autopar.intraop.problem import INFINITE, Int64Array, Problem
from autopar.intraop.solver import solve

_DEAR = 1_000
"""Times the chord from all time to all memory: at this price memory is all that counts."""


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


def trade_offs(built: Built, in_flight: int, count: int, time_limit_s: float, seed: int) -> list[TradeOff]:
    """At most `count` choices on the hull, the fastest first; each solve may take so many seconds."""
    usages = [
        usage * (in_flight if variable.kind == "node" else 1)
        for usage, variable in zip(built.problem.usages, built.variables, strict=True)
    ]

    def under(price: float) -> TradeOff:
        solution = solve(_priced(built.problem, usages, price), time_limit_s, seed)
        return _read(built, solution.choice)

    found = [under(0.0)]
    if count > 1:
        usage = max(1, found[0].usage_bytes(in_flight))
        found.append(under(_DEAR * found[0].cost_ns / usage))
    while len(found) < count and (gap := _widest_gap(found, in_flight)) is not None:
        fast, small = found[gap], found[gap + 1]
        between = under(_slope(fast, small, in_flight))
        if not fast.usage_bytes(in_flight) > between.usage_bytes(in_flight) > small.usage_bytes(in_flight):
            break  # the chord is the hull
        found.insert(gap + 1, between)
    return [one for number, one in enumerate(found) if one not in found[:number]]


def _priced(problem: Problem, usages: Sequence[Int64Array], price: float) -> Problem:
    """Costs with the usages' price in them, and no limit."""
    costs = [
        np.where(cost >= INFINITE, INFINITE, np.minimum(cost + np.rint(usage * price).astype(np.int64), INFINITE - 1))
        for cost, usage in zip(problem.costs, usages, strict=True)
    ]
    return replace(problem, costs=costs, usage_limit=None)


def _read(built: Built, choice: Sequence[int]) -> TradeOff:
    by_kind = {"node": 0, "stored": 0}
    for variable, usage, option in zip(built.variables, built.problem.usages, choice, strict=True):
        by_kind["node" if variable.kind == "node" else "stored"] += int(usage[option])
    cost = evaluate(replace(built.problem, usage_limit=None), choice).cost
    return TradeOff(tuple(choice), int(cost), by_kind["stored"], by_kind["node"])


def _widest_gap(found: Sequence[TradeOff], in_flight: int) -> int | None:
    """Between which neighbours the usage differs by the largest factor; None where no two differ."""
    factors = [(a.usage_bytes(in_flight) + 1) / (b.usage_bytes(in_flight) + 1) for a, b in pairwise(found)]
    widest = max(range(len(factors)), key=factors.__getitem__)
    return widest if factors[widest] > 1.0 else None


def _slope(fast: TradeOff, small: TradeOff, in_flight: int) -> float:
    """Nanoseconds a byte."""
    return (small.cost_ns - fast.cost_ns) / (fast.usage_bytes(in_flight) - small.usage_bytes(in_flight))
