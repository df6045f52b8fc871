"""Buffers and parameters that forward updates: where, and in which modules."""

from __future__ import annotations

from autopar.ir.graph import Graph


def joins_modules(graph: Graph) -> bool:
    """Whether what is updated is read or updated in more than one module, or in one with modules of its own: stages
    could part what belongs together."""
    around = {path for node in graph.nodes for path, _ in node.scope.path[:-1]}
    for buffer, value in graph.mutations.items():
        maker = graph.producers.get(value)
        tensors = [item.tensor for item in graph.stored if item.name == buffer]
        nodes = [node for tensor in tensors for node, _ in graph.consumers[tensor]]
        modules = {node.scope.module for node in nodes} | ({maker.scope.module} if maker is not None else set())
        if maker is None or len(modules) > 1 or not modules.isdisjoint(around):
            return True
    return False


def update_line(graph: Graph, buffer: str) -> str:
    """ " by NODE (OPERATOR) at LINE" of what makes a buffer's new value, for messages; empty where an input does."""
    node = graph.producers.get(graph.mutations[buffer])
    return "" if node is None else f" by {node.name} ({node.op}) at {node.source or 'an unknown line'}"
