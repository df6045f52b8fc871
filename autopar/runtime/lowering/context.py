"""Attention whose sequence is split over an axis: queries stay, keys and values come from all ranks, block by block.

Softmax over parts of the keys is put together by the logarithms of their sums of exponentials (FlashAttention):

    out = Σ_b exp(lse_b − lse) · out_b        lse = log Σ_b exp(lse_b)

and the gradients of a part need the whole result and the whole lse alone. So torch's kernels compute each part, and no
rank makes scores of all keys. What is gathered is not kept: the backward pass gathers it again, and sums the gradients
of keys and values where they are at home.

Under a causal mask the last positions have most to do. There, each rank computes one half of a rank's queries from the
front and one from the back: these are sent there, and the results home.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime import comm, pieces
from autopar.runtime.lowering.halo import Range, chunk
from autopar.runtime.lowering.statistics import widen
from autopar.runtime.mesh import Axis

__all__ = ["context_attention"]

Deal = Callable[[int], tuple[int, int]]  # the two halves of each rank
Part = tuple[Tensor, Tensor]  # of a result, and the logarithm of its sums of exponentials (batch, heads, queries)


class _Spread(NamedTuple):
    """What does not change from part to part. spans: of all positions, those of the queries here, one after another;
    group: query heads for each head of the keys."""

    axis: Axis
    length: int
    spans: tuple[Range, ...]
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
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    spans = _spans(lengths[0], axis.size, mirrored(axis.size, axis.index) if causal else neighbours(axis.index))
    spread = _Spread(axis, lengths[1], spans, causal, scale, query.size(-3) // key.size(-3))
    operands = [x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value)]
    result: Tensor = _ContextAttention.apply(*operands, spread)  # type: ignore[no-untyped-call]
    return result if query.dim() == 4 else result.squeeze(0)


class _ContextAttention(torch.autograd.Function):
    """Saves what is at home on this rank, and the lse of what it computes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spread: _Spread) -> Tensor:
        out, lse = _attend(_away(query, spread), *_whole(key, value, spread), spread)
        out = _home(out, spread)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.spread = spread
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        spread, wanted = ctx.spread, ctx.needs_input_grad
        query, out, grad = (_away(x, spread) for x in (query, out, grad))
        own, *others = _gradients(grad, query, *_whole(key, value, spread), out, lse, spread)
        summed = [_summed(other, spread) if wanted[n] else None for n, other in enumerate(others, 1)]
        return _home(own, spread) if wanted[0] else None, *summed, None


def _whole(key: Tensor, value: Tensor, spread: _Spread) -> Part:
    key, value = (pieces.gather(x, 2, spread.axis, spread.length) for x in (key, value))
    return _each_head(key, spread.group), _each_head(value, spread.group)


def _each_head(x: Tensor, group: int) -> Tensor:
    """A head for each query head."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def _summed(grad: Tensor, spread: _Spread) -> Tensor:
    """This rank's part of the sum over ranks, and over the query heads that share a head."""
    if spread.group > 1:
        grad = grad.view(grad.size(0), -1, spread.group, *grad.shape[2:]).sum(2)
    return pieces.reduce_scatter(grad, 2, spread.axis)


# Parts ----------------------------------------


def _attend(query: Tensor, key: Tensor, value: Tensor, spread: _Spread) -> Part:
    """The result of the queries that are here over all keys."""
    out = query.new_empty((query.size(0), query.size(2), query.size(1), value.size(3))).transpose(1, 2)
    lse = torch.empty(query.shape[:3], dtype=widen(query).dtype, device=query.device)
    for rows, seen in _queries(query, spread):
        parts = [_part(query[:, :, rows], key[:, :, k], value[:, :, k], causal, spread.scale) for k, causal in seen]
        out[:, :, rows], lse[:, :, rows] = _merged(*parts) if len(parts) > 1 else parts[0]
    return out, lse


def _queries(query: Tensor, spread: _Spread) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Rows of the queries that are here, with what they see: parts of the keys, and whether these are causal."""
    first = 0
    for begin, end in spread.spans:
        rows, first = slice(first, first + end - begin), first + end - begin
        parts = [(slice(begin, end), True), (slice(0, begin), False)] if spread.causal else [(slice(None), False)]
        if end > begin:
            yield rows, parts if begin else parts[:1]


def _merged(one: Part, other: Part) -> Part:
    """The result over the keys of both."""
    lse = torch.logaddexp(one[1], other[1])
    first, second = (result * (part - lse).exp().unsqueeze(-1) for result, part in (one, other))
    return first.add_(second), lse


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spread: _Spread
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries that are here, and their part of those of all keys and values."""
    whole = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, seen in _queries(query, spread):
        own = [x[:, :, rows] for x in (grad, query, out, lse)]
        for keys, causal in seen:
            found = _part_gradients((*own, key[:, :, keys], value[:, :, keys]), causal, spread.scale)
            for total, where, part in zip(whole, (rows, keys, keys), found, strict=True):
                total[:, :, where] += part
    return whole


# Mirrored halves ----------------------------------------


def neighbours(rank: int) -> tuple[int, int]:
    """The halves of a rank's own positions, among those of all ranks in order."""
    return 2 * rank, 2 * rank + 1


def mirrored(ranks: int, rank: int) -> tuple[int, int]:
    """One half from the front and one from the back: under a causal mask, each rank has as much to do then."""
    return rank, 2 * ranks - 1 - rank


def _spans(length: int, ranks: int, halves: Sequence[int]) -> tuple[Range, ...]:
    """The positions of halves."""
    found = []
    for half in halves:
        begin, end = chunk(length, ranks, half // 2)
        middle = begin + (end - begin + 1) // 2
        found.append((middle, end) if half % 2 else (begin, middle))
    return tuple(found)


def sent_rows(length: int, ranks: int) -> tuple[list[int], list[int]]:
    """The positions that each rank sends where mirrored halves are computed, and where results come home."""

    def left(halves: tuple[int, int], others: tuple[int, int]) -> int:
        return sum(end - begin for begin, end in _spans(length, ranks, [h for h in halves if h not in others]))

    pairs = [(neighbours(rank), mirrored(ranks, rank)) for rank in range(ranks)]
    return [left(own, away) for own, away in pairs], [left(away, own) for own, away in pairs]


def _away(x: Tensor, spread: _Spread) -> Tensor:
    """The halves that this rank computes, out of those that ranks have at home."""
    return _dealt(x, spread, neighbours, partial(mirrored, spread.axis.size)) if spread.causal else x


def _home(x: Tensor, spread: _Spread) -> Tensor:
    return _dealt(x, spread, partial(mirrored, spread.axis.size), neighbours) if spread.causal else x


def _dealt(x: Tensor, spread: _Spread, before: Deal, after: Deal) -> Tensor:
    """Halves (batch, heads, positions, width) of each rank, out of those that it had; positions are outside of heads in
    memory, as projections make them."""
    axis, wanted = spread.axis, after(spread.axis.index)
    rows = [end - begin for begin, end in _spans(spread.length, axis.size, range(2 * axis.size))]
    found = dict(zip(before(axis.index), torch.split(x, [rows[half] for half in before(axis.index)], 2), strict=True))
    sent = [[half for half in after(rank) if half in found and rank != axis.index] for rank in range(axis.size)]
    come = [[half for half in before(rank) if half in wanted and rank != axis.index] for rank in range(axis.size)]
    one = x.size(0) * x.size(1) * x.size(3)
    receives, sends = ([one * sum(rows[half] for half in halves) for halves in way] for way in (come, sent))
    buffer = torch.cat([x.new_empty(0), *(found[half].reshape(-1) for halves in sent for half in halves)])
    output = x.new_empty(sum(receives))
    comm.exchange(output, receives, buffer, sends, axis)
    arrived = [half for halves in come for half in halves]
    for half, part in zip(arrived, torch.split(output, [one * rows[half] for half in arrived]), strict=True):
        found[half] = part.view(*x.shape[:2], rows[half], x.size(3))
    result = x.new_empty((x.size(0), sum(rows[half] for half in wanted), x.size(1), x.size(3))).transpose(1, 2)
    return result.copy_(torch.cat([found[half] for half in wanted], 2))


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


def _part_gradients(tensors: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries, keys and values of a part: gradient, query, result and lse over all keys, key, value."""
    grad, query, out, lse, key, value = tensors
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
