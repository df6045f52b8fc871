"""What the simulator needs to know of each node whatever the plan, found once a graph."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from autopar.cost.memory import Saved, is_view, saved_values
from autopar.cost.work import base_name
from autopar.ir.graph import Graph

PASSING = frozenset(("add", "sub"))  # operators whose gradient is the result's gradient itself


class NodeFacts(NamedTuple):
    """Whether results share the operand's memory, gradients pass unchanged, and what autograd saves."""

    is_view: bool
    passes_gradient: bool
    saved: tuple[Saved, ...]


_known: dict[int, tuple[weakref.ref[Graph], dict[str, NodeFacts]]] = {}


def node_facts(graph: Graph) -> dict[str, NodeFacts]:
    """The facts by node name, remembered as long as the graph lives."""
    known = _known.get(id(graph))
    if known is not None and known[0]() is graph:
        return known[1]
    facts = {
        node.name: NodeFacts(
            is_view(node), is_view(node) or base_name(node.op) in PASSING, saved_values(node, graph)
        )
        for node in graph.nodes
    }
    key = id(graph)
    _known[key] = (weakref.ref(graph, lambda _: _known.pop(key, None)), facts)
    return facts
