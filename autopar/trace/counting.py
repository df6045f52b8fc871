"""Indexing that takes every element once, in order, is a reshape: a mask read by sample and by key, as transformers do.

Before → after: `y = x[arange(B)[:, None], arange(S)]` → `y = x.reshape(B, S)`, whatever dims of one the indices have.

A device's part of the batch, and a microbatch, can be reshaped; positions counted over the whole batch are not theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref

INDEX, RESHAPE = "aten.index.Tensor", "aten.reshape.default"
_COUNTS = {"aten.arange.default": (), "aten.arange.start": (0,), "aten.arange.start_step": (0,)}  # what comes first
_KEEP = frozenset({
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.default", "aten.squeeze.dims", RESHAPE,
    "aten.alias.default", "aten.clone.default",
})  # fmt: skip


def without_counting(graph: Graph) -> Graph:
    """The graph with reshapes in place of such indexing; the counts that nothing else reads are left for `clean`."""
    counting = _counting(graph)
    return replace(graph, nodes=tuple(_plain(graph, counting, node) for node in graph.nodes))


def _counting(graph: Graph) -> set[str]:
    """Tensors of 0, 1, 2 … in order, of which one dim at most is not of one."""
    found = set[str]()
    for node in graph.nodes:
        counts = _is_count(node) or (node.operands[:1] and node.operands[0] in found and _keeps(graph, node))
        if counts and sum(size != 1 for size in graph.tensors[node.results[0]].shape) <= 1:
            found.add(node.results[0])
    return found


def _is_count(node: Node) -> bool:
    start = _COUNTS.get(node.op)
    if start is None or node.args[: len(start)] != start:
        return False
    return node.op != "aten.arange.start_step" or len(node.args) < 3 or node.args[2] == 1


def _keeps(graph: Graph, node: Node) -> bool:
    """Whether a node's result has the elements of its first operand, in order."""
    if node.op == "aten.add.Tensor":
        return len(node.operands) == 1 and node.args[1] == 0
    if node.op == "aten._to_copy.default":
        return graph.tensors[node.results[0]].dtype in ("int64", "int32")
    return node.op in _KEEP


def _plain(graph: Graph, counting: set[str], node: Node) -> Node:
    """The node, or a reshape where it indexes the leading dims of a tensor by counting each of them."""
    if node.op != INDEX or not all(isinstance(index, Ref) and index.tensor in counting for index in node.args[1]):
        return node
    source, result = graph.tensors[node.operands[0]], graph.tensors[node.results[0]]
    shapes = [graph.tensors[index.tensor].shape for index in node.args[1]]
    if not _takes_all(source.shape, shapes):
        return node
    return replace(node, op=RESHAPE, args=(node.args[0], result.shape), kwargs=())


def _takes_all(shape: Sequence[int], indices: Sequence[Sequence[int]]) -> bool:
    """Whether each leading dim is counted to its end, and in an order of dims that is the tensor's own."""
    lengths = [max(index, default=1) for index in indices]
    if tuple(lengths) != tuple(shape[: len(lengths)]):
        return False
    places = [list(index).index(n) - len(index) for index, n in zip(indices, lengths, strict=True) if n > 1]
    return places == sorted(set(places))


__all__ = ["without_counting"]
