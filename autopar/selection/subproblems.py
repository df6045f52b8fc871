"""Parts of a network: what is left to choose when all but a few variables keep their values.

The pair costs to fixed neighbours become unary costs, and what the fixed variables use leaves less room. A
part whose variables are near each other in the graph, or live at one crowded time, is worth solving again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import ItemsView, Iterable, KeysView, Sequence

import numpy as np

from autopar.clock import Clock, worked
from autopar.selection.exact import ExactOutcome, search_exactly
from autopar.selection.network import Network, Use
from autopar.selection.problem import INFINITE, Int64Array
from autopar.selection.usage import Usage
from autopar.tunables import PART_S, REDUCE_S

_BRANCHING = 8
"""At most so many neighbours of one variable join at a time, lest a hub's crowd out all else."""
_SMALL_ENTRIES = 50_000
"""Larger parts are searched in a process of their own, which can be held to a time."""
_BACKTRACKS = 300
_MOST_S = 5.0


def search_part(
    part: Network, clock: Clock, seed: int, times: Iterable[int], upper_bound: int = INFINITE
) -> ExactOutcome:
    """Searches a part for the cheapest choice below `upper_bound`, for a few seconds at most."""
    worked(PART_S + part.num_entries * REDUCE_S)
    return search_exactly(
        part, clock.within(_MOST_S), seed, upper_bound=upper_bound, backtracks=_BACKTRACKS,
        times=times, small_entries=_SMALL_ENTRIES,
    )  # fmt: skip


class Subproblems:
    """A network's adjacency and uses by variable, from which parts are cut."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.usage = Usage(network)
        self._neighbours: list[dict[int, Int64Array]] = [{} for _ in network.unary]
        for (i, j), matrix in network.pairs.items():
            self._neighbours[i][j] = matrix
            self._neighbours[j][i] = matrix.T
        self._uses_of: list[list[Use]] = [[] for _ in network.unary]
        for use in network.uses:
            self._uses_of[use.variable].append(use)

    def cut(self, free: Sequence[int], values: Sequence[int], allowance: Int64Array | None = None) -> Network:
        """Returns the network of the free variables (ascending), all others fixed at their values.

        `allowance` is added to the room from each of the network's `room_starts` on.
        """
        number = {v: k for k, v in enumerate(free)}
        unary, pairs = self.costs_of(free, values, self.network.unary)
        uses = [Use(number[v], use.lo, use.hi, use.usages) for v in free for use in self._uses_of[v]]
        room = self._room_beside(free, values) + (0 if allowance is None else allowance)
        return Network(unary, pairs, uses, self.network.room_starts, room, ())

    def costs_of(
        self, free: Sequence[int], values: Sequence[int], unary: Sequence[Int64Array]
    ) -> tuple[list[Int64Array], dict[tuple[int, int], Int64Array]]:
        """Returns costs and tables of the free variables (ascending) beside the values of all others.

        unary: what values cost by themselves.
        """
        number = {v: k for k, v in enumerate(free)}
        left, pairs = [], {}
        for v in free:
            costs = unary[v]
            for w, matrix in self._neighbours[v].items():
                if w not in number:
                    costs = np.minimum(costs + matrix[:, values[w]], INFINITE)
                elif v < w:
                    pairs[number[v], number[w]] = matrix
            left.append(costs)
        return left, pairs

    def tables(self, variable: int) -> ItemsView[int, Int64Array]:
        """The variable's neighbours, with the costs of pairs by its own value first."""
        return self._neighbours[variable].items()

    def neighbours(self, variable: int) -> KeysView[int]:
        """The variables that share a table with this one."""
        return self._neighbours[variable].keys()

    def change_of_usage(self, variables: Iterable[int], before: Sequence[int], after: Sequence[int]) -> Int64Array:
        """Returns how much more is used from each of the network's `room_starts` on when variables change."""
        starts = self.network.room_starts
        change = np.zeros(len(starts) + 1, dtype=np.int64)
        for v in variables:
            for use in self._uses_of[v]:
                more = int(use.usages[after[v]] - use.usages[before[v]])
                first, last = np.searchsorted(starts, (use.lo, use.hi))
                change[first] += more
                change[last] -= more
        return np.cumsum(change)[:-1]

    def costs_beside(self, variable: int, values: Sequence[int]) -> Int64Array:
        """Returns the cost of each value of a variable beside the first variables' values, at most INFINITE."""
        costs = self.network.unary[variable]
        for w, matrix in self._neighbours[variable].items():
            if w < len(values):
                costs = np.minimum(costs + matrix[:, values[w]], INFINITE)
        return costs

    def _room_beside(self, free: Sequence[int], values: Sequence[int]) -> Int64Array:
        held = np.ones(self.network.num_variables, dtype=np.bool_)
        held[list(free)] = False
        return -self.usage.excess(values, held)

    def grow(self, seeds: Iterable[int], size: int, chance: random.Random) -> list[int]:
        """Returns up to `size` variables, ascending: the seeds and what is nearest to them, breadth first."""
        queue = deque(seeds)
        chosen: dict[int, None] = {}
        while queue and len(chosen) < size:
            v = queue.popleft()
            if v not in chosen:
                chosen[v] = None
                around = list(self._neighbours[v])
                queue.extend(chance.sample(around, min(len(around), _BRANCHING)))
        return sorted(chosen)

    def live_at(self, time: int) -> list[int]:
        """Returns the variables whose values use different amounts at a time, ascending."""
        return sorted({use.variable for use in self.network.uses if use.lo <= time < use.hi})
