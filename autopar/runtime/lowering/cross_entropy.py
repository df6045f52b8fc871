"""Cross-entropy over logits whose samples, classes, or both are split over mesh axes.

    loss = Σ_i w[t_i] · ((1 − ε) · (lse_i − z_i[t_i]) + …) / Σ_i w[t_i]        lse_i = log Σ_c exp z_i[c]

over the samples i whose target t_i is not ignored. Split classes cost two all-reduces over the class axes:
one of the largest logits (a value a sample), one of the sums of exponentials and the target logits (two
values a sample; a third with label smoothing). A mean over split samples costs one more, of the one valid
count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.lowering.ranges import check_range
from autopar.runtime.lowering.statistics import widen
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_offset

__all__ = ["cross_entropy", "start_valid_count", "valid_count"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    reduction_axes: Sequence[Axis] = (),
    class_axes: Sequence[Axis] = (),
    num_classes: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    count: Tensor | float | Callable[[], Tensor] | None = None,
) -> Tensor:
    """Cross-entropy of logits (N, C), (N, C, d1, …) or (C,) against class numbers, as `F.cross_entropy`.

    `reduction_axes` split the samples: the result is P on them, a local sum over the global valid count.
    `class_axes` split the classes, evenly or not: the result is I on them. `count` replaces the valid
    count, as when a microbatch is a part of the mean, or when `start_valid_count` was called earlier.
    `weight` (C,) is whole on every rank.
    """
    if logits.dim() > 2 and not class_axes and logits.movedim(1, -1).is_contiguous() and reduction != "none":
        logits, target = logits.movedim(1, -1).flatten(0, -2), target.flatten()  # rows, as they lie in memory
    if class_axes:
        losses = _split_class_losses(logits, target, class_axes, num_classes, ignore_index, label_smoothing, weight)
    elif reduction == "mean" and count is None and not reduction_axes:
        return F.cross_entropy(logits, target, weight, None, ignore_index, None, reduction, label_smoothing)
    else:
        kind = "none" if reduction == "none" else "sum"
        losses = F.cross_entropy(logits, target, weight, None, ignore_index, None, kind, label_smoothing)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    if count is None:
        count = start_valid_count(target, reduction_axes, ignore_index, weight)
    return (total / (count() if callable(count) else count)).to(total.dtype)  # a bfloat16 loss stays one


def valid_count(
    target: Tensor,
    reduction_axes: Sequence[Axis] = (),
    ignore_index: int = -100,
    weight: Tensor | None = None,
) -> Tensor:
    """The global number (or weight) of the targets that are not ignored, as a float tensor."""
    return start_valid_count(target, reduction_axes, ignore_index, weight)()


def start_valid_count(
    target: Tensor,
    reduction_axes: Sequence[Axis] = (),
    ignore_index: int = -100,
    weight: Tensor | None = None,
) -> Callable[[], Tensor]:
    """Starts `valid_count`; the returned function waits for it. Ranks that are apart in time don't stop each other."""
    valid = target != ignore_index
    if weight is None:
        count = valid.sum().to(torch.get_default_dtype())
    else:
        count = (widen(weight)[target.masked_fill(~valid, 0)] * valid).sum()
    split = [axis for axis in reduction_axes if axis.size > 1]
    if split and (found := comm.alone_on(split[0])) is not None:
        found.counts.append(count)
        return lambda: torch.ones_like(count)  # sums are divided when they meet
    wait = comm.start_all_reduce(count, split[0]) if split else None

    def result() -> Tensor:
        if wait is not None:
            wait()
        for axis in split[1:]:
            comm.all_reduce(count, axis)
        return count

    return result


def _split_class_losses(
    logits: Tensor,
    target: Tensor,
    axes: Sequence[Axis],
    num_classes: int,
    ignore_index: int,
    smoothing: float,
    weight: Tensor | None,
) -> Tensor:
    """One loss a sample, zero where ignored, from logits split by classes."""
    class_dim = 0 if logits.dim() == 1 else 1
    rows = logits.movedim(class_dim, -1)
    start, held = local_offset(num_classes, *axes), rows.size(-1)
    flat_target = target.reshape(-1)
    check_range(flat_target, num_classes, "class numbers of a loss", ignore_index)
    valid = flat_target != ignore_index
    safe = flat_target.masked_fill(~valid, 0)
    scale = valid.to(rows.dtype) if weight is None else weight.to(rows.dtype)[safe] * valid
    local_weight = None if weight is None else weight.to(rows.dtype)[start : start + held]
    losses: Tensor = _SplitClasses.apply(  # type: ignore[no-untyped-call]
        rows.reshape(len(safe), held),
        safe - start,
        scale,
        valid,
        tuple(axes),
        num_classes,
        smoothing,
        local_weight,
    )
    return losses.view(target.shape)


class _SplitClasses(torch.autograd.Function):
    """Losses (N,) of logits (N, local classes): sums and target logits are joined over the class axes."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        local_target: Tensor,
        scale: Tensor,
        valid: Tensor,
        axes: tuple[Axis, ...],
        num_classes: int,
        smoothing: float,
        weight: Tensor | None,
    ) -> Tensor:
        scores = widen(logits)
        largest = scores.amax(1) if scores.size(1) else scores.new_full((scores.size(0),), float("-inf"))
        for axis in axes:
            comm.all_reduce(largest, axis, dist.ReduceOp.MAX)
        shifted = scores - largest.unsqueeze(1)
        here = (local_target >= 0) & (local_target < scores.size(1))
        column = local_target.masked_fill(~here, 0)
        sums = _local_sums(shifted, here, column, smoothing, weight)
        exponentials = shifted.exp_()
        sums[0] = exponentials.sum(1)
        for axis in axes:
            comm.all_reduce(sums, axis)
        ctx.save_for_backward(exponentials, sums[0], here, column, scale, valid, weight)
        ctx.num_classes, ctx.smoothing, ctx.dtype = num_classes, smoothing, logits.dtype
        ctx.mass = sums[3] if smoothing and weight is not None else None
        log_total = sums[0].log()
        losses = (1 - smoothing) * scale * (log_total - sums[1])
        if smoothing:
            mass = num_classes if weight is None else sums[3]
            losses = losses + (mass * log_total - sums[2]) * (smoothing / num_classes)
        return torch.where(valid, losses, 0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, total, here, column, scale, valid, weight = ctx.saved_tensors
        smoothing, num_classes = ctx.smoothing, ctx.num_classes
        grad = torch.where(valid, grad, 0).to(exponentials.dtype)
        factor = grad * scale * (1 - smoothing)
        spread = factor
        if smoothing:
            mass = num_classes if weight is None else ctx.mass
            spread = spread + grad * smoothing / num_classes * mass
        result = exponentials * (spread / total).unsqueeze(1)
        if result.size(1):
            result.scatter_add_(1, column.unsqueeze(1), -(factor * here).unsqueeze(1))
        if smoothing:
            share = (grad * smoothing / num_classes).unsqueeze(1)
            result -= share if weight is None else share * weight
        return result.to(ctx.dtype), None, None, None, None, None, None, None


def _local_sums(shifted: Tensor, here: Tensor, column: Tensor, smoothing: float, weight: Tensor | None) -> Tensor:
    """Rows to sum over the class axes: exponentials (set later), target logits, and what smoothing needs."""
    sums = shifted.new_zeros((2 + (1 if smoothing else 0) + (1 if smoothing and weight is not None else 0), len(here)))
    if shifted.size(1):
        sums[1] = shifted.gather(1, column.unsqueeze(1)).squeeze(1).where(here, 0)  # a class may be hidden: −inf · 0
    if smoothing:
        sums[2] = (shifted if weight is None else shifted * weight).sum(1)
    if smoothing and weight is not None:
        sums[3] = weight.sum()
    return sums
