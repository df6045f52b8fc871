"""How many requests a period may bring, so that hardly any finds its batch full.

Requests come at random (Poisson), m a period in the mean, and a batch of b begins each period with what has come. Those
that find it full wait for the next. What is left over is a random walk that is held at 0, Q ← max(0, Q + A − b), whose
mean is, by Spitzer's identity,

    E[Q] = Σₖ E[(Nₖ − k · b)⁺] / k        k = 1, 2, …; Nₖ Poisson of mean k · m

A request that waits is counted in Q at least once: the share of those that do is at most E[Q] / m, whatever else is on
the device. With m so small that this is 1 − p, at least p of all requests are answered within a period and a batch.
"""

from __future__ import annotations

import math
from functools import lru_cache

from autopar.errors import PlanError

_HALVINGS = 50
_NOTHING = 1e-12
_MOST_PERIODS = 100_000


def checked_percentile(percentile: float) -> float:
    """Raises PlanError for one that is no share of requests."""
    if not 0.5 <= percentile < 1:
        raise PlanError(f"expected percentile from 0.5 to less than 1, such as 0.99, found {percentile!r}")
    return percentile


@lru_cache(maxsize=4096)
def most_arrivals(batch: int, percentile: float | None) -> float:
    """Of requests a period, the largest mean with which at least that share goes with the batch that begins next.

    percentile: None for requests that come evenly, of which a batch takes as many as it has room for.
    """
    if percentile is None:
        return float(batch)
    low, high = 0.0, float(batch)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if left_over(middle, batch) <= (1 - percentile) * middle else (low, middle)
    return low


def left_over(mean: float, batch: int) -> float:
    """Requests that a batch leaves in the mean, of so many that come a period."""
    if mean >= batch:
        return math.inf
    total = 0.0
    for periods in range(1, _MOST_PERIODS):
        more = excess(periods * mean, periods * batch) / periods
        total += more
        if more <= _NOTHING * max(mean, total):
            return total
    return math.inf


def excess(mean: float, most: int) -> float:
    """E[(N − most)⁺] of Poisson N of a mean that is at most so much: terms fall from the first on."""
    if mean <= 0:
        return 0.0
    term = math.exp(-mean + (most + 1) * math.log(mean) - math.lgamma(most + 2))
    total, count = 0.0, 1
    while term * count > _NOTHING * total and term > 0:
        total += term * count
        count += 1
        term *= mean / (most + count)
    return total


def counted(mean: float, most: int) -> list[float]:
    """Probabilities that 0 … most come, of Poisson arrivals; the last has all above it."""
    if mean <= 0:
        return [1.0, *[0.0] * most]
    found = [math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1)) for n in range(most)]
    return [*found, max(0.0, 1 - sum(found))]
