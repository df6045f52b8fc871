"""Buffers and parameters that forward updates: what reads them, and what a plan must not do beside that."""

from __future__ import annotations

from autopar.ir.graph import Graph, Node

#: in training they read running statistics to update them alone
_STATISTICS = frozenset({"aten._native_batch_norm_legit_functional.default"})


def readers(graph: Graph, buffer: str) -> list[Node]:
    """The nodes that read a buffer as it was before the step, and whose results depend on it."""
    tensors = [item.tensor for item in graph.stored if item.name == buffer]
    return [
        node
        for tensor in tensors
        for node, _ in graph.consumers[tensor]
        if node.op not in _STATISTICS and not _only_updates(graph, node)
    ]


def _only_updates(graph: Graph, node: Node) -> bool:
    """Whether all that comes of a node is what buffers become."""
    new = set(graph.mutations.values())
    for name in node.results:
        users = [user for user, _ in graph.consumers[name]]
        if name in graph.outputs or not (users or name in new) or not all(_only_updates(graph, user) for user in users):
            return False
    return True


def read_again(graph: Graph, recomputed: str) -> tuple[str, Node] | None:
    """A buffer that forward updates, and a node of a recomputed module that reads it: when that runs again, the buffer
    has its new value. None where there is no such. Parameters get theirs at the end of the step."""
    for buffer in (name for name in graph.mutations if name not in graph.parameter_by_name):
        for node in readers(graph, buffer):
            if not recomputed or f"{node.scope.module}.".startswith(f"{recomputed}."):
                return buffer, node
    return None


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
