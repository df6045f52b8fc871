"""What the simulator needs to know of a graph whatever the plan, found once."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from autopar.cost.memory import Saved, is_view, saved_values
from autopar.cost.work import base_name
from autopar.ir.graph import Graph, Node
from autopar.ir.structure import block_paths

PASSING = frozenset(("add", "sub"))  # operators whose gradient is the result's gradient itself


class NodeFacts(NamedTuple):
    """Whether results share the operand's memory, gradients pass unchanged, and what autograd saves."""

    is_view: bool
    passes_gradient: bool
    saved: tuple[Saved, ...]


class GraphFacts:
    """Facts of each node by name, and the blocks that parameters and nodes belong to."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = {node.name: _node_facts(node, graph) for node in graph.nodes}
        self.blocks = block_paths(graph)
        self._block_of: dict[str, str] = {}

    def block_of(self, name: str) -> str:
        """The innermost block that a module path or parameter's name lies in; "" is the program itself."""
        known = self._block_of.get(name)
        if known is None:
            found = not name or name in self.blocks
            known = self._block_of[name] = name if found else self.block_of(name.rpartition(".")[0])
        return known


def _node_facts(node: Node, graph: Graph) -> NodeFacts:
    passes = is_view(node) or base_name(node.op) in PASSING
    return NodeFacts(is_view(node), passes, saved_values(node, graph))


_known: dict[int, tuple[weakref.ref[Graph], GraphFacts]] = {}


def graph_facts(graph: Graph) -> GraphFacts:
    """The graph's facts, remembered as long as it lives."""
    key = id(graph)
    known = _known.get(key)
    if known is not None and known[0]() is graph:
        return known[1]
    facts = GraphFacts(graph)
    _known[key] = (weakref.ref(graph, lambda _: _known.pop(key, None)), facts)
    return facts
