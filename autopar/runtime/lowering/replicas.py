"""Replicas of the experts that most tokens choose: every rank computes those of its own tokens, and sends only others.

    counts    summed over all ranks: the experts with most rows of the moment are the same on each
    forward   their parameters go from the rank that has them to all
    backward  gradients of all replicas are summed where the parameters are

Which experts they are may change from step to step and from layer to layer; nothing that is stored moves (FasterMoE's
shadows, PPoPP'22). A sum over ranks, of which one has something and the others zeros, takes parameters there: it sends
as much as cutting them on their rank and gathering the parts would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.lowering.grouped import ExpertParameters
from autopar.runtime.mesh import Axis


class HotExperts:
    """The experts that every rank of some axes has a replica of. Every rank must make it.

    axes: those that split the experts, the outer one first, over all of which tokens are exchanged.
    """

    def __init__(self, ids: Tensor, num_experts: int, count: int, axes: Sequence[Axis]) -> None:
        known = ids.reshape(-1).clamp(max=num_experts)
        counts = known.new_zeros(num_experts + 1).scatter_add_(0, known, torch.ones_like(known))[:-1].contiguous()
        for axis in axes:
            comm.all_reduce(counts, axis)
        self._axes, self._num_experts = axes, num_experts
        self.experts = counts.argsort(descending=True, stable=True)[:count]
        place = ids.new_full((num_experts + 1,), count)
        place[self.experts] = torch.arange(count, device=ids.device, dtype=ids.dtype)
        self._slots = place[known]
        order = self._slots.argsort(stable=True)
        own = known.new_zeros(count + 1).scatter_add_(0, self._slots, torch.ones_like(known))
        self.counts: list[int] = own[:-1].tolist()
        self.order = order[: sum(self.counts)]
        """The choices of these experts, one expert after the other."""
        self.others = torch.where(self._slots.view_as(ids) < count, num_experts, ids)
        """Choices of the other experts, as they are; of these, a number that is no expert's."""

    def of(self, held: ExpertParameters) -> ExpertParameters:
        """Their parameters, whichever rank has them."""
        mine = self._mine(held.up.size(0))
        given = [one for one in (held.up, held.down, held.up_bias, held.down_bias) if one is not None]
        made = iter(_Replicated.apply(mine, self._axes, *given))  # type: ignore[no-untyped-call]
        up, down, up_bias, down_bias = (
            None if one is None else next(made) for one in (held.up, held.down, held.up_bias, held.down_bias)
        )
        assert up is not None and down is not None
        return held._replace(up=up, down=down, up_bias=up_bias, down_bias=down_bias)

    def _mine(self, held: int) -> Tensor:
        """The number of each among this rank's experts, or as many as it has, where it is another's."""
        begin, end = 0, self._num_experts
        for axis in self._axes:
            chunk = -(-(end - begin) // axis.size)
            begin, end = min(begin + axis.index * chunk, end), min(begin + (axis.index + 1) * chunk, end)
        local = self.experts - begin
        return torch.where((local >= 0) & (self.experts < end), local, held)


class _Replicated(torch.autograd.Function):
    """(experts of a rank, …) → (replicas, …) of several parameters, in one sum; their gradients back the same way."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, axes: Sequence[Axis], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(mine)
        ctx.axes, ctx.shapes = axes, [parameter.shape for parameter in parameters]
        flat, parts = _flat_parts(mine.size(0), parameters)
        for part, parameter in zip(parts, parameters, strict=True):
            if parameter.size(0):
                torch.index_select(parameter, 0, mine.clamp(max=parameter.size(0) - 1), out=part)
            part.masked_fill_(_as_rows(mine == parameter.size(0), part), 0)
        for axis in axes:
            comm.all_reduce(flat, axis)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        wanted = [number for number in range(len(grads)) if ctx.needs_input_grad[2 + number]]
        flat, parts = _flat_parts(mine.size(0), [grads[number] for number in wanted])
        for part, number in zip(parts, wanted, strict=True):
            part.copy_(grads[number])
        for axis in ctx.axes:
            comm.all_reduce(flat, axis)
        found: list[Tensor | None] = [None] * len(grads)
        for part, number in zip(parts, wanted, strict=True):
            home = found[number] = part.new_zeros(ctx.shapes[number])
            if home.size(0):
                part.masked_fill_(_as_rows(mine == home.size(0), part), 0)
                home.index_add_(0, mine.clamp(max=home.size(0) - 1), part)
        return None, None, *found


def _flat_parts(count: int, like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One buffer, and in it `count` rows of each of some tensors, one tensor after the other."""
    sizes = [count * math.prod(one.shape[1:]) for one in like]
    flat = like[0].new_empty(sum(sizes))
    parts = [part.view(count, *one.shape[1:]) for part, one in zip(torch.split(flat, sizes), like, strict=True)]
    return flat, parts


def _as_rows(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.dim() - 1))
