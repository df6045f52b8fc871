"""The experts of one rank, and products of groups of rows with a matrix each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.lowering.activations import activated

__all__ = ["grouped_mm"]


class ExpertParameters(NamedTuple):
    """Of the experts of one rank: up (experts, width, hidden), down (experts, hidden, width), biases (experts, hidden)
    and (experts, width), activation. hidden may be two dims, of which one is both parts of a gate: the first, or where
    these are `paired` the last."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    gated: bool
    paired: bool

    @property
    def hidden_dim(self) -> int:
        """The dim of hidden values in `up`."""
        return 3 if self.up.dim() == 4 and not self.paired else 2


class LocalExperts:
    """The experts of one rank, and how many rows each gets of each chunk."""

    def __init__(self, held: ExpertParameters, counts: Sequence[Sequence[int]]) -> None:
        self._held, self._up, self._counts = held, held.up.flatten(2), counts
        self._up_bias = None if held.up_bias is None else held.up_bias.flatten(1)

    def __call__(self, rows: Tensor, chunk: int) -> Tensor:
        """What they make of consecutive rows, those of each expert of a chunk."""
        held, counts = self._held, self._counts[chunk]
        hidden = grouped_product(rows, self._up, counts, self._up_bias)
        hidden = activated(hidden, held.activation, held.gated, held.paired)
        return grouped_product(hidden, held.down, counts, held.down_bias)


def grouped_product(rows: Tensor, matrices: Tensor, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """The product of each group of consecutive rows with the matrix of its group, and its bias added."""
    if _has_kernel(rows, matrices):
        ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32).to(rows.device, non_blocking=True)
        made: Tensor = _WithWholeGradient.apply(torch._grouped_mm(rows, matrices, offs=ends))  # type: ignore[no-untyped-call]
        return added_biases(made, bias, counts)
    if not counts:  # of no experts: no rows, which still lead the backward pass to the exchange
        return rows @ matrices.sum(0)
    parts = [part @ matrix for part, matrix in zip(torch.split(rows, list(counts)), matrices.unbind(0), strict=True)]
    if bias is not None:
        parts = [part + own for part, own in zip(parts, bias.unbind(0), strict=True)]
    return torch.cat(parts)


def added_biases(rows: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Each group of consecutive rows with the bias of its group, where there are any."""
    if bias is None:
        return rows
    return rows + bias.repeat_interleave(_tensor(counts, rows), 0, output_size=len(rows))


class _WithWholeGradient(torch.autograd.Function):
    """The same, whose gradient lies row by row in memory: the kernel's own gradients assert so on the device, where an
    expanded one (of a sum, say) ends the process."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        """A view."""
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """A copy where it does not."""
        return grad.contiguous()


def _tensor(counts: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(counts).to(like.device, non_blocking=True)


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch has one kernel for all groups: bfloat16 on GPUs since Ampere, in rows of 16 bytes."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or matrices.dtype != torch.bfloat16:
        return False
    is_whole = rows.numel() > 0 and matrices.size(1) % 8 == 0 and matrices.size(2) % 8 == 0
    return is_whole and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """As `grouped_product`, by where each group ends; rows beyond the last group become zeros."""
    bounds = [0, *ends.tolist()]
    counts = [end - begin for begin, end in pairwise(bounds)]
    rest = rows.size(0) - bounds[-1]
    result = grouped_product(rows[: bounds[-1]], matrices, counts)
    return F.pad(result, (0, 0, 0, rest)) if rest else result
