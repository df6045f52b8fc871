"""A number that is added to a scalar is a tensor of its own, which one microbatch, or one rank, can add alone.

Before → after, for a scalar x with a gradient and t = full([], 1): x + 1 → x + t, x − 1 → x − t, 1 − x → t − x.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Atom, Graph, Node, Ref, Tensor

_ADD, _SUB, _RSUB = "aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Scalar"
_TAKEN = {_ADD: _ADD, _SUB: _SUB, _RSUB: _SUB}


def with_offsets(graph: Graph) -> Graph:
    """The graph with such tensors; the input graph is left as it is."""
    nodes: list[Node] = []
    tensors = dict(graph.tensors)
    for node in graph.nodes:
        if not _adds_number(graph, node):
            nodes.append(node)
            continue
        x, value = node.args
        result = graph.tensors[node.results[0]]
        name = f"{result.name} offset"
        kwargs = (("dtype", Atom("dtype", result.dtype)), ("device", Atom("device", "rank")))
        nodes.append(Node(name, "aten.full.default", ((), value), kwargs, (name,), node.scope, node.source))
        tensors[name] = Tensor(name, (), result.dtype)
        pair = (Ref(name), x) if node.op == _RSUB else (x, Ref(name))
        nodes.append(replace(node, op=_TAKEN[node.op], args=pair))
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


def _adds_number(graph: Graph, node: Node) -> bool:
    if node.op not in _TAKEN or node.kwargs or len(node.args) != 2 or not node.results:
        return False
    result, value = graph.tensors[node.results[0]], node.args[1]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and result.shape == () and result.differentiable
