"""Removes the variables of a network that have at most two neighbours, keeping every optimum (bucket elimination).

    variable v between i and j:   c'_ij(a, b) = min_k  c_v(k) + c_vi(k, a) + c_vj(k, b)

Sharding problems are nearly series-parallel: chains of operators, branches that meet again, parameters that one
operator reads. So hardly anything is left for a search: for a transformer, what positions and masks share.
Dechter, "Bucket elimination" (Artificial Intelligence 113, 1999). Networks without memory rows only: a row would
tie all its variables together.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.clock import worked
from autopar.selection.problem import INFINITE, Int64Array
from autopar.tunables import REMOVE_S

_MOST_WORK = 500_000_000
"""Sums in one elimination: about half a second."""
SUMS_PER_S = 1_000_000_000
"""Of eliminations, in round numbers, so that what a time limit allows of them does not depend on the machine."""
NO_WORK_LIMIT = 1 << 62
_AT_ONCE = 1 << 15
"""Sums held at a time: what a processor's nearest cache takes."""


@dataclass(frozen=True)
class _Removed:
    """A variable that is gone: its best value given those of its neighbours."""

    variable: int
    unary: Int64Array
    tables: tuple[tuple[int, Int64Array], ...]  # neighbour, costs[own value, neighbour's value]

    def best(self, values: Sequence[int]) -> int:
        total = self.unary
        for neighbour, table in self.tables:
            total = np.minimum(total + table[:, values[neighbour]], INFINITE)
        return int(total.argmin())


@dataclass(frozen=True)
class Core:
    """What is left: variables renumbered, costs to minimise, and a constant that every choice pays."""

    unary: list[Int64Array]
    pairs: dict[tuple[int, int], Int64Array]
    constant: int
    kept: tuple[int, ...]
    num_variables: int
    removed: tuple[_Removed, ...]

    @property
    def num_entries(self) -> int:
        """The number of unary and pair entries: what a solver has to read."""
        return sum(c.size for c in self.unary) + sum(m.size for m in self.pairs.values())

    def expand(self, values: Sequence[int]) -> list[int]:
        """The best choice of the whole network that takes these values in the core."""
        found = [0] * self.num_variables
        for variable, value in zip(self.kept, values, strict=True):
            found[variable] = value
        for step in reversed(self.removed):
            found[step.variable] = step.best(found)
        return found


def eliminate(
    unary: Sequence[Int64Array], pairs: Mapping[tuple[int, int], Int64Array], most_work: int = NO_WORK_LIMIT
) -> Core:  # fmt: skip
    """Removes variables, of fewest neighbours and values first, until each has three or would take too long.

    most_work: sums that all of it may take.
    """
    eliminator = _Eliminator(unary, pairs, most_work)
    core = eliminator.run()
    worked((most_work - eliminator.work_left) / SUMS_PER_S + len(core.removed) * REMOVE_S)
    return core


class _Eliminator:
    def __init__(
        self, unary: Sequence[Int64Array], pairs: Mapping[tuple[int, int], Int64Array], most_work: int
    ) -> None:  # fmt: skip
        self.unary, self.work_left = list(unary), most_work
        self.around: list[dict[int, Int64Array]] = [{} for _ in unary]
        for (i, j), table in pairs.items():
            self.around[i][j], self.around[j][i] = table, table.T
        self.left = set(range(len(self.unary)))
        self.removed: list[_Removed] = []
        self.constant = 0
        self.queue = [self._key(variable) for variable in sorted(self.left)]
        heapq.heapify(self.queue)

    def run(self) -> Core:
        while (variable := self._next()) is not None:
            self._remove(variable)
        kept = tuple(sorted(self.left))
        number = {variable: position for position, variable in enumerate(kept)}
        pairs = {(number[i], number[j]): np.ascontiguousarray(table)
                 for i in kept for j, table in self.around[i].items() if i < j}  # fmt: skip
        return Core(
            [self.unary[i] for i in kept], pairs, self.constant, kept, len(self.unary), tuple(self.removed)
        )  # fmt: skip

    def _next(self) -> int | None:
        """Returns the variable of fewest neighbours and values; keys that have changed since are skipped."""
        while self.queue:
            key = heapq.heappop(self.queue)
            degree, _, variable = key
            if degree > 2:
                return None
            if variable in self.left and key == self._key(variable):
                work = self._work(variable)
                if work <= min(_MOST_WORK, self.work_left):
                    self.work_left -= work
                    return variable
        return None

    def _key(self, variable: int) -> tuple[int, int, int]:
        return len(self.around[variable]), len(self.unary[variable]), variable

    def _work(self, variable: int) -> int:
        work = len(self.unary[variable])
        for neighbour in self.around[variable]:
            work *= len(self.unary[neighbour])
        return work

    def _remove(self, variable: int) -> None:
        tables = tuple(self.around[variable].items())
        unary = self.unary[variable]
        self.removed.append(_Removed(variable, unary, tables))
        self.left.discard(variable)
        for neighbour, _ in tables:
            del self.around[neighbour][variable]
            heapq.heappush(self.queue, self._key(neighbour))
        if not tables:
            self.constant += int(unary.min())
        elif len(tables) == 1:
            ((i, to_i),) = tables
            message = np.minimum(unary[:, None] + to_i, INFINITE).min(axis=0)
            self.unary[i] = np.minimum(self.unary[i] + message, INFINITE)
        else:
            (i, to_i), (j, to_j) = tables
            self._connect(i, j, joined(unary, to_i, to_j))

    def _connect(self, i: int, j: int, table: Int64Array) -> None:
        if j in self.around[i]:
            table = np.minimum(table + self.around[i][j], INFINITE)
        self.around[i][j], self.around[j][i] = table, table.T
        for end in (i, j):
            heapq.heappush(self.queue, self._key(end))


def joined(unary: Int64Array, to_i: Int64Array, to_j: Int64Array) -> Int64Array:
    """min_k unary[k] + to_i[k, a] + to_j[k, b] for each a and b."""
    left, of_i = _distinct_rows(np.minimum(unary[:, None] + to_i, INFINITE).T)
    right, of_j = _distinct_rows(to_j.T)
    step = max(1, _AT_ONCE // max(1, right.size))
    parts = [(left[begin : begin + step, None] + right).min(axis=2) for begin in range(0, len(left), step)]
    found: Int64Array = np.minimum(np.concatenate(parts), INFINITE)[np.ix_(of_i, of_j)]
    return found


def _distinct_rows(table: Int64Array) -> tuple[Int64Array, list[int]]:
    """The rows without repetition, and which of them each row is.

    Options that leave a tensor in the same placement cost their neighbour the same: most rows are repeated.
    """
    numbers: dict[bytes, int] = {}
    of = [numbers.setdefault(row.tobytes(), len(numbers)) for row in np.ascontiguousarray(table)]
    return np.frombuffer(b"".join(numbers), dtype=np.int64).reshape(len(numbers), table.shape[1]), of
