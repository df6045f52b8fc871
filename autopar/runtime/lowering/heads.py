"""Heads of keys and values that queries share: which of them a rank needs, and attention that reads each once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_offset, local_size

__all__ = ["grouped_attention", "heads_of"]


_SHARES = ("cpu",)
"""Devices whose kernel knows grouped heads under a mask."""


def heads_of(x: Tensor, dim: int, num_queries: int, group: int, axes: Sequence[Axis]) -> Tensor:
    """For each query head of this rank the head of x that its group shares: (…, heads, …) → (…, own queries, …).

    `num_queries` heads in groups of `group` neighbours are split over `axes`, the outer one first, evenly or not.
    The gradient is a summand: heads that this rank does not use have zeros.
    """
    start, own = local_offset(num_queries, *axes), local_size(num_queries, *axes)
    wanted = torch.arange(start, start + own, device=x.device) // group
    return x.index_select(dim, wanted)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None,
    heads: tuple[int, int, Sequence[Axis]] | None = None,
) -> Tensor:  # fmt: skip
    """Attention whose query heads share those of keys and values in groups of neighbours, under a mask or none.

    query: (batch, query heads, queries, width); key, value: (batch, heads, length, width); mask: to be broadcast over
    (batch, query heads, queries, length), the batch and the last two given. The queries of a group are computed as if
    they were queries of its head, so that keys and values are read where they lie, once, by any kernel. CPUs' kernel
    does so itself, and is the faster one for several queries. heads: where axes split the heads of queries alone, how
    many there are on all of these, how many share one of keys, and the axes.
    """
    if heads is not None:
        key, value = (_own_heads(x, *heads) for x in (key, value))
    group = max(1, query.shape[1] // max(1, key.shape[1]))  # a rank may have no query heads
    if query.shape[2] > 1 and query.device.type in _SHARES:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=group > 1)
    folded = query.reshape(query.shape[0], key.shape[1], group * query.shape[2], query.shape[3])
    mask = None if mask is None else _folded_mask(mask, group, query.shape[2], key.shape[1])
    found = F.scaled_dot_product_attention(folded, key, value, mask, scale=scale)
    return found.reshape(*query.shape[:3], value.shape[3])


def _folded_mask(mask: Tensor, group: int, queries: int, heads: int) -> Tensor:
    """Of the queries of a group as those of one head: (…, own heads or 1, group × queries, length)."""
    if mask.dim() == 4 and mask.shape[1] > 1:
        return mask.reshape(mask.shape[0], heads, group * mask.shape[2], mask.shape[3])
    if queries == 1:
        return mask
    wide = mask if mask.dim() == 4 else mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    return wide.expand(-1, group, queries, -1).reshape(wide.shape[0], 1, group * queries, wide.shape[3])


def _own_heads(x: Tensor, num_queries: int, group: int, axes: Sequence[Axis]) -> Tensor:
    """The heads of x that this rank's queries share equally: a view, but where queries of several groups do not."""
    start, own = local_offset(num_queries, *axes), local_size(num_queries, *axes)
    first, last = start // group, (start + own - 1) // group + 1
    if last - first == 1 or (start % group == 0 and own % group == 0):
        return x.narrow(1, first, last - first)
    return heads_of(x, 1, num_queries, group, axes)
