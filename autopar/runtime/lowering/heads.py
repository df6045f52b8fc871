"""The key or value heads that a rank's query heads belong to, where axes split the query heads alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_offset, local_size

__all__ = ["heads_of"]


def heads_of(x: Tensor, dim: int, num_queries: int, group: int, axes: Sequence[Axis]) -> Tensor:
    """For each query head of this rank the head of x that its group shares: (…, heads, …) → (…, own queries, …).

    `num_queries` heads in groups of `group` neighbours are split over `axes`, the outer one first, evenly or not.
    The gradient is a summand: heads that this rank does not use have zeros.
    """
    start, own = local_offset(num_queries, *axes), local_size(num_queries, *axes)
    wanted = torch.arange(start, start + own, device=x.device) // group
    return x.index_select(dim, wanted)
