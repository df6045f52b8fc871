"""Linear operators that compute beside what they send (asynchronous tensor parallelism).

Graphs have them where that pays, or is asked for (`substitute.async_linears`): torch's linear operators, those of one
input side by side, with one rule more each, in which rows are split before, or after them:

    gathered_linears    x S(d), weights S(0) → results S(-1)    rows of all ranks come, block by block
    scattered_linear    x S(-1), weight S(1) → result S(dim)    blocks of the sum over ranks go home

As Megatron-LM's sequence parallelism sends (`R` before, `P` behind), but beside the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import Axis, P, Placement, R, S, Shape, local_shape
from autopar.ops.async_work import ASYNC_LINEARS as WORK
from autopar.ops.call import Call
from autopar.ops.inner import Inner, Sent
from autopar.ops.local import LocalCall, items
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator
from autopar.ops.saved import Saved
from autopar.ops.workspace import RuntimeMemory, Sizes

GATHERED_LINEARS = "autopar.gathered_linears.default"
SCATTERED_LINEAR = "autopar.scattered_linear.default"

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("gathered_linears(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor[]")
_LIBRARY.define("scattered_linear(Tensor input, Tensor weight, Tensor? bias=None, *, int dim) -> Tensor")


def _gathered_linears(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    return [F.linear(x, weight, biases[place] if biases else None) for place, weight in enumerate(weights)]


def _scattered_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dim: int
) -> torch.Tensor:
    return F.linear(x, weight, bias)


_LIBRARY.impl("gathered_linears", _gathered_linears, "CompositeImplicitAutograd")
_LIBRARY.impl("scattered_linear", _scattered_linear, "CompositeImplicitAutograd")


def num_weights(node: Node) -> int:
    """Of how many products side by side."""
    return len(node.args[1])


def _last(call: Call) -> int:
    return len(call.shape(0)) - 1


def _rows(call: Call) -> list[int]:
    return [dim for dim, size in enumerate(call.shape(0)[:-1]) if size > 1]


def gathered_linears(call: Call) -> list[AxisRule]:
    """As of linear operators, all of them alike; and rows that are gathered before."""
    weights, results = num_weights(call.node), len(call.node.results)
    stored = len(call.node.operands) - 1
    whole, wide, last = (R,) * stored, (S(0),) * stored, (S(_last(call)),) * results
    found = [AxisRule((S(dim), *whole), (S(dim),) * results) for dim in _rows(call)]
    found += [AxisRule((R, *wide), last), AxisRule((P, *(R,) * weights, *(P,) * (stored - weights)), (P,) * results)]
    return [*found, *(AxisRule((S(dim), *wide), last) for dim in _rows(call))]


def scattered_linear(call: Call) -> list[AxisRule]:
    """As of a linear operator, but for summands; these are scattered along `dim` behind it."""
    biases = len(call.node.operands) - 2
    found = [AxisRule((S(dim), R, *(R,) * biases), (S(dim),)) for dim in _rows(call)]
    found.append(AxisRule((R, S(0), *(S(0),) * biases), (S(_last(call)),)))
    return [*found, AxisRule((S(_last(call)), S(1), *(R,) * biases), (S(call.arguments["dim"]),))]


# Where rows travel ----------------------------------------


def gathered_axes(operands: Sequence[Placement]) -> list[int]:
    """The axes, by position, along which rows come."""
    pairs = enumerate(zip(operands[0], operands[1], strict=True))
    return [place for place, (rows, weight) in pairs if rows.kind == "S" and weight == S(0)]


def scattered_axes(operands: Sequence[Placement]) -> list[int]:
    """The axes, by position, along which blocks of the sum go home."""
    return [place for place, weight in enumerate(operands[1]) if weight == S(1)]


def _gather(operands: Sequence[Placement], axes: tuple[Axis, ...]) -> tuple[int, int] | None:
    """The axis and the dim along which rows come, if they do."""
    found = [place for place in gathered_axes(operands) if axes[place].size > 1]
    return (found[0], operands[0][found[0]].dim) if found else None


def _scatter(operands: Sequence[Placement], axes: tuple[Axis, ...]) -> int | None:
    return next((place for place in scattered_axes(operands) if axes[place].size > 1), None)


def gather_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Why rows do not come so, or None."""
    over = [place for place in gathered_axes(operands) if axes[place].size > 1]
    if not over:
        return None
    if not call.tensor(0).differentiable and any(call.tensor(n).differentiable for n in range(1, len(operands))):
        return "rows are gathered again beside their own gradient, which is not asked for"
    return _even_error(over, operands[0][over[0]].dim, call.shape(0), operands[0], axes)


def scatter_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Why the sum does not go home so, or None."""
    over = [place for place in scattered_axes(operands) if axes[place].size > 1]
    made = tuple(S(call.arguments["dim"]) if place in over else type_ for place, type_ in enumerate(operands[0]))
    return _even_error(over, call.arguments["dim"], call.shape(0), made, axes) if over else None


def _even_error(
    over: Sequence[int], dim: int, shape: Shape, placement: Placement, axes: tuple[Axis, ...]
) -> str | None:  # fmt: skip
    """Rows travel along one axis, which cuts them into equal parts, and no other does; each microbatch's apart."""
    axis, splitting = axes[over[0]], [axes[place] for place, type_ in enumerate(placement) if type_ == S(dim)]
    others = [other.name for other in splitting if other != axis and other.name != MICROBATCH and other.size > 1]
    if len(over) > 1:
        return f"rows travel over {len(over)} axes; blocks pass along one"
    if others:
        return f"rows travel over axis {axis.name} along dim {dim}, which axis {others[0]} splits, too"
    rows = shape[dim] // math.prod(other.size for other in splitting if other.name == MICROBATCH)
    if axis.shares or rows % axis.size:
        return f"rows travel over axis {axis.name}, which does not cut dim {dim} of {rows} into equal parts"
    return None


# What is sent ----------------------------------------


def _sent_by_gather(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Forward, rows in a ring. Backward they come again while their own gradient is made, and that goes home while
    those of the weights are."""
    found = _gather(operands, axes)
    if found is None:
        return [], []
    place, size = found[0], axes[found[0]].size
    part = math.prod(local_shape(call.shape(0), operands[0], axes)) * call.tensor(0).itemsize
    forward = [Inner("ring", place, (size - 1) * part, is_beside=True)]
    if not any(call.tensor(position).differentiable for position in range(1, 1 + num_weights(call.node))):
        return forward, [Inner("reduce_scatter", place, size * part)]
    gather = Inner("all_gather", place, size * part, is_beside=True, beside_share=0.5)
    return forward, [gather, gather._replace(collective="reduce_scatter")]


def _sent_by_scatter(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Forward, blocks of the sum in a ring; backward, of its gradient, while that of the rows is made."""
    place = _scatter(operands, axes)
    if place is None:
        return [], []
    size, itemsize = axes[place].size, call.tensor(0).itemsize
    rows = math.prod(local_shape(call.shape(0), operands[0], axes)[:-1]) // size
    passed = (size - 1) * rows * local_shape(call.shape(1), operands[1], axes)[0] * itemsize
    forward = Inner("ring", place, passed, is_beside=True)
    share = (size - 1) / size
    if call.tensor(1).differentiable and call.tensor(0).differentiable:
        share /= 2
    return [forward], [forward._replace(beside_share=share)]


# On a rank ----------------------------------------


def _gathered_text(local: LocalCall) -> str:
    weights = num_weights(local.call.node)
    x, *stored = local.names
    given = f"{x}, {items(stored[:weights])}, {items(stored[weights:]) if stored[weights:] else '()'}"
    found = _gather(local.placements, local.axes)
    if found is None:
        return f"rt.linears({given})"
    return f"rt.gathered_linears({given}, {found[1]}, {local.axes[found[0]].name})"


def _scattered_text(local: LocalCall) -> str:
    place = _scatter(local.placements, local.axes)
    given = ", ".join([*local.names, *["None"] * (3 - len(local.names))])
    if place is None:
        return f"torch.nn.functional.linear({given})"
    return f"rt.scattered_linear({given}, {local.call.arguments['dim']}, {local.axes[place].name})"


def _factors(node: Node, graph: Graph) -> list[Saved]:
    """This rank's rows where a weight has a gradient, and the weights where the rows have one."""
    x, *weights = node.operands[: 1 + (num_weights(node) if node.op == GATHERED_LINEARS else 1)]
    trained = any(graph.tensors[name].differentiable for name in weights)
    return [*[x] * trained, *(weights if graph.tensors[x].differentiable else ())]


def _memory_of_gather(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """Forward, rows in order, a block that is multiplied and one on its way, and where results are put in order as much
    as the results. Backward, rows and their gradient, of all ranks, on CPUs what is summed comes, too, beside the
    gradients of weights."""
    if not _is_gathered(sizes, operands):
        return None
    (place,) = [n for n in gathered_axes(operands) if sizes.axis_sizes[n] > 1]
    part, size, dim = sizes.operand(0), sizes.axis_sizes[place], operands[0][place].dim
    results = [math.prod(shape) * sizes.itemsize for shape in sizes.results]
    moves = math.prod(sizes.operands[0][:dim]) > 1
    whole = size * part
    forward = (2 + moves) * part + sum(results) * moves
    backward = whole * (2 + (sizes.device_type == "cpu")) + part * (1 + 2 * moves) + sum(results) * moves
    backward += sum(sizes.operand(n) for n in range(1, 1 + num_weights(node)) if sizes.differentiable[n])
    return RuntimeMemory(None, (forward, backward))


def _is_gathered(sizes: Sizes, operands: tuple[Placement, ...]) -> bool:
    return any(sizes.axis_sizes[place] > 1 for place in gathered_axes(operands))


def _memory_of_scatter(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """Forward, three blocks: made, on its way, and coming. Backward the gradient of all ranks' blocks; rows where they
    are put in order."""
    places = [place for place in scattered_axes(operands) if sizes.axis_sizes[place] > 1]
    if not places:
        return None
    size, dim = sizes.axis_sizes[places[0]], dict(node.kwargs)["dim"]
    moves = math.prod(sizes.operands[0][:dim]) > 1
    forward = 3 * sizes.result + sizes.operand(0) * moves
    backward = size * sizes.result + (sizes.result + 2 * sizes.operand(0)) * moves
    return RuntimeMemory(None, (forward, backward))


ASYNC_LINEARS: dict[str, Operator] = {
    GATHERED_LINEARS: Operator(
        gathered_linears, work=WORK, saved=_factors, limits=(gather_error,),
        lowered=_memory_of_gather, inside=_sent_by_gather, local=_gathered_text,
    ),
    SCATTERED_LINEAR: Operator(
        scattered_linear, work=WORK, saved=_factors, limits=(scatter_error,),
        lowered=_memory_of_scatter, inside=_sent_by_scatter, local=_scattered_text,
    ),
}  # fmt: skip
