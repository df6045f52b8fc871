"""The collectives inside of operators: what rows of the table say that an operator sends, by where its operands lie.

Bytes are those that rank 0 hands to the collective (conventions of `ir.redistribution.transfer_bytes`; of an exchange
with uneven parts, what it sends).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from autopar.ir.placement import Axis, Placement, Type
from autopar.ops.call import Call


class Inner(NamedTuple):
    """One collective inside an operator, on a mesh axis (by position): the bytes of rank 0, and of the busiest one.

    is_early: it starts at the top of forward, long before the operator that awaits it, and stops no rank. is_beside: it
    is under way in as many messages as the axis has steps, while the operator computes on what came before; or at once,
    while it computes such a share of all. messages: how many these are, where not one a step. also: further axes, by
    position, whose ranks take part in the same group.
    """

    collective: str
    axis: int
    num_bytes: int
    busiest_bytes: int = 0
    is_early: bool = False
    is_beside: bool = False
    beside_share: float = 0.0
    messages: int = 0
    also: tuple[int, ...] = ()

    def along(self, axes: tuple[Axis, ...]) -> Axis:
        """The axis, or all of them as one, where they are several: neighbours, the outer one first."""
        if not self.also:
            return axes[self.axis]
        several = [axes[position] for position in (self.axis, *self.also)]
        name, size = "+".join(axis.name for axis in several), math.prod(axis.size for axis in several)
        return Axis(name, size, several[-1].stride)

    @property
    def priced_bytes(self) -> int:
        """What the collective's time depends on: the ranks wait for the busiest."""
        return max(self.num_bytes, self.busiest_bytes)


Sent = tuple[list[Inner], list[Inner]]
"""In the forward pass, and in the backward pass where the first operand has a gradient."""

SendRule = Callable[[Call, tuple[Placement, ...], tuple[Axis, ...]], Sent]


def split_by(placement: Placement, test: Callable[[Type], bool]) -> list[int]:
    """The axes, by position, that split a dim which passes the test."""
    return [axis for axis, type_ in enumerate(placement) if type_.kind == "S" and test(type_)]


def sums_of_statistics(call: Call, count: int, over: list[int]) -> Sent:
    """Means and variances over axes: two sums of `count` elements on each forward, two backward."""
    sums = [Inner("all_reduce", axis, count * max(4, call.tensor(0).itemsize)) for axis in over for _ in range(2)]
    return sums, sums
