"""Reduction, timeline and parts against the problem they stand for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.selection.evaluator import evaluate
from autopar.selection.network import Network
from autopar.selection.problem import INFINITE
from autopar.selection.reduction import reduce_problem
from autopar.selection.subproblems import Subproblems
from autopar.selection.usage import Usage
from tests.selection.oracle import every_value, least_cost, random_problem, reducible_problem


@pytest.mark.parametrize("seed", range(40))
def test_reduction_keeps_the_optimum(seed: int) -> None:
    problem = random_problem(seed, forbidden=0.3)
    try:
        network = reduce_problem(problem)
    except InfeasibleError:
        assert least_cost(problem) is None
        return
    found = [evaluate(problem, network.expand(values)) for values in every_value(network)]
    assert min((e.cost for e in found if e.feasible), default=None) == least_cost(problem)
    assert [e.cost for e in found] == [network.cost(values) for values in every_value(network)]


@pytest.mark.parametrize("seed", range(20))
def test_timeline_says_what_the_evaluator_says(seed: int) -> None:
    problem, network = reducible_problem(seed)
    timeline = Usage(network)
    for values in every_value(network):
        found = evaluate(problem, network.expand(values))
        worst = int(timeline.excess(values).max())
        assert (worst <= 0) == (found.peak_usage <= problem.usage_limit)
        assert bool(timeline.violated_times(values, 3)) == (worst > 0)
        if worst > 0:
            assert worst == found.peak_usage - problem.usage_limit


@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_exactly_where_the_excess_is_not_positive(seed: int) -> None:
    _, network = reducible_problem(seed)
    timeline = Usage(network)
    rows = [timeline.row(int(start)) for start in network.room_starts]
    for values in every_value(network):
        used = [sum(int(usage[values[v]]) for v, usage in row.usages.items()) for row in rows]
        slack = np.array([row.slack for row in rows])
        np.testing.assert_array_equal(np.array(used) - slack, timeline.excess(values))
    for row in rows:
        assert row.implied == (sum(int(usage.max()) for usage in row.usages.values()) <= row.slack)


@pytest.mark.parametrize("seed", range(20))
def test_a_part_prices_and_fits_as_the_whole_does(seed: int) -> None:
    _, network = reducible_problem(seed, forbidden=0.0)
    chance = random.Random(seed)
    parts = Subproblems(network)
    values = [chance.randrange(len(costs)) for costs in network.unary]
    free = sorted(chance.sample(range(len(values)), min(3, len(values))))
    part = parts.cut(free, values)
    timeline = Usage(part)
    constant = network.cost(values) - part.cost([values[v] for v in free])
    for inside in every_value(part):
        whole = list(values)
        for v, value in zip(free, inside, strict=True):
            whole[v] = value
        assert part.cost(inside) + constant == network.cost(whole)
        np.testing.assert_array_equal(timeline.excess(inside), parts.usage.excess(whole))


def test_an_allowance_is_room() -> None:
    _, network = reducible_problem(3, forbidden=0.0)
    parts = Subproblems(network)
    values = [0] * network.num_variables
    allowance = np.arange(len(network.room), dtype=np.int64)
    more = parts.cut([0], values, allowance).room - parts.cut([0], values).room
    np.testing.assert_array_equal(more, allowance)


def test_growth_starts_at_the_seeds_and_stops_at_the_size() -> None:
    _, network = reducible_problem(3, num_nodes=12, forbidden=0.0)
    parts = Subproblems(network)
    for size in range(1, network.num_variables + 1):
        grown = parts.grow([0], size, random.Random(0))
        assert 0 in grown and len(grown) <= size and grown == sorted(set(grown))


def test_costs_beyond_infinite_are_infinite() -> None:
    unary = [np.array([INFINITE]), np.array([INFINITE])]
    network = Network(unary, {}, (), np.zeros(1, np.int64), np.zeros(1, np.int64), ())
    assert network.cost([0, 0]) == INFINITE
