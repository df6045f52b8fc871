"""Products of a training step in float8, from tables of products that cast their first operand besides.

    time of a row = product + rows · (a + b · width)        (rows, width): the operand that is cast, token by token

Softwares that train in float8 cast what a layer reads once, and the gradient of what it makes once: Transformer Engine
writes the transposed one in the same kernel. So the forward product and the gradient of the input each bring the cast
of an operand; the gradient of the weights takes both as they are, and its table is without (`cast_before`).

a and b are read off the table itself: products of any number of features cast as much, so the line of time over
features has the cast where it meets zero (bfloat16's tables, which cast nothing, have nothing there).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import median

import numpy as np

from autopar.cost.tables import Table

ROWS, WIDTHS = (4096, 8192, 16384, 32768), (2048, 4096, 8192, 16384)
FEATURES = ((2048, 8192), (3072, 12288), (4096, 16384))  # pairs that a line is drawn through


def cast_ns(table: Table) -> tuple[float, float]:
    """Nanoseconds of casting a row, and of each element of it, in a table of (rows, features, width); none below 0."""
    of_a_row = [median(_intercept_ns(table, rows, width) / rows for rows in ROWS) for width in WIDTHS]
    each, row = np.polyfit(WIDTHS, of_a_row, 1)
    return max(0.0, float(row)), max(0.0, float(each))


def _intercept_ns(table: Table, rows: float, width: float) -> float:
    found = []
    for few, many in FEATURES:
        less, more = (table.kernel_ns((rows, n, width), 2.0 * rows * n * width) for n in (few, many))
        found.append((less * many - more * few) / (many - few))
    return median(found)


def cast_before(table: Table, peak_flops: float) -> Table:
    """The table of products whose operands were cast before; none of them faster than the device's peak."""
    row, each = cast_ns(table)
    least = 1e9 / peak_flops / table.unit_ns
    rates = []
    for rate, (rows, features, width) in zip(table.rates, product(*table.axes), strict=True):
        cast = rows * (row + each * width) / (2.0 * rows * features * width)
        rates.append(max(rate * table.times - cast / table.unit_ns, least))
    return replace(table, rates=tuple(rates), times=1.0, like=None)
