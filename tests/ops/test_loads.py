"""Loads of the busiest rank, against a thousand routings that are drawn token by token."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from autopar.ir.routing import P99, POWER_LAW, Routing
from autopar.ops.loads import Numbers, busiest, choose, excess_of_sum, inclusions, largest, layers_of, weights_of

SKEWED = Routing.histogram([50, 3, 9, 10, 11, 60, 4, 1])


def drawn(routing: Routing, tokens: int, choices: int, experts: int, ranks: int, draws: int = 1_000) -> Numbers:
    """Rows of the busiest rank, of so many routings, by the definition alone: sequential draws without replacement."""
    generator = np.random.default_rng(11)
    (likely,) = layers_of(routing, choices, experts)
    weights = weights_of(np.asarray(likely), choices)
    if routing.kind == POWER_LAW:
        weights = np.arange(1, experts + 1) ** -routing.exponent
    found = []
    for _ in range(draws):
        ids = choose(weights, tokens, choices, generator)
        counts = np.bincount(ids.ravel(), minlength=experts).astype(float)
        counts = generator.permutation(counts) if routing.kind == POWER_LAW else counts
        found.append(largest(counts[None], ranks)[0])
    return np.sort(found)


@pytest.mark.parametrize(
    ("routing", "tokens", "choices", "experts", "ranks"),
    [
        (Routing.balanced(), 64, 2, 8, 4), (Routing.balanced(), 2_048, 2, 8, 8), (Routing.balanced(), 64, 8, 128, 64),
        (Routing.power_law(1.2), 64, 2, 8, 4), (Routing.power_law(1.2), 2_048, 2, 8, 8),
        (Routing.power_law(0.5), 64, 8, 128, 64), (SKEWED, 64, 2, 8, 4), (SKEWED, 2_048, 2, 8, 4),
        (Routing.balanced(), 300, 1, 6, 3),
    ],
)  # fmt: skip
def test_loads_are_those_of_drawn_routings(
    routing: Routing, tokens: int, choices: int, experts: int, ranks: int
) -> None:
    load, found = busiest(routing, tokens, choices, experts, ranks), drawn(routing, tokens, choices, experts, ranks)
    deviation = found.std()
    assert abs(load.mean - found.mean()) < 0.2 * deviation + 0.5
    assert abs(load.p99 - found[990]) < 0.6 * deviation + 1
    assert (found > load.most).mean() <= 0.016  # 1% and two standard errors of it


def drawn_with_replicas(
    routing: Routing, tokens: int, choices: int, experts: int, ranks: int, replicas: int
) -> tuple[Numbers, float]:
    """As `drawn`, where each rank keeps its own tokens' choices of the experts with most rows; and how many it keeps in
    the mean."""
    generator = np.random.default_rng(11)
    (likely,) = layers_of(routing, choices, experts)
    weights = weights_of(np.asarray(likely), choices)
    if routing.kind == POWER_LAW:
        weights = np.arange(1, experts + 1) ** -routing.exponent
    found, kept = [], 0
    for _ in range(1_000):
        own = generator.permutation(weights) if routing.kind == POWER_LAW else weights
        ids = choose(own, tokens, choices, generator)
        hottest = np.argsort(-np.bincount(ids.ravel(), minlength=experts), kind="stable")[:replicas]
        is_hot = np.isin(ids, hottest)
        cold = np.bincount(ids[~is_hot] // (experts // ranks), minlength=ranks)
        home = is_hot.reshape(ranks, -1).sum(1)
        found.append((cold + home).max())
        kept += int(home.sum())
    return np.sort(np.asarray(found, dtype=float)), kept / 1_000


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("routing", "tokens", "choices", "experts", "ranks"),
    [
        (Routing.balanced(), 64, 2, 8, 4), (Routing.power_law(1.2), 64, 2, 8, 4), (SKEWED, 64, 2, 8, 4),
        (Routing.power_law(1.2), 2_048, 2, 8, 8), (SKEWED, 2_048, 2, 8, 4),
    ],
)  # fmt: skip
def test_loads_with_replicas_are_those_of_drawn_routings(
    routing: Routing, tokens: int, choices: int, experts: int, ranks: int, replicas: int
) -> None:
    """Never said too low, and at most a few rows more than they are: see `_at_home`."""
    load = busiest(routing, tokens, choices, experts, ranks, replicas)
    found, kept = drawn_with_replicas(routing, tokens, choices, experts, ranks, replicas)
    slack = 0.04 * found.mean() + 1
    assert -0.2 * found.std() - 0.5 < load.mean - found.mean() < slack
    assert -0.6 * found.std() - 1 < load.p99 - found[990] < 0.6 * found.std() + slack
    assert (found > load.most).mean() <= 0.016
    assert load.home == pytest.approx(kept, rel=0.03)
    assert tokens < 1_000 or replicas < 2 or load.p99 < 0.8 * busiest(routing, tokens, choices, experts, ranks).p99


@pytest.mark.parametrize("routing", [Routing.balanced(), Routing.power_law(1.2), SKEWED])
@pytest.mark.parametrize("layers", [2, 16])
def test_layers_are_seldom_busiest_together(routing: Routing, layers: int) -> None:
    """Against sums of drawn routings; one layer is at its quantile, and the largest of several sums further out."""
    asked = (routing, 64, 2, 8, 4)
    found, generator = drawn(*asked), np.random.default_rng(5)
    sums = sum(generator.permutation(np.tile(found, 8)) for _ in range(layers))
    expected = (np.quantile(sums, 0.99) - layers * found.mean()) / (layers * (found[990] - found.mean()))
    assert excess_of_sum(*asked, layers) == pytest.approx(expected, rel=0.2)
    assert excess_of_sum(*asked, layers) < excess_of_sum(*asked, layers, 4) <= excess_of_sum(*asked, 1) == 1


def test_the_same_load_every_time_adds_up() -> None:
    assert excess_of_sum(SKEWED, 100, 2, 8, 1, 16) == 1  # one rank has all rows
    assert excess_of_sum(SKEWED, 100, 8, 8, 4, 16) == 1  # each token chooses every expert


def test_every_layer_counts() -> None:
    layers = {"a": [8, 1, 1, 1], "b": [1, 1, 1, 1], "c": [1, 1, 1, 1]}
    alone = [busiest(Routing.histogram(own), 1_000, 1, 4, 4) for own in layers.values()]
    load = busiest(Routing.histogram(layers), 1_000, 1, 4, 4)
    assert load.mean == pytest.approx(np.mean([one.mean for one in alone]), rel=0.01)
    assert load.most == pytest.approx(alone[0].most, rel=0.02)


def test_bounds() -> None:
    assert busiest(SKEWED, 100, 2, 8, 1)[:3] == (200, 200, 200)  # one rank has all rows
    assert busiest(SKEWED, 100, 8, 8, 4).mean == 200  # each token chooses every expert
    assert busiest(Routing.balanced(), 0, 2, 8, 4).most == 0
    everything = busiest(Routing.histogram([1, 1, 0, 0]), 100, 2, 4, 2)
    assert everything.mean == everything.most == 200  # all on the first rank
    surely = Routing.parse(SKEWED.text + P99)
    assert busiest(surely, 512, 2, 8, 4).mean == busiest(SKEWED, 512, 2, 8, 4).p99


def test_equal_asks_are_answered_alike() -> None:
    first = busiest(SKEWED, 777, 2, 8, 4)
    busiest.cache_clear()
    assert busiest(SKEWED, 777, 2, 8, 4) == first


@pytest.mark.parametrize("exponent", [0.0, 0.7, 2.0])
def test_inclusions_are_exact(exponent: float) -> None:
    """Against the sum over all ordered choices of two of five experts."""
    weights = np.arange(1.0, 6) ** -exponent
    weights /= weights.sum()
    two = np.zeros(5)
    for first, second in ((a, b) for a, b in combinations(range(5), 2)):
        for one, other in ((first, second), (second, first)):
            two[[one, other]] += weights[one] * weights[other] / (1 - weights[one])
    assert np.allclose(inclusions(weights, 2), two, atol=1e-6)
    assert np.allclose(inclusions(weights, 5), 1)
    assert np.allclose(inclusions(weights_of(two, 2), 2), two, atol=1e-3)  # by iteration
