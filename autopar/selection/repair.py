"""Makes a choice fit that nearly does: re-solves parts live at the worst time until nothing is exceeded.

Each step allows the excess that there is at all other times, and at the worst one a part of it, so that no
step makes anything worse and each that succeeds lowers the worst.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from autopar.clock import Clock
from autopar.selection.problem import INFINITE, Int64Array
from autopar.selection.subproblems import Subproblems, search_part

_SIZES = (50, 100, 200, 400)
"""Numbers of free variables: larger ones after smaller ones have failed."""
_KEPT = (0.0, 0.5, 0.9)
"""Shares of the worst excess that a step may keep, tried in turn."""
_CROWD = 20
"""So many variables of the worst time seed a part."""


def repair(
    parts: Subproblems, values: Sequence[int], clock: Clock, seed: int, cost_limit: int = INFINITE
) -> list[int] | None:
    """Returns a choice that fits and costs less than the limit, or None when none was reached in time."""
    chance = random.Random(seed)
    current, failures = list(values), 0
    while (excess := parts.usage.excess(current)).max(initial=0) > 0:
        if clock.is_over or failures >= 2 * len(_SIZES) * len(_KEPT):
            return None
        size = _SIZES[failures // len(_KEPT) % len(_SIZES)]
        kept = _KEPT[failures % len(_KEPT)]
        better = _relieve(parts, current, excess, size, kept, clock, chance)
        if better is not None and parts.network.cost(better) >= cost_limit:
            return None
        current, failures = (better, 0) if better is not None else (current, failures + 1)
    return current if parts.network.cost(current) < cost_limit else None


def _relieve(
    parts: Subproblems, values: list[int], excess: Int64Array, size: int, kept: float, clock: Clock,
    chance: random.Random,
) -> list[int] | None:  # fmt: skip
    """Returns a choice that exceeds less at the worst time and no more at any other, or None."""
    worst = int(np.argmax(excess))
    live = parts.live_at(int(parts.network.room_starts[worst]))
    free = parts.grow(chance.sample(live, min(len(live), _CROWD)), size, chance)
    part = parts.cut(free, values, _allowance(excess, worst, int(kept * excess[worst])))
    worst_time = int(part.room_starts[worst])
    outcome = search_part(part, clock, chance.randrange(2**31), [worst_time])
    if outcome.values is None:
        return None
    relieved = list(values)
    for v, value in zip(free, outcome.values, strict=True):
        relieved[v] = value
    return relieved


def _allowance(excess: Int64Array, worst: int, most: int) -> Int64Array:
    """Returns the excess, but at most `most` around the worst time, as far as it is more throughout."""
    allowance = np.maximum(excess, 0)
    less = np.flatnonzero(excess <= most)
    position = int(np.searchsorted(less, worst))
    first = int(less[position - 1]) + 1 if position else 0
    last = int(less[position]) if position < len(less) else len(excess)
    allowance[first:last] = most
    return allowance
