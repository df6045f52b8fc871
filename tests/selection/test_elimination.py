"""Elimination keeps every optimum: against all choices of small random networks, forbidden entries included."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.selection.elimination import eliminate
from autopar.selection.problem import INFINITE, Int64Array

Pairs = dict[tuple[int, int], Int64Array]


def random_network(seed: int, most_pairs: int) -> tuple[list[Int64Array], Pairs]:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
    unary = [np.array([rng.randint(0, 20) for _ in range(size)]) for size in sizes]
    possible = list(itertools.combinations(range(len(sizes)), 2))
    chosen = rng.sample(possible, min(most_pairs, len(possible)))
    costs = [*range(8), INFINITE, INFINITE]
    pairs = {(i, j): np.array([[rng.choice(costs) for _ in range(sizes[j])] for _ in range(sizes[i])])
             for i, j in chosen}  # fmt: skip
    return unary, pairs


def cost(unary: list[Int64Array], pairs: Pairs, values: list[int] | tuple[int, ...]) -> int:
    total = sum(int(costs[value]) for costs, value in zip(unary, values, strict=True))
    return min(INFINITE, total + sum(int(table[values[i], values[j]]) for (i, j), table in pairs.items()))


def best(unary: list[Int64Array], pairs: Pairs) -> tuple[int, tuple[int, ...]]:
    choices = itertools.product(*(range(len(costs)) for costs in unary))
    return min((cost(unary, pairs, values), values) for values in choices)


@pytest.mark.parametrize("most_pairs", [2, 5, 9, 15])
def test_the_core_has_the_networks_optimum(most_pairs: int) -> None:
    for seed in range(60):
        unary, pairs = random_network(seed, most_pairs)
        core = eliminate(unary, pairs)
        core_cost, values = best(core.unary, core.pairs)
        expected, _ = best(unary, pairs)
        assert min(INFINITE, core_cost + core.constant) == expected
        assert cost(unary, pairs, core.expand(values)) == expected


def test_series_parallel_networks_vanish() -> None:
    table = np.arange(4).reshape(2, 2)
    ladder = {(0, 1): table, (1, 2): table, (0, 2): table, (2, 3): table, (3, 4): table, (2, 4): table}
    assert eliminate([np.arange(2)] * 5, ladder).kept == ()


def test_dense_networks_stay() -> None:
    pairs = {pair: np.eye(2, dtype=np.int64) for pair in itertools.combinations(range(5), 2)}
    core = eliminate([np.arange(2)] * 5, pairs)
    assert core.kept == (0, 1, 2, 3, 4) and core.constant == 0 and len(core.pairs) == 10


@pytest.mark.parametrize("most_work", [0, 10, 40, 200])
def test_with_little_work_allowed_more_is_left_and_the_optimum_stays(most_work: int) -> None:
    counts = []
    for seed in range(40):
        unary, pairs = random_network(seed, 9)
        core, whole = eliminate(unary, pairs, most_work), eliminate(unary, pairs)
        counts.append(len(core.kept) - len(whole.kept))
        core_cost, values = best(core.unary, core.pairs)
        expected, _ = best(unary, pairs)
        assert min(INFINITE, core_cost + core.constant) == expected
        assert cost(unary, pairs, core.expand(values)) == expected
    assert min(counts) >= 0
    assert max(counts) > 0 or most_work == 200
