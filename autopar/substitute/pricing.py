"""What a graph costs on one device: the profile's time of every operator, forward and backward.

    cost = Σ forward + backward of each node + Σ over tensors of (readers − 1) sums of gradients

What only rearranges parameters costs nothing: they are stored as they are used (`substitute.packing`). In inference,
neither does what is made of parameters alone and kept (`ir.structure.made_once`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from autopar.cost import Profile, node_time_ns
from autopar.cost.compute import pointwise_time_ns
from autopar.ir.graph import Node, Tensor
from autopar.ir.structure import made_once
from autopar.substitute.defined import Values
from autopar.substitute.lowering import AtenLowering

REARRANGING = frozenset({
    "aten.cat.default", "aten.split_with_sizes.default", "aten.slice.Tensor", "aten.transpose.int", "aten.t.default",
    "aten.split.Tensor",
})  # fmt: skip
"""Operators that move elements and compute nothing."""


class Pricer:
    """Costs of whole graphs, remembering those of nodes."""

    def __init__(self, profile: Profile, trains: bool) -> None:
        self.profile, self.trains = profile, trains
        self._known: dict[Any, int] = {}
        self._given: dict[int, tuple[Node, int]] = {}

    def __call__(self, values: Values) -> int:
        """Nanoseconds of a step of what the values are computed with."""
        lowering = AtenLowering(values, placed=False)
        nodes = list(lowering.nodes()) if self.trains else lowering.ordered()
        reads = Counter(name for node in nodes for name in node.operands)
        reads.update(values.ends)
        free = self._rearranged(lowering, nodes, reads) if self.trains else self._made_once(lowering, nodes)
        total = sum(self._node_ns(node, lowering) for node in nodes if node.name not in free)
        return total + (self._sums_ns(lowering, reads) if self.trains else 0)

    def _rearranged(self, lowering: AtenLowering, nodes: list[Node], reads: Counter[str]) -> set[str]:
        """Nodes that move elements of parameters alone, which nothing else reads: all trained, or all frozen."""
        updated = lowering.values.graph.mutations
        stored = {s.tensor for s in lowering.values.graph.parameters if s.name not in updated}
        moving = [
            node
            for node in nodes
            if node.op in REARRANGING and len({lowering.tensor(name).differentiable for name in node.operands}) == 1
        ]
        free: set[str] = set()
        while True:
            found = [
                node
                for node in moving
                if node.name not in free and all(name in stored and reads[name] == 1 for name in node.operands)
            ]
            if not found:
                return free
            free.update(node.name for node in found)
            stored.update(name for node in found for name in node.results)

    def _made_once(self, lowering: AtenLowering, nodes: list[Node]) -> set[str]:
        """In inference, nodes whose results are kept from one step to the next."""
        values, graph = lowering.values, lowering.values.graph
        parameters = {item.tensor for item in graph.stored if item.kind == "parameter"}
        given = {item.tensor for item in graph.stored if item.name not in graph.mutations}
        once = made_once(nodes, given, parameters, lambda name: lowering.tensor(name).num_bytes, values.ends)
        return {node.name for node in nodes if once.issuperset(node.results)}

    def _sums_ns(self, lowering: AtenLowering, reads: Counter[str]) -> int:
        """Time to add up the gradients of what several nodes read."""
        return sum((count - 1) * self.sum_ns(lowering.tensor(name)) for name, count in reads.items() if count > 1)

    def sum_ns(self, tensor: Tensor) -> int:
        """Time to add up two gradients of a tensor."""
        return pointwise_time_ns(3 * tensor.num_bytes, self.profile) if tensor.differentiable else 0

    def _node_ns(self, node: Node, lowering: AtenLowering) -> int:
        known = self._given.get(id(node))
        if known is not None:
            return known[1]
        operands = [lowering.tensor(name) for name in node.operands]
        results = [lowering.tensor(name) for name in node.results]
        plain = (node.op, _plain(node), tuple(map(_form, operands)), tuple(map(_form, results)))
        if plain not in self._known:
            self._known[plain] = self._time_ns(node, operands, results)
        if lowering.values.graph.node_by_name.get(node.name) is node:
            self._given[id(node)] = node, self._known[plain]
        return self._known[plain]

    def _time_ns(self, node: Node, operands: list[Tensor], results: list[Tensor]) -> int:
        tensors = dict(zip((*node.operands, *node.results), (*operands, *results), strict=True))
        shapes = tuple(tensor.shape for tensor in operands), tuple(tensor.shape for tensor in results)
        forward, backward = node_time_ns(node, *shapes, tensors, self.profile)
        return forward + backward if self.trains else forward


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.differentiable


def _plain(node: Node) -> str:
    """The arguments that are not tensors."""
    return repr([item for item in node.args if not isinstance(item, tuple)]) + repr(node.kwargs)
