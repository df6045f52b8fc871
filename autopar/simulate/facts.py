"""What the simulator needs to know of a graph whatever the plan, found once."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import NamedTuple

from autopar.cost.memory import is_view, passes_gradient, saved_values
from autopar.ir.graph import Graph, Node
from autopar.ir.structure import block_paths, constant_tensors, folded_tensors
from autopar.ops.saved import Saved


class NodeFacts(NamedTuple):
    """Whether results share the operand's memory, the positions of operands whose gradients do, what autograd saves."""

    is_view: bool
    passing: tuple[int, ...]
    saved: tuple[Saved, ...]


class GraphFacts:
    """Facts of each node by name, the blocks that parameters and nodes belong to, the tensors that never change, and of
    these those that no step computes."""

    def __init__(self, graph: Graph, device_type: str) -> None:
        self.nodes = {node.name: _node_facts(node, graph, device_type) for node in graph.nodes}
        self.blocks = block_paths(graph)
        self._block_of: dict[tuple[str, frozenset[str]], str] = {}
        self.constants, self.folded = constant_tensors(graph), folded_tensors(graph)
        self._graph = weakref.ref(graph)
        self._twins: tuple[tuple[tuple[str, ...], ...], dict[str, tuple[int, int]]] | None = None

    def twins(self, blocks: tuple[tuple[str, ...], ...]) -> dict[str, tuple[int, int]]:
        """For each node in a repeated block, the number of the distinct block and the node's place in it.

        blocks: the module paths of the instances of each.
        """
        if self._twins is None or self._twins[0] != blocks:
            graph = self._graph()
            assert graph is not None, "the facts of a graph are asked for while it lives"
            self._twins = blocks, _twins(graph, blocks)
        return self._twins[1]

    def block_of(self, name: str, recomputed: frozenset[str] = frozenset()) -> str:
        """The innermost block that a module path or parameter's name lies in; "" is the program itself.

        recomputed: modules that are blocks for that reason.
        """
        key = name, recomputed
        known = self._block_of.get(key)
        if known is None:
            found = not name or name in self.blocks or name in recomputed
            known = self._block_of[key] = name if found else self.block_of(name.rpartition(".")[0], recomputed)
        return known


def _twins(graph: Graph, blocks: tuple[tuple[str, ...], ...]) -> dict[str, tuple[int, int]]:
    number = {path: position for position, paths in enumerate(blocks) for path in paths}
    counts: dict[str, int] = defaultdict(int)
    found = {}
    for node in graph.nodes:
        path = node.scope.outermost(number)
        if path is not None:
            found[node.name] = number[path], counts[path]
            counts[path] += 1
    return found


def _node_facts(node: Node, graph: Graph, device_type: str) -> NodeFacts:
    passing = tuple(position for position, passes in enumerate(passes_gradient(node, graph)) if passes)
    return NodeFacts(is_view(node, graph), passing, saved_values(node, graph, device_type))


_known: dict[tuple[int, str], tuple[weakref.ref[Graph], GraphFacts]] = {}


def graph_facts(graph: Graph, device_type: str) -> GraphFacts:
    """The graph's facts on a kind of device, remembered as long as it lives."""
    key = id(graph), device_type
    known = _known.get(key)
    if known is not None and known[0]() is graph:
        return known[1]
    facts = GraphFacts(graph, device_type)
    _known[key] = (weakref.ref(graph, lambda _: _known.pop(key, None)), facts)
    return facts
