"""Rows of a cache, written in place (the planner's `ops.caches`)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["write_rows"]


def write_rows(cache: Tensor, positions: Tensor, rows: Tensor, is_written: Tensor) -> Tensor:
    """Writes rows of each sequence where they belong, and returns the cache itself.

    cache: this rank's (batch, heads, length, head dim); positions, is_written: (batch, steps); rows: (batch, heads,
    steps, head dim). Rows that are not written keep what was there: one write without branches, as graphs of a device
    need it.
    """
    if rows.shape[2] > 1:
        return _whole_rows(cache, positions, rows, is_written)
    index = positions[:, None, :, None].expand_as(rows)
    rows = torch.where(is_written[:, None, :, None], rows, cache.gather(2, index))
    return cache.scatter_(2, index, rows)


def _whole_rows(cache: Tensor, positions: Tensor, rows: Tensor, is_written: Tensor) -> Tensor:
    """The same by numbers of rows, not of elements: twice as fast, for some more small operators."""
    batch, heads, length, width = cache.shape
    first = torch.arange(0, batch * heads * length, length, device=cache.device).reshape(batch, heads, 1)
    index = (first + positions[:, None]).reshape(-1)
    flat = cache.view(batch * heads * length, width)
    rows = torch.where(is_written[:, None, :, None], rows, flat.index_select(0, index).reshape(rows.shape))
    flat.index_copy_(0, index, rows.reshape(len(index), width))
    return cache
