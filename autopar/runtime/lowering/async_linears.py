"""Linear operators that compute beside what they send, over an axis that splits their rows (asynchronous tensor
parallelism: Wang et al., ASPLOS'23).

    gathered    rows pass from rank to rank, and each block is multiplied while the next one comes
                backward: rows are gathered beside g·W, whose sum over ranks goes home beside gᵀx
    scattered   blocks of the result pass from rank to rank, each rank adding its product to what comes
                backward: blocks of g pass around beside g·W

Products are those of whole matrices but for their rows, so that nothing is computed twice. What came from others is not
kept: the backward pass has it come again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.mesh import Axis

__all__ = ["gathered_linears", "linears", "scattered_linear"]


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`F.linear` of x (…, in) by each weight (outₙ, in), and its bias (outₙ,) where there are any: (…, outₙ) each."""
    return tuple(F.linear(x, weight, *bias) for weight, bias in _pairs(weights, biases))


def gathered_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], dim: int, axis: Axis
) -> tuple[Tensor, ...]:
    """`linears` of the rows of all ranks: x is this rank's of equal parts along `dim`, results are whole along it.

    Gradients of weights and biases are of all rows; that of x is summed over ranks, and cut. Every rank must call it.
    """
    if axis.size == 1:
        return linears(x, weights, biases)
    found: tuple[Tensor, ...] = _GatheredLinears.apply(x, dim, axis, len(weights), *weights, *biases)  # type: ignore[no-untyped-call] # torch's
    return found


def scattered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, axis: Axis) -> Tensor:
    """`F.linear` of x (…, in) by weight (out, in), both of them this rank's part along `in`, summed over ranks and cut
    into equal parts along `dim`.

    The bias is added to this rank's part, of which its gradient is. Every rank must call it.
    """
    if axis.size == 1:
        return F.linear(x, weight, bias)
    found: Tensor = _ScatteredLinear.apply(x, weight, bias, dim, axis)  # type: ignore[no-untyped-call] # torch's
    return found


def _pairs(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    each = [(bias,) for bias in biases] if biases else [()] * len(weights)
    return zip(weights, each, strict=True)


class _GatheredLinears(torch.autograd.Function):
    """Saves this rank's rows, and the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, count: int, *stored: Tensor) -> tuple[Tensor, ...]:
        weights, biases = stored[:count], stored[count:]
        ctx.dim, ctx.axis, ctx.count = dim, axis, count
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        own = _rows(x, dim)
        made = [own.new_empty((axis.size * own.size(0), weight.size(0))) for weight in weights]
        for block, rows in _passing(own, axis, lambda rows: torch.empty_like(own)):
            for whole, (weight, bias) in zip(made, _pairs(weights, biases), strict=True):
                _multiply(block, weight.t(), bias, whole[rows])
        shape = [axis.size * size if place == dim else size for place, size in enumerate(x.shape)]
        return tuple(_shaped(whole, shape, dim) for whole in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        wants, count = ctx.needs_input_grad, ctx.count
        given = [None if g is None else _rows(g, ctx.dim) for g in gradients]
        wants_weight = any(want and g is not None for want, g in zip(wants[4 : 4 + count], given, strict=True))
        gather = _start_gather(_rows(x, ctx.dim), ctx.axis) if wants_weight else None
        home = _start_sum(_product_sum(given, weights), ctx.axis) if wants[0] else None
        rows = None if gather is None else gather()
        wide = [
            g.t() @ rows if g is not None and rows is not None and want else None
            for g, want in zip(given, wants[4 : 4 + count], strict=True)
        ]
        summed = [
            g.sum(0) if g is not None and want else None for g, want in zip(given, wants[4 + count :], strict=False)
        ]
        own = None if home is None else _shaped(home(), x.shape, ctx.dim)
        return own, None, None, None, *wide, *summed


class _ScatteredLinear(torch.autograd.Function):
    """Saves what it multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        ctx.save_for_backward(x, weight)
        every = _rows(x, dim)
        length, coming, arrived = every.size(0) // axis.size, None, None
        for step in range(axis.size):
            is_last, rank = step == axis.size - 1, (axis.index - 1 - step) % axis.size
            part = every.new_empty((length, weight.size(0)))
            added = (bias,) if is_last and bias is not None else ()
            _multiply(every[rank * length : (rank + 1) * length], weight.t(), added, part)
            if coming is not None and arrived is not None:
                coming()
                part.add_(arrived)
            if not is_last:
                arrived = torch.empty_like(part)
                coming = comm.start_pass_on(arrived.view(-1), part.view(-1), axis)
        shape = [size // axis.size if place == dim else size for place, size in enumerate(x.shape)]
        return _shaped(part, [*shape[:-1], weight.size(0)], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        own, axis = _rows(gradient, ctx.dim), ctx.axis
        whole = own.new_empty((axis.size * own.size(0), own.size(1))) if wants_weight else None
        back = own.new_empty((axis.size * own.size(0), weight.size(1))) if wants_x else None

        def room(rows: slice) -> Tensor:
            return torch.empty_like(own) if whole is None else whole[rows]

        if wants_x or wants_weight:
            for block, rows in _passing(own, axis, room):
                if whole is not None and block is own:
                    whole[rows] = own
                if back is not None:
                    _multiply(block, weight, (), back[rows])
        wide = None if whole is None else whole.t() @ _rows(x, ctx.dim)
        found = None if back is None else _shaped(back, x.shape, ctx.dim)
        return found, wide, own.sum(0) if wants_bias else None, None, None


def _passing(own: Tensor, axis: Axis, room: Callable[[slice], Tensor]) -> Iterator[tuple[Tensor, slice]]:
    """The blocks of all ranks and which rows of the whole they are, this rank's first; the next one is under way to the
    room for it while one is worked on."""
    block, length = own, own.size(0)
    for step in range(axis.size):
        rank, coming = (axis.index - step) % axis.size, None
        if step < axis.size - 1:
            before = (rank - 1) % axis.size
            arriving = room(slice(before * length, (before + 1) * length))
            coming = comm.start_pass_on(arriving.view(-1), block.view(-1), axis)
        yield block, slice(rank * length, (rank + 1) * length)
        if coming is not None:
            coming()
            block = arriving


def _start_gather(own: Tensor, axis: Axis) -> Callable[[], Tensor]:
    whole = own.new_empty((axis.size * own.size(0), own.size(1)))
    wait = comm.start_all_gather(whole, own, axis)

    def result() -> Tensor:
        wait()
        return whole

    return result


def _start_sum(summand: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Of summands of all ranks, each rank's part of the rows."""
    own = summand.new_empty((summand.size(0) // axis.size, summand.size(1)))
    wait = comm.start_reduce_scatter(own, summand, axis)

    def result() -> Tensor:
        wait()
        return own

    return result


def _product_sum(gradients: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
    """Σ g·W over the results that have a gradient."""
    total: Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is not None:
            total = gradient @ weight if total is None else total.addmm_(gradient, weight)
    assert total is not None, "a backward pass has a gradient"
    return total


def _multiply(left: Tensor, right: Tensor, bias: tuple[Tensor, ...], into: Tensor) -> None:
    if bias:
        torch.addmm(bias[0], left, right, out=into)
    else:
        torch.mm(left, right, out=into)


def _rows(x: Tensor, dim: int) -> Tensor:
    """A matrix of rows whose order is that along `dim`."""
    return x.movedim(dim, 0).reshape(math.prod(x.shape[:-1]), x.size(-1)).contiguous()


def _shaped(matrix: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Such a matrix in the shape of what it is of, with as many columns as it has."""
    others = [size for place, size in enumerate(shape[:-1]) if place != dim]
    return matrix.view(shape[dim], *others, matrix.size(1)).movedim(0, dim).contiguous()
