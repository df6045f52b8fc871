"""A graph as a chain of layers, the units that stages are made of.

The model's repeated blocks are the layers (`block_layers`); what comes before them goes with the first, what comes
after with the last (embedding; head and loss). A node that needs no activation, only inputs or only stored tensors (a
mask, a rotary table, a view of a weight), runs in each layer that reads it, so that nothing of it is sent. Tensors may
skip layers, and stored tensors may be read by several: stages keep or send them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node
from autopar.ir.structure import is_random

Members = Mapping[str, tuple[int, ...]]
"""The layers (or stages) that each node runs in, by its name."""


@dataclass(frozen=True)
class Layers:
    """A chain of `count` layers; `fixed`: the layer of each node that decides where others go."""

    fixed: Mapping[str, int]
    count: int

    def members(self, graph: Graph, stage_of: Sequence[int]) -> Members:
        """The stages of all nodes, when each layer is in the given stage."""
        return spread(graph, {name: stage_of[layer] for name, layer in self.fixed.items()}, max(stage_of) + 1)


def block_layers(graph: Graph, block_paths: Sequence[str]) -> Layers:
    """A layer for each repeated block, in the order in which they run; none for a model without."""
    order: dict[str, int] = {}
    paths = set(block_paths)
    block_of = {node.name: _block(node, paths) for node in graph.nodes}
    for path in block_of.values():
        if path is not None:
            order.setdefault(path, len(order))
    return Layers({name: order[path] for name, path in block_of.items() if path is not None}, len(order))


def _block(node: Node, paths: set[str]) -> str | None:
    return next((path for path, _ in node.scope.path if path in paths), None)


def spread(graph: Graph, fixed: Mapping[str, int], count: int) -> Members:
    """The stages of all nodes, where those of the blocks are given."""
    portable = portable_nodes(graph)
    stage: dict[str, int] = {}
    behind: set[str] = set()  # nodes in a block, or that read what one makes
    for node in graph.nodes:
        makers = [graph.producers[name] for name in node.operands if name in graph.producers]
        before = [maker.name for maker in makers if maker.name not in portable]
        stage[node.name] = max([fixed.get(node.name, 0), *(stage[name] for name in before)])
        if node.name in fixed or not behind.isdisjoint(before):
            behind.add(node.name)
    found: dict[str, tuple[int, ...]] = {}
    for node in reversed(graph.nodes):
        readers = [s for name in node.results for user, _ in graph.consumers[name] for s in found[user.name]]
        if node.name in portable and readers:
            found[node.name] = tuple(sorted(set(readers)))
        elif node.name in behind or not readers:
            found[node.name] = (stage[node.name] if node.name in behind else count - 1,)
        else:
            found[node.name] = (min(readers),)
    return found


def portable_nodes(graph: Graph) -> set[str]:
    """Nodes that depend on inputs and constants alone, or on stored tensors alone, and not on chance."""
    kinds: dict[str, str] = dict.fromkeys(graph.inputs, "input")
    kinds |= {item.tensor: "stored" if item.kind == "parameter" else "constant" for item in graph.stored}
    kinds |= {item.tensor: "activation" for item in graph.stored if item.name in graph.mutations}
    found = set()
    for node in graph.nodes:
        read = {kinds[name] for name in node.operands} - {"constant"}
        kind = "activation" if len(read) > 1 or is_random(node) else read.pop() if read else "constant"
        kinds.update((name, kind) for name in node.results)
        if kind != "activation":
            found.add(node.name)
    return found
