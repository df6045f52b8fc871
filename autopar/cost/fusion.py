"""What torch.compile joins in the blocks of a program, and what an operator takes there.

Compiled is a piece at a time: the statements of one module between two redistributions or inner modules
(`runtime.compiling`). Operators that move memory and are linked in a piece become one kernel. What only they read of
each other stays in registers: it is neither written nor read, forward or backward, and not saved; the backward kernel
makes it again from what its piece read. Products, attention and convolutions stay kernels of their own.

    time = the operator's time (`compute`) without the bytes of what stays in registers, and without a launch
           where another operator of its kernel has launched it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from autopar.cost.compute import call_issue_ns, call_time_ns, launch_ns, node_call
from autopar.cost.profile import Profile
from autopar.ir.graph import Graph, Node, Tensor
from autopar.ir.placement import Shape
from autopar.ops.table import operator
from autopar.ops.work import VIEW

FUSED = frozenset({
    "pointwise", "transcendental", "gelu", "gelu_tanh", "silu", "normalization", "rms_norm", "reduction", "softmax",
    "dropout", "copy", "straight_copy", "batch_norm", "batch_norm_inference",
})  # fmt: skip
"""Families whose operators a compiler makes one kernel of."""


class Fused(NamedTuple):
    """Which operands and results of an operator stay in registers, and whether its kernel makes them again for the
    backward pass, for which it keeps what it reads."""

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    makes_again: bool = False


def fusions(
    graph: Graph, converted: frozenset[str], saved: Mapping[str, Collection[object]]
) -> dict[str, Fused]:  # fmt: skip
    """Of each operator that is joined with another, by name, what stays in registers.

    converted: tensors that are redistributed before they are read. saved: by operator, what autograd keeps of it.
    """
    piece_of = {node.name: number for number, piece in enumerate(_pieces(graph, converted)) for node in piece}
    inside = {
        name for node in graph.nodes for name in node.results
        if name not in converted and _stays(graph, node, name, piece_of)
    }  # fmt: skip
    kernels = _kernels(graph, inside)
    again = {kernels[node.name] for node in graph.nodes if not inside.isdisjoint(saved.get(node.name, ()))}
    found = {}
    for node in graph.nodes:
        operands = tuple(name in inside for name in node.operands)
        results = tuple(name in inside for name in node.results)
        if any(operands) or any(results):
            found[node.name] = Fused(operands, results, kernels[node.name] in again)
    return found


def _pieces(graph: Graph, converted: frozenset[str]) -> Iterator[list[Node]]:
    """Neighbouring operators of one module, up to what reads a converted tensor."""
    piece: list[Node] = []
    for node in graph.nodes:
        if piece and (node.scope.module != piece[-1].scope.module or not converted.isdisjoint(node.operands)):
            yield piece
            piece = []
        piece.append(node)
    if piece:
        yield piece


def _stays(graph: Graph, node: Node, result: str, piece_of: Mapping[str, int]) -> bool:
    """Whether a result is read in the kernel that makes it, and nowhere else."""
    readers = [reader for reader, _ in graph.consumers[result]]
    if not readers or result == graph.loss or not _is_fused(node):
        return False
    return all(_is_fused(reader) and piece_of[reader.name] == piece_of[node.name] for reader in readers)


def _is_fused(node: Node) -> bool:
    work = operator(node.op).work
    return work is not VIEW and work.family in FUSED


def _kernels(graph: Graph, inside: Collection[str]) -> dict[str, str]:
    """Of each operator the first one of its kernel."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        makers = {found[graph.producers[name].name] for name in node.operands if name in inside}
        first = min(makers, default=node.name, key=[*found, node.name].index)
        found[node.name] = first
        found.update((name, first) for name, kernel in found.items() if kernel in makers)
    return found


def compiled_time_ns(
    node: Node, operand_shapes: tuple[Shape, ...], result_shapes: tuple[Shape, ...], tensors: Mapping[str, Tensor],
    profile: Profile, fused: Fused,
) -> tuple[tuple[int, int], tuple[int, int]]:  # fmt: skip
    """Nanoseconds (forward, backward) of an operator that is joined with others, and what the host needs to launch
    it. The first operator of a kernel launches it forward, the last one backward."""
    eager = node_call(node, operand_shapes, result_shapes, tensors)
    call = eager._replace(
        operand_itemsizes=_left(eager.operand_itemsizes, fused.operands),
        result_itemsizes=_left(eager.result_itemsizes, fused.results),
    )
    times, issues = map(min, call_time_ns(call, profile), call_time_ns(eager, profile)), call_issue_ns(call, profile)
    starts = not any(fused.operands), not any(fused.results)
    launches = [0 if begins else launch_ns(call, side, profile) for side, begins in enumerate(starts)]
    issued = [issue if begins else 0 for issue, begins in zip(issues, starts, strict=True)]
    forward, backward = (max(0, time - launch) for time, launch in zip(times, launches, strict=True))
    return (forward, backward), (issued[0], issued[1])


def _left(sizes: tuple[int, ...], in_registers: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple(0 if stays else size for size, stays in zip(sizes, in_registers, strict=True))
