"""Lookup in a table whose rows are split over mesh axes: each rank looks up what it holds (a summand)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_offset


def embedding(
    ids: Tensor, weight: Tensor, axis: Axis | Sequence[Axis], num_embeddings: int, padding_idx: int = -1
) -> Tensor:
    """Rows of a (num_embeddings, width) table split by rows; the result is P on the axes.

    Zeros stand where another rank holds the row. The row `padding_idx`, if not negative, gets no gradient.
    """
    axes = [axis] if isinstance(axis, Axis) else list(axis)
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
