"""Lookup in a table whose rows are split over mesh axes: each rank looks up what it holds (a summand)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.lowering.ranges import check_range
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_offset

__all__ = ["embedding", "embedding_bag"]


def embedding(
    ids: Tensor, weight: Tensor, axis: Axis | Sequence[Axis], num_embeddings: int, padding_idx: int = -1
) -> Tensor:
    """Rows of a (num_embeddings, width) table split by rows; the result is P on the axes.

    Zeros stand where another rank holds the row. The row `padding_idx`, if not negative, gets no gradient.
    """
    axes = [axis] if isinstance(axis, Axis) else list(axis)
    check_range(ids, num_embeddings, "row numbers of an embedding")
    rows = weight.size(0)
    local = ids - local_offset(num_embeddings, *axes)
    elsewhere = (local < 0) | (local >= rows)
    if rows == 0:
        return weight.new_zeros((*ids.shape, weight.size(1))) + weight.sum()
    found = F.embedding(local.masked_fill(elsewhere, 0), weight)
    if padding_idx >= 0:
        padding = (ids == padding_idx).unsqueeze(-1)
        found = found.detach().where(padding, found)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def embedding_bag(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor,
    axes: Sequence[Axis],
    num_embeddings: int,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Tensor:
    """Sums or means of bags of rows of a table that the axes split by rows; the result is P on them.

    ids (n,) and `offsets`, where each bag begins, as `F.embedding_bag` takes them. Rows of other ranks count as zeros;
    a mean divides by the number of all rows in the bag. The row `padding_idx`, if not negative, counts for nothing.
    """
    check_range(ids, num_embeddings, "row numbers of an embedding")
    local = ids - local_offset(num_embeddings, *axes)
    here = (local >= 0) & (local < weight.size(0))
    counted = ids != padding_idx
    factors = (here & counted).to(weight.dtype)
    if mode == "mean":
        factors = factors / _bag_sizes(counted, offsets, include_last_offset)
    elif per_sample_weights is not None:
        factors = factors * per_sample_weights
    return F.embedding_bag(
        local.masked_fill(~here, 0),
        weight,
        offsets,
        mode="sum",
        per_sample_weights=factors,
        include_last_offset=include_last_offset,
    )


def _bag_sizes(counted: Tensor, offsets: Tensor, include_last_offset: bool) -> Tensor:
    """For each row number, how many rows of its bag count; at least one."""
    begins = offsets[:-1] if include_last_offset else offsets
    positions = torch.arange(counted.numel(), device=counted.device, dtype=begins.dtype)
    bags = torch.searchsorted(begins.contiguous(), positions, right=True) - 1
    sizes = torch.zeros(begins.numel(), dtype=torch.int64, device=counted.device)
    return sizes.index_add(0, bags, counted.long())[bags].clamp(min=1)
