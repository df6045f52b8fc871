"""Solves strategy-selection problems: the best choice found, a lower bound, and why the search stopped.

    solve = reduce_problem → search_exactly → (what that leaves open) search_hard → evaluate

A hard network is searched from three sides: exactly, in a process of its own; for prices of memory, which
give a bound and choices that nearly fit; and by re-solving neighbourhoods of the best choice that fits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.intraop.evaluator import evaluate
from autopar.intraop.exact import SMALL_ENTRIES, Outcome, search_exactly
from autopar.intraop.hard import search_hard
from autopar.intraop.network import Network
from autopar.intraop.peak import minimise_peak
from autopar.intraop.problem import Problem
from autopar.intraop.reduction import reduce_problem
from autopar.intraop.solution import Solution

__all__ = ["Solution", "minimise_peak", "solve"]

_PEAK_TIME_LIMIT_S = 5.0
"""At most this, besides the time limit, goes into saying what limit could be met."""


@dataclass(frozen=True)
class _Answer:
    """The outcome of the search that settled the matter."""

    outcome: Outcome
    method: str


def solve(problem: Problem, time_limit_s: float = 10.0, seed: int = 0, gap_limit: float = 0.0) -> Solution:
    """Returns the cheapest feasible choice found within the time limit (seconds of wall time).

    Stops early once (cost − lower bound) / cost is at most `gap_limit`. Deterministic for a given seed
    when it stops as "optimal" without having needed the clock, as small problems do. Raises InfeasibleError
    when no choice meets the usage limit, or none was found, naming the smallest peak usage known.
    """
    started = time.monotonic()
    try:
        network = reduce_problem(problem)
    except InfeasibleError as error:
        raise _infeasible(problem, seed, proven=True) from error
    answer = _search(problem, network, started + time_limit_s, seed, gap_limit)
    if answer.outcome.values is None:
        raise _infeasible(problem, seed, proven=answer.outcome.complete)
    return _checked_solution(problem, network, answer, started, seed, gap_limit)


def _search(problem: Problem, network: Network, deadline: float, seed: int, gap_limit: float) -> _Answer:
    outcome = Outcome(None, 10**18, 0)
    if network.num_entries <= SMALL_ENTRIES:
        outcome = search_exactly(network, deadline, seed)
        if outcome.complete or time.monotonic() >= deadline:
            return _Answer(outcome, "toulbar2, rows as needed")
    return _Answer(search_hard(network, outcome, deadline, seed, gap_limit), "prices and neighbourhoods")


def _checked_solution(
    problem: Problem, network: Network, answer: _Answer, started: float, seed: int, gap_limit: float
) -> Solution:
    assert answer.outcome.values is not None
    choice = network.expand(answer.outcome.values)
    evaluation = evaluate(problem, choice)
    assert evaluation.feasible, f"{problem.name}: the search returned a choice that is not feasible"
    bound = min(answer.outcome.lower_bound, evaluation.cost)
    solution = Solution(choice, evaluation.cost, bound, evaluation.peak_usage, "time limit",
                        time.monotonic() - started, seed, answer.method)  # fmt: skip
    return solution


def _infeasible(problem: Problem, seed: int, *, proven: bool) -> InfeasibleError:
    least = minimise_peak(problem, _PEAK_TIME_LIMIT_S, seed)
    how = "can be met" if least.stop_reason == "optimal" else f"was found (none is below {least.lower_bound})"
    what = "no choice of strategies fits" if proven else "no choice of strategies that fits was found"
    return InfeasibleError(
        f"{problem.name}: {what} in the usage limit of {problem.usage_limit} bytes; the smallest peak usage "
        f"that {how} is {least.peak_usage} bytes: raise the limit to at least that, or allow more strategies"
    )
