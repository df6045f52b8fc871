"""Products in float8 whose operands were cast before, from tables of products that cast one themselves."""

from __future__ import annotations

from itertools import product

import pytest

from autopar.cost.provenance import Provenance
from autopar.cost.tables import Table
from benchmarks.accuracy.gpu.float8 import cast_before, cast_ns

PEAK, ROW_NS, EACH_NS = 1e15, 4.0, 0.0016
AXES = ((512.0, 4096.0, 8192.0, 16384.0, 32768.0), (2048.0, 3072.0, 4096.0, 8192.0, 12288.0, 16384.0),
        (2048.0, 4096.0, 8192.0, 16384.0))  # fmt: skip


def table(casts: float) -> Table:
    rates = [
        (2e9 * m * n * k / PEAK + casts * m * (ROW_NS + EACH_NS * k)) / (2 * m * n * k) / 1e-6
        for m, n, k in product(*AXES)
    ]
    source = Provenance("published", "a test", "2026-11-28")
    return Table("NT float8_e4m3fn", AXES, tuple(rates), source, unit_ns=1e-6)


def test_the_cast_is_read_off_products_of_other_numbers_of_features() -> None:
    assert cast_ns(table(1)) == pytest.approx((ROW_NS, EACH_NS), rel=0.02)
    row, each = cast_ns(table(0))
    assert row < 0.05 and each < 1e-4


def test_what_was_cast_before_takes_its_product_alone_and_no_less_than_the_peak() -> None:
    made = cast_before(table(1), PEAK)
    for m, n, k in product(*AXES):
        assert made.kernel_ns((m, n, k), 2 * m * n * k) == pytest.approx(2e9 * m * n * k / PEAK, rel=0.03)
    assert min(cast_before(table(1), PEAK / 2).rates) * 1e-6 >= 2e9 / PEAK * 0.999
