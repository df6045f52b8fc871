"""A linear operator over split rows whose weight's gradient is made of the rows of all ranks, on each of them.

    backward   x and g of each rank, side by side → all_gather → gᵀx and Σg, whole on every rank
               meanwhile g·W, of this rank's rows

Zeros that are added to even out rows add nothing to either sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.mesh import Axis

__all__ = ["linear_by_factors"]


def linear_by_factors(
    x: Tensor, weight: Tensor, bias: Tensor | None, axes: Sequence[Axis], rows: int | None = None
) -> Tensor:
    """x (…, in) of which the axes split the rows, weight (out, in), bias (out,) → (…, out), as `F.linear`.

    The gradients of weight and bias are those of all rows (type I on the axes). rows: the most that a rank has, where
    they are not equal.
    """
    real = tuple(axis for axis in axes if axis.size > 1)
    matrix = x.reshape(math.prod(x.shape[:-1]), x.size(-1))  # of no columns, -1 would say nothing
    found: Tensor = _LinearByFactors.apply(matrix, weight, bias, real, rows)  # type: ignore[no-untyped-call] # torch's
    return found.view(*x.shape[:-1], weight.size(0))


class _LinearByFactors(torch.autograd.Function):
    """Of a matrix of rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axes: tuple[Axis, ...], rows: int | None
    ) -> Tensor:
        ctx.axes, ctx.rows = axes, rows
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wait = None
        if wants_weight or wants_bias:
            wait = _start_gather(torch.cat([x, gradient], 1), ctx.axes, ctx.rows)
        own = gradient @ weight if wants_x else None
        if wait is None:
            return own, None, None, None, None
        both = wait()
        inputs, gradients = both[:, : weight.size(1)], both[:, weight.size(1) :]
        whole = gradients.t() @ inputs if wants_weight else None
        return own, whole, gradients.sum(0) if wants_bias else None, None, None


def _start_gather(own: Tensor, axes: Sequence[Axis], rows: int | None) -> Callable[[], Tensor]:
    """Starts to gather rows along the last axis; along the others, once that is waited for."""
    if rows is not None and own.size(0) < rows:
        own = F.pad(own, (0, 0, 0, rows - own.size(0)))
    first = own.new_empty((axes[-1].size * own.size(0), own.size(1)))
    wait = comm.start_all_gather(first, own, axes[-1])

    def result() -> Tensor:
        wait()
        found = first
        for axis in reversed(axes[:-1]):
            whole = found.new_empty((axis.size * found.size(0), found.size(1)))
            comm.all_gather(whole, found, axis)
            found = whole
        return found

    return result
