"""Attention whose sequence may be split: queries, keys and values alike, which ranks exchange inside (long contexts).

It is torch's operator under another name, with the number of keys of all ranks among its arguments: what a rank has to
do depends on that, and a rank's own shapes do not say it. Graphs have it where a sequence is to be split
(`substitute.sequences`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir.graph import Node
from autopar.ir.placement import Axis, Placement, S, chunk_length, local_shape
from autopar.ops import saved, work, workspace
from autopar.ops.attention import attention, heads_error, heads_on_rank
from autopar.ops.call import Call
from autopar.ops.inner import Inner, Sent, split_by
from autopar.ops.local import LocalCall
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator
from autopar.runtime.lowering.context import sent_rows

CONTEXT_ATTENTION = "autopar.context_attention.default"
TORCH_ATTENTION = "aten.scaled_dot_product_attention.default"

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "context_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int length) -> Tensor"
)


def _context_attention(*operands: Any, length: int, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*operands, **options)


_LIBRARY.impl("context_attention", _context_attention, "CompositeImplicitAutograd")


def context_attention(call: Call) -> list[AxisRule]:
    """As attention; and along the sequence, where queries are at home with their keys."""
    rules, sequence = attention(call), S(len(call.shape(0)) - 2)
    return [*rules, AxisRule((sequence,) * 3, (sequence,))] if rules and may_split(call) else rules


def may_split(call: Call) -> bool:
    """Whether the sequence may be: without a mask, causal over as many keys as queries, one sample beside another."""
    query, key, value = call.operand_shapes[:3]
    if len(call.node.operands) > 3 or query[:-3] != key[:-3] or key[:-1] != value[:-1] or query[-3] % key[-3]:
        return False
    is_square = query[-2] == key[-2]
    gradients = {call.tensor(position).differentiable for position in range(3)}
    return min(query[-2], key[-2]) > 1 and len(gradients) == 1 and (is_square or not call.arguments["is_causal"])


def _sequence_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Keys come from the ranks of one axis, all with equal parts but the last."""
    over = [axes[position] for position in _split(call, operands) if axes[position].size > 1]
    if len(over) > 1:
        return f"the sequence is split by {len(over)} axes; keys are exchanged over one"
    return f"the sequence is split in shares over axis {over[0].name}" if over and over[0].shares else None


def _split(call: Call, operands: tuple[Placement, ...]) -> list[int]:
    """The axes that split the sequence."""
    return split_by(operands[1], lambda type_: type_ == S(len(call.shape(1)) - 2))


def _inside(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Keys and values are gathered, for the backward pass again, where their gradients are summed and scattered; causal
    queries go where they are computed, their results home, and so do all that the backward pass reads, and its own."""
    split = _split(call, operands)
    if not split:
        return [], []
    axis = max(split, key=lambda position: axes[position].size)
    sizes = [_whole_bytes(call, position, operands, axes, axis) for position in (1, 2)]
    gathers = [Inner("all_gather", axis, size) for size in sizes]
    sums = [Inner("reduce_scatter", axis, size) for size in sizes]
    if not call.arguments["is_causal"]:
        return gathers, [*gathers, *sums]
    away, home = sent_rows(call.shape(0)[-2], axes[axis].size)
    moves = [_moved(call, position, operands, axes, axis, rows) for position, rows in ((0, away), (2, home))]
    back = [_moved(call, position, operands, axes, axis, rows) for position, rows in ((0, home), (2, away), (2, away))]
    return [*moves, *gathers], [*moves[:1], *back, *gathers, *sums]


def _whole_bytes(call: Call, position: int, operands: tuple[Placement, ...], axes: tuple[Axis, ...], axis: int) -> int:
    """Of keys or values over the whole sequence."""
    shape = list(local_shape(call.shape(position), operands[position], axes))
    if _takes_heads(call, operands):
        shape[-3] = local_shape(call.shape(0), operands[0], axes)[-3]
    shape[-2] = axes[axis].size * chunk_length(call.shape(position)[-2], axes[axis].size, 0)
    return math.prod(shape) * call.tensor(position).itemsize


def _moved(
    call: Call, position: int, operands: tuple[Placement, ...], axes: tuple[Axis, ...], axis: int, rows: list[int]
) -> Inner:
    """So many rows of each rank, as wide as queries (0) or results (2), of all heads of queries."""
    query = local_shape(call.shape(0), operands[0], axes)
    one = math.prod(query[:-2]) * call.shape(position)[-1] * call.tensor(0).itemsize
    return Inner("all_to_all", axis, one * rows[0], one * max(rows))


def _takes_heads(call: Call, operands: tuple[Placement, ...]) -> bool:
    """Whether each rank takes a head of the keys for each head of its queries before it sends them."""
    head = len(call.shape(0)) - 3
    return call.shape(1)[head] > 1 and any(q == S(head) != k for q, k in zip(operands[0], operands[1], strict=True))


def _local(local: LocalCall) -> str | None:
    """The runtime's function where the sequence is split; torch's operator elsewhere."""
    call, length = local.call, len(local.call.shape(1)) - 2
    axes = local.axes_where(1, lambda type_: type_ == S(length))
    axes = [axis.name for axis in local.axes if axis.name in axes and axis.size > 1]
    names = heads_on_rank(local)
    if not axes:
        node = as_torch(call.node, () if names is None else ("enable_gqa",))
        return local.plain(names or local.names, node)
    lengths = call.shape(0)[length], call.shape(1)[length]
    told = f"{call.arguments['is_causal']}, {call.arguments['scale']!r}, {lengths}, {axes[0]}"
    return f"rt.context_attention({', '.join(names or local.names)}, {told})"


def as_torch(node: Node, without: tuple[str, ...] = ()) -> Node:
    """The call of torch's own operator, without some options."""
    kwargs = tuple((name, value) for name, value in node.kwargs if name not in ("length", *without))
    return replace(node, op=TORCH_ATTENTION, kwargs=kwargs)


CONTEXT: dict[str, Operator] = {
    CONTEXT_ATTENTION: Operator(
        context_attention, work=work.CONTEXT_ATTENTION, saved=saved.attention, saved_on_cpu=saved.attention_on_cpu,
        lowered=workspace.context_attention, limits=(heads_error, _sequence_error), inside=_inside, local=_local,
    ),
}  # fmt: skip
