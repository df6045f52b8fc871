"""Attention over a sliding window, and of packed documents by their numbers: no mask of all pairs is ever made.

Graphs have it where a sequence is long or to be split (`substitute.bands`). It knows the number of positions of all
ranks: what a rank sees, and needs of others, depends on that. Where the sequence is split, keys and values of the
positions before a rank's own that its queries see are fetched, or come in a ring that stops where the window does
(`runtime.lowering.window`). With sinks, each query head has one more score, of no key, that takes its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir.placement import Axis, Placement, R, S, local_shape
from autopar.ops import saved, work, workspace
from autopar.ops.attention import grouped_rules, heads_error, heads_on_rank
from autopar.ops.call import Call
from autopar.ops.context import sequence_axes, sequence_error
from autopar.ops.inner import Inner, Sent
from autopar.ops.local import LocalCall
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator
from autopar.runtime.lowering.band import needed_keys, passed_keys, seen_pairs
from autopar.runtime.lowering.halo import Range, overlap

WINDOW_ATTENTION = "autopar.window_attention.default"
SINK_ATTENTION = "autopar.sink_attention.default"
SEQUENCE = 2
"""The dim of positions, in queries, keys, values and the result."""

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "window_attention(Tensor query, Tensor key, Tensor value, Tensor? documents=None, *, float? scale=None, "
    "bool enable_gqa=False, int window, int length, bool ring=False) -> Tensor"
)

_LIBRARY.define(
    "sink_attention(Tensor query, Tensor key, Tensor value, Tensor sinks, Tensor? documents=None, *, "
    "float? scale=None, bool enable_gqa=False, int window, int length, bool ring=False) -> Tensor"
)


def _window_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor | None = None, *, window: int,
    length: int, ring: bool = False, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """What it says, for short sequences: emitted programs call the runtime's."""
    return F.scaled_dot_product_attention(query, key, value, _seen(query, documents, window, length), **options)


def _sink_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor,
    documents: torch.Tensor | None = None, *, window: int, length: int, scale: float | None = None,
    enable_gqa: bool = False, ring: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The same of this: a column beside the scores that no value belongs to."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    scores = scores.masked_fill(~_seen(query, documents, window, length), -math.inf)
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


def _seen(query: torch.Tensor, documents: torch.Tensor | None, window: int, length: int) -> torch.Tensor:
    places = torch.arange(length, device=query.device)
    seen = (places <= places[:, None]) & (places > places[:, None] - window)
    if documents is None:
        return seen
    return seen & (documents[:, None, :, None] == documents[:, None, None])


_LIBRARY.impl("window_attention", _window_attention, "CompositeImplicitAutograd")
_LIBRARY.impl("sink_attention", _sink_attention, "CompositeImplicitAutograd")


def window_attention(call: Call) -> list[AxisRule]:
    """Samples, heads and groups of heads as of attention, with the sinks of query heads; and positions, of queries with
    their keys. Numbers of documents are whole along these: each rank reads those of others, too."""
    sinks = int(call.node.op == SINK_ATTENTION)
    others = ", h" * sinks + ", b Z" * (len(call.node.operands) - 3 - sinks)
    rules = grouped_rules(call, f"b h Q D, b h T D, b h T V{others} -> b h Q V")
    if call.arguments["length"] == 1:
        return rules
    return [*rules, AxisRule((*(S(SEQUENCE),) * 3, *(R,) * (len(call.node.operands) - 3)), (S(SEQUENCE),))]


def _inside(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Forward, what others see of a rank's keys and values; backward again, and their gradients home."""
    split = sequence_axes(call, operands)
    if not split:
        return [], []
    axis = max(split, key=lambda position: axes[position].size)
    length, window = call.arguments["length"], call.arguments["window"]
    rows = [_row_bytes(call, position, operands, axes) for position in (1, 2)]
    if call.arguments["ring"]:
        return _inside_ring(axis, axes[axis].size, length, window, sum(rows))
    held, needed = needed_keys(length, axes[axis].size, window)
    if held == needed:
        return [], []
    sent, back = _moved(held, needed), _moved(needed, held)
    fetch = [Inner("all_to_all", axis, row * sent[0], row * max(sent)) for row in rows]
    return fetch, [*fetch, *(Inner("all_to_all", axis, row * back[0], row * max(back)) for row in rows)]


def _inside_ring(axis: int, ranks: int, length: int, window: int, row: int) -> Sent:
    """Beside all that is computed but for the last block, of the rank in the middle."""
    steps = passed_keys(length, ranks, window)
    if not steps:
        return [], []
    sent = [sum(_rows(step[rank]) for step in steps) for rank in range(ranks)]
    home = [sum(_rows(step[rank - 1]) for step in steps) if rank else 0 for rank in range(ranks)]
    both = [one + other for one, other in zip(sent, home, strict=True)]
    share = _share_before_the_last(steps, ranks, length, window)
    forward, backward = (
        Inner("ring", axis, row * way[0], row * max(way), is_beside=True, beside_share=share, messages=len(steps))
        for way in (sent, both)
    )
    return [forward], [backward]


def _share_before_the_last(steps: Sequence[Sequence[Range]], ranks: int, length: int, window: int) -> float:
    """What is computed before the last block is there, of all, by the rank that has most to do after it."""
    queries = needed_keys(length, ranks, window)[0]
    last = [seen_pairs(queries[rank], steps[-1][rank - 1], window) for rank in range(1, ranks)]
    rank = max(range(1, ranks), key=lambda rank: last[rank - 1])
    return 1 - last[rank - 1] / seen_pairs(queries[rank], (0, length), window)


def _moved(held: Sequence[Range], needed: Sequence[Range]) -> list[int]:
    """Of each rank, how many of its positions go to others."""
    ranks = range(len(held))
    return [sum(_rows(overlap(held[own], needed[other])) for other in ranks if other != own) for own in ranks]


def _rows(rows: Range) -> int:
    return rows[1] - rows[0]


def _row_bytes(call: Call, position: int, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> int:
    """Of one position of keys or values, in all heads that a rank sends."""
    shape = list(local_shape(call.shape(position), operands[position], axes))
    if call.shape(1)[1] > 1 and any((q == S(1)) != (k == S(1)) for q, k in zip(*operands[:2], strict=True)):
        shape[1] = local_shape(call.shape(0), operands[0], axes)[1]
    return math.prod(shape[:SEQUENCE]) * shape[-1] * call.tensor(position).itemsize


def _local(local: LocalCall) -> str:
    """The runtime's function, wherever the sequence is."""
    call, names = local.call, heads_on_rank(local) or list(local.names)
    split = local.axes_where(1, lambda type_: type_ == S(SEQUENCE))
    axes = [axis.name for axis in local.axes if axis.name in split and axis.size > 1]
    told = call.arguments
    first = f"{', '.join(names[:3])}, {told['window']}, {told['scale']!r}, {told['length']}"
    others = ("sinks", "documents") if call.node.op == SINK_ATTENTION else ("documents",)
    options = ", ring=True" * bool(axes and told["ring"])
    options += "".join(f", {what}={name}" for what, name in zip(others, names[3:], strict=False))
    return f"rt.window_attention({first}, {axes[0] if axes else None}{options})"


_WINDOWED = Operator(
    window_attention, work=work.WINDOW_ATTENTION, saved=saved.window_attention,
    workspace=workspace.attention, lowered=workspace.window_attention,
    limits=(heads_error, sequence_error), inside=_inside, local=_local,
)  # fmt: skip
WINDOWED: dict[str, Operator] = {WINDOW_ATTENTION: _WINDOWED, SINK_ATTENTION: _WINDOWED}
