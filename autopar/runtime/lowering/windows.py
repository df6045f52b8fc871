"""Convolution and pooling over spatial dims that mesh axes split: halos are exchanged, then windows run locally.

`splits` lists (dim of x, the axis that splits it, its whole length); each dim is split by one axis. Several dims may
be: the halo of the second carries the rows that the first one brought, so corners arrive too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.lowering.halo import Window, chunk, rows_of_padding, with_halo
from autopar.runtime.mesh import Axis

__all__ = ["avg_pool", "convolution", "max_pool"]

Split = tuple[int, Axis, int]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    splits: Sequence[Split],
) -> Tensor:
    """A convolution of one to three spatial dims; the result is split as `x` is."""
    windows = [Window(*sizes) for sizes in zip(weight.shape[2:], stride, padding, dilation, strict=True)]
    x, inner = covered(x, windows, splits, 0.0)
    function = (F.conv1d, F.conv2d, F.conv3d)[len(windows) - 1]
    result: Tensor = function(x, weight, bias, tuple(stride), tuple(inner), tuple(dilation), groups)
    return result


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    splits: Sequence[Split],
) -> Tensor:
    """The largest value under each window; padding counts as nothing."""
    windows = [Window(*sizes) for sizes in zip(kernel, stride, padding, dilation, strict=True)]
    x, inner = covered(x, windows, splits, float("-inf"))
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(windows) - 1]
    result: Tensor = function(x, tuple(kernel), tuple(stride), tuple(inner), tuple(dilation))
    return result


def avg_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
    splits: Sequence[Split],
) -> Tensor:
    """The mean under each window, over the whole window or over the rows that exist."""
    windows = [Window(*sizes) for sizes in zip(kernel, stride, padding, strict=True)]
    extended, inner = covered(x, windows, splits, 0.0)
    if len(windows) == 1:
        result = F.avg_pool1d(extended, tuple(kernel), tuple(stride), tuple(inner), False, count_include_pad)
    else:
        function = (F.avg_pool2d, F.avg_pool3d)[len(windows) - 2]
        result = function(extended, tuple(kernel), tuple(stride), tuple(inner), False, count_include_pad)
    if count_include_pad:
        return result
    for dim, axis, size in _real(splits):
        result = result * _missing(result, windows[dim - x.dim()], dim, axis, size)
    return result


def _real(splits: Sequence[Split]) -> list[Split]:
    """An axis of one rank splits nothing."""
    return [split for split in splits if split[1].size > 1]


def _missing(like: Tensor, window: Window, dim: int, axis: Axis, size: int) -> Tensor:
    """For each output row of this rank, rows of the window over those of them that exist; to multiply by."""
    begin, end = chunk(window.result_size(size), axis.size, axis.index)
    first = torch.arange(begin, end, device=like.device) * window.stride - window.padding
    exist = (first + window.kernel).clamp(max=size) - first.clamp(min=0)
    return (window.kernel / exist).to(like.dtype).view(-1, *[1] * (like.dim() - 1 - dim))


def covered(x: Tensor, windows: Sequence[Window], splits: Sequence[Split], fill: float) -> tuple[Tensor, list[int]]:
    """`x` with halos and padding along the split dims, and the padding that is left to the operator itself."""
    inner = [window.padding for window in windows]
    pads = [(0, 0)] * len(windows)
    for dim, axis, size in _real(splits):
        position = dim - x.dim()
        x = with_halo(x, dim, axis, size, windows[position])
        pads[position] = rows_of_padding(axis, size, windows[position], x.size(dim))
        inner[position] = 0
    flat = [rows for pair in reversed(pads) for rows in pair]
    return (F.pad(x, flat, value=fill) if any(flat) else x), inner
