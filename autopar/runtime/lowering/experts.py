"""Routed experts on one rank: its tokens through its experts, which may be a slice of all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_offset

__all__ = ["grouped_mm", "routed_experts"]


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    gated: bool,
    num_experts: int,
    axes: Sequence[Axis] = (),
) -> Tensor:
    """Sums, over the experts that are chosen for each token, of their weighted results.

    x (tokens, width), ids and weights (tokens, choices), up (experts, width, hidden), down (experts, hidden, width).
    `axes` split the experts: the result is P on them, and only choices of this rank's experts are computed.
    """
    choices = ids.size(1)
    local = ids.reshape(-1) - local_offset(num_experts, *axes)
    held = up.size(0)
    local = torch.where((local >= 0) & (local < held), local, held)  # those of other ranks come last
    order = local.argsort(stable=True)
    counts = torch.bincount(local, minlength=held + 1)[:held].tolist()
    order = order[: sum(counts)]
    hidden = activated(grouped_product(x[order // choices], up, counts), activation, gated)
    rows = grouped_product(hidden, down, counts) * weights.reshape(-1)[order].unsqueeze(-1)
    spread = rows.new_zeros((ids.numel(), rows.size(1))).index_copy(0, order, rows)
    return spread.view(ids.size(0), choices, -1).sum(1)


def grouped_product(rows: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """The product of each group of consecutive rows with the matrix of its group."""
    parts = torch.split(rows, list(counts))
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.unbind(0), strict=True)])


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """As `grouped_product`, by where each group ends; rows beyond the last group become zeros."""
    bounds = [0, *ends.tolist()]
    counts = [end - begin for begin, end in pairwise(bounds)]
    rest = rows.size(0) - bounds[-1]
    result = grouped_product(rows[: bounds[-1]], matrices, counts)
    return F.pad(result, (0, 0, 0, rest)) if rest else result


def activated(hidden: Tensor, name: str, gated: bool) -> Tensor:
    """activation(h), or activation(h₁) · h₂ of the halves of h; "gelu_tanh" is the approximate gelu of ATen."""
    first, second = hidden.chunk(2, -1) if gated else (hidden, None)
    made: Tensor = (
        F.gelu(first, approximate="tanh") if name == "gelu_tanh" else getattr(torch.ops.aten, name).default(first)
    )
    return made if second is None else made * second
