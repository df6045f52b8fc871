"""What a distribution of routing yields: rows of the most loaded rank, where ranks have slices of the experts.

A row is a token's choice of an expert. T tokens are taken to choose independently of each other; N_e of them choose
expert e, which is likely by π_e for each (`ir.routing`):

    E N = T·π     Cov N = T·(diag v − v·vᵀ / Σv),   v_e = π_e·(1 − π_e)·E / (E − 1)

The covariance is Hájek's for samples of fixed size, exact where all experts are alike; drawing one after the other
differs from it little. Of few tokens, draws are made token by token; of more, N is taken as normal, with the skewness
of a binomial (Cornish and Fisher's first term). Either way draws are made from `SEED`, so that a load is the same
wherever it is asked for. The largest sum of N over a rank's experts has no closed form: its mean and quantile are the
draws'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.ir.routing import POWER_LAW, Routing

DRAWS, FEWEST_DRAWS = 2_000, 500
"""Draws among all layers, and of each at least: twice as many take twice the time, and a 99th percentile then errs by
1.4 times less; it errs by about 4% of its distance from the mean."""
SEED = 0
TOKEN_BY_TOKEN = 2_048  # tokens × experts up to which draws are made token by token: 0.2 s at most
_QUANTILE, _QUANTILES = 0.99, 16
_TIMES = 64  # points of the integral of `inclusions`; with twice as many, none changes by 0.1%
_SURELY = 1.645  # standard errors above a quantile of draws, which 19 in 20 such quantiles do not reach

Numbers = NDArray[np.float64]
Likely = tuple[float, ...]


class RankLoad(NamedTuple):
    """Rows of the most loaded of some ranks: in the mean, at the 99th percentile, both of a layer in the mean of all
    layers, and at the 99th percentile of the layer where that is most, and surely, which memory is counted by. home:
    the rows, of all, that stay where their tokens are, for experts that every rank has a replica of, in the mean."""

    mean: float
    p99: float
    most: int
    home: float = 0.0


@lru_cache(maxsize=1 << 14)
def busiest(routing: Routing, tokens: int, choices: int, num_experts: int, ranks: int, replicas: int = 0) -> RankLoad:
    """The load of the busiest of `ranks` that have equal slices of the experts, of `tokens` tokens in all, equally many
    on each rank. replicas: the number of experts, those with most rows, that every rank has for its own tokens."""
    choices, ranks = min(choices, num_experts), min(ranks, num_experts)
    rows = tokens * choices
    if ranks <= 1 or not rows:
        return RankLoad(rows, rows, rows)
    if routing.rows:
        return RankLoad(routing.rows, routing.rows, routing.rows)
    layers = layers_of(routing, choices, num_experts)
    drawn = _drawn_loads(routing, tokens, choices, num_experts, ranks, replicas)
    found, shares = [own.busiest for own in drawn], np.asarray([*layers.values()]) / sum(layers.values())
    p99 = float(np.dot(shares, [_at_p99(own) for own in found]))
    mean = p99 if routing.at_p99 else float(np.dot(shares, [own.mean() for own in found]))
    home = float(np.dot(shares, [own.home for own in drawn]))
    return RankLoad(mean, p99, int(np.ceil(max(_at_p99(own, _SURELY) for own in found))), home)


@lru_cache(maxsize=1 << 10)
def quantiles(
    routing: Routing, tokens: int, choices: int, num_experts: int, ranks: int, replicas: int = 0
) -> tuple[int, ...]:
    """Loads of the busiest rank that stand for all that are drawn, of all layers: each for as many."""
    choices, ranks = min(choices, num_experts), min(ranks, num_experts)
    if ranks <= 1 or not tokens * choices or routing.rows:
        return (round(busiest(routing, tokens, choices, num_experts, ranks, replicas).mean),)
    kinds = layers_of(routing, choices, num_experts)
    found = [own.busiest for own in _drawn_loads(routing, tokens, choices, num_experts, ranks, replicas)]
    drawn = np.concatenate([np.tile(own, layers) for own, layers in zip(found, kinds.values(), strict=True)])
    return tuple(round(rows) for rows in np.quantile(drawn, (np.arange(_QUANTILES) + 0.5) / _QUANTILES))


class _DrawnLoads(NamedTuple):
    """Of one kind of layer: rows of the busiest rank, draw by draw, and those of all that stay at home in the mean."""

    busiest: Numbers
    home: float


def _drawn_loads(
    routing: Routing, tokens: int, choices: int, num_experts: int, ranks: int, replicas: int
) -> list[_DrawnLoads]:
    """Draws of each kind of layer."""
    layers = layers_of(routing, choices, num_experts)
    draws = max(FEWEST_DRAWS, DRAWS // len(layers))
    generator = np.random.Generator(np.random.PCG64(SEED))
    found = list[_DrawnLoads]()
    for likely in layers:
        counts = _drawn(np.asarray(likely), tokens, choices, draws, generator)
        counts = generator.permuted(counts, axis=1) if routing.kind == POWER_LAW else counts
        if not replicas:
            found.append(_DrawnLoads(largest(counts, ranks), 0.0))
            continue
        cold, hot = parted(counts, replicas)
        rows = by_rank(cold, ranks) + _at_home(hot, tokens, min(choices, replicas), ranks, generator)
        found.append(_DrawnLoads(rows.max(1), float(hot.sum(1).mean())))
    return found


def parted(counts: Numbers, replicas: int) -> tuple[Numbers, Numbers]:
    """Of draws (draws, experts): those of experts that are on one rank (draws, experts), where those of the others are
    none, and those of the `replicas` experts with most rows (draws, replicas)."""
    hottest = np.argsort(-counts, axis=1, kind="stable")[:, :replicas]
    cold = counts.copy()
    np.put_along_axis(cold, hottest, 0.0, axis=1)
    return cold, np.take_along_axis(counts, hottest, axis=1)


def _at_home(hot: Numbers, tokens: int, choices: int, ranks: int, generator: np.random.Generator) -> Numbers:
    """Rows of each rank's own tokens for experts of so many rows in all: (draws, ranks). A rank's tokens are a sample
    of all, in which an expert's are hypergeometric; experts are taken to be independent there, which they are not quite
    (who chose one has one choice less left), so that ranks differ a little more here than they do."""
    own = tokens // ranks
    share = hot / max(1, tokens)
    variance = (own * share * (1 - share)).sum(1) * (tokens - own) / max(1, tokens - 1)
    deviations = np.sqrt(np.maximum(variance, 0.0))[:, None] * generator.standard_normal((len(hot), ranks))
    return np.asarray(np.clip(hot.sum(1)[:, None] / ranks + deviations, 0, own * choices))


@lru_cache(maxsize=1 << 10)
def excess_of_sum(
    routing: Routing, tokens: int, choices: int, num_experts: int, ranks: int, layers: int, sums: int = 1,
    replicas: int = 0,
) -> float:  # fmt: skip
    """Layers are seldom busiest together. Of what all of them at their 99th percentile have above their means, the part
    that their sum has at its own: 1 for one layer, about 1/√layers for many. sums: of so many independent sums the
    largest counts, each of which all but one in a hundred times as many draws stay within."""
    choices, ranks = min(choices, num_experts), min(ranks, num_experts)
    if ranks <= 1 or not tokens * choices or layers * sums <= 1:
        return 1.0
    kinds = layers_of(routing, choices, num_experts)
    found = [own.busiest for own in _drawn_loads(routing, tokens, choices, num_experts, ranks, replicas)]
    shares = np.asarray([*kinds.values()]) / sum(kinds.values())
    counts = np.maximum(1, np.round(shares * layers)).astype(int)
    generator, most = np.random.Generator(np.random.PCG64(SEED + 1)), DRAWS * max(1, sums)
    summed, apart = np.zeros(most), 0.0
    for own, count in zip(found, counts, strict=True):
        for _ in range(count):
            summed += generator.choice(own, most)
        apart += count * (_at_p99(own) - own.mean())
    if apart <= 0:
        return 1.0
    mean = sum(count * own.mean() for own, count in zip(found, counts, strict=True))
    quantile = float(np.quantile(summed, 1 - (1 - _QUANTILE) / max(1, sums)))
    return float(np.clip((quantile - mean) / apart, 0.0, 1.0))


def largest(counts: Numbers, ranks: int) -> Numbers:
    """Of draws (draws, experts) of rows by expert: those of the slice of the experts that has most."""
    return np.asarray(by_rank(counts, ranks).max(1))


def by_rank(counts: Numbers, ranks: int) -> Numbers:
    """Of draws (draws, experts): those of each rank's slice of the experts (draws, ranks), none of ranks without."""
    length = -(-counts.shape[1] // ranks)
    sums = np.add.reduceat(counts, np.arange(0, counts.shape[1], length), axis=1)
    return np.pad(sums, ((0, 0), (0, ranks - sums.shape[1])))


def _at_p99(rows: Numbers, errors: float = 0.0) -> float:
    """The least number of rows that at most one draw in a hundred exceeds; errors: standard errors of it more."""
    count = len(rows)
    place = _QUANTILE * count + errors * np.sqrt(count * _QUANTILE * (1 - _QUANTILE))
    return float(np.sort(rows)[min(count - 1, int(np.ceil(place)))])


# Draws ----------------------------------------


def _drawn(likely: Numbers, tokens: int, choices: int, draws: int, generator: np.random.Generator) -> Numbers:
    """How many tokens choose each expert (draws, experts)."""
    if tokens * len(likely) > TOKEN_BY_TOKEN:
        return _normal(likely, tokens, draws, generator)
    chosen = choose(weights_of(likely, choices), draws * tokens, choices, generator).reshape(draws, tokens * choices)
    offset = np.arange(draws)[:, None] * len(likely)
    counts = np.bincount((chosen + offset).ravel(), minlength=draws * len(likely))
    return counts.reshape(draws, -1).astype(float)


def choose(weights: Numbers, tokens: int, choices: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Experts (tokens, choices) drawn one after the other without replacement: the first to arrive of a race."""
    if choices == len(weights):
        return np.broadcast_to(np.arange(choices), (tokens, choices))
    arrivals = generator.exponential(size=(tokens, len(weights))) / np.maximum(weights, 1e-300)
    return np.argpartition(arrivals, choices, axis=1)[:, :choices]


def _normal(likely: Numbers, tokens: int, draws: int, generator: np.random.Generator) -> Numbers:
    variance = likely * (1 - likely) * len(likely) / (len(likely) - 1)
    total = variance.sum()
    if total < 1e-9:  # every token chooses the same experts
        return np.broadcast_to(tokens * likely, (draws, len(likely)))
    spread = np.sqrt(np.maximum(variance, 1e-12))
    standard = generator.standard_normal((draws, len(likely)))
    standard = standard + (1 - 2 * likely) / (spread * np.sqrt(tokens)) * (standard**2 - 1) / 6
    deviations = spread * standard
    deviations = deviations - variance / total * deviations.sum(1, keepdims=True)
    return np.asarray(np.clip(tokens * likely + np.sqrt(tokens) * deviations, 0, tokens))


# How likely an expert is ----------------------------------------


@lru_cache(maxsize=256)
def layers_of(routing: Routing, choices: int, num_experts: int) -> dict[Likely, int]:
    """How likely a token chooses each expert, with how many layers are so; those with as many experts count."""
    if routing.kind == POWER_LAW:
        return {tuple(inclusions(np.arange(1.0, num_experts + 1) ** -routing.exponent, choices)): 1}
    counts = Counter(own for _, own in routing.counts if len(own) == num_experts)
    found = {_likely(own, choices): layers for own, layers in counts.items()}
    return found or {(choices / num_experts,) * num_experts: 1}


def _likely(counts: Sequence[float], choices: int) -> Likely:
    """In proportion to counts, none above 1: what a token would choose more than once goes to the other experts."""
    given, capped = np.asarray(counts, dtype=float), np.zeros(len(counts), dtype=bool)
    while True:
        rest = max(given[~capped].sum(), 1e-300)
        likely = np.where(capped, 1.0, (choices - capped.sum()) * given / rest)
        if not (likely > 1 + 1e-12).any():
            return tuple(np.minimum(likely, 1.0))
        capped |= likely > 1


def inclusions(weights: Numbers, choices: int) -> Numbers:
    """How likely each expert is among the first `choices` that are drawn by weight without replacement.

    Of a race in which expert e arrives at a time that is exponential at rate w_e: ∫ w_e·exp(−w_e·t)·P(fewer than
    `choices` others have arrived by t) dt, over u = 1 − exp(−w_e·t) where that is in [0, 1].
    """
    if choices >= len(weights):
        return np.ones(len(weights))
    points, shares = np.polynomial.legendre.leggauss(_TIMES)
    rates = np.log1p(-(points + 1) / 2) / weights[:, None]  # of each expert e: −t at each point, (experts, points)
    counts = np.zeros((choices, *rates.shape))  # how likely it is that so many others have arrived
    counts[0] = 1
    for other, weight in enumerate(weights):
        arrived = 1 - np.exp(weight * rates)
        arrived[other] = 0
        counts[1:] = counts[1:] * (1 - arrived) + counts[:-1] * arrived
        counts[0] *= 1 - arrived
    likely = counts.sum(0) @ (shares / 2)
    return np.asarray(likely * choices / likely.sum())


def weights_of(likely: Numbers, choices: int) -> Numbers:
    """The weights by which drawing without replacement has each expert so likely among the choices."""
    if np.ptp(likely) < 1e-12 or choices == 1:
        return likely
    rare = np.maximum(likely, 1e-9)
    weights = -np.log1p(-np.minimum(rare, 1 - 1e-9))
    for _ in range(20):
        weights = weights * rare / np.maximum(inclusions(weights, choices), 1e-12)
    return np.asarray(weights / weights.sum())
