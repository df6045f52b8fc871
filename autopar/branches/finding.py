"""Where a graph forks and joins: what stands between is branches that know nothing of each other.

    join       an operator that reads results of several operators
    fork       the nearest operator on every way from the graph's inputs to all of these (their common dominator)
    region     the operators after the fork that nothing but the region and the join reads (it post-dominates them)
    branches   the region's connected parts

Of the buffers that forward updates (batch norm's running statistics) nothing depends: they do not count as readers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import networkx as nx

from autopar.ir.graph import IDENTITY, Graph, Node, found_once

_START = ""  # what all operators come from

Makers = Mapping[str, Sequence[str]]
"""By operator, in the order of the graph, those whose results it reads."""


@dataclass(frozen=True)
class ForkRegion:
    """What stands between a fork and a join: node names of each branch in their order, and the join's name."""

    join: str
    branches: tuple[tuple[str, ...], ...]


def find_regions(graph: Graph, refuses: Callable[[Node], bool]) -> list[ForkRegion]:
    """The regions of at least two branches, the largest first. refuses: whether a node must not be in a branch; then
    nothing of its branch is in any."""
    refused = dict[str, bool]()

    def is_refused(name: str) -> bool:
        if name not in refused:
            refused[name] = refuses(graph.node_by_name[name])
        return refused[name]

    found = []
    for region in _every_region(graph):
        branches = tuple([branch for branch in region.branches if not any(map(is_refused, branch))])
        if len(branches) > 1:
            found.append(ForkRegion(region.join, branches))
    return sorted(found, key=lambda region: -sum(map(len, region.branches)))


@found_once
def _every_region(graph: Graph) -> list[ForkRegion]:
    """Those of at least two branches, whatever is in them, in the order of their joins."""
    order = {node.name: number for number, node in enumerate(graph.nodes)}
    makers = {node.name: _makers(graph, node) for node in graph.nodes}
    dominators = _Dominators(makers, order)
    joins = [node for node in graph.nodes if len(makers[node.name]) > 1]
    between = ((join, _between(graph, join, dominators.common(makers[join.name]), makers, order)) for join in joins)
    every = [ForkRegion(join.name, _branches(graph, members, makers)) for join, members in between]
    return [region for region in every if len(region.branches) > 1]


def _branches(graph: Graph, members: list[str], makers: Makers) -> tuple[tuple[str, ...], ...]:
    parts = (_without_names(graph, part, makers) for part in _connected(makers, members))
    return tuple([part for part in parts if part])


def _makers(graph: Graph, node: Node) -> list[str]:
    return list(dict.fromkeys(graph.producers[name].name for name in node.operands if name in graph.producers))


class _Dominators:
    """The tree of immediate dominators: in a graph without cycles, an operator's is what is common to its makers."""

    def __init__(self, makers: Makers, order: Mapping[str, int]) -> None:
        self._parent, self._order = {_START: _START}, {**order, _START: -1}
        for name, own in makers.items():
            self._parent[name] = self.common(own) if own else _START

    def common(self, names: Iterable[str]) -> str:
        """The nearest operator on every way to all of these."""
        return reduce(self._common, names)

    def _common(self, one: str, other: str) -> str:
        while one != other:
            one, other = sorted((one, other), key=self._order.__getitem__)
            other = self._parent[other]
        return one


def _between(graph: Graph, join: Node, fork: str, makers: Makers, order: Mapping[str, int]) -> list[str]:
    """The operators after the fork that only lead to the join, the last one first."""
    ends = {graph.producers[name].name for name in graph.outputs if name in graph.producers}
    found = {join.name: None}
    waiting = [-order[name] for name in makers[join.name]]
    heapq.heapify(waiting)
    seen = set(waiting)
    while waiting:
        node = graph.nodes[-heapq.heappop(waiting)]
        readers = {reader.name for name in node.results for reader, _ in graph.consumers[name]}
        if node.name == fork or node.name in ends or not readers <= found.keys():
            continue
        found[node.name] = None
        for maker in makers[node.name]:
            if -order[maker] not in seen:
                seen.add(-order[maker])
                heapq.heappush(waiting, -order[maker])
    return [name for name in found if name != join.name]


def _connected(makers: Makers, members: list[str]) -> list[tuple[str, ...]]:
    """The connected parts, each in the order of the graph."""
    inside = nx.Graph()
    inside.add_nodes_from(reversed(members))
    for name in members:
        inside.add_edges_from((maker, name) for maker in makers[name] if maker in inside)
    place = {name: number for number, name in enumerate(reversed(members))}
    parts = [tuple(sorted(part, key=place.__getitem__)) for part in nx.connected_components(inside)]
    return sorted(parts, key=lambda part: place[part[0]])


def _without_names(graph: Graph, part: tuple[str, ...], makers: Makers) -> tuple[str, ...]:
    """Without the identities at its begin, whose operands are made outside."""
    inside = set(part)
    for name in part:
        node = graph.node_by_name[name]
        if node.op == IDENTITY and inside.isdisjoint(makers[name]):
            inside.discard(name)
    return tuple(name for name in part if name in inside)
