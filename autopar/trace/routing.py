"""Routing: the operators that bring tokens to their experts and back become one, `autopar.routed_experts`.

Before → after, for x (tokens, width), ids and weights (tokens, choices), and any number of such layers:

    sorted, order = sort(ids.reshape(-1));  ends = cumsum(histc(sorted, experts, 0, experts − 1))
    rows = grouped_mm(x[order // choices], up, ends);  rows = activation(rows) or activation(left) · right
    rows = grouped_mm(rows, down, ends) · weights.reshape(-1)[order]
    back[order] = arange;  y = rows[back].reshape(tokens, choices, width).sum(1)
    →  y = routed_experts(x, ids, weights, up, down)

Everything between the sort and the way back treats each row by itself, so the order of the rows does not matter.
Where a model deviates from this, its operators stay as they are: right, replicated, and reported in the coverage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Node, Ref
from autopar.ops.experts import ROUTED_EXPERTS

_GROUPED = {"transformers.grouped_mm_fallback.default", "aten._grouped_mm.default"}
_ACTIVATIONS = {"silu", "gelu", "relu", "sigmoid", "tanh", "mish", "softplus"}


def fuse_routing(graph: Graph) -> Graph:
    """Replaces each such group of operators; those that are no longer read are left for `clean`."""
    matcher = _RoutingMatcher(graph)
    nodes = tuple(matcher.fused(node) or node for node in graph.nodes)
    return replace(graph, nodes=nodes)


class _Mismatch(Exception):
    """This is no routing."""


class _RoutingMatcher:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def fused(self, node: Node) -> Node | None:
        """The one operator for a routing whose last operator is the node; None for any other node."""
        if node.op != "aten.sum.dim_IntList":
            return None
        try:
            args = self._routing(node)
        except _Mismatch:
            return None
        return Node(node.name, ROUTED_EXPERTS, args, (), node.outputs, node.scope, node.source)

    def _routing(self, last: Node) -> tuple[Any, ...]:
        """The fused operator's arguments."""
        _require(last.args[1:] == ((1,),) and not last.kwargs)
        grouped = self._made(last.args[0], "aten.reshape.default")
        _require(len(self._shape(last.args[0])) == 3)
        tokens, choices, width = self._shape(last.args[0])
        gathered = self._made(grouped.args[0], "aten.index.Tensor")
        _require(self._shape(grouped.args[0]) == (tokens * choices, width))
        order = self._inverse(_only(gathered.args[1]))
        weighted = self._made(gathered.args[0], "aten.mul.Tensor")
        second = self._made(weighted.args[0], *_GROUPED)
        weights = self._flat(self._rows(self._unsqueezed(weighted.args[1]), order), (tokens, choices))
        ids = self._flat(self._sorted(order), (tokens, choices))
        hidden, activation, gated = self._activated(_plain(second)[0])
        first = self._made(hidden, *_GROUPED)
        rows, up, ends = _plain(first)
        _, down, same_ends = _plain(second)
        num_experts = self._shape(up)[0]
        _require(ends == same_ends)
        self._check_ends(ends, order, num_experts)
        x = self._chosen_tokens(rows, order, choices)
        _require(self._shape(x)[0] == tokens)
        return x, ids, weights, up, down, activation, gated, num_experts

    def _made(self, value: Any, *ops: str) -> Node:
        """The node that makes a tensor, which must be one of these operators."""
        node = self.graph.producers.get(value.tensor) if isinstance(value, Ref) else None
        _require(node is not None and node.op in ops)
        assert node is not None
        return node

    def _shape(self, value: Any) -> tuple[int, ...]:
        _require(isinstance(value, Ref))
        return self.graph.tensors[value.tensor].shape

    def _flat(self, value: Any, shape: tuple[int, ...]) -> Ref:
        """What a flat tensor was before it was flattened."""
        source = self._made(value, "aten.reshape.default").args[0]
        _require(self._shape(source) == shape)
        return Ref(source.tensor)

    def _sorted(self, order: Ref) -> Any:
        """What was sorted into the order, ascending."""
        node = self._made(order, "aten.sort.default", "aten.argsort.default")
        _require(node.outputs[-1] == order.tensor and len(node.args) == 1 and not node.kwargs)
        return node.args[0]

    def _rows(self, value: Any, order: Ref) -> Any:
        """The tensor whose rows were taken in the order."""
        node = self._made(value, "aten.index.Tensor")
        _require(_only(node.args[1]) == order)
        return node.args[0]

    def _unsqueezed(self, value: Any) -> Any:
        node = self._made(value, "aten.unsqueeze.default")
        _require(node.args[1] in (-1, 1))
        return node.args[0]

    def _inverse(self, value: Any) -> Ref:
        """The order that a permutation undoes: back[order] = arange."""
        node = self._made(value, "aten.index_put.default")
        _require(len(node.args) == 3 and not node.kwargs)
        order, numbers = _only(node.args[1]), self._made(node.args[2], "aten.arange.default")
        _require(isinstance(order, Ref) and self._shape(order) == (numbers.args[0],) == self._shape(value))
        return Ref(order.tensor)

    def _chosen_tokens(self, rows: Any, order: Ref, choices: int) -> Ref:
        """The tokens whose rows were taken, one for each choice, in the order."""
        node = self._made(rows, "aten.index.Tensor")
        which = self._made(_only(node.args[1]), "aten.floor_divide.default")
        _require(which.args == (order, choices) and len(self._shape(node.args[0])) == 2)
        return Ref(node.args[0].tensor)

    def _check_ends(self, ends: Any, order: Ref, num_experts: int) -> None:
        """Where each expert's rows end: the running sum of how often each number occurs."""
        total = self._made(ends, "aten.cumsum.default")
        _require(total.args[1] == 0)
        counts = self._made(total.args[0], "aten.histc.default")
        _require(tuple(counts.args[1:]) == (num_experts, 0, num_experts - 1) and not counts.kwargs)
        source = self.graph.producers.get(counts.args[0].tensor)
        numbers = source.args[0] if source is not None and source.op == "aten._to_copy.default" else counts.args[0]
        _require(numbers.tensor == self._made(order, "aten.sort.default").outputs[0])

    def _activated(self, value: Any) -> tuple[Any, str, bool]:
        """What went into the activation, its name, and whether one half gates the other."""
        node = self.graph.producers.get(value.tensor)
        _require(node is not None)
        assert node is not None
        if node.op != "aten.mul.Tensor":
            return node.args[0], _activation(node), False
        act = self.graph.producers.get(node.args[0].tensor)
        _require(act is not None and isinstance(node.args[1], Ref))
        assert act is not None
        name = _activation(act)
        halves = self._made(act.args[0], "aten.split.Tensor")
        width = self._shape(halves.args[0])[-1]
        _require(halves.outputs == (act.args[0].tensor, node.args[1].tensor))
        _require(tuple(halves.args[1:]) in ((width // 2, -1), (width // 2, 1)))
        return halves.args[0], name, True


def _require(condition: bool) -> None:
    if not condition:
        raise _Mismatch


def _only(indices: Any) -> Any:
    """The index of a tensor's first dim, when there is no other."""
    _require(isinstance(indices, tuple) and len(indices) == 1)
    return indices[0]


def _plain(node: Node) -> tuple[Any, Any, Any]:
    """Rows, matrices and ends of a grouped product without further options."""
    _require(len(node.args) == 3 and not node.kwargs)
    rows, matrices, ends = node.args
    return rows, matrices, ends


def _activation(node: Node) -> str:
    name = node.op.split(".")[1]
    options = (*node.args[1:], *node.kwargs)
    if name == "gelu" and options == (("approximate", "tanh"),):
        return "gelu_tanh"
    _require(name in _ACTIVATIONS and not options)
    return name
