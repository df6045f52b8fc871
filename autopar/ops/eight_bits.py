"""Operators whose activations may be kept for the backward pass in 8 bits, where inexact gradients are allowed: which
of what they keep, what packing takes for a while, and moves (`runtime.lowering.in_eight_bits`).

An operator may be one whose gradient is as far off as what it keeps: products, norms, and curves without poles. A
logarithm or a quotient near 0 is none, nor a comparison. What is packed are activations: floating-point tensors that
are made of the batch and have gradients; never parameters, statistics, or what is kept as a copy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.ir.graph import Graph, Node, found_once
from autopar.ops.call import Call, base_name
from autopar.ops.layout import copied
from autopar.ops.saved import Extra, Saved
from autopar.ops.workspace import Sizes, Workspace
from autopar.runtime.eight_bits import BLOCK

_OPERANDS = """
    linear mm addmm matmul bmm baddbmm conv1d conv2d conv3d layer_norm rms_norm batch_norm
    _native_batch_norm_legit_functional mul gelu silu mish softplus elu hardswish scaled_dot_product_attention
"""
_RESULTS = "softmax _softmax tanh sigmoid exp"
_BY_VIEWS = frozenset(["matmul", "bmm", "baddbmm", "mm", "addmm"])
"""Whose operands torch lays anew where they do not lie in order: it keeps the copy, which no hook knows."""
_FLOATS = frozenset(["float16", "bfloat16", "float32", "float64"])

Passes = tuple[tuple[int, ...], tuple[int, ...]]


class Packed(NamedTuple):
    """What an operator keeps in 8 bits: the places of operands, or its only result."""

    operands: tuple[int, ...] = ()
    result: bool = False

    def names(self, node: Node) -> tuple[str, ...]:
        """Of the tensors."""
        return node.results[:1] if self.result else tuple([node.operands[place] for place in self.operands])


@found_once
def _of_the_batch(graph: Graph) -> frozenset[str]:
    """Activations: what is made, of what comes in with the batch."""
    found, made = {*graph.inputs}, set[str]()
    for node in graph.nodes:
        if not found.isdisjoint(node.operands):
            found.update(node.results)
            made.update(node.results)
    return frozenset(
        name for name in made if graph.tensors[name].differentiable and graph.tensors[name].dtype in _FLOATS
    )


def packed_by(node: Node, graph: Graph, saved: tuple[Saved, ...]) -> Packed:
    """What of it may be in 8 bits, if anything. saved: what the operator keeps (`cost.memory.saved_values`)."""
    name = base_name(node.op)
    if name in _RESULTS.split():
        return Packed(result=saved == (node.results[0],) and node.results[0] in _of_the_batch(graph))
    if name not in _OPERANDS.split() or len({*node.operands}) < len(node.operands) or _is_unfused(node, graph):
        return Packed()
    found = [
        place for place, operand in enumerate(node.operands) if operand in saved and operand in _of_the_batch(graph)
    ]
    if name in _BY_VIEWS:
        found = [place for place in found if node.operands[place] not in copied(graph).permuted]
    return Packed(tuple(found))


def _is_unfused(node: Node, graph: Graph) -> bool:
    """Attention that is not one kernel on what it is given: with dropout, or fewer heads of keys."""
    if base_name(node.op) != "scaled_dot_product_attention":
        return False
    arguments, (query, key) = Call(graph, node).arguments, (graph.tensors[name].shape for name in node.operands[:2])
    value = graph.tensors[node.operands[2]].shape
    return bool(arguments["dropout_p"]) or query[:-2] != key[:-2] or value[-1] != key[-1] or len(node.operands) > 3


def kept_in_eight_bits(node: Node, graph: Graph, saved: tuple[Saved, ...], packed: Packed) -> tuple[Saved, ...]:
    """What is kept of the call, as in `ops.saved`."""
    names = packed.names(node)
    return tuple(_bytes_of(one, graph) if isinstance(one, str) and one in names else one for one in saved)


def _bytes_of(name: str, graph: Graph) -> Extra:
    tensor = graph.tensors[name]
    dims = tuple(range(len(tensor.shape)))
    return Extra(name, dims, 1, range_bytes=2 * max(4, tensor.itemsize), range_of=BLOCK)


def _tensors(packed: Packed, node: Node, graph: Graph, sizes: Sizes) -> list[tuple[int, int, bool]]:
    """Of each that is packed: its elements, bytes of one, and whether it is copied to be in order."""
    names = packed.names(node)
    shapes = sizes.results[:1] if packed.result else [sizes.operands[place] for place in packed.operands]
    permuted = copied(graph).permuted
    return [
        (math.prod(shape), graph.tensors[name].itemsize, name in permuted)
        for name, shape in zip(names, shapes, strict=True)
    ]


def eight_bits_workspace(packed: Packed, node: Node, graph: Graph, sizes: Sizes, own: Workspace) -> Workspace:
    """Bytes for a while, with those of the operator itself. Forward, one after the other, steps from a block's lowest
    value, in float32 at least, and its ranges; backward, values for as long as the operator's pass takes."""
    forward = backward = most = 0
    for count, itemsize, is_copied in _tensors(packed, node, graph, sizes):
        wide, blocks = max(4, itemsize), -(-count // BLOCK)
        forward = max(forward, count * (wide + itemsize * is_copied) + 6 * wide * blocks)
        backward += count * itemsize
        most = max(most, count * wide * (itemsize < wide))
    return max(own[0], forward), own[1] + backward + most


def eight_bits_moved(packed: Packed, node: Node, graph: Graph, sizes: Sizes) -> Passes:
    """Bytes that each kernel more reads and writes, forward and backward."""
    forward, backward = list[int](), list[int]()
    for count, itemsize, is_copied in _tensors(packed, node, graph, sizes):
        wide = max(4, itemsize)
        forward += [2 * count * itemsize] * is_copied
        forward += [count * itemsize, count * (itemsize + wide), *[2 * count * wide] * 3, count * (wide + 1)]
        backward += [count * (1 + wide), 2 * count * wide, *[count * (itemsize + wide)] * (itemsize < wide)]
    return tuple(forward), tuple(backward)


def eight_bits_call(packed: Packed, names: list[str], call: str) -> str:
    """The call's text, of operands of these names."""
    if packed.result:
        return f"rt.result_in_eight_bits(lambda: {call})"
    return f"rt.in_eight_bits(lambda: {call}, {', '.join(names[place] for place in packed.operands)})"
