"""Solves strategy-selection problems: the best choice found, a lower bound, and why the search stopped.

    solve = reduce_problem → without rows → search_exactly → (what these leave open) search_hard → evaluate

Small networks are searched exactly in this process; what is left open, or large, is searched from both sides
(`search_hard`).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.clock import Clock, worked
from autopar.errors import InfeasibleError
from autopar.selection.bounding import bounded
from autopar.selection.elimination import SUMS_PER_S
from autopar.selection.evaluator import evaluate
from autopar.selection.exact import SMALL_ENTRIES, ExactOutcome, search_exactly
from autopar.selection.hard import search_hard
from autopar.selection.network import Network
from autopar.selection.peak import minimise_peak
from autopar.selection.problem import INFINITE, Problem
from autopar.selection.reduction import reduce_problem
from autopar.selection.solution import Solution
from autopar.selection.toulbar import minimise_here
from autopar.selection.usage import Usage
from autopar.tunables import REDUCE_S, SOLVE_S

__all__ = ["Solution", "minimise_peak", "solve"]

_CORE_BACKTRACKS = 2_000
_ELIMINATION_SHARE = 0.25
"""Of the time limit: elimination in large networks takes long, and leaves much."""
_EXACT_SHARE = 0.25
"""Of the time limit: rows that bind can make one round of exact search last for ever, where parts go on improving."""
_PEAK_TIME_LIMIT_S = 5.0
"""At most this, besides the time limit, goes into saying what limit could be met."""


def solve(
    problem: Problem, time_limit_s: float = 10.0, seed: int = 0, gap_limit: float = 0.0, *, clock: Clock | None = None
) -> Solution:
    """Returns the cheapest feasible choice found within the time limit (seconds of wall time).

    clock: ends the search, instead of a time limit; by one that counts work it is deterministic for a given seed. By
    time it is when it stops as "optimal" without having needed the limit, as small problems do. Stops early once
    (cost − lower bound) / cost is at most `gap_limit`. Raises InfeasibleError when no choice meets the usage limit, or
    none was found, naming the smallest peak usage known.
    """
    clock = clock or Clock.of_time(time_limit_s)
    try:
        network = reduce_problem(problem)
    except InfeasibleError as error:
        raise _infeasible(problem, _least_peak(problem, clock, seed), proven=True) from error
    work = int(_ELIMINATION_SHARE * (clock.end - clock.began) * SUMS_PER_S)
    network = replace(network, elimination_work=work)
    worked(SOLVE_S + network.num_entries * REDUCE_S)
    outcome, method = _search(network, clock, seed, gap_limit)
    if outcome.values is None:
        choice = _of_least_peak(problem, clock, seed, proven=outcome.complete)
    else:
        choice = network.expand(outcome.values)
    evaluation = evaluate(problem, choice)
    assert evaluation.feasible, f"{problem.name}: the search returned a choice that is not feasible"
    bound = min(outcome.lower_bound, evaluation.cost)
    return Solution(
        choice, evaluation.cost, bound, evaluation.peak_usage,
        _stop_reason(evaluation.cost, bound, gap_limit, clock), clock.passed_s, seed, method,
    )  # fmt: skip


def _search(network: Network, clock: Clock, seed: int, gap_limit: float) -> tuple[ExactOutcome, str]:
    """Returns what was found, and by which search."""
    outcome = _without_rows(network, seed)
    if outcome.complete:
        return outcome, f"bucket elimination and {'toulbar2' if _has_small_core(network) else 'arc consistency'}"
    if network.num_entries <= SMALL_ENTRIES:
        outcome = search_exactly(network, clock.part(_EXACT_SHARE), seed)
        if outcome.complete:
            return outcome, "toulbar2, rows as needed"
    return search_hard(network, outcome, clock, seed, gap_limit), "prices and neighbourhoods"


def _has_small_core(network: Network) -> bool:
    return network.core.num_entries <= SMALL_ENTRIES


def _without_rows(network: Network, seed: int) -> ExactOutcome:
    """The optimum without memory rows, as far as little effort finds it: often it fits, and is the optimum.

    Where it does not, or more is left to search, `search_hard` begins with it.
    """
    if _has_small_core(network):
        result = minimise_here(network, (), INFINITE, _CORE_BACKTRACKS, seed)
        choice, bound = result["choice"], result["lower_bound"]
    else:
        found = bounded(network.core)
        choice, bound = network.core.expand(found.values) if found.cost < INFINITE else None, found.lower_bound
    if choice is None or Usage(network).violated_times(choice, 1):
        return ExactOutcome(None, INFINITE, bound)
    return ExactOutcome(choice, network.cost(choice), bound)


def _stop_reason(cost: int, lower_bound: int, gap_limit: float, clock: Clock) -> str:
    if cost <= lower_bound:
        return "optimal"
    return "gap limit" if cost - lower_bound <= gap_limit * cost else clock.stop_reason


def _least_peak(problem: Problem, clock: Clock, seed: int) -> Solution:
    """Says what limit could be met, in time of its own: of the whole limit again, some seconds at most."""
    seconds = min(clock.end - clock.began, _PEAK_TIME_LIMIT_S)
    own = Clock.of(seconds) if clock.is_counted else Clock.of_time(seconds)
    return minimise_peak(problem, seed=seed, clock=own)


def _of_least_peak(problem: Problem, clock: Clock, seed: int, *, proven: bool) -> tuple[int, ...]:
    """The choice of the least peak usage, where that fits after all; raises InfeasibleError otherwise."""
    least = _least_peak(problem, clock, seed)
    if problem.usage_limit is not None and least.peak_usage <= problem.usage_limit and not proven:
        return least.choice
    raise _infeasible(problem, least, proven=proven)


def _infeasible(problem: Problem, least: Solution, *, proven: bool) -> InfeasibleError:
    how = "can be met" if least.stop_reason == "optimal" else f"was found (none is below {least.lower_bound})"
    what = "no choice of strategies fits" if proven else "no choice of strategies that fits was found"
    return InfeasibleError(
        f"{problem.name}: {what} in the usage limit of {problem.usage_limit} bytes; the smallest peak usage "
        f"that {how} is {least.peak_usage} bytes: raise the limit to at least that, or allow more strategies"
    )
