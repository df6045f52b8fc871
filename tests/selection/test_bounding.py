"""Arc consistency bounds what any choice costs, and meets the optimum where tables are those of a tree."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.selection.bounding import bounded
from autopar.selection.elimination import Core
from autopar.selection.problem import INFINITE
from tests.selection.test_elimination import Pairs, best, cost, random_network


def _core(seed: int, most_pairs: int) -> Core:
    unary, pairs = random_network(seed, most_pairs)
    return Core(unary, pairs, seed % 3, tuple(range(len(unary))), len(unary), ())


@pytest.mark.parametrize("most_pairs", [0, 2, 5, 9, 15])
def test_no_choice_costs_less_than_the_bound(most_pairs: int) -> None:
    met = 0
    for seed in range(80):
        core = _core(seed, most_pairs)
        tables = [costs.copy() for costs in core.unary], {key: table.copy() for key, table in core.pairs.items()}
        least = min(best(core.unary, core.pairs)[0] + core.constant, INFINITE)
        found = bounded(core)
        assert found.lower_bound <= least <= found.cost
        assert found.cost == min(cost(core.unary, core.pairs, found.values) + core.constant, INFINITE)
        met += found.lower_bound == found.cost
        assert all(np.array_equal(a, b) for a, b in zip(tables[0], core.unary, strict=True))
        assert all(np.array_equal(tables[1][key], core.pairs[key]) for key in core.pairs)
    assert met >= 40


def test_a_chain_is_solved() -> None:
    rng = random.Random(0)
    pairs: Pairs = {(i, i + 1): np.array([[rng.randint(0, 99) for _ in range(5)] for _ in range(5)]) for i in range(5)}
    unary = [np.array([rng.randint(0, 99) for _ in range(5)]) for _ in range(6)]
    found = bounded(Core(unary, pairs, 5, tuple(range(6)), 6, ()))
    expected = min(cost(unary, pairs, values) for values in itertools.product(range(5), repeat=6))
    assert found.lower_bound == found.cost == expected + 5


def test_what_is_forbidden_everywhere_stays_within_bounds() -> None:
    """Sums of many forbidden tables would not fit in 64 bits."""
    size = 24
    pairs: Pairs = {pair: np.full((2, 2), INFINITE) for pair in itertools.combinations(range(size), 2)}
    found = bounded(Core([np.zeros(2, dtype=np.int64)] * size, pairs, 0, tuple(range(size)), size, ()))
    assert found.cost == found.lower_bound == INFINITE
