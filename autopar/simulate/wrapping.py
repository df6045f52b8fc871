"""The module around a stage's blocks, which is a function of the emitted program, too: it keeps variables until it has
returned. A model that a head is put on has one, with all layers inside of it.

Where it gathers nothing again, all else is as if its operators were the program's own: a stage is cut inside of it,
and what its parts hold for it is given back where it returns. What is made in it and read behind it is not. Nor is it
cut where an operator by itself is computed again for what another segment does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autopar.ir.graph import Graph, Node
from autopar.ops.call import base_name
from autopar.ops.layout import RESHAPES
from autopar.simulate.facts import GraphFacts


class Wrapper(NamedTuple):
    """A module's path, and the places of the first and last of its nodes."""

    path: str
    first: int
    last: int

    def goes_on(self, end: int) -> bool:
        """Whether it has begun before a place, and goes on there."""
        return self.first < end <= self.last

    def returns(self, begin: int, end: int) -> bool:
        """Whether what has begun before a segment returns in it."""
        return self.first < begin <= self.last < end


NO_WRAPPER = Wrapper("", 0, -1)


def wrapping_module(graph: Graph, facts: GraphFacts) -> str:
    """The block of a whole model that most of it is inside of, in several others; "" for none. Found once."""
    key = "wrapping module", ""
    if key not in graph.found:
        chains = [_around(facts, node) for node in graph.nodes]
        inside = Counter(chain[-1] for chain in chains if chain)
        path = max(inside, key=lambda name: inside[name], default="")
        inner = {chain[-2] for chain in chains if len(chain) > 1 and chain[-1] == path}
        graph.found[key] = path if len(inner) > 1 and 2 * inside[path] > len(chains) else ""
    found: str = graph.found[key]
    return found


def wrapper_in(graph: Graph, facts: GraphFacts, recomputed: frozenset[str], path: str) -> Wrapper:
    """Where the module of that path is in a stage; none where it is computed again, or others' nodes are between its
    own."""
    chains = [_around(facts, node, recomputed) for node in graph.nodes] if path else []
    places = [place for place, chain in enumerate(chains) if chain and chain[-1] == path]
    if not places or path in recomputed or places[-1] - places[0] + 1 != len(places):
        return NO_WRAPPER
    return Wrapper(path, places[0], places[-1])


def _around(facts: GraphFacts, node: Node, recomputed: frozenset[str] = frozenset()) -> list[str]:
    """The blocks around a node, innermost first."""
    found, block = list[str](), facts.block_of(node.scope.module, recomputed)
    while block:
        found.append(block)
        block = facts.block_of(block.rpartition(".")[0], recomputed)
    return found


def outliving(
    graph: Graph, facts: GraphFacts, wrapper: Wrapper, runs: Sequence[tuple[Node, ...]], last: Sequence[str]
) -> frozenset[str] | None:
    """What is made in a wrapper and held when it has returned: what is read behind it, or `last`, and what that is a
    view of. None where another segment makes what some of it may be a view of, as the plan has it."""
    if wrapper is NO_WRAPPER:
        return frozenset()
    home = {name: number for number, run in enumerate(runs) for node in run for name in node.results}
    places = {name: place for place, node in enumerate(graph.nodes) for name in node.results}
    read = {name for node in graph.nodes[wrapper.last + 1 :] for name in node.operands}
    found = {name for name in {*read, *last} if places.get(name, wrapper.last + 1) <= wrapper.last}
    for node in reversed(graph.nodes):
        may_be_view = facts.nodes[node.name].is_view or base_name(node.op) in RESHAPES
        if found.isdisjoint(node.results) or not node.operands or not may_be_view:
            continue
        base = node.operands[0]
        if base in home and base not in found:
            if base_name(node.op) in RESHAPES and home[base] != home[node.results[0]]:
                return None
            found.add(base)
    return frozenset(found)


def leave_segments(graph: Graph, runs: Sequence[tuple[Node, ...]], names: Iterable[str]) -> bool:
    """Whether results are read in other segments than make them."""
    home = {node.name: number for number, run in enumerate(runs) for node in run}
    return any(
        home[reader.name] != home[graph.producers[name].name] for name in names for reader, _ in graph.consumers[name]
    )
