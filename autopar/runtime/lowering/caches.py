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
    index = positions[:, None, :, None].expand_as(rows)
    rows = torch.where(is_written[:, None, :, None], rows, cache.gather(2, index))
    return cache.scatter_(2, index, rows)
