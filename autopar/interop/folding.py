"""A deep graph made short: of equal blocks the first ones and the last are kept.

The blocks that are gone cost what the last of the first ones costs, which stands for them: so everything is found on
the short graph once, however many blocks there are. Who read what a block that is gone made, reads the equal tensor of
the one that stands for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autopar.interop.clustering import Layers, portable_nodes, spread
from autopar.ir.graph import Graph, reading

_DEEP = 64
"""Layers of a model in which kinds of blocks that take turns are folded, too."""
_MOST_TURNS = 8
"""Of such kinds: so many places are tried to cut behind."""
FEWEST_KEPT = 3  # of a distinct block: the first, one that stands for those between, the last


class EqualBlocks(Protocol):
    """Module paths of the instances of each distinct block, and the first equal node and tensor of each."""

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]: ...

    def representative_node(self, name: str) -> str: ...
    def representative_tensor(self, name: str) -> str: ...


@dataclass(frozen=True)
class Folded:
    """A short graph and its layers. layer_of: for each layer of the whole graph the short one's that is equal to it.

    copies: how many nodes or stored tensors of the whole graph one of the short graph stands for, where not one.
    stand_in: for each node that is gone, and each tensor that such nodes make or read from storage, the equal one of
    the block that stands for theirs.
    """

    graph: Graph
    layers: Layers
    layer_of: tuple[int, ...]
    copies: Mapping[str, int] = field(default_factory=dict)
    stand_in: Mapping[str, str] = field(default_factory=dict)


def fold(graph: Graph, blocks: EqualBlocks, layers: Layers, kept: int = FEWEST_KEPT) -> Folded:
    """The graph with `kept` blocks of each kind; itself where there are no more, where something else runs between
    them, or where a block that is kept would be read no more. `layers`: those of `block_layers`.

    Where kinds take turns in a deep model, of some one more is kept, so that all are cut behind the same turn.
    """
    same = Folded(graph, layers, tuple(range(layers.count)))
    order = _instances(graph, blocks, layers)
    choices = [{layer: group[kept - 2] for group in order for layer in group[kept - 1 : -1] if len(group) > kept}]
    if not choices[0]:
        return same
    if layers.count >= _DEEP:
        first = max(choices[0].values())
        choices += [_behind(order, kept, last) for last in range(first, first + _MOST_TURNS)]
    portable, unread = portable_nodes(graph), _unread(graph)
    members = spread(graph, layers.fixed, layers.count)
    for stands in choices:
        gone = {name for name, found in members.items() if all(layer in stands for layer in found)}
        if any(layers.fixed.get(name) is None and name not in portable for name in gone):
            return same
        short = _without(graph, blocks, layers, stands, gone)
        if not _unread(short.graph) - unread:
            return short
    return same


def _behind(order: Sequence[Sequence[int]], kept: int, last: int) -> dict[int, int]:
    """What stands for the layers that are gone, where of each kind all up to layer `last` are kept, and its last."""
    found = dict[int, int]()
    for group in order:
        count = bisect_right(group, last)
        if len(group) > kept and kept - 1 <= count:
            found |= dict.fromkeys(group[count:-1], group[count - 1])
    return found


def _unread(graph: Graph) -> set[str]:
    """What nodes make for nobody. A block between others of another kind is, once who read it is gone."""
    return {name for node in graph.nodes for name in node.results if not graph.consumers[name]} - {*graph.outputs}


def _instances(graph: Graph, blocks: EqualBlocks, layers: Layers) -> list[list[int]]:
    """The layers of each distinct block, in the order in which they run."""
    groups: dict[str, list[int]] = defaultdict(list)
    first: dict[int, str] = {}
    for node in graph.nodes:
        layer = layers.fixed.get(node.name)
        if layer is not None and layer not in first:
            first[layer] = blocks.representative_node(node.name)
            groups[first[layer]].append(layer)
    return list(groups.values())


def _without(
    graph: Graph, blocks: EqualBlocks, layers: Layers, stands: Mapping[int, int], gone: set[str]
) -> Folded:  # fmt: skip
    twin, twin_node = _stand_ins(graph, blocks, layers, stands)
    nodes = tuple(reading(node, twin) for node in graph.nodes if node.name not in gone)
    used = {name for node in nodes for name in (*node.operands, *node.results)} | {*graph.inputs, *graph.outputs}
    read = {name for node in graph.nodes for name in node.operands}
    stored = tuple(item for item in graph.stored if item.tensor in used or item.tensor not in read)
    known = used | {item.tensor for item in stored}
    short = replace(
        graph, nodes=nodes, stored=stored, tensors={name: t for name, t in graph.tensors.items() if name in known},
        mutations={buffer: name for buffer, name in graph.mutations.items() if name in known},
    )  # fmt: skip
    kept = {layer: number for number, layer in enumerate(n for n in range(layers.count) if n not in stands)}
    fixed = {name: kept[layer] for name, layer in layers.fixed.items() if layer in kept}
    layer_of = tuple(kept[stands.get(layer, layer)] for layer in range(layers.count))
    copies = _copies(short, Layers(fixed, len(kept)), layer_of, graph)
    return Folded(short, Layers(fixed, len(kept)), layer_of, copies, {**twin, **twin_node})


def _stand_ins(
    graph: Graph, blocks: EqualBlocks, layers: Layers, stands: Mapping[int, int]
) -> tuple[dict[str, str], dict[str, str]]:  # fmt: skip
    """For each tensor that a block that is gone made or reads from storage, the equal one of the block that stands for
    it; for each of its nodes likewise."""
    tensors: dict[tuple[int, str], str] = {}
    nodes: dict[tuple[int, str], str] = {}
    for node in graph.nodes:
        layer = layers.fixed.get(node.name)
        if layer is not None:
            nodes[layer, blocks.representative_node(node.name)] = node.name
            read = (name for name in node.operands if name in graph.stored_by_tensor)
            tensors.update(((layer, blocks.representative_tensor(name)), name) for name in (*read, *node.results))
    return _equal_in(tensors, stands), _equal_in(nodes, stands)


def _equal_in(named: Mapping[tuple[int, str], str], stands: Mapping[int, int]) -> dict[str, str]:
    """By name in a layer that is gone, the name in the one that stands for it. named: by layer and representative."""
    return {name: named[stands[layer], key] for (layer, key), name in named.items() if layer in stands}


def _copies(short: Graph, layers: Layers, layer_of: Sequence[int], whole: Graph) -> dict[str, int]:
    """How often each layer of the short graph stands in the whole one: for its nodes, and what they alone store."""
    count = Counter(layer_of)
    found = {name: count[layer] for name, layer in layers.fixed.items()}
    for item in short.stored:
        readers = {user.name for user, _ in whole.consumers[item.tensor]}
        if readers and readers <= layers.fixed.keys():
            found[item.tensor] = max(count[layers.fixed[name]] for name in readers)
    return {name: number for name, number in found.items() if number > 1}
