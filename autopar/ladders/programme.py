"""A small integer programme of provisioning, exact: how many devices of each role under a time and a budget.

    minimise    x₁ + x₂ + x₃ · (x₄ + x₅)                     devices
    subject to  a/x₁ + b/x₂ + c/(x₃·x₄) + d/(x₃·x₅) ≤ T      time of what each does
                e·(x₁ + x₂) + x₃ · (f·x₄ + g·x₅) ≤ B         money
                1 ≤ xᵢ ≤ n, whole

x₁ and x₂ are of two parts that are not replicated (such as loading and evaluation), x₃ is a number of equal groups with
x₄ and x₅ devices each (such as workers and servers). Times divide by how many share them, so the programme is neither
linear nor convex in integers; but it comes apart into pairs (x₁, x₂) and triples (x₃, x₄, x₅), whose time, money and
devices add up. Of each only those count that no other of as few devices undercuts in both time and money. All is whole
numbers: times are compared as multiples of 1 / lcm(1 … n)², so that nothing is rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import PlanError

MOST = 16
"""Of each variable: lcm(1 … 16)² times a coefficient of a million is a whole number of 64 bits."""
_MOST_TIME = 2_000_000
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Programme:
    """Coefficients a to g, the time T and the budget B, all whole numbers from 0 up. most: n."""

    a: int
    b: int
    c: int
    d: int
    e: int
    f: int
    g: int
    time: int
    budget: int
    most: int = MOST

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_time = name in ("a", "b", "c", "d", "time")
            most = MOST if name == "most" else _MOST_TIME if is_time else 2**40
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise PlanError(f"expected {name} as a whole number from 0 to {most:,}, found {value!r}")
        if self.most < 1:
            raise PlanError("expected most as a number from 1 up, found 0")


class Provision(NamedTuple):
    """The least devices, and the x that have them; of equals the cheapest, then the fastest, then the first."""

    devices: int
    x: tuple[int, int, int, int, int]


def provisioned(programme: Programme) -> Provision | None:
    """The optimum; None where no x does it in time and under the budget."""
    p, (pairs, triples, scale) = programme, _grids(programme.most)
    unit = scale * scale
    one, two = pairs
    three, four, five = triples
    first = _Choices(
        one + two, p.a * scale // one * scale + p.b * scale // two * scale, p.e * (one + two), pairs
    ).undercut_by_none()
    second = _Choices(
        three * (four + five), _over(p.c, three, four, scale) + _over(p.d, three, five, scale),
        three * (p.f * four + p.g * five), triples,
    ).undercut_by_none()  # fmt: skip
    time = first.time[:, None] + second.time[None, :]
    money = first.money[:, None] + second.money[None, :]
    fits = (time <= p.time * unit) & (money <= p.budget)
    if not fits.any():
        return None
    devices = first.devices[:, None] + second.devices[None, :]
    least = int(devices[fits].min())
    where = np.argwhere(fits & (devices == least))
    best = min(
        where.tolist(), key=lambda at: (int(money[tuple(at)]), int(time[tuple(at)]), first.x(at[0]), second.x(at[1]))
    )
    return Provision(least, (*first.x(best[0]), *second.x(best[1])))  # type: ignore[arg-type] # two and three


def _over(amount: int, groups: Numbers, each: Numbers, scale: int) -> Numbers:
    """amount / (groups · each), in units of 1 / scale²; exact, for both divide scale."""
    return amount * (scale // groups) * (scale // each)


class _Choices(NamedTuple):
    """Choices of some variables: devices, time and money of each, and the variables' values."""

    devices: Numbers
    time: Numbers
    money: Numbers
    values: tuple[Numbers, ...]

    def x(self, place: int) -> tuple[int, ...]:
        return tuple(int(values[place]) for values in self.values)

    def undercut_by_none(self) -> _Choices:
        """Those that no other of as few devices is at least as fast and as cheap as; of equals the first."""
        order = np.lexsort((*reversed(self.values), self.time, self.money, self.devices))
        kept, fronts = list[int](), list[tuple[int, int]]()
        for place in order.tolist():
            time, money = int(self.time[place]), int(self.money[place])
            if not any(t <= time and m <= money for t, m in fronts):
                fronts = [(t, m) for t, m in fronts if not (time <= t and money <= m)] + [(time, money)]
                kept.append(place)
        at = np.array(kept)
        return _Choices(self.devices[at], self.time[at], self.money[at], tuple(values[at] for values in self.values))


@lru_cache(maxsize=MOST)
def _grids(most: int) -> tuple[tuple[Numbers, ...], tuple[Numbers, ...], int]:
    """All pairs, all triples, and the lcm of 1 to `most`."""
    one = np.arange(1, most + 1, dtype=np.int64)

    def grid(number: int) -> Any:
        return tuple(axis.ravel() for axis in np.meshgrid(*[one] * number, indexing="ij"))

    return grid(2), grid(3), math.lcm(*range(1, most + 1))
