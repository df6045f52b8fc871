"""What travels where experts are sliced: the table that a layer reads when it runs.

Of rows of the busiest rank, each way has a price, both passes: what operators compute, and

    tensor   rows to all slices and their results home       n · rows · (width + width), twice
    data     slices to all rows and their gradients home     the experts of a rank of all slices, twice

The first grows with the rows, the second does not: there is one load at most from which on slices travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost.exchanges import PlacedExperts
from autopar.ir.graph import EXPECTED, SLICES
from autopar.ir.routing import Routing
from autopar.ir.slice_table import DATA, TENSOR, SliceTable, SliceWay
from autopar.ops.sliced import slice_table_of, sliced_over

_FURTHEST = 1 << 10
"""Times the rows of an even load, up to which a load is looked for from which on slices travel."""


@dataclass(frozen=True, eq=False)
class PlacedSlices(PlacedExperts):
    """An operator whose experts are sliced, and how it is placed."""

    @property
    def can_choose(self) -> bool:
        """Whether ranks with other rows have slices of its experts."""
        return any(self.axes[axis].size > 1 for axis in sliced_over(self.operands))

    def sliced_ns(self, rows: int, how: str) -> int:
        """What the operator takes, both passes, where the busiest rank has so many rows."""
        told = {**dict(self.node.kwargs), SLICES: f"0:{how}", EXPECTED: Routing(rows=rows).text}
        return self._time_ns(replace(self.node, kwargs=tuple(told.items())))

    @cached_property
    def slice_table(self) -> SliceTable:
        """The way that is cheaper, by load."""
        low, high = 0, _FURTHEST * self.even_rows
        if not self._is_data(high):
            return SliceTable()
        if self._is_data(1):
            return SliceTable((SliceWay(0, DATA),))
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_data(middle) else (middle, high)
        return SliceTable((SliceWay(0, TENSOR), SliceWay(high, DATA)))

    def _is_data(self, rows: int) -> bool:
        return self.sliced_ns(rows, DATA) < self.sliced_ns(rows, TENSOR)


def gain_by_load_ns(one: PlacedExperts, table: SliceTable) -> int:
    """How much less the operator takes by a table than as it is, in the mean of the routing's loads, beside what it
    takes less at their mean."""
    if not isinstance(one, PlacedSlices):
        return 0
    now, mean, loads = slice_table_of(one.node), round(sum(one.loads) / len(one.loads)), one.loads

    def gain_ns(rows: int) -> int:
        return one.sliced_ns(rows, now.at(rows)) - one.sliced_ns(rows, table.at(rows))

    return round(sum(map(gain_ns, loads)) / len(loads)) - gain_ns(mean)


def sliced_tables(placed: Mapping[str, PlacedExperts]) -> dict[str, SliceTable]:
    """The table of each operator, by name."""
    return {name: one.slice_table for name, one in placed.items() if isinstance(one, PlacedSlices)}
