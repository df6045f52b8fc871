"""Prices a choice of strategies, exactly and independently of any solver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.errors import PlanError
from autopar.selection.problem import INFINITE, Problem


@dataclass(frozen=True)
class Evaluation:
    """What a choice costs and uses."""

    cost: int
    """Sum of node and edge costs; `INFINITE` when the choice takes a forbidden entry."""
    peak_usage: int
    """The largest usage at any time."""
    feasible: bool
    """Whether no forbidden entry is taken and the peak is within the problem's limit."""


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """Evaluates one strategy number for each node; raises PlanError when the choice is malformed."""
    _check_choice(problem, choice)
    cost = _total_cost(problem, choice)
    peak_usage = _peak(problem, choice)
    fits = problem.usage_limit is None or peak_usage <= problem.usage_limit
    return Evaluation(cost, peak_usage, fits and cost < INFINITE)


def _check_choice(problem: Problem, choice: Sequence[int]) -> None:
    if len(choice) != problem.num_nodes:
        raise PlanError(f"choice: expected {problem.num_nodes} strategies, one a node, found {len(choice)}")
    for node, (strategy, costs) in enumerate(zip(choice, problem.costs, strict=True)):
        if not 0 <= strategy < len(costs):
            raise PlanError(f"choice of node {node}: expected 0 to {len(costs) - 1}, found {strategy}")


def _total_cost(problem: Problem, choice: Sequence[int]) -> int:
    """Sums in Python's unbounded integers, so that many large costs cannot wrap around."""
    terms = [int(costs[s]) for costs, s in zip(problem.costs, choice, strict=True)]
    for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        terms.append(int(matrix[choice[i], choice[j]]))
    return INFINITE if max(terms, default=0) >= INFINITE else min(sum(terms), INFINITE)


def _peak(problem: Problem, choice: Sequence[int]) -> int:
    """Sweeps the times at which usage changes."""
    changes: defaultdict[int, int] = defaultdict(int)
    for (lo, hi), usages, strategy in zip(problem.intervals, problem.usages, choice, strict=True):
        if lo < hi:
            changes[lo] += int(usages[strategy])
            changes[hi] -= int(usages[strategy])
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)
