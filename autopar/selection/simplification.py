"""Simplifies a network that takes long to search; of the choices that cost least, one at least is kept.

Four rules, applied until none applies:
- a table that is a sum of what either value costs alone is moved to the values: its variables are no longer tied;
- a value goes where another one costs no more, whatever the neighbours take, and never uses more;
- a variable that uses no memory and has two neighbours at most is eliminated (`elimination`);
- what every value uses is taken off the room.
Operators that read a constant are tied to hubs of thousands by tables of the first kind, and most parameters that no
one shares have one value left after the second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.clock import worked
from autopar.selection.elimination import SUMS_PER_S, joined
from autopar.selection.network import Network, Use
from autopar.selection.problem import INFINITE, Int64Array
from autopar.tunables import REMOVE_S

_MOST_COMPARISONS = 4_000_000
"""Entries that may be compared to find the values of one variable that others dominate: some hundredths of a second."""
_FAR = 1 << 60
"""Beyond any cost; twice as much still fits in 64 bits."""


@dataclass(frozen=True, eq=False)
class _Eliminated:
    """A variable that is gone: its best value given those of its neighbours, all numbered as in the whole network."""

    variable: int
    values: Int64Array
    costs: Int64Array
    tables: tuple[tuple[int, Int64Array, Int64Array], ...]  # neighbour, its values, costs[own value, neighbour's value]

    def best(self, found: Sequence[int]) -> int:
        total = self.costs
        for neighbour, values, table in self.tables:
            total = np.minimum(total + table[:, np.searchsorted(values, found[neighbour])], INFINITE)
        return int(self.values[total.argmin()])


@dataclass(frozen=True)
class Simplified:
    """A smaller network, and how its choices are those of the whole."""

    network: Network
    constant: int
    """What every choice costs besides."""
    variables: tuple[int, ...]
    """Those that are left."""
    values: tuple[Int64Array, ...]
    """Of all variables of the whole network, those that are left."""
    instead: tuple[Int64Array, ...]
    """For each value of the whole network the place, among those that are left, of one that is as good."""
    eliminated: tuple[_Eliminated, ...]

    def restrict(self, values: Sequence[int]) -> list[int]:
        """Returns a choice of what is left that costs no more than one of the whole network, and uses no more."""
        return [int(self.instead[variable][values[variable]]) for variable in self.variables]

    def expand(self, values: Sequence[int]) -> list[int]:
        """Returns the choice of the whole network."""
        found = [0] * len(self.values)
        for variable, value in zip(self.variables, values, strict=True):
            found[variable] = int(self.values[variable][value])
        for step in reversed(self.eliminated):
            found[step.variable] = step.best(found)
        return found


def simplify(network: Network) -> Simplified:
    """Returns a network that is quicker to search, whose optimum is that of the whole less a constant."""
    simplifier = _Simplifier(network)
    simplifier.run()
    return simplifier.result()


def _distinct_usages(network: Network) -> list[list[Int64Array]]:
    """What each variable's values use, at whatever times, each once."""
    found: list[dict[bytes, Int64Array]] = [{} for _ in network.unary]
    for use in network.uses:
        found[use.variable][use.usages.tobytes()] = use.usages
    return [list(usages.values()) for usages in found]


class _Simplifier:
    """Tables while rules apply; the values of a variable are numbered as they are left."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.unary = list(network.unary)
        self.around: list[dict[int, Int64Array]] = [{} for _ in self.unary]
        for (i, j), table in network.pairs.items():
            self.around[i][j], self.around[j][i] = table, table.T
        self.values: list[Int64Array] = [np.arange(len(costs)) for costs in self.unary]
        self.instead = list(self.values)
        self.usages = _distinct_usages(network)
        self.left = [True] * len(self.unary)
        self.eliminated: list[_Eliminated] = []
        self.constant = 0
        self.queue = deque(range(len(self.unary)))
        self.queued = [True] * len(self.unary)

    def run(self) -> None:
        """Applies the rules to each variable, and again where something beside it has changed."""
        while self.queue:
            variable = self.queue.popleft()
            self.queued[variable] = False
            if self.left[variable]:
                self._untie(variable)
                self._drop_dominated(variable)
                self._eliminate(variable)
        worked(len(self.eliminated) * REMOVE_S)

    def _look_again(self, variable: int) -> None:
        if not self.queued[variable]:
            self.queued[variable] = True
            self.queue.append(variable)

    def _part(self, i: int, j: int) -> None:
        del self.around[i][j], self.around[j][i]
        self._look_again(j)

    def _untie(self, variable: int) -> None:
        for other, table in list(self.around[variable].items()):
            own = table[:, 0] - table[0, 0]
            if table.max() < INFINITE and (table - own[:, None] == table[0]).all():
                self._part(variable, other)
                self._add(variable, own)
                self._add(other, table[0])

    def _add(self, variable: int, costs: Int64Array) -> None:
        """Adds to what values cost; what all of them cost at least goes to the constant."""
        total = np.where(self.unary[variable] < INFINITE, self.unary[variable] + costs, INFINITE)
        least = int(total.min())
        if least < INFINITE:
            self.unary[variable] = np.where(total < INFINITE, total - least, INFINITE)
            self.constant += least
        else:
            self.unary[variable] = np.full(len(total), INFINITE)

    def _drop_dominated(self, variable: int) -> None:
        instead = self._instead(variable)
        kept = np.unique(instead)
        if len(kept) == len(instead):
            return
        self.instead[variable] = np.searchsorted(kept, instead)[self.instead[variable]]
        self.values[variable] = self.values[variable][kept]
        self.unary[variable] = self.unary[variable][kept]
        usages = (usage[kept] for usage in self.usages[variable])
        self.usages[variable] = [usage for usage in usages if usage.min() < usage.max()]
        for other, table in self.around[variable].items():
            left = np.ascontiguousarray(table[kept])
            self.around[variable][other], self.around[other][variable] = left, left.T
            self._look_again(other)
        self._look_again(variable)

    def _instead(self, variable: int) -> Int64Array:
        """For each value one that dominates it, or itself; of two that are as good as each other the first stays."""
        costs = self.unary[variable]
        instead = np.arange(len(costs))
        frugal = ~np.eye(len(costs), dtype=np.bool_)
        for usage in self.usages[variable]:
            frugal &= usage[:, None] <= usage
        better, worse = np.nonzero(frugal)
        comparisons = len(better) * sum(table.shape[1] for table in self.around[variable].values())
        if not len(better) or comparisons > _MOST_COMPARISONS:
            return instead
        worked(comparisons / SUMS_PER_S)
        excess = costs[better] - costs[worse]
        for table in self.around[variable].values():
            excess = np.clip(excess + (table[better] - table[worse]).max(axis=1), -_FAR, _FAR)
        for a, b in zip(better[excess <= 0], worse[excess <= 0], strict=True):
            if instead[a] == a:
                instead[instead == b] = a
        return instead

    def _eliminate(self, variable: int) -> None:
        tables, costs = list(self.around[variable].items()), self.unary[variable]
        if self.usages[variable] or len(tables) > 2:
            return
        of = tuple((other, self.values[other], table) for other, table in tables)
        self.eliminated.append(_Eliminated(variable, self.values[variable], costs, of))
        self.left[variable] = False
        for other, _ in tables:
            self._part(variable, other)
        if not tables:
            self.constant += int(costs.min())
        elif len(tables) == 1:
            ((other, table),) = tables
            self._add(other, np.minimum(costs[:, None] + table, INFINITE).min(axis=0))
        else:
            (i, to_i), (j, to_j) = tables
            worked(len(costs) * to_i.shape[1] * to_j.shape[1] / SUMS_PER_S)
            self._tie(i, j, joined(costs, to_i, to_j))

    def _tie(self, i: int, j: int, table: Int64Array) -> None:
        if j in self.around[i]:
            table = np.minimum(table + self.around[i][j], INFINITE)
        self.around[i][j], self.around[j][i] = table, table.T

    def result(self) -> Simplified:
        """What is left, renumbered."""
        variables = tuple(variable for variable, left in enumerate(self.left) if left)
        number = {variable: position for position, variable in enumerate(variables)}
        pairs = {(number[i], number[j]): np.ascontiguousarray(table)
                 for i in variables for j, table in self.around[i].items() if i < j}  # fmt: skip
        uses, room = self._uses(number)
        left = Network([self.unary[i] for i in variables], pairs, uses, self.network.room_starts, room, ())
        return Simplified(
            left, self.constant, variables, tuple(self.values), tuple(self.instead), tuple(self.eliminated)
        )

    def _uses(self, number: dict[int, int]) -> tuple[list[Use], Int64Array]:
        """What values use beyond the least one, and the room that the least ones leave."""
        starts, uses = self.network.room_starts, []
        change = np.zeros(len(starts) + 1, dtype=np.int64)
        for use in self.network.uses:
            usages = use.usages[self.values[use.variable]]
            least = int(usages.min())
            first, last = np.searchsorted(starts, (use.lo, use.hi))
            change[first] += least
            change[last] -= least
            if usages.max() > least:
                uses.append(Use(number[use.variable], use.lo, use.hi, usages - least))
        return uses, self.network.room - np.cumsum(change)[:-1]
