"""Operators whose local form is not the operator itself on shards: they know global counts, or communicate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.call import Call
from tests.ops.interpreter import Case, Layout, run_locally
from tests.ops.shards import Shards, axes_with, offset, sum_over


def _map(function: Callable[..., Tensor], *shards: Shards) -> Shards:
    return {coordinate: function(*(s[coordinate] for s in shards)) for coordinate in shards[0]}


def mean(case: Case, layout: Layout, operands: list[Shards]) -> list[Shards]:
    """A local sum over the global length."""
    arguments = Call(case.graph, case.node).arguments
    whole = case.operands[0]
    dims = list(arguments.get("dim") or range(whole.dim()))
    length = math.prod(whole.shape[dim] for dim in dims) if whole.dim() else 1
    keep = bool(arguments.get("keepdim", False))
    return [_map(lambda x: x.sum(dims, keepdim=keep) / length, operands[0])]


def embedding(case: Case, layout: Layout, operands: list[Shards]) -> list[Shards]:
    """Rows that this rank doesn't hold read as zero."""
    arguments = Call(case.graph, case.node).arguments
    if not axes_with(layout.operands[0], {0}):
        return run_locally(case, layout, operands)
    num_rows, padding = case.operands[0].shape[0], arguments["padding_idx"]

    def look_up(coordinate: Any) -> Tensor:
        weight, ids = operands[0][coordinate], operands[1][coordinate]
        start = offset(num_rows, layout.operands[0], 0, layout.sizes, coordinate)
        mine = (ids >= start) & (ids < start + weight.shape[0])
        local_padding = padding - start if start <= padding < start + weight.shape[0] else None
        rows = F.embedding(torch.where(mine, ids - start, 0), weight, local_padding)
        return rows * mine.unsqueeze(-1)

    return [{coordinate: look_up(coordinate) for coordinate in operands[0]}]


def cross_entropy(case: Case, layout: Layout, operands: list[Shards]) -> list[Shards]:
    """Split samples: a local sum over the global count. Split classes: maximum, sum and target logit are reduced."""
    arguments = Call(case.graph, case.node).arguments
    if arguments["reduction"] == 0 or not any(t.kind == "S" for t in (*layout.operands[0], *layout.operands[1])):
        return run_locally(case, layout, operands)
    logits, targets = operands
    class_axes = axes_with(layout.operands[0], {1})
    if class_axes:
        losses = _split_classes(case, layout, logits, targets, class_axes)
    else:
        options = {"ignore_index": arguments["ignore_index"], "label_smoothing": arguments["label_smoothing"]}
        losses = _map(lambda x, y: F.cross_entropy(x, y, reduction="sum", **options), logits, targets)
    if arguments["reduction"] == 2:
        return [losses]
    valid = _map(lambda y: (y != arguments["ignore_index"]).sum().to(torch.float64), targets)
    sample_axes = {axis for axis, type_ in enumerate(layout.operands[1]) if type_.kind == "S"}
    return [_map(lambda loss, count: loss / count, losses, sum_over(valid, sample_axes))]


def _split_classes(case: Case, layout: Layout, logits: Shards, targets: Shards, axes: set[int]) -> Shards:
    ignored = Call(case.graph, case.node).arguments["ignore_index"]
    highest = case.operands[0].max()  # any number that all ranks agree on
    exponentials = _map(lambda x: (x - highest).exp().sum(1), logits)
    totals = sum_over(exponentials, axes, invariant=True)

    def own_target(coordinate: Any) -> Tensor:
        x, y = logits[coordinate], targets[coordinate]
        start = offset(case.operands[0].shape[1], layout.operands[0], 1, layout.sizes, coordinate)
        mine = (y >= start) & (y < start + x.shape[1])
        return x.gather(1, torch.where(mine, y - start, 0).unsqueeze(1)).squeeze(1) * mine

    chosen = sum_over({coordinate: own_target(coordinate) for coordinate in logits}, axes, invariant=True)
    return _map(lambda z, t, y: ((z.log() + highest - t) * (y != ignored)).sum(), totals, chosen, targets)


def batch_norm(case: Case, layout: Layout, operands: list[Shards]) -> list[Shards]:
    """Statistics are those of all samples: sums are reduced over the axes that split them."""
    call = Call(case.graph, case.node)
    arguments = call.arguments
    if not arguments["training"]:
        return run_locally(case, layout, operands)
    axes = axes_with(layout.operands[0], {0})
    shape = case.operands[0].shape
    dims, count = [0, *range(2, len(shape))], math.prod(shape) // shape[1]
    x = operands[call.positions["input"][0]]

    def wide(channel: Tensor, like: Tensor) -> Tensor:
        return channel.reshape(1, -1, *[1] * (like.dim() - 2))

    means = sum_over(_map(lambda v: v.sum(dims) / count, x), axes)
    centred = _map(lambda v, m: v - wide(m, v), x, means)
    variances = sum_over(_map(lambda v: v.square().sum(dims) / count, centred), axes)
    scales = _map(lambda v: (v + arguments["eps"]).rsqrt(), variances)
    weight, bias, running_mean, running_var = (
        operands[call.positions[name][0]] for name in ("weight", "bias", "running_mean", "running_var")
    )
    y = _map(lambda c, s, w, b: c * wide(s * w, c) + wide(b, c), centred, scales, weight, bias)
    momentum = arguments["momentum"]
    new_mean = _map(lambda old, m: old * (1 - momentum) + m.detach() * momentum, running_mean, means)
    unbiased = count / (count - 1)
    new_var = _map(lambda old, v: old * (1 - momentum) + v.detach() * unbiased * momentum, running_var, variances)
    return [y, _map(torch.detach, means), _map(torch.detach, scales), new_mean, new_var]


COMMUNICATING: dict[str, Callable[[Case, Layout, list[Shards]], list[Shards]]] = {
    "aten.mean.default": mean,
    "aten.mean.dim": mean,
    "aten.embedding.default": embedding,
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten._native_batch_norm_legit_functional.default": batch_norm,
}
