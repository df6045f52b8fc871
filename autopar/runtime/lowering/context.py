"""Attention whose sequence is split over an axis: queries stay, keys and values come from all ranks, block by block.

Softmax over parts of the keys is put together by the logarithms of their sums of exponentials (FlashAttention):

    out = Σ_b exp(lse_b − lse) · out_b        lse = log Σ_b exp(lse_b)

and the gradients of a part need the whole result and the whole lse alone. So torch's kernels compute each part, and no
rank makes scores of all keys. What is gathered is not kept: the backward pass gathers it again, and sums the gradients
of keys and values where they are at home.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime import pieces
from autopar.runtime.lowering.statistics import widen
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_offset

__all__ = ["context_attention"]

Part = tuple[Tensor, Tensor]  # of a result, and the logarithm of its sums of exponentials (batch, heads, queries)


class _Spread(NamedTuple):
    """What does not change from part to part. offset: where this rank's queries begin; group: query heads for each head
    of the keys."""

    axis: Axis
    length: int
    offset: int
    causal: bool
    scale: float
    group: int


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, lengths: tuple[int, int], axis: Axis
) -> Tensor:
    """`F.scaled_dot_product_attention` of ([batch], heads, length, width), all of them split along length over `axis`.

    `lengths` are those of all queries and of all keys; where `causal`, they are one. Query heads may be a multiple of
    the heads of keys and values. Every rank must call it, even one without a query.
    """
    queries, keys = lengths
    group = query.size(-3) // key.size(-3)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    options = _Spread(axis, keys, local_offset(queries, axis), causal, scale, group)
    operands = [x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value)]
    result: Tensor = _GatheredKeys.apply(*operands, options)  # type: ignore[no-untyped-call]
    return result if query.dim() == 4 else result.squeeze(0)


class _GatheredKeys(torch.autograd.Function):
    """Keys and values of all ranks at once."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: _Spread) -> Tensor:
        out, lse = _attend(query, *_whole(key, value, options), options)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        options = ctx.options
        own, *others = _gradients(grad, query, *_whole(key, value, options), out, lse, options)
        wanted = ctx.needs_input_grad
        home = [_home(other, options) if wanted[n] else None for n, other in enumerate(others, 1)]
        return own if wanted[0] else None, *home, None


def _whole(key: Tensor, value: Tensor, options: _Spread) -> Part:
    key, value = (pieces.gather(x, 2, options.axis, options.length) for x in (key, value))
    return _each_head(key, options.group), _each_head(value, options.group)


def _each_head(x: Tensor, group: int) -> Tensor:
    """A head for each query head."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def _home(grad: Tensor, options: _Spread) -> Tensor:
    """This rank's part of the sum over ranks, and over the query heads that share a head."""
    if options.group > 1:
        grad = grad.view(grad.size(0), -1, options.group, *grad.shape[2:]).sum(2)
    return pieces.reduce_scatter(grad, 2, options.axis)


def _attend(query: Tensor, key: Tensor, value: Tensor, options: _Spread) -> Part:
    """The result of this rank's queries over all keys."""
    scale, begin, end = options.scale, options.offset, options.offset + query.size(2)
    if query.numel() == 0:
        return value[:, :, : query.size(2)].expand(*query.shape[:3], -1).clone(), query.new_empty(query.shape[:3])
    if not options.causal:
        return _part(query, key, value, False, scale)
    own = _part(query, key[:, :, begin:end], value[:, :, begin:end], True, scale)
    return _merged(own, _part(query, key[:, :, :begin], value[:, :, :begin], False, scale)) if begin else own


def _merged(one: Part, other: Part) -> Part:
    """The result over the keys of both."""
    lse = torch.logaddexp(one[1], other[1])
    first, second = (result * (part - lse).exp().unsqueeze(-1) for result, part in (one, other))
    return torch.empty_like(one[0]).copy_(first.add_(second)), lse


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, options: _Spread
) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank's queries, and their part of those of all keys and values."""
    begin, end = options.offset, options.offset + query.size(2)
    if query.numel() == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    if not options.causal:
        return _part_gradients(grad, query, key, value, out, lse, False, options.scale)
    whole = torch.zeros_like(key), torch.zeros_like(value)
    own = None
    for rows, causal in ((slice(begin, end), True), (slice(0, begin), False)):
        if rows.stop > rows.start:
            parts = key[:, :, rows], value[:, :, rows]
            found, *others = _part_gradients(grad, query, *parts, out, lse, causal, options.scale)
            own = found if own is None else own.add_(found)
            for total, other in zip(whole, others, strict=True):
                total[:, :, rows].copy_(other)
    assert own is not None
    return own, *whole


# Kernels ----------------------------------------


def _part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Part:
    """Attention over some keys; causal over as many as there are queries."""
    kernel = _kernel(query, value)
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, lse
    if kernel == "flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return found[0], found[1]
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ widen(value)).to(value.dtype), lse


def _part_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries, keys and values of a part, where `out` and `lse` are over all keys."""
    kernel = _kernel(query, value)
    if kernel == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return found[0], found[1], found[2]
    if kernel == "flash":
        unused = torch.empty((), dtype=torch.int64, device=query.device)  # seeds of a dropout that is not there
        lengths = query.size(2), key.size(2)
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, None, None, *lengths, 0.0, causal, unused, unused, scale=scale
        )
        return found[0], found[1], found[2]
    wide = widen(grad)
    weights = (_scores(query, key, causal, scale) - lse.unsqueeze(-1)).exp()
    moved = wide @ widen(value).mT - (wide * widen(out)).sum(-1, keepdim=True)
    scores = weights * moved * scale
    own = scores @ widen(key), scores.mT @ widen(query), weights.mT @ wide
    return own[0].to(query.dtype), own[1].to(key.dtype), own[2].to(value.dtype)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = widen(query) @ widen(key).mT * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -math.inf) if causal else scores


def _kernel(query: Tensor, value: Tensor) -> str:
    """Which of torch's kernels that tell the lse computes such heads; none where it is taken apart."""
    width = query.size(-1)
    if width != value.size(-1):
        return ""
    if query.device.type == "cpu":
        return "cpu"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    is_flash = query.device.type == "cuda" and is_half and width % 8 == 0 and width <= 256
    return "flash" if is_flash and torch.cuda.get_device_capability(query.device) >= (8, 0) else ""
