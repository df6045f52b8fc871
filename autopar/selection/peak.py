"""The smallest peak usage that any allowed choice has: what a usage limit must at least be.

Bisection on the limit. Each step asks whether some choice fits; costs are replaced by usages times how
long they last, so that the first choice tried is one that uses little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.clock import Clock
from autopar.errors import InfeasibleError
from autopar.selection.evaluator import evaluate
from autopar.selection.exact import search_exactly
from autopar.selection.problem import INFINITE, Problem
from autopar.selection.reduction import prune_strategies, reduce_problem, room_over_time
from autopar.selection.solution import Solution

_LARGEST_WEIGHT = 10**6
"""Substitute costs are scaled so that the dearest strategy costs about this."""


def minimise_peak(
    problem: Problem, time_limit_s: float = 10.0, seed: int = 0, *, clock: Clock | None = None
) -> Solution:
    """Returns a choice whose peak usage is the least found; `cost` and `lower_bound` are peak usages.

    clock: ends the search, instead of a time limit. Raises InfeasibleError when every choice takes a forbidden entry.
    """
    clock = clock or Clock.of_time(time_limit_s)
    frugal = replace(problem, costs=_frugal_costs(problem), edge_costs=_only_forbidden(problem))
    low = _least_conceivable_peak(frugal)
    best, high, limit = _first_choice(frugal, clock, seed), INFINITE, low
    high = evaluate(problem, best).peak_usage
    while low < high and not clock.is_over:
        choice, impossible = _choice_within(frugal, limit, clock, seed)
        if choice is not None:
            best, high = choice, evaluate(problem, choice).peak_usage
        elif impossible:
            low = limit + 1
        else:
            break
        limit = (low + high) // 2
    return Solution(tuple(best), high, low, high, "optimal" if low >= high else clock.stop_reason,
                    clock.passed_s, seed, "bisection of the usage limit")  # fmt: skip


def _frugal_costs(problem: Problem) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Prices each strategy by what it uses, and for how long; a forbidden one stays forbidden."""
    lengths = [max(0, hi - lo) for lo, hi in problem.intervals]
    weights = [u * float(length) for u, length in zip(problem.usages, lengths, strict=True)]
    unit = max((float(w.max()) for w in weights), default=0.0) / _LARGEST_WEIGHT or 1.0
    prices = [np.ceil(w / unit).astype(np.int64) for w in weights]
    return [np.where(c >= INFINITE, INFINITE, p) for c, p in zip(problem.costs, prices, strict=True)]


def _only_forbidden(problem: Problem) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    return [np.where(matrix >= INFINITE, INFINITE, 0) for matrix in problem.edge_costs]


def _least_conceivable_peak(problem: Problem) -> int:
    """Returns the peak of every node's least usage, a lower bound."""
    unlimited = replace(problem, usage_limit=None)
    allowed = prune_strategies(unlimited)
    least = [int(u[d].min()) for u, d in zip(problem.usages, allowed, strict=True)]
    _, room = room_over_time(replace(problem, usage_limit=INFINITE), np.array(least, dtype=np.int64))
    return INFINITE - int(room.min())


def _first_choice(problem: Problem, clock: Clock, seed: int) -> Sequence[int]:
    """Returns the choice that uses least, over all times together."""
    network = reduce_problem(replace(problem, usage_limit=None))
    outcome = search_exactly(network, clock, seed)
    if outcome.values is None:
        raise InfeasibleError(f"{problem.name}: every choice takes a forbidden strategy or pair")
    return network.expand(outcome.values)


def _choice_within(problem: Problem, limit: int, clock: Clock, seed: int) -> tuple[Sequence[int] | None, bool]:
    """Returns a choice whose peak is within the limit, or None and whether there is none."""
    try:
        network = reduce_problem(replace(problem, usage_limit=limit))
    except InfeasibleError:
        return None, True
    outcome = search_exactly(network, clock, seed)
    if outcome.values is None:
        return None, outcome.lower_bound >= INFINITE
    return network.expand(outcome.values), False
