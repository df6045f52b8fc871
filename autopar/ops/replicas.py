"""Replicas of experts: those with most rows of the moment are computed where the tokens are, on every rank.

    x S(0), up S(0), replicas=k → S(0)

Inside, rows by expert are summed over the ranks that share the experts, the parameters of the k experts with most go to
all of them, and gradients of those home, each in a sum an axis (`runtime.lowering.replicas`); tokens of the others are
exchanged. Which experts these are is known when the program runs; how many rows they spare, a distribution of routing
says (`ops.loads`).
"""

from __future__ import annotations

import math

from autopar.ir.graph import BY_LOAD, REPLICAS, Node
from autopar.ir.placement import Axis, Placement, S, local_shape
from autopar.ops.call import Call
from autopar.ops.inner import Inner, Sent, split_by
from autopar.ops.sliced import sliced_over

_NUMBER_BYTES = 8


def replicas_of(node: Node) -> int:
    """How many experts every rank has a replica of."""
    return int(dict(node.kwargs).get(REPLICAS, 0))


def replicas_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Where experts are split, all ranks that share them have tokens of their own, and exchange these one way."""
    over = [p for p in split_by(operands[3], lambda type_: type_ == S(0)) if axes[p].size > 1]
    if not replicas_of(call.node) or not over:
        return None
    alike = ", ".join(axes[position].name for position in over if operands[0][position] != S(0))
    if alike:
        return f"experts have replicas, but ranks of axis {alike} have the same tokens and other experts"
    if any(axes[position].size > 1 for position in sliced_over(operands)):
        return "experts have replicas, and are sliced over ranks with other tokens; they may be either"
    if dict(call.node.kwargs).get(BY_LOAD):
        return "experts have replicas, and tokens are exchanged by load; they may be either"
    if len({call.tensor(position).dtype for position in _parameters(call)}) > 1:
        return "experts have replicas, which need parameters of one dtype"
    return None


def sent_for_replicas(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...], over: list[int]) -> Sent:
    """Rows by expert, and the parameters of replicas; their gradients. over: the axes that share the experts."""
    if not replicas_of(call.node) or not over:
        return [], []
    sizes = [(p, _replica_bytes(call, p, operands, axes)) for p in _parameters(call)]
    home = sum(size for position, size in sizes if call.tensor(position).differentiable)
    count = int(call.arguments["num_experts"]) * _NUMBER_BYTES
    sums = [[Inner("all_reduce", axis, size) for axis in over] for size in (count, sum(s for _, s in sizes), home)]
    return [*sums[0], *sums[1]], sums[2] if home else []


def _parameters(call: Call) -> list[int]:
    """The operands, by position, that experts are made of."""
    return list(range(3, len(call.node.operands)))


def _replica_bytes(call: Call, position: int, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> int:
    """Of all replicas of a parameter on one rank, which has as much of each expert's as of its own."""
    own = local_shape(call.shape(position), operands[position], axes)
    return replicas_of(call.node) * math.prod(own[1:]) * call.tensor(position).itemsize
