"""Indexing that takes every element once, in order, is a reshape: a mask read by sample and by key, as transformers do.

Before → after: `y = x[arange(B)[:, None], arange(S)]` → `y = x.reshape(B, S)`, whatever dims of one the indices have.
Indexing that takes of every element one, `y = x[arange(B), i]`, as losses and pooling do, is
`y = x.gather(1, where(i < 0, i + C, i)[:, None])[:, 0]`.

A device's part of the batch, and a microbatch, can be reshaped; positions counted over the whole batch are not theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Atom, Graph, Node, Ref, Tensor

INDEX, RESHAPE, GATHER = "aten.index.Tensor", "aten.reshape.default", "aten.gather.default"
_COUNTS = {"aten.arange.default": (), "aten.arange.start": (0,), "aten.arange.start_step": (0,)}  # what comes first
_KEEP = frozenset({
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.default", "aten.squeeze.dims", RESHAPE,
    "aten.alias.default", "aten.clone.default",
})  # fmt: skip


def without_counting(graph: Graph) -> Graph:
    """The graph with reshapes in place of such indexing; the counts that nothing else reads are left for `clean`."""
    counting = _counting(graph)
    tensors = dict(graph.tensors)
    nodes = [new for node in graph.nodes for new in _gathered(graph, counting, _plain(graph, counting, node), tensors)]
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


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


def _gathered(graph: Graph, counting: set[str], node: Node, tensors: dict[str, Tensor]) -> list[Node]:
    """The node, or a gather where it counts the leading dims of a tensor and takes one element of the next."""
    if node.op != INDEX or len(node.args[1]) < 2 or not all(isinstance(index, Ref) for index in node.args[1]):
        return [node]
    source, result = graph.tensors[node.operands[0]], graph.tensors[node.results[0]]
    *counts, chosen = (graph.tensors[index.tensor] for index in node.args[1])
    batch, rest = source.shape[: len(counts)], source.shape[len(counts) + 1 :]
    if chosen.dtype not in ("int64", "int32") or not counting.issuperset(count.name for count in counts):
        return [node]
    if len(chosen.shape) > len(batch) or result.shape != (*batch, *rest) or not _counts_in_place(batch, counts):
        return [node]
    made: list[Node] = []

    def call(op: str, shape: Sequence[int], dtype: str, *args: object, is_last: bool = False) -> Ref:
        name = f"{node.name} {len(made)}"
        outputs = node.outputs if is_last else (name,)
        if not is_last:
            differentiable = op == GATHER and result.differentiable
            tensors[name] = Tensor(name, tuple(shape), dtype, differentiable)
        own = node.name if is_last else name
        made.append(replace(node, name=own, op=op, args=args, kwargs=(), outputs=outputs))
        return Ref(name)

    index = Ref(chosen.name)
    is_negative = call("aten.lt.Scalar", chosen.shape, "bool", index, 0)
    wrapped = call("aten.add.Tensor", chosen.shape, chosen.dtype, index, source.shape[len(batch)])
    index = call("aten.where.self", chosen.shape, chosen.dtype, is_negative, wrapped, index)
    if chosen.dtype != "int64":
        index = call("aten._to_copy.default", chosen.shape, "int64", index)
        made[-1] = replace(made[-1], kwargs=(("dtype", Atom("dtype", "int64")),))
    ones = (*(1,) * (len(batch) - len(chosen.shape)), *chosen.shape, 1, *(1,) * len(rest))
    index = call(RESHAPE, ones, "int64", index, ones)
    if (whole := (*batch, 1, *rest)) != ones:
        index = call("aten.expand.default", whole, "int64", index, whole)
    taken = call(GATHER, whole, source.dtype, node.args[0], len(batch), index)
    call(RESHAPE, result.shape, result.dtype, taken, result.shape, is_last=True)
    return made


def _counts_in_place(batch: Sequence[int], counts: Sequence[Tensor]) -> bool:
    """Whether each count, of as many elements as its dim, is along that dim once all are broadcast."""
    aligned = [(1,) * (len(batch) - len(count.shape)) + tuple(count.shape) for count in counts]
    return all(
        shape == tuple(n if dim == place else 1 for dim, n in enumerate(batch)) for place, shape in enumerate(aligned)
    )
