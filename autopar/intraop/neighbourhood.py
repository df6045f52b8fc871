"""Improves a feasible choice by re-solving parts of it exactly: large-neighbourhood search.

A neighbourhood is a set of variables that are near each other in the graph, or live at one crowded time.
All others keep their values, which leaves a small network: their pair costs become unary costs, and what
they use leaves less room.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from autopar.intraop.network import Network, Use
from autopar.intraop.problem import INFINITE, Int64Array
from autopar.intraop.rows import memory_rows
from autopar.intraop.toulbar import minimise_within_backtracks

_SIZES = (12, 25, 50, 100, 200)
"""Numbers of free variables to choose from; the search learns which pay."""
_BACKTRACKS = 300
_LOCAL_SHARE = 0.5
"""How often a neighbourhood is grown along the graph alone, rather than from one time as well."""


class NeighbourhoodSearch:
    """Holds the current values of a network and what they use over time."""

    def __init__(self, network: Network, values: Sequence[int], seed: int) -> None:
        self.network = network
        self.values = list(values)
        self.random = random.Random(seed)
        self.seed = seed
        self.neighbours: list[dict[int, Int64Array]] = [{} for _ in network.unary]
        for (i, j), matrix in network.pairs.items():
            self.neighbours[i][j] = matrix
            self.neighbours[j][i] = matrix.T
        self.uses_of: list[list[Use]] = [[] for _ in network.unary]
        for use in network.uses:
            self.uses_of[use.variable].append(use)
        self.room_left = network.room.copy()
        self._hold(range(network.num_variables), 1)
        self.gains = dict.fromkeys(_SIZES, 1.0)

    def run(self, deadline: float) -> None:
        """Improves until the deadline (of time.monotonic)."""
        if self.network.num_variables == 0:
            return
        while time.monotonic() < deadline:
            size = self.random.choices(list(self.gains), weights=list(self.gains.values()))[0]
            started = time.monotonic()
            gain = self.improve(self._pick(size))
            self._learn(size, gain / (time.monotonic() - started))

    def improve(self, free: list[int]) -> int:
        """Re-solves the free variables; returns by how much the cost fell."""
        self._hold(free, -1)
        part = self._part(free)
        current = [self.values[v] for v in free]
        cost = _cost(part, current)
        result = minimise_within_backtracks(part, memory_rows(part), cost, _BACKTRACKS, self.seed)
        gain = 0
        if result["choice"] is not None:
            gain = cost - _cost(part, result["choice"])
            for v, value in zip(free, result["choice"], strict=True):
                self.values[v] = value
        self._hold(free, 1)
        return gain

    def _learn(self, size: int, gain_per_s: float) -> None:
        """Keeps a decaying mean of the gain by size, relative to the best, never below a tenth of it."""
        self.gains[size] = 0.9 * self.gains[size] + 0.1 * gain_per_s
        best = max(self.gains.values())
        self.gains = {s: max(g, 0.1 * best, 1e-9) for s, g in self.gains.items()}

    def _pick(self, size: int) -> list[int]:
        """Grows breadth first from a random variable, or from a few that are live at one time."""
        queue = deque(self._seeds())
        chosen: dict[int, None] = {}
        while queue and len(chosen) < size:
            v = queue.popleft()
            if v not in chosen:
                chosen[v] = None
                around = list(self.neighbours[v])
                queue.extend(self.random.sample(around, min(len(around), 8)))
        return sorted(chosen)

    def _seeds(self) -> list[int]:
        if not self.network.uses or self.random.random() < _LOCAL_SHARE:
            return [self.random.randrange(self.network.num_variables)]
        use = self.random.choice(self.network.uses)
        others = self.random.sample(self.network.uses, min(len(self.network.uses), 400))
        live = [other.variable for other in others if other.lo < use.hi and use.lo < other.hi]
        return [use.variable, *live[:6]]

    def _part(self, free: list[int]) -> Network:
        """Returns the network of the free variables, all others fixed."""
        number = {v: k for k, v in enumerate(free)}
        unary, pairs = [], {}
        for v in free:
            costs = self.network.unary[v]
            for w, matrix in self.neighbours[v].items():
                if w not in number:
                    costs = np.minimum(costs + matrix[:, self.values[w]], INFINITE)
                elif v < w:
                    pairs[number[v], number[w]] = matrix
            unary.append(costs)
        uses = [Use(number[v], u.lo, u.hi, u.usages) for v in free for u in self.uses_of[v]]
        return Network(unary, pairs, uses, self.network.room_starts, self.room_left, ())

    def _hold(self, variables: Sequence[int], sign: int) -> None:
        """Takes (1) or gives back (−1) the room that the variables use."""
        starts = self.network.room_starts
        for v in variables:
            for use in self.uses_of[v]:
                first, last = np.searchsorted(starts, (use.lo, use.hi))
                self.room_left[first:last] -= sign * use.usages[self.values[v]]


def _cost(network: Network, values: Sequence[int]) -> int:
    unary = sum(int(costs[value]) for costs, value in zip(network.unary, values, strict=True))
    return unary + sum(int(matrix[values[i], values[j]]) for (i, j), matrix in network.pairs.items())
