"""Operators that keep for their backward pass a few bits of each element, which is all that it asks of them.

    relu         whether an element is not cut off           1 bit, instead of the result
    leaky_relu   whether it is above zero                    1 bit, instead of the input
    hardtanh     whether it is between the bounds (ReLU6)    1 bit, instead of the input
    clamp        whether it is between, or at one of them    1 bit, instead of the input
    threshold    whether it is above                         1 bit, instead of the input
    dropout      whether it was kept                         1 bit, instead of a byte
    max_pool     where in its window the largest one is      1 to 8 bits a result, instead of the input and 8 bytes

Forward and gradients are torch's own, bit for bit. Gist: Jain et al., ISCA'18, sections 4.1 and 4.2 (binarize).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.bits import packed, room_for, unpacked, written
from autopar.runtime.lowering.halo import Window
from autopar.runtime.lowering.windows import Split, covered
from autopar.runtime.mesh import Axis
from autopar.runtime.randomness import keep_mask, masked

__all__ = ["clamp_in_bits", "hardtanh_in_bits", "leaky_relu_in_bits", "max_pool_in_bits", "native_dropout_in_bits",
           "relu_in_bits", "threshold_in_bits"]  # fmt: skip

_Window = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], bool]
"""Kernel, stride, padding and dilation, row and column, and whether sizes are rounded up."""


def relu_in_bits(x: Tensor) -> Tensor:
    """As `relu`; a bit an element is kept."""
    made: Tensor = _Relu.apply(x)  # type: ignore[no-untyped-call] # torch's
    return made


class _Relu(torch.autograd.Function):
    """Gradients pass where the result is not 0 or less: as in torch, where it is no number, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.relu(x)
        room = room_for(result.shape, 1, result)
        torch.le(result, 0, out=written(room, result.shape, torch.bool)).logical_not_()
        ctx.save_for_backward(packed(room, 1))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _passed(gradient, *ctx.saved_tensors)


def _passed(gradient: Tensor, passing: Tensor) -> Tensor:
    """The gradient where a bit is set, and 0 elsewhere."""
    made = unpacked(passing, 1, gradient.shape, torch.bool).to(gradient.dtype)
    # torch's own kernel, which takes a tenth of the time of `where` on a CPU, in the memory of its result
    return torch.ops.aten.threshold_backward.grad_input(gradient, made, 0, grad_input=made)  # type: ignore[no-any-return] # torch's


def hardtanh_in_bits(x: Tensor, low: float, high: float) -> Tensor:
    """As `hardtanh`; a bit an element is kept."""
    made: Tensor = _Clipped.apply(x, low, high, (torch.gt, torch.lt))  # type: ignore[no-untyped-call] # torch's
    return made


def threshold_in_bits(x: Tensor, threshold: float, value: float) -> Tensor:
    """As `threshold`; a bit an element is kept."""
    made: Tensor = _Threshold.apply(x, threshold, value)  # type: ignore[no-untyped-call] # torch's
    return made


def clamp_in_bits(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """As `clamp` by numbers; a bit an element is kept."""
    made: Tensor = _Clipped.apply(x, low, high, (torch.ge, torch.le))  # type: ignore[no-untyped-call] # torch's
    return made


class _Clipped(torch.autograd.Function):
    """Gradients pass where the input compares so with the bounds that there are. What is no number passes none: of
    torch's own kernels for `hardtanh` some do, as it lies in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float | None, high: float | None, compare: Sequence[Any]) -> Tensor:
        room = room_for(x.shape, 1, x)
        passing = written(room, x.shape, torch.bool)
        asked = [(compared, bound) for compared, bound in zip(compare, (low, high), strict=True) if bound is not None]
        asked[0][0](x, asked[0][1], out=passing)
        for compared, bound in asked[1:]:
            passing.logical_and_(compared(x, bound))
        ctx.save_for_backward(packed(room, 1))
        return torch.clamp(x, low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _passed(gradient, *ctx.saved_tensors), None, None, None


class _Threshold(torch.autograd.Function):
    """Gradients pass where the input is not at the threshold or below: as in torch, where it is no number, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: float, value: float) -> Tensor:
        room = room_for(x.shape, 1, x)
        torch.le(x, threshold, out=written(room, x.shape, torch.bool)).logical_not_()
        ctx.save_for_backward(packed(room, 1))
        return torch.nn.functional.threshold(x, threshold, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _passed(gradient, *ctx.saved_tensors), None, None


def leaky_relu_in_bits(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """As `leaky_relu`; a bit an element is kept."""
    made: Tensor = _LeakyRelu.apply(x, negative_slope)  # type: ignore[no-untyped-call] # torch's
    return made


class _LeakyRelu(torch.autograd.Function):
    """Gradients pass where the input is above 0, and are multiplied elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        room = room_for(x.shape, 1, x)
        torch.gt(x, 0, out=written(room, x.shape, torch.bool))
        ctx.save_for_backward(packed(room, 1))
        ctx.slope = slope
        return torch.nn.functional.leaky_relu(x, slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (above,) = ctx.saved_tensors
        made = unpacked(above, 1, gradient.shape, torch.bool).to(gradient.dtype)
        torch.ops.aten.leaky_relu_backward.grad_input(gradient, made, ctx.slope, False, grad_input=made)
        return made, None


def native_dropout_in_bits(
    x: Tensor,
    p: float,
    axes: Sequence[Axis] = (),
    shape: Sequence[int] | None = None,
    placement: str | None = None,
) -> tuple[Tensor, None]:
    """As `native_dropout`; a bit an element is kept, and no mask handed out."""
    if p == 0:
        return x, None
    made: Tensor = _Dropout.apply(x, p, axes, shape, placement)  # type: ignore[no-untyped-call] # torch's
    return made, None


class _Dropout(torch.autograd.Function):
    """The mask is drawn as ever, and packed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: float, axes: Sequence[Axis], shape: Sequence[int] | None, placement: str | None
    ) -> Tensor:
        mask = keep_mask(x, p, axes, shape, placement)
        room = room_for(mask.shape, 1, mask)
        written(room, mask.shape, torch.bool).copy_(mask)
        ctx.save_for_backward(packed(room, 1))
        ctx.p = p
        del room
        return masked(x, mask, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (kept,) = ctx.saved_tensors
        return masked(gradient, unpacked(kept, 1, gradient.shape, torch.bool), ctx.p), None, None, None, None


def max_pool_in_bits(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool = False,
    splits: Sequence[Split] = (),
) -> Tensor:
    """As `max_pool` of an image's two dims; where in its window each maximum is is kept, in as few bits as say it."""
    windows = [Window(*sizes) for sizes in zip(kernel, stride, padding, dilation, strict=True)]
    x, inner = covered(x, windows, splits, float("-inf"))
    window = tuple(kernel), tuple(stride), tuple(inner), tuple(dilation), ceil_mode
    made: Tensor = _MaxPool.apply(x, window)  # type: ignore[no-untyped-call] # torch's
    return made


def bits_of_window(elements: int) -> int:
    """Bits, of those that fill a byte evenly, that number so many elements."""
    return next(bits for bits in (1, 2, 4, 8) if 1 << bits >= elements)


class _MaxPool(torch.autograd.Function):
    """Torch's indices are those of an image's elements. Less that of a window's first element they are one of few."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: _Window) -> Tensor:
        result, indices = torch.ops.aten.max_pool2d_with_indices(x, *window)
        offsets, first = _offsets(x, result, window)
        numbers = torch.zeros(_most_offset(x, window) + 1, dtype=torch.uint8, device=x.device)
        numbers[offsets] = torch.arange(len(offsets), dtype=torch.uint8, device=x.device)
        bits = bits_of_window(len(offsets))
        room = room_for(indices.shape, bits, x)
        torch.take(numbers, indices.sub_(first), out=written(room, indices.shape))
        ctx.save_for_backward(packed(room, bits))
        ctx.window, ctx.like = window, (x.shape, x.dtype, x.device)
        return result  # type: ignore[no-any-return] # torch's

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (numbers,) = ctx.saved_tensors
        shape, dtype, device = ctx.like
        x = torch.empty((), dtype=dtype, device=device).expand(shape)  # of which the gradient has the shape
        offsets, first = _offsets(x, gradient, ctx.window)
        chosen = unpacked(numbers, bits_of_window(len(offsets)), gradient.shape).int()
        indices = offsets.index_select(0, chosen.flatten()).view(gradient.shape).add_(first)
        del chosen
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *ctx.window, indices), None


def _offsets(x: Tensor, result: Tensor, window: _Window) -> tuple[Tensor, Tensor]:
    """How far each element of a window is from its first one, in row-major order; and the index of each window's first
    one, which padding may put outside of the image. Of equal offsets, as in images narrower than a window, any does."""
    kernel, stride, padding, dilation, _ = window
    rows, columns = (torch.arange(kernel[dim], device=x.device) * dilation[dim] for dim in (0, 1))
    first_row, first_column = (
        torch.arange(result.shape[dim - 2], device=x.device) * stride[dim] - padding[dim] for dim in (0, 1)
    )
    offsets = (rows.unsqueeze(1) * x.shape[-1] + columns).flatten()
    return offsets, first_row.unsqueeze(1) * x.shape[-1] + first_column


def _most_offset(x: Tensor, window: _Window) -> int:
    """Of a window's last element."""
    kernel, _, _, dilation, _ = window
    return int((kernel[0] - 1) * dilation[0] * x.shape[-1] + (kernel[1] - 1) * dilation[1])
