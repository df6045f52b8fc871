"""Solves strategy-selection problems: the best choice found, a lower bound, and why the search stopped.

solve = reduce_problem → memory_rows → minimise → evaluate
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.intraop.evaluator import evaluate
from autopar.intraop.problem import INFINITE, Problem
from autopar.intraop.reduction import reduce_problem
from autopar.intraop.rows import memory_rows
from autopar.intraop.toulbar import minimise


@dataclass(frozen=True)
class Solution:
    """A feasible choice with what is known about its quality."""

    choice: tuple[int, ...]
    """One strategy for each node."""
    cost: int
    """What was minimised: total cost (`solve`) or peak usage (`minimise_peak`), as the evaluator finds it."""
    lower_bound: int
    """No feasible choice costs less."""
    peak_usage: int
    stop_reason: str
    """"optimal" (cost equals lower_bound), "gap limit" or "time limit"."""
    seconds: float
    seed: int
    method: str

    @property
    def gap(self) -> float:
        """(cost − lower bound) / cost; 0 when proven optimal."""
        return (self.cost - self.lower_bound) / self.cost if self.cost else 0.0


def solve(problem: Problem, time_limit_s: float = 10.0, seed: int = 0) -> Solution:
    """Returns the cheapest feasible choice found within the time limit.

    Deterministic when the search ends before the limit. Raises InfeasibleError when no choice meets the
    usage limit, naming the smallest peak that can be met, or that was found.
    """
    started = time.monotonic()
    network = reduce_problem(problem)
    rows = memory_rows(network)
    result = minimise(network, rows, INFINITE, time_limit_s - (time.monotonic() - started), seed)
    if result["choice"] is None:
        raise InfeasibleError(f"{problem.name}: no choice of strategies was found that fits in the usage "
                              f"limit {problem.usage_limit}")  # fmt: skip
    choice = network.expand(result["choice"])
    evaluation = evaluate(problem, choice)
    assert evaluation.feasible, f"{problem.name}: the solver returned an infeasible choice"
    reason = "optimal" if evaluation.cost <= result["lower_bound"] else "time limit"
    return Solution(choice, evaluation.cost, result["lower_bound"], evaluation.peak_usage, reason,
                    time.monotonic() - started, seed, "toulbar2")  # fmt: skip
