"""Small random strategy-selection problems, and their optima by trying every choice."""

from __future__ import annotations

import itertools
import random

from autopar.errors import InfeasibleError
from autopar.selection.evaluator import evaluate
from autopar.selection.network import Network
from autopar.selection.problem import INFINITE, Problem
from autopar.selection.reduction import reduce_problem


def random_problem(seed: int, *, num_nodes: int = 6, tightness: float = 0.55, forbidden: float = 0.1) -> Problem:
    """Returns a problem of few choices; a tightness near 0 is infeasible, 1 has no binding limit."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 4) for _ in range(num_nodes)]
    usages = [[chance.randint(0, 20) for _ in range(size)] for size in sizes]
    intervals = [_interval(chance) for _ in sizes]
    pairs = [pair for pair in itertools.permutations(range(num_nodes), 2) if chance.random() < 0.25]
    matrices = [[[_cost(chance, forbidden) for _ in range(sizes[j])] for _ in range(sizes[i])] for i, j in pairs]
    most = sum(max(usage) for usage in usages)
    costs = [[_cost(chance, forbidden / 2) for _ in range(size)] for size in sizes]
    return Problem(f"random {seed}", intervals, costs, usages, pairs, matrices, int(tightness * most))


def reducible_problem(seed: int, **how: float) -> tuple[Problem, Network]:
    """Returns the first random problem from a seed on that reduction leaves open, and what it leaves."""
    for other in itertools.count(seed, 1000):
        problem = random_problem(other, **how)  # type: ignore[arg-type]
        try:
            return problem, reduce_problem(problem)
        except InfeasibleError:
            assert least_cost(problem) is None
    raise AssertionError("unreachable")


def _interval(chance: random.Random) -> tuple[int, int]:
    lo = chance.randint(0, 6)
    return (lo, lo + chance.randint(1, 5)) if chance.random() < 0.85 else (0, 0)


def _cost(chance: random.Random, forbidden: float) -> int:
    return INFINITE if chance.random() < forbidden else chance.randint(0, 50)


def every_choice(problem: Problem) -> itertools.product[tuple[int, ...]]:
    """Yields all choices."""
    return itertools.product(*(range(len(costs)) for costs in problem.costs))


def every_value(network: Network) -> itertools.product[tuple[int, ...]]:
    """Yields all choices of values of a network."""
    return itertools.product(*(range(len(costs)) for costs in network.unary))


def least_cost(problem: Problem) -> int | None:
    """Returns the cost of the cheapest feasible choice, None when there is none."""
    found = (evaluate(problem, choice) for choice in every_choice(problem))
    return min((e.cost for e in found if e.feasible), default=None)


def least_peak(problem: Problem) -> int | None:
    """Returns the smallest peak usage of the choices that take nothing forbidden, None when there are none."""
    found = (evaluate(problem, choice) for choice in every_choice(problem))
    return min((e.peak_usage for e in found if e.cost < INFINITE), default=None)
