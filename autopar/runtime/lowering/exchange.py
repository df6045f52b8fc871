"""Rows that are exchanged over ranks, as many as are known when the program runs.

Rows lie in blocks, one for each index of an array of counts such as (ranks to go to, experts there). An exchange over
an axis sends the blocks of each index of the first dim to that rank; afterwards the first dim says where they are from.
Over several axes, rows go along one after the other, so that those for one node travel there together:

    (to inner, to outer, experts) → (from inner, to outer, experts) → (to outer, from inner, experts) → (from outer, …)

An exchange is begun and ended by two functions, so that something may be computed meanwhile; its backward pass runs the
other way, begun where the forward pass ended.

Which axes there are, and into how many chunks rows are cut, may depend on the load (`LoadTable`): then every rank is
told the counts of all, so that all take the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.mesh import Axis


class RowOrder(NamedTuple):
    """Which row comes where, and where each row goes."""

    rows: Tensor
    inverse: Tensor


class RowLeg(NamedTuple):
    """The way of rows along one axis: as they must lie to be sent, and how many go to and come from each rank."""

    axis: Axis
    order: RowOrder | None
    sent: list[int]
    received: list[int]


class RowWay(NamedTuple):
    """All legs, and the order that brings what came to the experts, one after the other. counts: of each expert."""

    legs: tuple[RowLeg, ...]
    order: RowOrder | None
    counts: list[int]


def ways(counts: Tensor, axes: Sequence[Axis]) -> list[RowWay]:
    """The way of the rows of each of several chunks, of which `counts` are (chunks, ranks of each axis, experts).

    Counts are exchanged, and read by the host once. Every rank of the axes must call it.
    """
    before = [counts]  # how rows lie before each leg, and at last
    for level, axis in enumerate(axes):
        before.append(_sent_alike(before[-1].movedim(1 + level, 1), axis))
    return _ways(before, before, axes)


def _ways(before: Sequence[Tensor], read: Sequence[Tensor], axes: Sequence[Axis]) -> list[RowWay]:
    """read: the same counts, where the host reads them."""
    lengths = list[Tensor]()
    for level in range(len(axes)):
        lengths += [_along(read[level], 1 + level), _along(read[level + 1], 1)]
    lengths.append(_along(read[-1], read[-1].dim() - 1))
    told = torch.cat(lengths, 1).tolist()
    widths = [length.size(1) for length in lengths]
    return [_way(row, widths, [lying[chunk] for lying in before], axes) for chunk, row in enumerate(told)]


def _way(told: list[int], widths: list[int], before: list[Tensor], axes: Sequence[Axis]) -> RowWay:
    """Of one chunk. told: rows to and from each rank, leg by leg, then of each expert; widths: how many of each."""
    ends = list(accumulate(widths))
    *of_legs, experts = [told[end - width : end] for end, width in zip(ends, widths, strict=True)]
    legs = []
    for level, axis in enumerate(axes):
        sent, received = of_legs[2 * level : 2 * level + 2]
        legs.append(RowLeg(axis, order_by(before[level], level, sum(sent)) if level else None, sent, received))
    last = before[-1]
    return RowWay(tuple(legs), order_by(last, last.dim() - 1, sum(experts)) if axes else None, experts)


def _along(counts: Tensor, dim: int) -> Tensor:
    """(chunks, dim): the rows of each index."""
    return counts.movedim(dim, 1).reshape(counts.size(0), counts.size(dim), -1).sum(2)


def _sent_alike(counts: Tensor, axis: Axis) -> Tensor:
    """What the ranks have counted for this one, (chunks, from, …), of (chunks, to, …)."""
    buffer = counts.movedim(1, 0).contiguous()
    output = torch.empty_like(buffer)
    comm.all_to_all(output, buffer, axis)
    return output.movedim(0, 1)


def order_by(counts: Tensor, dim: int, total: int) -> RowOrder:
    """Of rows in blocks of these counts, so that the blocks' dim `dim` becomes the first."""
    sizes = counts.movedim(dim, 0).flatten()
    begins = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape).movedim(dim, 0).flatten()
    moved = begins - (sizes.cumsum(0) - sizes)
    places = torch.arange(total, device=counts.device)
    rows = moved.repeat_interleave(sizes, output_size=total) + places
    return RowOrder(rows, torch.empty_like(rows).index_copy_(0, rows, places))


class _RowsReordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def reordered(rows: Tensor, order: RowOrder | None, is_back: bool = False) -> Tensor:
    """Rows in an order, or back as they were."""
    if order is None:
        return rows
    there, back = (order.inverse, order.rows) if is_back else order
    made: Tensor = _RowsReordered.apply(rows, there, back)  # type: ignore[no-untyped-call]
    return made


# Ways by load ----------------------------------------


class LoadTable(NamedTuple):
    """How rows are exchanged, by the rows of the rank that gets most of them: from so many on, "flat" or "two-level",
    and in how many chunks. joint: all axes of the exchange as one."""

    rows: Sequence[tuple[int, str, int]]
    joint: Axis

    @property
    def chunks(self) -> int:
        """The most of any row; those of the others divide it."""
        return max(chunks for _, _, chunks in self.rows)

    def at(self, most: int) -> tuple[str, int]:
        """How, and in how many chunks, where the busiest rank gets so many rows."""
        return next((how, chunks) for start, how, chunks in reversed(self.rows) if start <= most)


class SeenLoad:
    """The counts of all ranks of an exchange. Every rank of the axes must make it; the host reads them once.

    axes: the outer one first. counts: of this rank, in as many chunks as the table has at most: (chunks, ranks of each
    axis, experts).
    """

    def __init__(self, counts: Tensor, axes: Sequence[Axis], table: LoadTable, beside: Axis | None = None) -> None:
        """beside: an axis whose ranks, each of another exchange, take the same way as the busiest of them."""
        sizes = [axis.size for axis in axes]
        self._axes = axes
        everyone = counts.new_empty((table.joint.size, *counts.shape))
        comm.all_gather(everyone, counts.contiguous(), table.joint)
        self._everyone = everyone.view(*sizes, *counts.shape)
        most = self._most(self._everyone)
        if beside is not None:
            comm.all_reduce(most, beside, dist.ReduceOp.MAX)
        told = torch.cat([everyone.flatten(), most]).cpu()
        self._read, self.most = told[:-1].view(self._everyone.shape), int(told[-1])
        self.how, self.chunks = table.at(self.most)
        self.legs = [table.joint] if self.how == "flat" else list(reversed(axes))

    def _most(self, everyone: Tensor) -> Tensor:
        """The rows that the busiest rank gets."""
        levels = len(self._axes)
        return everyone.sum((*range(levels + 1), -1)).max().view(1)

    def ways(self) -> list[RowWay]:
        """The ways of the rows of this rank along the legs, chunk by chunk."""
        return _ways(self._before(self._everyone), self._before(self._read), self.legs)

    def _before(self, everyone: Tensor) -> list[Tensor]:
        """How rows lie on this rank before each leg, and at last, as exchanges of counts would tell."""
        count, levels = len(self.legs), len(self._axes)
        chosen = self._as_chosen(everyone.flatten(0, levels - 1))
        sizes = [leg.size for leg in reversed(self.legs)]
        chosen = chosen.view(*sizes, *chosen.shape[1:])  # from ranks of the outer leg first
        chosen = chosen.permute(*reversed(range(count)), *range(count, chosen.dim()))
        return [self._lying(chosen, level) for level in range(count + 1)]

    def _lying(self, counts: Tensor, level: int) -> Tensor:
        """(chunks, from ranks of the legs that are done, the last one first, to ranks of the others, experts)."""
        free = slice(None)
        senders = [free if number < level else leg.index for number, leg in enumerate(self.legs)]
        receivers = [leg.index if number < level else free for number, leg in enumerate(self.legs)]
        found = counts[(*senders, free, *receivers)]
        return found.permute(level, *reversed(range(level)), *range(level + 1, found.dim()))

    def _as_chosen(self, counts: Tensor) -> Tensor:
        """(…, chunks, ranks of each axis, experts) → (…, fewer chunks, ranks of each leg, experts)."""
        levels = len(self._axes)
        most = counts.size(-levels - 2)
        first = counts.dim() - levels - 2
        shape = (*counts.shape[:first], self.chunks, most // self.chunks, *counts.shape[first + 1 :])
        parted = counts.reshape(shape).sum(first + 1)
        if self.how == "flat":
            return parted.flatten(first + 1, -2)
        first += 1
        return parted.permute(*range(first), *reversed(range(first, first + levels)), first + levels)


# Rows under way ----------------------------------------


@dataclass(slots=True)
class RowFlight:
    """Rows under way along a leg, there or back, or their gradients the other way."""

    leg: RowLeg
    is_back: bool
    under_way: tuple[comm.Wait, Tensor, Tensor] | None = None  # with what is sent, and what arrives

    def start(self, rows: Tensor, is_back: bool) -> Tensor:
        """Begins to send rows (count, width); what arrives may be read after `wait`."""
        leg = self.leg
        sent, received = (leg.received, leg.sent) if is_back else (leg.sent, leg.received)
        rows, width = rows.contiguous(), rows.size(1)
        made = rows.new_empty((sum(received), width))
        lengths = ([count * width for count in counts] for counts in (received, sent))
        wait = comm.start_exchange(made.view(-1), next(lengths), rows.view(-1), next(lengths), leg.axis)
        self.under_way = wait, rows, made
        return made

    def wait(self) -> Tensor:
        """What has arrived."""
        assert self.under_way is not None, "nothing was sent"
        (wait, _, made), self.under_way = self.under_way, None
        wait()
        return made


class _RowsSent(torch.autograd.Function):
    """Begins to send; its backward pass waits for the gradients, which `_RowsArrived` has begun to send."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: RowFlight) -> Tensor:
        ctx.flight = flight
        return flight.start(rows, flight.is_back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.wait(), None


class _RowsArrived(torch.autograd.Function):
    """Waits for what was sent; its backward pass begins to send the gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: RowFlight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.start(grad, not ctx.flight.is_back)
        return grad, None  # of this many rows; `_RowsSent` takes what arrives


Begun = tuple[Tensor, RowFlight]


def begin(rows: Tensor, leg: RowLeg, is_back: bool = False) -> Begun:
    """Begins to send rows along a leg, or back."""
    flight = RowFlight(leg, is_back)
    sent = rows if is_back else reordered(rows, leg.order)
    made: Tensor = _RowsSent.apply(sent, flight)  # type: ignore[no-untyped-call]
    return made, flight


def end(begun: Begun) -> Tensor:
    """What has arrived; what came back lies as it did before the leg."""
    made: Tensor = _RowsArrived.apply(*begun)  # type: ignore[no-untyped-call]
    flight = begun[1]
    return reordered(made, flight.leg.order, is_back=True) if flight.is_back else made
