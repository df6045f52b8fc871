"""What operators send inside, by operator and placement: the communication that no redistribution shows.

What a row of the table says is what the runtime's lowering of the operator does.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Axis, Placement, S, Shape
from autopar.ops.call import Call, call_of
from autopar.ops.inner import Inner, Sent, split_by
from autopar.ops.table import operator


def inner_communication(
    graph: Graph, node: Node, operands: tuple[Placement, ...], axes: tuple[Axis, ...], trains: bool = True
) -> Sent:
    """What a node sends with operands so placed, each time it runs: forward and backward."""
    row = operator(node.op)
    inside = row.inside
    if inside is None or not any(type_.kind == "S" for placement in operands for type_ in placement):
        return [], []
    forward, backward = inside(call_of(graph, node), operands, axes)
    backward = backward if trains and graph.tensors[node.operands[row.sends_for]].differentiable else []
    return _real(forward, axes), _real(backward, axes)


def _real(sent: list[Inner], axes: tuple[Axis, ...]) -> list[Inner]:
    return [inner for inner in sent if axes[inner.axis].size > 1]


def is_mean_over_samples(call: Call) -> bool:
    """Whether the operator divides by the number of its targets, which the ranks that share them count together."""
    counts = operator(call.node.op).counts_samples
    return counts is not None and counts(call)


def count_of_targets(call: Call, operands: tuple[Placement, ...]) -> list[Inner]:
    """What a mean over samples sends to count its targets, once for all microbatches: a float32 an axis, or a sum of
    weights."""
    if not is_mean_over_samples(call):
        return []
    size = max(4, call.tensor(2).itemsize) if call.has_tensor("weight") else 4
    return [Inner("all_reduce", axis, size) for axis in split_by(operands[0], lambda type_: type_ != S(1))]


def worked_shapes(
    node: Node, shapes: tuple[Shape, ...], operands: tuple[Placement, ...], axes: tuple[Axis, ...]
) -> tuple[Shape, ...]:
    """Shapes of the operands on one rank by which its work is counted: their own, but where ranks work for others."""
    worked = operator(node.op).worked
    return shapes if worked is None else worked(shapes, operands, axes)


def gathered_rows(node: Node, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> int:
    """Of how many ranks' rows each rank makes the gradients of what is stored; 1: of its own."""
    gathered = operator(node.op).gathered
    return 1 if gathered is None else gathered(operands, axes)
