"""A cost-function network with memory rows: what a Problem becomes once it is reduced.

Variables replace nodes. A variable may stand for several nodes whose strategies determine each other, so
that it is live over several intervals; `Network.expand` gives back one strategy for each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.selection.elimination import NO_WORK_LIMIT, Core, eliminate
from autopar.selection.problem import INFINITE, Int64Array


@dataclass(frozen=True, eq=False)
class Use:
    """Memory that a variable holds over the times [lo, hi), by value, beyond the value that holds least."""

    variable: int
    lo: int
    hi: int
    usages: Int64Array


@dataclass(frozen=True, eq=False)
class Member:
    """One node of the problem: strategy `strategies[v]` when `variable` takes value v."""

    variable: int
    strategies: Int64Array


@dataclass(frozen=True, eq=False)
class Network:
    """Minimise Σ unary + Σ pairs while the live uses fit in the room left at each time."""

    unary: Sequence[Int64Array]
    pairs: dict[tuple[int, int], Int64Array]
    """Costs by (v, w), v < w: |D_v| × |D_w|; `INFINITE` forbids."""
    uses: Sequence[Use]
    room_starts: Int64Array
    """Times, ascending, at which the room changes."""
    room: Int64Array
    """What is left for `uses` from each of those times on: the limit less what every choice uses."""
    members: Sequence[Member]
    elimination_work: int = NO_WORK_LIMIT
    """Sums that bucket elimination may take."""

    @property
    def num_variables(self) -> int:
        """The number of variables."""
        return len(self.unary)

    @property
    def num_entries(self) -> int:
        """The number of unary and pair entries: what a solver has to read."""
        return sum(c.size for c in self.unary) + sum(m.size for m in self.pairs.values())

    @cached_property
    def core(self) -> Core:
        """What bucket elimination leaves when the uses are not looked at."""
        return eliminate(self.unary, self.pairs, self.elimination_work)

    def cost(self, values: Sequence[int]) -> int:
        """Returns Σ unary + Σ pairs of one value a variable, at most INFINITE; summed in unbounded integers."""
        terms = [int(costs[value]) for costs, value in zip(self.unary, values, strict=True)]
        terms.extend(int(matrix[values[i], values[j]]) for (i, j), matrix in self.pairs.items())
        return INFINITE if max(terms, default=0) >= INFINITE else min(sum(terms), INFINITE)

    def expand(self, values: Sequence[int]) -> tuple[int, ...]:
        """Returns one strategy for each node of the problem."""
        return tuple(int(member.strategies[values[member.variable]]) for member in self.members)

    def room_at(self, time: int) -> int:
        """Returns what is left for the uses at a time."""
        return int(self.room[np.searchsorted(self.room_starts, time, side="right") - 1])
