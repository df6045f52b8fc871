"""Means and batch normalisation over dims that mesh axes split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.mesh import Axis
from autopar.runtime.redistribute import redistribute

BatchNorm = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def wide(x: Tensor) -> Tensor:
    """The tensor in the dtype in which sums over it are taken: float32 for halves."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def mean(x: Tensor, dims: Sequence[int], keepdim: bool, count: int) -> Tensor:
    """A local sum over `dims` over the global `count` of elements: P on the axes that split the dims."""
    return x.sum(tuple(dims), keepdim) / count


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    axes: Sequence[Axis] = (),
) -> BatchNorm:
    """Batch normalisation of x (N, C, …) with statistics over the shards of all `axes`.

    `weight` and `bias` are R on the axes. Returns (result, mean, 1 / deviation, new running mean, new running
    variance), as ATen's functional batch norm does; the running statistics come back as they were in
    evaluation. Halves are normalised in float32, as ATen's kernels do.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        given = [None if t is None else wide(t) for t in (weight, bias, running_mean, running_var)]
        found = batch_norm(wide(x), given[0], given[1], given[2], given[3], training, momentum, eps, axes)
        running = [None if t is None else t.to(x.dtype) for t in found[3:]]
        return found[0].to(x.dtype), found[1], found[2], running[0], running[1]
    if not training:
        assert running_mean is not None and running_var is not None, "evaluation needs running statistics"
        scale = (running_var + eps).rsqrt()
        return _scale(x, running_mean, scale, weight, bias), running_mean, scale, running_mean, running_var
    dims = [dim for dim in range(x.dim()) if dim != 1]
    count = _element_count(x, axes)
    average = _sum_over(x.sum(dims), axes) / count
    centred = x - _channels(average, x)
    variance = _sum_over(centred.square().sum(dims), axes) / count
    scale = (variance + eps).rsqrt()
    new_mean = _blend(running_mean, average.detach(), momentum)
    new_variance = _blend(running_var, variance.detach() * (count / (count - 1)), momentum)
    return _affine(centred * _channels(scale, x), weight, bias), average, scale, new_mean, new_variance


def _element_count(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    count = torch.tensor(float(x.numel() // max(1, x.size(1))), dtype=torch.float64, device=x.device)
    for axis in axes:
        comm.all_reduce(count, axis)
    return count.to(x.dtype)


def _sum_over(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = redistribute(x, axis, "P -> R")
    return x


def _channels(x: Tensor, like: Tensor) -> Tensor:
    return x.view(1, -1, *[1] * (like.dim() - 2))


def _scale(x: Tensor, average: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _affine((x - _channels(average, x)) * _channels(scale, x), weight, bias)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * _channels(weight, x)
    return x if bias is None else x + _channels(bias, x)


def _blend(running: Tensor | None, new: Tensor, momentum: float) -> Tensor | None:
    return None if running is None else (1 - momentum) * running + momentum * new.to(running.dtype)
