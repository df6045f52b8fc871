"""Tables of a profile: how long kernels take by their shape, at the vertices of a grid.

Named by the kind of kernel (`kernels`), and by a dtype where they know only that: `NT bfloat16`. A table without a
dtype is of float32.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from autopar.cost.provenance import Provenance
from autopar.errors import ProfileError

#: dims of the grid of each kind of table that is known, by the first word of its name
_NUM_AXES = {
    "NT": 3, "NN": 3, "TN": 3, "batched": 3, "attention": 2, "flash": 4, "plain": 4, "strided": 3, "grouped": 3,
    "decode": 3,
}  # fmt: skip
#: the family of operators whose kernels a table knows, by the first word of its name
_FAMILIES = {
    **dict.fromkeys(("NT", "NN", "TN", "batched"), "matmul"),
    **dict.fromkeys(("attention", "flash", "decode"), "attention"),
    **dict.fromkeys(("plain", "strided", "grouped"), "convolution"),
}  # fmt: skip
MOST = 1e10  # of a rate, in its unit
_MANY = 4096  # rates that are written as lines of text: JSON of single numbers takes long to check


@dataclass(frozen=True)
class Table:
    """Nanoseconds a FLOP of a kernel by its shape, at the vertices of a grid; between them linear in logarithms.

    `axes` are the grid's coordinates in increasing order, `rates` the values in row-major order, in `unit_ns`. Outside
    the grid the nearest value on its border holds. No kernel takes less than `least_ns`. `like` names the table that
    has the axes and rates of this one, whose kernels take `times` as long.
    """

    name: str
    axes: tuple[tuple[float, ...], ...]
    rates: tuple[float, ...]
    provenance: Provenance
    unit_ns: float = 1.0
    least_ns: float = 0.0
    like: str | None = None
    times: float = 1.0

    @property
    def family(self) -> str:
        """Of the operators whose kernels it knows; empty for kernels that no operator is taken to run."""
        return _FAMILIES.get(self.name.partition(" ")[0], "")

    @cached_property
    def _logs(self) -> tuple[list[list[float]], list[float]]:
        return [list(map(math.log, axis)) for axis in self.axes], list(map(math.log, self.rates))

    def ns_per_flop(self, coordinates: Sequence[float]) -> float:
        """The rate of a kernel of that shape."""
        axes, rates = self._logs
        corners = [(0, 1.0)]
        for axis, coordinate in zip(axes, coordinates, strict=True):
            near = _neighbours(axis, math.log(max(coordinate, 1e-9)))
            corners = [(base * len(axis) + n, weight * w) for base, weight in corners for n, w in near]
        return math.exp(sum(rates[corner] * weight for corner, weight in corners)) * self.unit_ns * self.times

    def kernel_ns(self, coordinates: Sequence[float], flops: float) -> float:
        """Nanoseconds of a kernel of that shape and so many floating-point operations."""
        return max(self.least_ns, flops * self.ns_per_flop(coordinates))

    def holds(self, coordinates: Sequence[float]) -> bool:
        """Whether the shape lies within the grid."""
        return all(axis[0] <= x <= axis[-1] for axis, x in zip(self.axes, coordinates, strict=True))

    def slowed(self, times: float) -> Table:
        """Where everything takes so many times as long."""
        return replace(self, times=self.times * times, least_ns=self.least_ns * times)


def _neighbours(axis: Sequence[float], x: float) -> list[tuple[int, float]]:
    """The positions on both sides of x and their weights."""
    right = bisect_right(axis, x)
    if right == 0 or right == len(axis):
        return [(min(right, len(axis) - 1), 1.0)]
    share = (x - axis[right - 1]) / (axis[right] - axis[right - 1])
    return [(right - 1, 1 - share), (right, share)]


def read_tables(items: Sequence[Mapping[str, Any]], origin: str) -> dict[str, Table]:
    """Tables of a profile's JSON by name. Raises ProfileError for one that is none."""
    found: dict[str, Table] = {}
    for item in items:
        table = _read(item, found, origin)
        _check(table, origin)
        found[table.name] = table
    return found


def _read(item: Mapping[str, Any], before: Mapping[str, Table], origin: str) -> Table:
    fields = {name: value for name, value in item.items() if name not in ("rates", "axes", "provenance")}
    fields["provenance"] = Provenance(**item["provenance"])
    if item.get("like") is None:
        rates = _numbers(item, origin) if item["rates"] and isinstance(item["rates"][0], str) else item["rates"]
        return Table(axes=tuple(map(tuple, item["axes"])), rates=tuple(rates), **fields)
    like = before.get(item["like"])
    if like is None:
        raise ProfileError(f"{origin}: {item['name']}: expected to be like a table above, found {item['like']!r}")
    return Table(axes=like.axes, rates=like.rates, **{"unit_ns": like.unit_ns, **fields})


def _numbers(item: Mapping[str, Any], origin: str) -> list[float]:
    try:
        found = [float(text) for line in item["rates"] for text in line.split()]
    except (ValueError, AttributeError) as error:
        raise ProfileError(f"{origin}: {item['name']}: expected lines of rates, found {error}") from None
    if not all(0 < rate <= MOST for rate in found):
        raise ProfileError(f"{origin}: {item['name']}: expected rates above 0")
    return found


def write_table(table: Table) -> dict[str, Any]:
    """The inverse of what `read_tables` does, for one. Of a large grid, a line of text for each row of its last dim."""
    found: dict[str, Any] = {"name": table.name}
    if table.like is not None:
        found |= {"like": table.like}
    else:
        found |= {"axes": [list(axis) for axis in table.axes], "rates": _written(table)}
    others = {"unit_ns": (table.unit_ns, 1.0), "least_ns": (table.least_ns, 0.0), "times": (table.times, 1.0)}
    found |= {name: value for name, (value, usual) in others.items() if value != usual}
    return {**found, "provenance": dict(vars(table.provenance))}


def _written(table: Table) -> list[float] | list[str]:
    if len(table.rates) <= _MANY:
        return list(table.rates)
    row = len(table.axes[-1])
    return [" ".join(map(_short, table.rates[n : n + row])) for n in range(0, len(table.rates), row)]


def _short(value: float) -> str:
    return f"{value:.17g}".removesuffix(".0") if float(f"{value:.6g}") != value else f"{value:.6g}"


def _check(table: Table, origin: str) -> None:
    if len(table.rates) != math.prod(map(len, table.axes)):
        raise ProfileError(f"{origin}: {table.name}: expected a rate for each vertex, found {len(table.rates)}")
    if len(table.axes) != _NUM_AXES.get(table.name.partition(" ")[0], len(table.axes)):
        raise ProfileError(f"{origin}: {table.name}: expected a grid of other dims, found {len(table.axes)}")
    if any(right <= left for axis in table.axes for left, right in pairwise(axis)):
        raise ProfileError(f"{origin}: {table.name}: expected coordinates that increase, found {list(table.axes)}")
