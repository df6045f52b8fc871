"""Routed experts in slices: ranks of an axis have tokens of their own, and each a part of every expert's hidden values.

    x S(0), up S(hidden), down S(1) → S(0)

Inside, rows go to all slices and home again, or slices go to all rows and their gradients home (`ir.slice_table`); the
parameters are stored, and their gradients lie, alike in both.
"""

from __future__ import annotations

import math

from autopar.ir.graph import SLICES, Node
from autopar.ir.placement import Axis, Placement, R, S, Shape, local_shape
from autopar.ir.slice_table import TENSOR, SliceTable
from autopar.ops.call import Call
from autopar.ops.inner import Inner, Sent, split_by
from autopar.ops.notation import AxisRule

_NUMBER_BYTES = 8


def hidden_dim(up: Shape, paired: bool) -> int:
    """The dim of hidden values in `up`, of which one more may be the parts of a gate."""
    return 3 if len(up) == 4 and not paired else 2


def sliced_rule(call: Call) -> list[AxisRule]:
    """Where hidden values can be split. Tokens without a gradient get none back: then experts have none."""
    up, arguments = call.shape(3), call.arguments
    count = len(call.node.operands)
    wanted = {call.tensor(position).differentiable for position in range(count) if position not in (1, 2)}
    has_parts = not arguments["gated"] or len(up) == 4
    dim = hidden_dim(up, arguments["paired"])
    is_uniform = call.tensor(0).differentiable or not any(wanted)
    if not (has_parts and is_uniform and call.shape(0)[0] > 1 and up[dim] > 1):
        return []
    biases = [S(dim - 1)] * call.has_tensor("up_bias") + [R] * call.has_tensor("down_bias")
    return [AxisRule((S(0), S(0), S(0), S(dim), S(1), *biases), (S(0),))]


def sliced_over(operands: tuple[Placement, ...]) -> list[int]:
    """The axes, by position, whose ranks have slices of the experts, and tokens of their own."""
    return [axis for axis in split_by(operands[3], lambda type_: type_ != S(0)) if operands[0][axis] == S(0)]


def slice_table_of(node: Node) -> SliceTable:
    """What travels at which load. Raises PlanError."""
    return SliceTable.parse(dict(node.kwargs).get(SLICES, ""))


def sliced_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Slices are equal, over one axis, whose ranks have rows in as many chunks."""
    over = [axes[position] for position in sliced_over(operands) if axes[position].size > 1]
    if not over:
        return None
    names = ", ".join(axis.name for axis in over)
    if len(over) > 1 or over[0].shares:
        return f"experts are sliced over axes {names} of ranks with other tokens; they may be over one, in equal parts"
    length = local_shape(call.shape(4), operands[4], tuple(_whole(axis, over[0]) for axis in axes))[1]
    if length % over[0].size:
        return (
            f"{length} hidden values are not divided by the {over[0].size} ranks of axis {names}, whose tokens differ"
        )
    return None


def _whole(axis: Axis, other: Axis) -> Axis:
    """The axis, as if it had one rank where it is the other."""
    return Axis(axis.name, 1, axis.stride) if axis == other else axis


def sent_for_slices(
    call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...], rows: tuple[int, int], chunks: int,
    told_chunks: int = 0,
) -> Sent:  # fmt: skip
    """Counts; then rows and their results, or slices, and gradients of either the other way.

    rows: of a rank in the mean, and of the busiest; chunks: in which they come; told_chunks: in which they may come, by
    load: then all ranks agree about the load, too.
    """
    over = [position for position in sliced_over(operands) if axes[position].size > 1]
    if not over:
        return [], []
    axis, ranks = over[0], axes[over[0]].size
    experts = local_shape(call.shape(3), operands[3], axes)[0]
    told = [Inner("all_reduce", axis, _NUMBER_BYTES)] if told_chunks else []
    told.append(Inner("all_gather", axis, ranks * max(chunks, told_chunks) * experts * _NUMBER_BYTES))
    if slice_table_of(call.node).at(rows[1]) == TENSOR:
        moved = _rows(call, operands, axes, axis, rows, chunks)
        return [*told, *moved], moved
    there, home = _slices(call, operands, axes, axis)
    return [*told, *there], home


def _rows(
    call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...], axis: int, rows: tuple[int, int], chunks: int
) -> list[Inner]:
    """To all ranks, and what their slices make of them home."""
    width = local_shape(call.shape(0), operands[0], axes)[1] * call.tensor(0).itemsize
    made = local_shape(call.shape(4), operands[4], axes)[2] * call.tensor(4).itemsize
    own, busiest = (-(-count // chunks) * axes[axis].size for count in rows)
    legs = (Inner("exchange", axis, own * size, busiest * size) for size in (width, made))
    return [leg for leg in legs for _ in range(chunks)]


def _slices(
    call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...], axis: int
) -> tuple[list[Inner], list[Inner]]:
    """To all ranks, and home what gradients those have of them that want any."""
    sizes = [(position, slice_bytes(call, position, operands, axes)) for position in sliced_operands(call)]
    whole = [(position, size * axes[axis].size) for position, size in sizes]
    home = [Inner("reduce_scatter", axis, size) for position, size in whole if call.tensor(position).differentiable]
    return [Inner("all_gather", axis, size) for _, size in whole], home


def sliced_operands(call: Call) -> list[int]:
    """The operands, by position, that are sliced."""
    return [3, 4, *([5] if call.has_tensor("up_bias") else [])]


def slice_bytes(call: Call, position: int, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> int:
    """Of an operand on one rank."""
    return math.prod(local_shape(call.shape(position), operands[position], axes)) * call.tensor(position).itemsize
