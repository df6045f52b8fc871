"""Improves a choice that fits by re-solving parts of it exactly: large-neighbourhood search (Shaw, 1998)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.clock import Clock
from autopar.selection.subproblems import Subproblems, search_part
from autopar.selection.worth import Worths

_SIZES = (12, 25, 50, 100, 200, 400, 800)
"""Numbers of free variables to choose from, up to half of all; the search learns which pay."""
_LOCAL_SHARE = 0.5
"""How often a part is grown from one variable, rather than from several that are live at one time."""
_CROWD = 7
"""So many variables of a crowded time seed a part."""
_MOST_TIMES = 24
"""Rows that parts start with: those needed most recently."""


class NeighbourhoodSearch:
    """Holds a choice that fits, and what re-solving its parts has taught."""

    def __init__(self, parts: Subproblems, values: Sequence[int], seed: int, times: Sequence[int] = ()) -> None:
        self.values = list(values)
        self.cost = parts.network.cost(values)
        self._parts = parts
        self._seed = seed
        self._random = random.Random(seed)
        self._times = dict.fromkeys(times)
        most = -(-parts.network.num_variables // 2)
        self._sizes = Worths(sorted({min(size, most) for size in _SIZES if most}), self._random)

    def adopt(self, values: Sequence[int]) -> None:
        """Goes on from another choice that fits."""
        self.values, self.cost = list(values), self._parts.network.cost(values)

    def step(self, clock: Clock) -> bool:
        """Re-solves one part; False when none of any size can be expected to end before the clock does."""
        started = clock.now
        size = None if clock.is_over else self._sizes.choose(clock.left_s)
        if size is None:
            return False
        gain = self.improve(self._parts.grow(self._seeds(), size, self._random), clock)
        self._sizes.remember(size, clock.now - started, gain)
        return True

    def improve(self, free: list[int], clock: Clock) -> int:
        """Re-solves the free variables; returns by how much the cost fell."""
        part = self._parts.cut(free, self.values)
        current = part.cost([self.values[v] for v in free])
        times = list(self._times)[-_MOST_TIMES:]
        outcome = search_part(part, clock, self._seed, times, current)
        for row_time in outcome.times[len(times) :]:
            self._times.pop(row_time, None)
            self._times[row_time] = None
        if outcome.values is None or outcome.cost >= current:
            return 0
        for v, value in zip(free, outcome.values, strict=True):
            self.values[v] = value
        self.cost -= current - outcome.cost
        return current - outcome.cost

    def _seeds(self) -> list[int]:
        if self._times and self._random.random() >= _LOCAL_SHARE:
            live = self._parts.live_at(self._random.choice(list(self._times)))
            if live:
                return self._random.sample(live, min(len(live), _CROWD))
        return [self._random.randrange(self._parts.network.num_variables)]
