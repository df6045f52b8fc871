"""The small integer programme, against trying all x."""

from __future__ import annotations

import math
import random
import time
from fractions import Fraction

import numpy as np
import pytest

from autopar.errors import PlanError
from autopar.ladders import Programme, provisioned
from autopar.ladders.programme import Provision

INSTANCES = 1_000
GRID = np.stack([axis.ravel() for axis in np.meshgrid(*[np.arange(1, 9)] * 5, indexing="ij")])


def tried(p: Programme) -> int | None:
    """The least devices of all x up to 8, in whole numbers."""
    x1, x2, x3, x4, x5 = GRID
    unit = math.lcm(*range(1, 9)) ** 2
    time_ = p.a * unit // x1 + p.b * unit // x2 + p.c * unit // (x3 * x4) + p.d * unit // (x3 * x5)
    money = p.e * (x1 + x2) + x3 * (p.f * x4 + p.g * x5)
    fits = (time_ <= p.time * unit) & (money <= p.budget)
    return int((x1 + x2 + x3 * (x4 + x5))[fits].min()) if fits.any() else None


def drawn(seed: int) -> Programme:
    draw = random.Random(seed)
    a, b, c, d = (draw.randint(0, 100) for _ in range(4))
    e, f, g = (draw.randint(0, 20) for _ in range(3))
    return Programme(a, b, c, d, e, f, g, draw.randint(5, 200), draw.randint(20, 600), most=8)


def satisfies(p: Programme, found: Provision) -> bool:
    x1, x2, x3, x4, x5 = found.x
    spent = Fraction(p.a, x1) + Fraction(p.b, x2) + Fraction(p.c, x3 * x4) + Fraction(p.d, x3 * x5)
    money = p.e * (x1 + x2) + x3 * (p.f * x4 + p.g * x5)
    return spent <= p.time and money <= p.budget and x1 + x2 + x3 * (x4 + x5) == found.devices


def test_equal_to_trying_all() -> None:
    spent, feasible = list[float](), 0
    for seed in range(INSTANCES):
        programme = drawn(seed)
        began = time.process_time()
        found = provisioned(programme)
        spent.append(time.process_time() - began)
        expected = tried(programme)
        assert (found is None) == (expected is None), seed
        if found is not None:
            feasible += 1
            assert found.devices == expected and satisfies(programme, found), seed
    assert INSTANCES / 4 < feasible < INSTANCES
    assert np.median(spent) < 0.02


def test_wrong_coefficients_are_refused() -> None:
    with pytest.raises(PlanError, match="expected a as a whole number"):
        Programme(-1, 0, 0, 0, 0, 0, 0, 1, 1)
