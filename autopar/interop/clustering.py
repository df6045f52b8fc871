"""A graph as a chain of layers, the units that stages are made of.

The model's repeated blocks are the layers (`block_layers`); what comes before them goes with the first, what comes
after with the last (embedding; head and loss). A model without is cut where little crosses, into layers of about equal
time (`balanced_layers`). A node that needs no activation, only inputs or only stored tensors (a
mask, a rotary table, a view of a weight), runs in each layer that reads it, so that nothing of it is sent. Tensors may
skip layers, and stored tensors may be read by several: stages keep or send them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir.graph import Graph, Node, found_once
from autopar.ir.structure import runs_once

_IMBALANCE = 1.25
"""No layer takes so many times the mean, but for a single node that does."""

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

    def with_ends(self, graph: Graph) -> Layers:
        """Two layers more: what runs before the first of these, and what runs after the last."""
        members, portable = self.members(graph, range(self.count)), portable_nodes(graph)
        before, after = _never_behind(graph, self.fixed), _never_ahead(graph, self.fixed)
        fixed = {name: layer + 1 for name, layer in self.fixed.items()}
        for node in graph.nodes:
            if node.name in portable or node.name in fixed:
                continue
            if node.name in before and members[node.name] == (0,):
                fixed[node.name] = 0
            elif node.name in after and members[node.name] == (self.count - 1,):
                fixed[node.name] = self.count + 1
        return Layers(fixed, self.count + 2)


def _never_behind(graph: Graph, nodes: Container[str]) -> set[str]:
    """What reads nothing that comes of these nodes."""
    found = set[str]()
    for node in graph.nodes:
        makers = [graph.producers[name].name for name in node.operands if name in graph.producers]
        if node.name not in nodes and found.issuperset(makers):
            found.add(node.name)
    return found


def _never_ahead(graph: Graph, nodes: Container[str]) -> set[str]:
    """What none of these nodes reads, nor anything that they read comes of."""
    found = set[str]()
    for node in reversed(graph.nodes):
        readers = [user.name for name in node.results for user, _ in graph.consumers[name]]
        if node.name not in nodes and found.issuperset(readers):
            found.add(node.name)
    return found


def block_layers(graph: Graph, block_paths: Sequence[str]) -> Layers:
    """A layer for each repeated block, in the order in which they run; none for a model without."""
    order: dict[str, int] = {}
    paths = set(block_paths)
    block_of = {node.name: node.scope.outermost(paths) for node in graph.nodes}
    for path in block_of.values():
        if path is not None:
            order.setdefault(path, len(order))
    return Layers({name: order[path] for name, path in block_of.items() if path is not None}, len(order))


def balanced_layers(graph: Graph, times_ns: Mapping[str, int], count: int) -> Layers:
    """At most `count` layers of neighbouring nodes, none of which takes much longer than the mean.

    times_ns: of each node. Of all such cuts that with the fewest bytes of activations across the borders is taken, each
    border counting what is made before it and read behind it (Alpa, OSDI'22, section 5.2). Dynamic programming over
    (layers, nodes).
    """
    portable = portable_nodes(graph)
    nodes = [node for node in graph.nodes if node.name not in portable]
    until = np.concatenate([[0], np.cumsum([times_ns[node.name] for node in nodes])])
    count = min(count, len(nodes))
    if count < 2:
        return Layers({}, 0)
    most = max(int(until[-1] / count * _IMBALANCE), int(np.diff(until).max()))
    first = np.searchsorted(until, until - most)  # for each end of a layer, the first node that it may begin with
    crossing = _crossing_bytes(graph, nodes)
    best = np.where(first == 0, 0.0, np.inf)  # bytes of all borders of layers up to the node
    best[0] = np.inf
    before: list[npt.NDArray[np.int64]] = []
    for _ in range(count - 1):
        begins, best = _least_within(best + crossing, first)
        before.append(begins)
    if not np.isfinite(best[-1]):
        return balanced_layers(graph, times_ns, count - 1)
    end, fixed = len(nodes), dict[str, int]()
    for layer in range(count - 1, -1, -1):
        begin = int(before[layer - 1][end]) if layer else 0
        fixed |= {node.name: layer for node in nodes[begin:end]}
        end = begin
    return Layers(fixed, count)


def _least_within(
    values: npt.NDArray[np.float64], first: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """For each position the first of the least values from `first` of it up to before it, and that value.

    Each range is covered by two whose length is a power of two, of which all least values are known.
    """
    every = np.arange(len(values))
    lengths = every - first
    found, least = np.zeros(len(values), dtype=np.int64), np.full(len(values), np.inf)
    of_length, length = every, 1  # where the least of so many values from each position on is
    while length <= lengths.max():
        ends = every[(length <= lengths) & (lengths < 2 * length)]
        left, right = of_length[first[ends]], of_length[ends - length]
        found[ends] = np.where(values[left] <= values[right], left, right)
        least[ends] = values[found[ends]]
        left, right = of_length[:-length], of_length[length:]
        of_length, length = np.where(values[left] <= values[right], left, right), 2 * length
    return found, least


def _crossing_bytes(graph: Graph, nodes: Sequence[Node]) -> npt.NDArray[np.float64]:
    """For each position the bytes made before it that are read from it on."""
    position = {node.name: number for number, node in enumerate(nodes)}
    total = np.zeros(len(nodes) + 1)
    for number, node in enumerate(nodes):
        for name in node.results:
            last = max((position.get(user.name, 0) for user, _ in graph.consumers[name]), default=0)
            tensor = graph.tensors[name]
            total[number + 1 : last + 1] += math.prod(tensor.shape) * tensor.itemsize
    return total


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
    found = _spread_back(graph, portable, stage, behind, {}, count)
    beside = _beside(graph, found) if graph.mutations else {}
    return _spread_back(graph, portable, stage, behind, beside, count) if beside else found


def _spread_back(
    graph: Graph, portable: set[str], stage: Mapping[str, int], behind: set[str], known: Mapping[str, int], count: int
) -> dict[str, tuple[int, ...]]:
    """The stages of all nodes, of some as they are known, of others where they are read."""
    found: dict[str, tuple[int, ...]] = {}
    for node in reversed(graph.nodes):
        readers = [s for name in node.results for user, _ in graph.consumers[name] for s in found[user.name]]
        if node.name in known and node.name not in behind:
            found[node.name] = (known[node.name],)
        elif node.name in portable and readers:
            found[node.name] = tuple(sorted(set(readers)))
        elif node.name in behind or not readers:
            found[node.name] = (stage[node.name] if node.name in behind else count - 1,)
        else:
            found[node.name] = (min(readers),)
    return found


def _beside(graph: Graph, members: Members) -> dict[str, int]:
    """The stages of nodes that only make what stored tensors become: those in which these are read."""
    updating: set[str] = set()
    for node in reversed(graph.nodes):
        users = {user.name for name in node.results for user, _ in graph.consumers[name]}
        if updating.issuperset(users) and not set(graph.outputs).intersection(node.results):
            updating.add(node.name)
    tensors = {item.name: item.tensor for item in graph.stored}
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in updating:
            names = (name for result in node.results for name in graph.updates.get(result, ()))
            own = [tensors[name] for name in names if name in tensors]
            users = {user.name for tensor in (*own, *node.operands) for user, _ in graph.consumers[tensor]} - updating
            makers = [graph.producers[name].name for name in node.operands if name in graph.producers]
            near = [found.get(name, members[name][0]) for name in (*users, *makers)]
            found |= {node.name: max(near)} if near else {}
    return found


@found_once
def portable_nodes(graph: Graph) -> set[str]:
    """Nodes that depend on inputs and constants alone, or on stored tensors alone, that more than one stage may run
    (`runs_once`), and that make nothing that is stored."""
    kinds: dict[str, str] = dict.fromkeys(graph.inputs, "input")
    kinds |= {item.tensor: "stored" if item.kind == "parameter" else "constant" for item in graph.stored}
    kinds |= {item.tensor: "activation" for item in graph.stored if item.name in graph.mutations}
    found = set()
    for node in graph.nodes:
        read = {kinds[name] for name in node.operands} - {"constant"}
        is_single = runs_once(node) or not graph.updates.keys().isdisjoint(node.results)
        kind = "activation" if len(read) > 1 or is_single else read.pop() if read else "constant"
        kinds.update((name, kind) for name in node.results)
        if kind != "activation":
            found.add(node.name)
    return found
