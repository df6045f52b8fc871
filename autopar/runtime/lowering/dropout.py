"""Dropout with equal masks on ranks that hold the same part, independent ones on the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.mesh import Axis
from autopar.runtime.randomness import apply_mask, keep_mask

__all__ = ["dropout", "native_dropout"]


def dropout(
    x: Tensor,
    p: float,
    axes: Sequence[Axis] = (),
    shape: Sequence[int] | None = None,
    placement: str | None = None,
) -> Tensor:
    """Zeroes elements with probability p, scales the rest by 1 / (1 − p); `axes` are those that shard `x`."""
    return native_dropout(x, p, axes, shape, placement)[0]


def native_dropout(
    x: Tensor,
    p: float,
    axes: Sequence[Axis] = (),
    shape: Sequence[int] | None = None,
    placement: str | None = None,
) -> tuple[Tensor, Tensor]:
    """As `dropout`, with the mask of what was kept. `shape` and `placement` of the whole serve exact mode."""
    if p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = keep_mask(x, p, axes, shape, placement)
    return apply_mask(x, mask, p), mask
