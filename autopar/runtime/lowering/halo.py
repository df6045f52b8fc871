"""Halo exchange: each rank of an axis gets the rows of a split dim that its own windows cover.

A rank *holds* a range of the dim's rows and *needs* another one. Every rank knows the ranges of all, so each row
goes straight from the rank that holds it to those that need it, however far away: slices may be uneven, and
shorter than the halo. The gradient takes the way back, and is added where several ranks needed a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.mesh import Axis

Range = tuple[int, int]  # begin and end


@dataclass(frozen=True, slots=True)
class Window:
    """What an output row of a convolution or pooling covers along one dim."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """From the first row under the kernel to the last."""
        return self.dilation * (self.kernel - 1) + 1

    def result_size(self, size: int) -> int:
        """Number of output rows."""
        return (size + 2 * self.padding - self.span) // self.stride + 1

    def covered(self, begin: int, end: int) -> Range:
        """The input rows under the output rows from `begin` to `end`; some may lie in the padding."""
        return begin * self.stride - self.padding, (end - 1) * self.stride - self.padding + self.span


def chunk(size: int, parts: int, index: int) -> Range:
    """The rows of part `index`, as `torch.chunk` cuts them."""
    length = -(-size // parts)
    return min(size, index * length), min(size, (index + 1) * length)


def clip(rows: Range, size: int) -> Range:
    """Those of the rows that exist."""
    begin = min(max(rows[0], 0), size)
    return begin, max(begin, min(rows[1], size))


@cache
def ranges(size: int, window: Window, parts: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """For each rank, the input rows that it holds and those that its part of the output needs."""
    after = window.result_size(size)
    held = tuple(chunk(size, parts, index) for index in range(parts))
    needed = tuple(clip(window.covered(*chunk(after, parts, index)), size) for index in range(parts))
    return held, needed


def with_halo(x: Tensor, dim: int, axis: Axis, size: int, window: Window) -> Tensor:
    """The existing rows along `dim` (of `size` over the axis) under this rank's windows."""
    held, needed = ranges(size, window, axis.size)
    if held == needed:
        return x
    result: Tensor = _Exchange.apply(x, dim, axis, held, needed)  # type: ignore[no-untyped-call]
    return result


def rows_of_padding(axis: Axis, size: int, window: Window, exist: int) -> tuple[int, int]:
    """Rows of padding under this rank's windows, before and after those that exist."""
    begin, end = window.covered(*chunk(window.result_size(size), axis.size, axis.index))
    front = min(max(0, -begin), end - begin)
    return front, end - begin - front - exist


def overlap(left: Range, right: Range) -> Range:
    """The rows that are in both; an empty range within the left one where there are none."""
    begin = min(max(left[0], right[0]), left[1])
    return begin, max(begin, min(left[1], right[1]))


class _Exchange(torch.autograd.Function):
    """The needed rows out of the held ones; backward, the sum of the gradients of the held ones."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, axis: Axis, held: tuple[Range, ...], needed: tuple[Range, ...]
    ) -> Tensor:
        ctx.dim, ctx.axis, ctx.held, ctx.needed = dim, axis, held, needed
        return fetched(x, dim, axis, held, needed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return given_back(grad, ctx.dim, ctx.axis, ctx.held, ctx.needed), None, None, None, None


def fetched(x: Tensor, dim: int, axis: Axis, held: Sequence[Range], needed: Sequence[Range]) -> Tensor:
    """The needed rows, out of the held ones."""
    return torch.cat(_trade(x, dim, axis, held, needed), dim)


def given_back(grad: Tensor, dim: int, axis: Axis, held: Sequence[Range], needed: Sequence[Range]) -> Tensor:
    """The sum of what ranks have of the held rows, out of the needed ones."""
    begin, end = held[axis.index]
    total = grad.new_zeros((*grad.shape[:dim], end - begin, *grad.shape[dim + 1 :]))
    for piece, other in zip(_trade(grad, dim, axis, needed, held), needed, strict=True):
        first, last = overlap(held[axis.index], other)
        total.narrow(dim, first - begin, last - first).add_(piece)
    return total


def _trade(x: Tensor, dim: int, axis: Axis, own: Sequence[Range], wanted: Sequence[Range]) -> list[Tensor]:
    """The pieces of this rank's wanted rows, by the rank whose own rows they are among."""
    begin = own[axis.index][0]
    pieces = []
    for rows in wanted:
        first, last = overlap(own[axis.index], rows)
        pieces.append(x.narrow(dim, first - begin, last - first))
    kept, pieces[axis.index] = pieces[axis.index], x.narrow(dim, 0, 0)
    buffer = torch.cat([piece.reshape(-1) for piece in pieces])
    shapes = [
        (*x.shape[:dim], 0 if index == axis.index else _length(overlap(rows, wanted[axis.index])), *x.shape[dim + 1 :])
        for index, rows in enumerate(own)
    ]
    lengths = [torch.Size(shape).numel() for shape in shapes]
    output = buffer.new_empty(sum(lengths))
    comm.exchange(output, lengths, buffer, [piece.numel() for piece in pieces], axis)
    found = [part.view(shape) for part, shape in zip(torch.split(output, lengths), shapes, strict=True)]
    found[axis.index] = kept
    return found


def _length(rows: Range) -> int:
    return rows[1] - rows[0]
