"""The parts of a graph that are rewritten by themselves, and which of them are equal.

A region is a run of neighbouring nodes of one repeated block, or between two. No path leaves a run and comes back, so
that whatever happens inside closes no cycle. What is found for one region serves its twins, name by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from autopar.ir.graph import Graph, Node

FEWEST_NODES = 8
"""Smaller repeated blocks, such as the layers of a list, are no regions of their own but belong to what is around."""
SIGN = "~"
"""What parts a value's name from the number of a value that a rule made for it."""


@dataclass(frozen=True)
class RewriteRegion:
    """Nodes `start` to `stop` of a graph, and where they run: the path of a block, or "" between blocks."""

    path: str
    start: int
    stop: int

    def nodes(self, graph: Graph) -> tuple[Node, ...]:
        return graph.nodes[self.start : self.stop]

    def graph(self, whole: Graph) -> Graph:
        """The region as a graph of its own: what it reads comes in, and what others read goes out."""
        return subgraph(whole, self.nodes(whole))


def subgraph(whole: Graph, nodes: Sequence[Node]) -> Graph:
    """Some nodes as a graph of their own: what they read comes in, and what others read goes out."""
    own = {name for node in nodes for name in node.results}
    read = dict.fromkeys(name for node in nodes for name in node.operands if name not in own)
    members = {node.name for node in nodes}
    ends = {*whole.outputs, *whole.mutations.values()}
    outputs = [
        name
        for node in nodes
        for name in node.results
        if name in ends or any(user.name not in members for user, _ in whole.consumers[name])
    ]
    return replace(
        whole,
        inputs=tuple(name for name in read if name not in whole.stored_by_tensor),
        stored=tuple(whole.stored_by_tensor[name] for name in read if name in whole.stored_by_tensor),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        mutations={},
        loss=whole.loss if whole.loss in outputs else None,
    )


@dataclass(frozen=True)
class EqualRegions:
    """Equal regions; the first stands for all."""

    regions: tuple[RewriteRegion, ...]

    @cached_property
    def first(self) -> RewriteRegion:
        return self.regions[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """Where they run."""
        return tuple(region.path for region in self.regions)


def find_regions(
    graph: Graph, paths: Sequence[Sequence[str]], representatives: Mapping[str, str]
) -> list[EqualRegions]:
    """The regions of a graph without identity nodes, those that are equal together.

    paths: of equal blocks. representatives: for a node of a block, that of the first equal block.
    """
    sizes = Counter(path for node in graph.nodes for path, _ in node.scope.path)
    blocks = {path for group in paths if len(group) > 1 for path in group if sizes[path] >= FEWEST_NODES}
    found: dict[tuple[str, ...], list[RewriteRegion]] = {}
    place = [node.scope.outermost(blocks) or "" for node in graph.nodes]
    for path, run in groupby(range(len(place)), key=place.__getitem__):
        numbers = list(run)
        region = RewriteRegion(path, numbers[0], numbers[-1] + 1)
        names = [node.name for node in region.nodes(graph)]
        found.setdefault(tuple(representatives.get(name, name) for name in names), []).append(region)
    return [EqualRegions(tuple(regions)) for regions in found.values()]


def names_in(first: Sequence[Node], twin: Sequence[Node]) -> dict[str, str]:
    """For every tensor of a region that of its twin."""
    found: dict[str, str] = {}
    for one, other in zip(first, twin, strict=True):
        found.update(zip(one.operands, other.operands, strict=True))
        found.update((a, b) for a, b in zip(one.outputs, other.outputs, strict=True) if a is not None and b is not None)
    found.update((one.name, other.name) for one, other in zip(first, twin, strict=True) if one.name not in found)
    return found


def in_twin(name: str, names: Mapping[str, str]) -> str:
    """A value of a region in its twin: tensors by name, those made for a tensor as made for the tensor's twin."""
    base, sign, number = name.partition(SIGN)
    return names.get(base, base) + sign + number
