"""Solves a network again all at once, but for a few variables that keep their values: cutset conditioning.

Networks of sharding problems are nearly series-parallel: beside some hubs, whose placements many operators follow, and
what ties repeated blocks together. With one variable in ten held, all others are eliminated exactly (`elimination`).
Other ones are held each time, so that hubs are free as well, beside more neighbours that are not.
Dechter, "Enhancement schemes for constraint processing" (Artificial Intelligence 41, 1990).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Sequence

from autopar.selection.elimination import eliminate
from autopar.selection.problem import Int64Array
from autopar.selection.subproblems import Subproblems

_SPREADS = (1.0, 4.0, 30.0)
"""How much chance decides which variables are held, rather than how many neighbours they have."""


def solve_beside_cutset(
    parts: Subproblems, unary: Sequence[Int64Array], values: Sequence[int], chance: random.Random,
    free: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """Returns a choice that costs no more, with all variables at their best beside some that keep their values.

    unary: what values cost, in place of the network's own costs. free: variables that are to be held least of all.
    """
    held = _cutset([parts.neighbours(v) for v in range(len(values))], chance, free)
    solved = [v for v in range(len(values)) if v not in held]
    core = eliminate(*parts.costs_of(solved, values, unary))
    assert not core.unary, "beside a cutset everything can be eliminated"
    found = list(values)
    for variable, value in zip(solved, core.expand([]), strict=True):
        found[variable] = value
    return found


def _cutset(neighbours: Sequence[Collection[int]], chance: random.Random, free: Collection[int]) -> set[int]:
    """Returns variables beside which each of the others can be eliminated, by its two neighbours at most."""
    spread = chance.choice(_SPREADS)
    weights = [chance.random() ** spread for _ in neighbours]
    for variable in free:
        weights[variable] = 0.0
    graph = _Ties(neighbours)
    heap = [(-weights[v] * len(around), v) for v, around in enumerate(neighbours)]
    heapq.heapify(heap)
    held: set[int] = set()
    graph.eliminate()
    while heap:
        key, variable = heapq.heappop(heap)
        if graph.gone[variable]:
            continue
        # Neighbours have become fewer, or more, since: what was next is it mostly still.
        now = -weights[variable] * len(graph.around[variable])
        if now > key:
            heapq.heappush(heap, (now, variable))
            continue
        held.add(variable)
        graph.remove(variable)
        graph.eliminate()
    return held


class _Ties:
    """Which variables share a table, while they are held and eliminated."""

    def __init__(self, neighbours: Sequence[Collection[int]]) -> None:
        self.around = [set(around) for around in neighbours]
        self.gone = [False] * len(neighbours)
        self._low = [v for v, around in enumerate(self.around) if len(around) <= 2]

    def remove(self, variable: int) -> None:
        self.gone[variable] = True
        for other in self.around[variable]:
            self.around[other].discard(variable)
            if len(self.around[other]) <= 2:
                self._low.append(other)

    def eliminate(self) -> None:
        """Removes variables for as long as one has two neighbours at most, which are tied then."""
        while self._low:
            variable = self._low.pop()
            if self.gone[variable]:
                continue
            if len(self.around[variable]) == 2:
                i, j = self.around[variable]
                self.around[i].add(j)
                self.around[j].add(i)
            self.remove(variable)
