"""Gradients of weights that meet as their factors: rows are gathered, and each rank makes the whole product itself.

    x S(d), weight I, bias I -> S(d)        d: any dim but the last

The gradient of a linear operator's weight is gᵀx, a sum over rows: of n ranks with b rows each, (n−1)·b·(in + out)
elements reach each rank, instead of 2(n−1)/n·in·out for the sum of n products. That is less where the rows of all
ranks are fewer than the harmonic mean of `in` and `out`. Each rank computes n times the product's work.
Sufficient factors: Xie et al., UAI'16; Poseidon, ATC'17, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Axis, I, Placement, S, Shape, are_alike, lengths_along, local_shape
from autopar.ops.call import Call
from autopar.ops.inner import Inner, Sent
from autopar.ops.local import LocalCall, tuple_of
from autopar.ops.notation import AxisRule
from autopar.ops.workspace import RuntimeMemory, Sizes

LINEAR = "aten.linear.default"


def factor_rules(call: Call) -> list[AxisRule]:
    """Each dim of rows; not for a weight without a gradient."""
    shape, others = call.shape(0), len(call.node.operands) - 1
    if not call.tensor(1).differentiable:
        return []
    rows = (S(dim) for dim, size in enumerate(shape[:-1]) if size > 1)
    return [AxisRule((type_,) + (I,) * others, (type_,)) for type_ in rows]


def is_by_factors(operands: tuple[Placement, ...], axis: int) -> bool:
    """Whether factors are gathered along an axis: rows are split, and the weight's gradient is whole."""
    return operands[0][axis].kind == "S" and operands[1][axis] == I


def factor_axes(operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> list[int]:
    """The axes, by position, along which factors are gathered."""
    return [place for place, axis in enumerate(axes) if axis.size > 1 and is_by_factors(operands, place)]


def num_gathered(operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> int:
    """Of how many ranks each computes the rows' product."""
    return math.prod(axes[place].size for place in factor_axes(operands, axes))


def factors_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Ranks of several kinds would round a product in several ways, and what must be equal would drift apart."""
    unequal = [axes[place].name for place in factor_axes(operands, axes) if axes[place].shares]
    return f"factors are gathered over axis {unequal[0]}, whose ranks have shares of the batch" if unequal else None


def most_rows(shape: Shape, placement: Placement, axes: tuple[Axis, ...]) -> int:
    """The most rows that a rank has."""
    return math.prod(max(lengths_along(shape, placement, dim, axes)) for dim in range(len(shape) - 1))


def sent_for_factors(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Backward, rows of both factors side by side, along the inner axis first, while the input's gradient is made."""
    over = factor_axes(operands, axes)
    if not over:
        return [], []
    width = sum(local_shape(call.shape(1), operands[1], axes)) * call.tensor(0).itemsize
    gathered, sent = most_rows(call.shape(0), operands[0], axes) * width, list[Inner]()
    for place in reversed(over):
        gathered *= axes[place].size
        sent.append(Inner("all_gather", place, gathered))
    if call.tensor(0).differentiable:  # one of as many products as there are gathered rows, and its own
        share = 1 / (1 + num_gathered(operands, axes))
        sent[0] = sent[0]._replace(is_beside=True, beside_share=share)
    return [], sent


def factors_memory(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """Both factors side by side, of this rank, then of ever more; a gradient that does not lie in rows is copied."""
    over = [size for place, size in enumerate(sizes.axis_sizes) if size > 1 and is_by_factors(operands, place)]
    if not over:
        return None
    own = sizes.operand(0) + sizes.result
    levels = [own * math.prod(over[place:]) for place in range(len(over))]
    return RuntimeMemory(None, (0, own + sum(levels) + sizes.result))


def local_linear(local: LocalCall) -> str | None:
    """The runtime's function. rows: as many as each rank adds zeros up to, where they are not as many on all."""
    over = [local.axes[place].name for place in factor_axes(local.placements, local.axes)]
    if not over:
        return None
    shape, placement = local.call.shape(0), local.placements[0]
    even = all(are_alike(shape, placement, dim, local.axes) for dim in range(len(shape) - 1))
    rows = "" if even else f", rows={most_rows(shape, placement, local.axes)}"
    x, weight, *bias = local.names
    return f"rt.linear_by_factors({x}, {weight}, {bias[0] if bias else None}, {tuple_of(over)}{rows})"


# Where they may pay ----------------------------------------


def may_pay(graph: Graph, node: Node) -> bool:
    """Whether factors of all rows are fewer elements than are sent for a sum of the weight's gradient. graph: of the
    step."""
    rows, (features, width) = math.prod(graph.tensors[node.operands[0]].shape[:-1]), _weight(graph, node)
    return rows * (features + width) < 2 * features * width


def pays(graph: Graph, node: Node, microbatches: int, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> bool:
    """The same of one rank's part, with operands so placed; not where rows meet in a sum along other axes, too. graph:
    of a microbatch."""
    over = factor_axes(operands, axes)
    split = [place for place, axis in enumerate(axes) if axis.size > 1 and _splits_rows(graph, node, operands, place)]
    if over != split:
        return not over
    features, width = local_shape(_weight(graph, node), operands[1], axes)
    rows = most_rows(graph.tensors[node.operands[0]].shape, operands[0], axes) * num_gathered(operands, axes)
    return microbatches * rows * (features + width) < 2 * features * width


def _splits_rows(graph: Graph, node: Node, operands: tuple[Placement, ...], place: int) -> bool:
    type_ = operands[0][place]
    return type_.kind == "S" and type_.dim < len(graph.tensors[node.operands[0]].shape) - 1


def _weight(graph: Graph, node: Node) -> Shape:
    return graph.tensors[node.operands[1]].shape


def meets(node: Node) -> bool:
    """Whether there are rules of an operator by which its weight's gradient meets as factors."""
    return node.op == LINEAR


def without_factors(node: Node, rules: Sequence[AxisRule]) -> Sequence[AxisRule]:
    """An operator's rules by which nothing is sent for gradients inside."""
    if not meets(node):
        return rules
    return [rule for rule in rules if not (rule.operands[0].kind == "S" and rule.operands[1] == I)]
