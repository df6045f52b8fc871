"""Attention whose sequence may be split: queries, keys and values alike, which ranks exchange inside (long contexts).

It is torch's operator under another name, with the number of keys of all ranks among its arguments: what a rank has to
do depends on that, and a rank's own shapes do not say it. Graphs have it where a sequence is to be split
(`substitute.sequences`). ring: split, keys and values pass from rank to rank while queries are computed over those at
hand; else they are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir.graph import Node, Tensor
from autopar.ir.placement import Axis, Placement, R, S, Type, chunk_length, local_shape
from autopar.ops import saved, work, workspace
from autopar.ops.attention import attention, heads_error, heads_on_rank
from autopar.ops.call import Call
from autopar.ops.inner import Inner, Sent, split_by
from autopar.ops.local import LocalCall
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator
from autopar.runtime.lowering.halves import block_rows, sent_rows

CONTEXT_ATTENTION = "autopar.context_attention.default"
TORCH_ATTENTION = "aten.scaled_dot_product_attention.default"

_OPERANDS = ("query", "key", "value")

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "context_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int length, bool ring=False) -> Tensor"
)


def _context_attention(*operands: Any, length: int, ring: bool = False, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*operands, **options)


_LIBRARY.impl("context_attention", _context_attention, "CompositeImplicitAutograd")


def context_attention(call: Call) -> list[AxisRule]:
    """As attention; and along the sequence, where queries are at home with their keys. In a ring, in no other way along
    the sequence."""
    rules, sequence = attention(call), S(len(call.shape(0)) - 2)
    if not rules or not may_split(call, ring=call.arguments["ring"]):
        return rules
    if call.arguments["ring"]:
        rules = [rule for rule in rules if rule.operands[0] != sequence]
    masks = [_mask_rows(shape) for shape in call.operand_shapes[3:]]
    return [*rules, AxisRule((*(sequence,) * 3, *masks), (sequence,))]


def _mask_rows(shape: tuple[int, ...]) -> Type:
    """How a mask lies where its queries are split; one that all queries share is whole."""
    return S(len(shape) - 2) if shape[-2] > 1 else R


def may_split(call: Call, ring: bool = False) -> bool:
    """Whether the sequence may be: causal over as many keys as queries, one sample beside another; without a mask, or
    in a ring with one that nothing learns."""
    query, key, value = call.operand_shapes[:3]
    if query[:-3] != key[:-3] or key[:-1] != value[:-1] or query[-3] % key[-3]:
        return False
    masks = [call.tensor(position) for position in range(3, len(call.node.operands))]
    if masks and not (ring and _is_plain_mask(call, masks[0])):
        return False
    is_square = query[-2] == key[-2]
    gradients = {call.tensor(position).differentiable for position in range(3)}
    return min(query[-2], key[-2]) > 1 and len(gradients) == 1 and (is_square or not call.arguments["is_causal"])


def _is_plain_mask(call: Call, mask: Tensor) -> bool:
    """Whether it has a column for each key, and no gradient; beside it nothing is causal."""
    is_whole = len(mask.shape) >= 2 and mask.shape[-1] == call.shape(1)[-2]
    return is_whole and not mask.differentiable and not call.arguments["is_causal"]


def sequence_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Why a sequence is not split so, or None. Keys come from the ranks of one axis, all with equal parts but the
    last."""
    over = [axes[position] for position in sequence_axes(call, operands) if axes[position].size > 1]
    if len(over) > 1:
        return f"the sequence is split by {len(over)} axes; keys are exchanged over one"
    return f"the sequence is split in shares over axis {over[0].name}" if over and over[0].shares else None


def sequence_axes(call: Call, operands: tuple[Placement, ...]) -> list[int]:
    """The axes, by position, that split the sequence."""
    return split_by(operands[1], lambda type_: type_ == S(len(call.shape(1)) - 2))


def _inside(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Keys and values are gathered, or pass around, for the backward pass again, where their gradients are summed on
    their way home; causal queries go where they are computed, their results home, and so do all that the backward pass
    reads, and its own."""
    split = sequence_axes(call, operands)
    if not split:
        return [], []
    axis = max(split, key=lambda position: axes[position].size)
    if call.arguments["ring"]:
        return _inside_ring(call, operands, axes, axis)
    sizes = [_whole_bytes(call, position, operands, axes, axis) for position in (1, 2)]
    gathers = [Inner("all_gather", axis, size) for size in sizes]
    sums = [Inner("reduce_scatter", axis, size) for size in sizes]
    to, back = _moves(call, operands, axes, axis, ["query"], ["result"])
    again, home = _moves(call, operands, axes, axis, ["query", "result", "result"], ["query"])
    return [*to, *gathers, *back], [*again, *gathers, *sums, *home]


def _inside_ring(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...], axis: int) -> Sent:
    """Keys and values go away with their queries. Each rank passes on the blocks of all but the rank after it; of
    gradients, of all."""
    size, is_causal = axes[axis].size, bool(call.arguments["is_causal"])
    rows = [block_rows(call.shape(1)[-2], size, rank, is_causal) for rank in range(size)]
    passed = [sum(rows) - rows[(rank + 1) % size] for rank in range(size)]
    row = sum(_row_bytes(call, name, operands, axes) for name in _OPERANDS[1:])
    sent = [(row * count, row * (count + sum(rows))) for count in passed]
    forward, backward = (Inner("ring", axis, way[0], max(way), is_beside=True) for way in zip(*sent, strict=True))
    to, back = _moves(call, operands, axes, axis, _OPERANDS, ["result"])
    again, home = _moves(call, operands, axes, axis, [*_OPERANDS, "result", "result"], _OPERANDS)
    return [*to, forward, *back], [*again, backward, *home]


def _whole_bytes(call: Call, position: int, operands: tuple[Placement, ...], axes: tuple[Axis, ...], axis: int) -> int:
    """Of keys or values over the whole sequence."""
    shape = list(local_shape(call.shape(position), operands[position], axes))
    if _takes_heads(call, operands):
        shape[-3] = local_shape(call.shape(0), operands[0], axes)[-3]
    shape[-2] = axes[axis].size * chunk_length(call.shape(position)[-2], axes[axis].size, 0)
    return math.prod(shape) * call.tensor(position).itemsize


def _moves(
    call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...], axis: int, to: Sequence[str],
    home: Sequence[str],
) -> tuple[list[Inner], list[Inner]]:  # fmt: skip
    """Of causal attention, what goes where mirrored halves are computed, and what comes home, or their gradients."""
    if not call.arguments["is_causal"]:
        return [], []
    away, back = sent_rows(call.shape(0)[-2], axes[axis].size)
    found = [
        [Inner("all_to_all", axis, row * rows[0], row * max(rows)) for row in widths]
        for rows, widths in (
            (away, [_row_bytes(call, name, operands, axes) for name in to]),
            (back, [_row_bytes(call, name, operands, axes) for name in home]),
        )
    ]
    return found[0], found[1]


def _row_bytes(call: Call, name: str, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> int:
    """Of one position of a query, key or value, or of the result, in all heads that a rank has of it."""
    heads = 1 if name in ("key", "value") and not _takes_heads(call, operands) else 0
    shape = local_shape(call.shape(heads), operands[heads], axes)
    width = call.shape(2 if name in ("value", "result") else 0)[-1]
    return math.prod(shape[:-2]) * width * call.tensor(0).itemsize


def _takes_heads(call: Call, operands: tuple[Placement, ...]) -> bool:
    """Whether each rank takes a head of the keys for each head of its queries before it sends them."""
    head = len(call.shape(0)) - 3
    return call.shape(1)[head] > 1 and any(q == S(head) != k for q, k in zip(operands[0], operands[1], strict=True))


def _local(local: LocalCall) -> str | None:
    """The runtime's function where the sequence is split, or a mask is kept as it is; torch's operator elsewhere."""
    call, length = local.call, len(local.call.shape(1)) - 2
    axes = local.axes_where(1, lambda type_: type_ == S(length))
    axes = [axis.name for axis in local.axes if axis.name in axes and axis.size > 1]
    names, is_ring = heads_on_rank(local), bool(call.arguments["ring"])
    masks = (names or local.names)[3:] if is_ring else []
    if not axes and not masks:
        node = as_torch(call.node, () if names is None else ("enable_gqa",))
        return local.plain(names or local.names, node)
    lengths = call.shape(0)[length], call.shape(1)[length]
    told = f"{call.arguments['is_causal']}, {call.arguments['scale']!r}, {lengths}, {axes[0] if axes else None}"
    options = ", ring=True" * is_ring + "".join(f", mask={name}" for name in masks)
    return f"rt.context_attention({', '.join((names or local.names)[:3])}, {told}{options})"


def as_torch(node: Node, without: tuple[str, ...] = ()) -> Node:
    """The call of torch's own operator, without some options."""
    kwargs = tuple((name, value) for name, value in node.kwargs if name not in ("length", "ring", *without))
    return replace(node, op=TORCH_ATTENTION, kwargs=kwargs)


CONTEXT: dict[str, Operator] = {
    CONTEXT_ATTENTION: Operator(
        context_attention, work=work.CONTEXT_ATTENTION,
        saved=saved.context_attention, saved_on_cpu=saved.context_attention_on_cpu,
        workspace=workspace.attention, lowered=workspace.context_attention,
        limits=(heads_error, sequence_error), inside=_inside, local=_local,
    ),
}  # fmt: skip
