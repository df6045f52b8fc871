"""A new tensor whose every part is written is the parts side by side.

Before → after: `y = new_empty(…, 5); y[..., :3].copy_(a); y[..., 3:].copy_(b)`, which is exported as
`slice_scatter(slice_scatter(new_empty(…), a, -1, 0, 3), b, -1, 3, 5)` → `cat([a, b], -1)`

Nothing is left of what the new tensor held, so that nobody has to make it: whole on each rank, where no operand says
how it is split. Eager PyTorch copies each part once, and so does cat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.graph import Graph, Node
from autopar.ir.structure import is_random
from autopar.ops.table import operator

_SCATTER, _CAT = "aten.slice_scatter.default", "aten.cat.default"


def with_parts_joined(graph: Graph) -> Graph:
    """The graph with `cat` in place of the last write; the new tensor and the other writes are left for `clean`."""
    return replace(graph, nodes=tuple([_joined(graph, node) for node in graph.nodes]))


def _joined(graph: Graph, node: Node) -> Node:
    """`cat` where a node is the last of writes that fill a new tensor; else the node."""
    if node.op != _SCATTER:
        return node
    writes = [*_writes(graph, node)]
    made = graph.producers.get(writes[-1].operands[0])
    if made is None or not operator(made.op).creates or is_random(made):
        return node
    dim = _dim(graph, node)
    alike = [(*_where(graph, write), write.args[1]) for write in writes if _dim(graph, write) == dim]
    parts = sorted(alike, key=lambda part: part[:2])
    ends = [0, *(end for _, end, *_ in parts)]
    whole = graph.tensors[node.results[0]]
    fills = [start for start, *_ in parts] == ends[:-1] and ends[-1] == whole.shape[dim]
    is_plain = all(step == 1 and graph.tensors[part.tensor].dtype == whole.dtype for *_, step, part in parts)
    if len(parts) < len(writes) or not fills or not is_plain:
        return node
    return replace(node, op=_CAT, args=(tuple(part for *_, part in parts), dim), kwargs=())


def _writes(graph: Graph, last: Node) -> Iterator[Node]:
    """The last write, and those before it whose result nobody else reads."""
    yield last
    before = graph.producers.get(last.operands[0])
    read_by_others = {*graph.outputs, *graph.mutations.values()}
    while before is not None and before.op == _SCATTER and read_by_others.isdisjoint(before.results):
        if len(graph.consumers[before.results[0]]) > 1:
            break
        yield before
        before = graph.producers.get(before.operands[0])


def _dim(graph: Graph, write: Node) -> int:
    rank = len(graph.tensors[write.results[0]].shape)
    return (_argument(write, 2, "dim") or 0) % rank


def _where(graph: Graph, write: Node) -> tuple[int, int, int]:
    """First row, end and step of a write."""
    length = graph.tensors[write.results[0]].shape[_dim(graph, write)]
    start, end, step = (_argument(write, at, name) for at, name in ((3, "start"), (4, "end"), (5, "step")))
    return slice(start, end, step).indices(length)


def _argument(node: Node, position: int, name: str) -> int | None:
    found = node.args[position] if len(node.args) > position else dict(node.kwargs).get(name)
    assert found is None or isinstance(found, int), f"expected a number for {name} of {node.name}, found {found}"
    return found
