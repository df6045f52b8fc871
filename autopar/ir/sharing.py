"""Gives every tensor with several consumers one identity node, so that one conversion serves them all.

Before → after: `y = f(x); z = g(x)` → `x' = alias(x); y = f(x'); z = g(x')`. The gradients of all consumers meet
at x', so a redistribution between x and x' is paid once forward and once backward. Tensors without gradient need
none: their conversions are shared by placement. Parameters are converted once a step and need none either.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from autopar.ir.graph import IDENTITY, Graph, Node, Ref, common_scope, reading


def share(graph: Graph) -> Graph:
    """The graph with identity nodes, placed just before the first consumer, in the consumers' common module."""
    tensors, nodes, renamed = dict(graph.tensors), [], dict[str, str]()
    wanted = {name for name, users in graph.consumers.items() if _is_shared(graph, name, users)}
    taken = {*tensors, *graph.node_by_name}
    for node in graph.nodes:
        for name in dict.fromkeys(node.operands):
            if name in wanted and name not in renamed:
                renamed[name] = _fresh(f"{name}_shared", taken)
                tensors[renamed[name]] = replace(tensors[name], name=renamed[name])
                nodes.append(_identity(graph, name, renamed[name]))
        nodes.append(reading(node, renamed))
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


def _fresh(name: str, taken: Container[str]) -> str:
    return _fresh(name + "_", taken) if name in taken else name


def _is_shared(graph: Graph, name: str, users: list[tuple[Node, int]]) -> bool:
    count = len(users) + (name in graph.outputs)
    return count > 1 and graph.tensors[name].differentiable and name not in graph.stored_by_tensor


def _identity(graph: Graph, name: str, new: str) -> Node:
    users = [node for node, _ in graph.consumers[name]]
    return Node(new, IDENTITY, (Ref(name),), (), (new,), common_scope([node.scope for node in users]), users[0].source)


def unshared(graph: Graph) -> Graph:
    """The graph without identity nodes: what `share` was given."""
    source = {node.results[0]: node.operands[0] for node in graph.nodes if node.op == IDENTITY}
    nodes = [reading(node, source) for node in graph.nodes if node.op != IDENTITY]
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name not in source}
    return replace(graph, nodes=tuple(nodes), tensors=tensors)
