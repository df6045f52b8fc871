"""A bound of a network without memory rows, and a choice that mostly meets it: soft arc consistency.

    sweep, variable by variable:   what every pair with a value costs at least is moved to the value,
                                   what all values cost at least to the bound,
                                   what values cost more than that to their pairs with variables that come next
    and back, from the last variable to the first

No move adds to what any choice costs as a whole, and no table falls below zero: so what has come to the bound is one.
What is forbidden costs no more than `INFINITE`, wherever it is moved.
Where each variable has a value left that costs nothing with those of its neighbours, these values are an optimum: on
trees after one sweep. Schiex, "Arc consistency for soft constraints" (CP 2000); the order of the moves is that of
Kolmogorov, "Convergent tree-reweighted message passing" (PAMI 28, 2006). Where elimination leaves a few variables of
many values, a search would read tables of millions of entries; a sweep is a few sums of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.clock import worked
from autopar.selection.elimination import Core
from autopar.selection.problem import INFINITE, Int64Array
from autopar.tunables import SWEEP_S

_MOST_SWEEPS = 12
"""Two or three are mostly enough; what more would gain is little."""


@dataclass(frozen=True)
class Bounded:
    """No choice of the core costs less than the bound; `values` cost so much: INFINITE where they are forbidden."""

    lower_bound: int
    values: list[int]
    cost: int


def bounded(core: Core) -> Bounded:
    """The best bound of some sweeps, and the best choice that the costs left over lead to."""
    tables, best, bound = _Tables(core), None, -1
    for _ in range(_MOST_SWEEPS):
        tables.sweep()
        worked(core.num_entries * SWEEP_S)
        values = tables.cheapest()
        cost = _cost(core, values)
        if best is None or cost < best[1]:
            best = values, cost
        if tables.bound in (bound, best[1]):
            break
        bound = tables.bound
    assert best is not None
    return Bounded(min(tables.bound, INFINITE), *best)


def _cost(core: Core, values: Sequence[int]) -> int:
    """Of a choice; summed in unbounded integers."""
    unary = (int(costs[value]) for costs, value in zip(core.unary, values, strict=True))
    pairs = (int(table[values[i], values[j]]) for (i, j), table in core.pairs.items())
    return min(core.constant + sum(unary) + sum(pairs), INFINITE)


class _Tables:
    """Costs of values and of pairs of these, which sweeps move."""

    def __init__(self, core: Core) -> None:
        self.bound = core.constant
        self.unary = [costs.copy() for costs in core.unary]
        self.around: list[dict[int, Int64Array]] = [{} for _ in self.unary]
        for (i, j), table in core.pairs.items():
            own = table.copy()
            self.around[i][j], self.around[j][i] = own, own.T

    def sweep(self) -> None:
        """Every variable on the way there, and on the way back."""
        variables = range(len(self.unary))
        for variable in variables:
            self._move(variable, [table for j, table in self.around[variable].items() if j > variable])
        for variable in reversed(variables):
            self._move(variable, [table for j, table in self.around[variable].items() if j < variable])

    def _move(self, variable: int, following: Sequence[Int64Array]) -> None:
        """From the variable's pairs to its values, from there to the bound, and what is left to the pairs that follow.

        With few of these it keeps a part: what came from many would be spread too thin on the way back.
        """
        costs, around = self.unary[variable], self.around[variable]
        for table in around.values():
            least = table.min(axis=1)
            table -= least[:, None]
            np.minimum(costs + least, INFINITE, out=costs)
        least_of_all = int(costs.min())
        self.bound += least_of_all
        costs -= least_of_all
        part = costs // max(1, len(following), len(around) - len(following))
        for table in following:
            costs -= part
            np.minimum(table + part[:, None], INFINITE, out=table)

    def cheapest(self) -> list[int]:
        """Variable by variable the value that costs least with those that others have already."""
        values: list[int] = []
        for variable, around in enumerate(self.around):
            costs = self.unary[variable] + sum(table[:, values[j]] for j, table in around.items() if j < variable)
            values.append(int(costs.argmin()))
        return values
