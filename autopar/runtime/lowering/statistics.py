"""Means, batch, group and weight normalisation over dims that mesh axes split.

Statistics take two all-reduces an axis, of the sums and then of the squares of what is left of the mean: as exact as
one device's, whatever the mean. Their backward passes take as many. Half precision is summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.mesh import Axis
from autopar.runtime.redistributing import redistribute

__all__ = ["batch_norm", "group_norm", "mean", "weight_norm"]

BatchNorm = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def mean(x: Tensor, dims: Sequence[int], keepdim: bool, count: int) -> Tensor:
    """A local sum over `dims` over the global `count` of elements: P on the axes that split the dims."""
    return x.sum(tuple(dims), keepdim) / count


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    axes: Sequence[Axis],
    count: int,
) -> BatchNorm:
    """Batch normalisation in training of x (N, C, …) whose samples or spatial dims are split over the `axes`.

    `count` is the global number of elements a channel. `weight` and `bias` are R on the axes. Returns (result, mean,
    1 / deviation, new running mean, new running variance), as ATen's functional batch norm does.
    """
    result, average, scale, variance = _BatchNorm.apply(x, weight, bias, eps, tuple(axes), count)  # type: ignore[no-untyped-call]
    new_mean = _blend(running_mean, average, momentum)
    new_variance = _blend(running_var, variance * (count / (count - 1)), momentum)
    return result, average, scale, new_mean, new_variance


class _BatchNorm(torch.autograd.Function):
    """Saves its input alone, and the statistics of each channel: what is left of the mean is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axes: tuple[Axis, ...], count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = widen(x)
        average = _summed(wide.sum(dims), axes) / count
        variance = _summed((wide - _channels(average, x)).square_().sum(dims), axes) / count
        scale = (variance + eps).rsqrt()
        result = (wide - _channels(average, x)).mul_(_channels(scale if weight is None else scale * weight, x))
        if bias is not None:
            result.add_(_channels(bias, x))
        ctx.save_for_backward(x, weight, average, scale)
        ctx.axes, ctx.count, ctx.has_bias = axes, count, bias is not None
        ctx.mark_non_differentiable(average, scale, variance)
        return result.to(x.dtype), average, scale, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, average, scale = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide_grad, centred = widen(grad), widen(x) - _channels(average, x)
        total, product = wide_grad.sum(dims), (wide_grad * centred).sum(dims) * scale
        own = None
        if ctx.needs_input_grad[0]:  # else the ranks have nothing to sum
            mean_total, mean_product = (_summed(local.clone(), ctx.axes) / ctx.count for local in (total, product))
            own = centred.mul_(_channels(-scale * mean_product, x)).add_(wide_grad).sub_(_channels(mean_total, x))
            own = own.mul_(_channels(scale if weight is None else scale * weight, x)).to(x.dtype)
        own_weight = None if weight is None else product.to(weight.dtype)
        own_bias = total.to(scale.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return own, own_weight, own_bias, None, None, None


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    axes: Sequence[Axis],
    count: int,
) -> Tensor:
    """Group normalisation of x (N, C, …) whose spatial dims are split over the `axes`.

    `num_groups` are those of the channels that this rank holds, `count` the global number of elements in a sample's
    group. `weight` and `bias` are R on the axes.
    """
    grouped = widen(x).reshape(x.size(0), num_groups, -1)
    average = _sum_over(grouped.sum(2, keepdim=True), axes) / count
    centred = grouped - average
    variance = _sum_over(centred.square().sum(2, keepdim=True), axes) / count
    normal = (centred * (variance + eps).rsqrt()).view(x.shape)
    return _affine(normal, weight, bias).to(x.dtype)


def weight_norm(v: Tensor, g: Tensor, dim: int, axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """v · g / ‖v‖ for each slice of a weight along `dim`, of which other dims are split over the `axes`, and the norms.

    `g` has the length 1 along those, and is R on the axes. The squares take one all-reduce an axis.
    """
    others, wide = [other for other in range(v.dim()) if other != dim], widen(v)
    norms = _sum_over(wide.square().sum(others, keepdim=True), axes).sqrt()
    return (wide * (g / norms)).to(v.dtype), norms.detach()


def widen(x: Tensor) -> Tensor:
    """The tensor in the dtype in which sums over it are taken: float32 for half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _sum_over(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = redistribute(x, axis, "P -> R")
    return x


def _summed(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Sums over the axes, in place."""
    for axis in axes:
        comm.all_reduce(x, axis)
    return x


def _channels(x: Tensor, like: Tensor) -> Tensor:
    return x.view(1, -1, *[1] * (like.dim() - 2))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * _channels(weight, x)
    return x if bias is None else x + _channels(bias, x)


def _blend(running: Tensor | None, new: Tensor, momentum: float) -> Tensor | None:
    return None if running is None else (1 - momentum) * running + momentum * new.to(running.dtype)
