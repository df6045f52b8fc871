"""Attention over a part of the keys, and what several parts are together.

Softmax over parts of the keys is put together by the sums of their exponentials (FlashAttention):

    out = Σ_b w_b · out_b / Σ_b w_b        w_b = total_b · exp(top_b − max top)

and the gradients of a part need the whole result and the whole sums alone. Torch's kernels compute parts where they
tell these sums, as top = log Σ exp and total = 1. Elsewhere top is the greatest score, so that what a mask pushes to
the least number of its dtype still counts as one among its like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime.lowering.statistics import widen

SCORES_AT_ONCE = 1 << 26
"""Where no kernel does, scores are made for so many pairs of query and key at a time."""


class ScoreSums(NamedTuple):
    """Of exponentials of each query's scores (batch, heads, queries): total · exp(top)."""

    top: Tensor
    total: Tensor

    def of(self, rows: slice) -> ScoreSums:
        """Those of some queries."""
        return ScoreSums(self.top[:, :, rows], self.total[:, :, rows])


class AttentionPart(NamedTuple):
    """A result over some of the keys, and its sums."""

    result: Tensor
    sums: ScoreSums


class PartQueries(NamedTuple):
    """What the gradients of a part need of queries: their own, their results over all keys with the gradient of these,
    and the sums over all keys."""

    query: Tensor
    out: Tensor
    grad: Tensor
    sums: ScoreSums

    def of(self, rows: slice) -> PartQueries:
        """Those of some queries."""
        query, out, grad = (x[:, :, rows] for x in self[:3])
        return PartQueries(query, out, grad, self.sums.of(rows))


class PartCall(NamedTuple):
    """What is the same in all parts, but for the mask: that has their keys; and documents, by numbers of queries and of
    keys (batch, positions): those of one see each other."""

    causal: bool
    scale: float
    mask: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None


def empty_part(query: Tensor, width: int) -> AttentionPart:
    """Over no keys; in the precision in which parts are put together."""
    dtype, rows = widen(query).dtype, query.shape[:3]
    result = torch.zeros((*rows, width), dtype=dtype, device=query.device)
    return AttentionPart(result, ScoreSums(result.new_full(rows, -math.inf), result.new_zeros(rows)))


def add_part(whole: AttentionPart, rows: slice, part: AttentionPart) -> None:
    """Puts a part to the result of some queries, in place."""
    merge_part(AttentionPart(whole.result[:, :, rows], whole.sums.of(rows)), part)


def merge_part(whole: AttentionPart, part: AttentionPart) -> None:
    """Puts a part to a result of the same queries, in place."""
    old, new = whole.sums, part.sums
    top = torch.maximum(old.top, new.top)
    shift = torch.where(top == -math.inf, 0.0, top)
    weights = [sums.total * (sums.top - shift).exp() for sums in (old, new)]
    total = weights[0] + weights[1]
    one, other = ((weight / torch.where(total == 0, 1.0, total)).unsqueeze(-1) for weight in weights)
    whole.result.mul_(one).addcmul_(widen(part.result), other)
    old.top.copy_(top)
    old.total.copy_(total)


def part_over(query: Tensor, key: Tensor, value: Tensor, call: PartCall) -> AttentionPart:
    """Attention over some keys; causal over as many as there are queries."""
    if not query.numel() or not key.numel():  # kernels divide by their sizes
        return empty_part(query, value.size(-1))
    kernel = _kernel(query, value, call)
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, call.causal, scale=call.scale
        )
        return AttentionPart(out, ScoreSums(lse, torch.ones_like(lse)))
    if kernel == "flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, call.causal, scale=call.scale
        )
        return AttentionPart(found[0], ScoreSums(found[1], torch.ones_like(found[1])))
    whole = empty_part(query, value.size(-1))
    for rows in _rows_at_once(query, key):
        scores = _scores(query, key, call, rows)
        top = scores.amax(-1)
        weights = (scores - torch.where(top == -math.inf, 0.0, top).unsqueeze(-1)).exp_()
        add_part(whole, rows, _weighted(weights, value, top))
    return whole


def _weighted(weights: Tensor, value: Tensor, top: Tensor) -> AttentionPart:
    total = weights.sum(-1)
    result = weights @ widen(value) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return AttentionPart(result, ScoreSums(top, total))


def part_gradients(own: PartQueries, key: Tensor, value: Tensor, call: PartCall) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries, keys and values of a part."""
    query, out, grad, sums = own
    if not query.numel() or not key.numel():
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    kernel = _kernel(query, value, call)
    lse = sums.top + sums.total.log() if kernel else sums.top
    if kernel == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, call.causal, scale=call.scale
        )
        return found[0], found[1], found[2]
    if kernel == "flash":
        unused = torch.empty((), dtype=torch.int64, device=query.device)  # seeds of a dropout that is not there
        lengths = query.size(2), key.size(2)
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, None, None, *lengths, 0.0, call.causal, unused, unused, scale=call.scale
        )
        return found[0], found[1], found[2]
    return _gradients_by_rows(own, key, value, call)


def _gradients_by_rows(own: PartQueries, key: Tensor, value: Tensor, call: PartCall) -> tuple[Tensor, Tensor, Tensor]:
    whole = torch.zeros_like(own.query), torch.zeros_like(widen(key)), torch.zeros_like(widen(value))
    for rows in _rows_at_once(own.query, key):
        some = own.of(rows)
        is_empty, wide = some.sums.total == 0, widen(some.grad)
        shift, divisor = torch.where(is_empty, 0.0, some.sums.top), torch.where(is_empty, 1.0, some.sums.total)
        weights = (_scores(own.query, key, call, rows) - shift.unsqueeze(-1)).exp_() / divisor.unsqueeze(-1)
        moved = wide @ widen(value).mT - (wide * widen(some.out)).sum(-1, keepdim=True)
        scores = weights * moved * call.scale
        whole[0][:, :, rows] = (scores @ widen(key)).to(key.dtype)
        whole[1].add_(scores.mT @ widen(some.query))
        whole[2].add_(weights.mT @ wide)
    return whole[0], whole[1].to(key.dtype), whole[2].to(value.dtype)


def _rows_at_once(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Slices of the queries."""
    each = max(1, SCORES_AT_ONCE // max(1, query.size(0) * query.size(1) * key.size(2)))
    for begin in range(0, query.size(2), each):
        yield slice(begin, min(query.size(2), begin + each))


def _scores(query: Tensor, key: Tensor, call: PartCall, rows: slice) -> Tensor:
    scores = widen(query[:, :, rows]) @ widen(key).mT * call.scale
    if call.documents is not None:
        queries, keys = call.documents
        scores.masked_fill_(queries[:, None, rows, None] != keys[:, None, None], -math.inf)
    if call.causal:
        places = torch.arange(key.size(2), device=scores.device)
        return scores.masked_fill_(places > places[rows, None], -math.inf)
    if call.mask is None:
        return scores
    mask = call.mask if call.mask.size(-2) == 1 else call.mask[..., rows, :]
    return scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)


def _kernel(query: Tensor, value: Tensor, call: PartCall) -> str:
    """Which of torch's kernels that tell the lse computes such heads; none where it is taken apart."""
    width = query.size(-1)
    if width != value.size(-1) or call.mask is not None or call.documents is not None:
        return ""
    if query.device.type == "cpu":
        return "cpu"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    is_flash = query.device.type == "cuda" and is_half and width % 8 == 0 and width <= 256
    return "flash" if is_flash and torch.cuda.get_device_capability(query.device) >= (8, 0) else ""
