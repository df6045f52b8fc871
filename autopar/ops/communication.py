"""What operators send inside, by operator and placement: the communication that no redistribution shows.

Each entry is what the runtime's lowering of the operator does. Bytes are those that rank 0 hands to the collective
(conventions of `ir.redistribution.transfer_bytes`; of an exchange with uneven parts, what it sends). A backward
exchange takes place where the operator's first operand has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Axis, Placement, S, Type, local_shape
from autopar.ops.call import Call, call_of
from autopar.ops.windows import halos, has_windows, with_row_lengths


class Inner(NamedTuple):
    """One collective inside an operator, on a mesh axis (by position): the bytes of rank 0, and of the busiest one.

    is_early: it starts at the top of forward, long before the operator that awaits it, and stops no rank.
    """

    collective: str
    axis: int
    num_bytes: int
    busiest_bytes: int = 0
    is_early: bool = False

    @property
    def priced_bytes(self) -> int:
        """What the collective's time depends on: the ranks wait for the busiest."""
        return max(self.num_bytes, self.busiest_bytes)


Sent = tuple[list[Inner], list[Inner]]
"""In the forward pass, and in the backward pass where the first operand has a gradient."""


def inner_communication(
    graph: Graph, node: Node, operands: tuple[Placement, ...], axes: tuple[Axis, ...], trains: bool = True
) -> Sent:
    """What a node sends with operands so placed, each time it runs: forward and backward."""
    function = _find(node.op)
    if function is None or not any(type_.kind == "S" for placement in operands for type_ in placement):
        return [], []
    forward, backward = function(call_of(graph, node), operands, axes)
    backward = backward if trains and graph.tensors[node.operands[0]].differentiable else []
    return _real(forward, axes), _real(backward, axes)


def _real(sent: list[Inner], axes: tuple[Axis, ...]) -> list[Inner]:
    return [inner for inner in sent if axes[inner.axis].size > 1]


def _split_by(placement: Placement, test: Callable[[Type], bool]) -> list[int]:
    return [axis for axis, type_ in enumerate(placement) if type_.kind == "S" and test(type_)]


def _cross_entropy(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Split classes: the maximum, then two sums a sample. A mean over split samples: their count, a float32."""
    local = local_shape(call.shape(0), operands[0], axes)
    size = math.prod(local) // local[1] * max(4, call.tensor(0).itemsize) if len(local) > 1 else 0
    classes = _split_by(operands[0], lambda type_: type_ == S(1))
    sent = [Inner("all_reduce", axis, size * count) for axis in classes for count in (1, 2)]
    return sent, []


def is_mean_cross_entropy(call: Call) -> bool:
    """Whether the operator is a cross-entropy that divides by the number of its targets."""
    return call.node.op == "aten.cross_entropy_loss.default" and call.arguments["reduction"] == 1


def count_of_targets(call: Call, operands: tuple[Placement, ...]) -> list[Inner]:
    """What a mean cross-entropy sends to count its targets, once for all microbatches: a float32 an axis, or a sum of
    weights."""
    if not is_mean_cross_entropy(call):
        return []
    size = max(4, call.tensor(2).itemsize) if call.has_tensor("weight") else 4
    return [Inner("all_reduce", axis, size) for axis in _split_by(operands[0], lambda type_: type_ != S(1))]


def _halo_exchange(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Forward each rank sends the rows that others need, backward the gradients of those that it got."""
    local, itemsize = local_shape(call.shape(0), operands[0], axes), call.tensor(0).itemsize
    forward: list[Inner] = []
    backward: list[Inner] = []
    for halo, row in with_row_lengths(local, halos(call, operands[0], axes)):
        sent, received = ([count * row * itemsize for count in counts] for counts in (halo.sent, halo.received))
        forward.append(Inner("all_to_all", halo.axis, sent[0], max(sent)))
        backward.insert(0, Inner("all_to_all", halo.axis, received[0], max(received)))
    return forward, backward


def _batch_norm(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Means and variances of the channels: two sums forward, two backward."""
    if not call.arguments.get("training", False):
        return [], []
    channels = local_shape(call.shape(0), operands[0], axes)[1]
    return _statistics(call, channels, _split_by(operands[0], lambda type_: type_ != S(1)))


def _group_norm(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Means and variances of the samples' groups: two sums forward, two backward."""
    local = local_shape(call.shape(0), operands[0], axes)
    groups = call.arguments["num_groups"] * local[1] // call.shape(0)[1]
    return _statistics(call, local[0] * groups, _split_by(operands[0], lambda type_: type_.dim > 1))


def _statistics(call: Call, count: int, over: list[int]) -> Sent:
    sums = [Inner("all_reduce", axis, count * max(4, call.tensor(0).itemsize)) for axis in over for _ in range(2)]
    return sums, sums


_TABLE = {
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten.group_norm.default": _group_norm,
}


def _find(op: str) -> Callable[[Call, tuple[Placement, ...], tuple[Axis, ...]], Sent] | None:
    return _halo_exchange if has_windows(op) else _TABLE.get(op)
