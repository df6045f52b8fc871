"""Routing: the operators that bring tokens to their experts and back become one, `autopar.routed_experts`.

Before → after, for x (tokens, width), ids and weights (tokens, choices), and any number of such layers:

    sorted, order = sort(ids.reshape(-1));  ends = cumsum(histc(sorted, experts, 0, experts − 1))
    rows = grouped_mm(x[order // choices], up, ends) + up_bias[sorted];  rows = f(rows)
    rows = (grouped_mm(rows, down, ends) + down_bias[sorted]) · weights.reshape(-1)[order]
    back[order] = arange;  y = rows[back].reshape(tokens, choices, width).sum(1)
    →  y = routed_experts(x, ids, weights, up, down, f, up_bias, down_bias)

f is any few elementwise operators, of the rows or of two parts of their columns (`trace.activations`); there, `up` and
its bias are seen with a dim for the parts. Everything between the sort and the way back treats each row by itself, so
the order of the rows does not matter. Where a model deviates from this, its operators stay as they are: right,
replicated, and reported in the coverage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.ir.graph import Graph, Node, Ref, Tensor
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.trace.activations import Activation, RoutingMismatch, activation_of, require

_GROUPED = {"transformers.grouped_mm_fallback.default", "aten._grouped_mm.default"}


def fuse_routing(graph: Graph) -> Graph:
    """Replaces each such group of operators; those that are no longer read are left for `clean`."""
    matcher = _RoutingMatcher(graph)
    nodes, tensors = list[Node](), dict(graph.tensors)
    for node in graph.nodes:
        found = matcher.matched(node)
        nodes += [node] if found is None else found.nodes(node, tensors)
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


class _MatchedRouting(NamedTuple):
    """The operands of a routing, and what lies between its two products."""

    x: Ref
    ids: Ref
    weights: Ref
    up: Ref
    down: Ref
    up_bias: Ref | None
    down_bias: Ref | None
    activation: Activation
    num_experts: int

    def nodes(self, last: Node, tensors: dict[str, Tensor]) -> list[Node]:
        """The one operator in the place of the routing's last, and the views of `up` and its bias that it reads."""
        text, gated, paired = self.activation
        views, (up, up_bias) = list[Node](), (self.up, self.up_bias)
        if gated:
            views += [self._parted("up", up, last, tensors)]
            views += [self._parted("bias", up_bias, last, tensors)] if up_bias is not None else []
            up, up_bias = Ref(views[0].results[0]), Ref(views[1].results[0]) if len(views) > 1 else None
        args = (self.x, self.ids, self.weights, up, self.down, text, gated, self.num_experts)
        biases = (up_bias, self.down_bias) if up_bias or self.down_bias else ()
        kwargs = (("paired", True),) if paired else ()
        node = Node(last.name, ROUTED_EXPERTS, (*args, *biases), kwargs, last.outputs, last.scope, last.source)
        return [*views, node]

    def _parted(self, what: str, value: Ref, last: Node, tensors: dict[str, Tensor]) -> Node:
        """A view whose last dim, of both parts of the hidden values, is two."""
        whole = tensors[value.tensor]
        *outer, width = whole.shape
        parts = (width // 2, 2) if self.activation.paired else (2, width // 2)
        name = f"{last.name}_{what}"
        tensors[name] = replace(whole, name=name, shape=(*outer, *parts))
        return Node(name, "aten.reshape.default", (value, (*outer, *parts)), (), (name,), last.scope, last.source)


class _RoutingMatcher:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def matched(self, node: Node) -> _MatchedRouting | None:
        """The routing whose last operator is the node; None for any other node."""
        if node.op != "aten.sum.dim_IntList":
            return None
        try:
            return self._routing(node)
        except RoutingMismatch:
            return None

    def _routing(self, last: Node) -> _MatchedRouting:
        require(last.args[1:] == ((1,),) and not last.kwargs)
        grouped = self._made(last.args[0], "aten.reshape.default")
        require(len(self._shape(last.args[0])) == 3)
        tokens, choices, width = self._shape(last.args[0])
        gathered = self._made(grouped.args[0], "aten.index.Tensor")
        require(self._shape(grouped.args[0]) == (tokens * choices, width))
        order = self._inverse(_only(gathered.args[1]))
        weighted = self._made(gathered.args[0], "aten.mul.Tensor")
        weights = self._flat(self._rows(self._unsqueezed(weighted.args[1]), order), (tokens, choices))
        ids = self._flat(self._sorted(order), (tokens, choices))
        second, down_bias = self._product(weighted.args[0], order)
        hidden, down, ends = _plain(second)
        first, up_bias, activation = self._activated(hidden, order, self._shape(down)[1])
        rows, up, same_ends = _plain(first)
        num_experts = self._shape(up)[0]
        require(ends == same_ends and self._shape(down)[0] == num_experts)
        self._check_ends(ends, order, num_experts)
        x = self._chosen_tokens(rows, order, choices)
        require(self._shape(x)[0] == tokens)
        return _MatchedRouting(x, ids, weights, up, down, up_bias, down_bias, activation, num_experts)

    def _activated(self, hidden: Any, order: Ref, width: int) -> tuple[Node, Ref | None, Activation]:
        """The first product, its bias, and what lies between it and the second: the nearest product, or sum of one with
        a bias, of which all of the hidden values are elementwise functions."""
        for value in self._before(hidden):
            try:
                node, bias = self._product(value, order)
            except RoutingMismatch:
                continue
            return node, bias, activation_of(self.graph, value, hidden, width)
        raise RoutingMismatch

    def _before(self, value: Any) -> Iterator[Any]:
        """What a value is made of, along first tensor operands, back to a grouped product."""
        while True:
            yield value
            node = self.graph.producers.get(value.tensor) if isinstance(value, Ref) else None
            if node is None or node.op in _GROUPED or not node.operands:
                return
            value = Ref(node.operands[0])

    def _product(self, value: Any, order: Ref) -> tuple[Node, Ref | None]:
        """The grouped product that makes a value, and the bias of each row's group that was added to it."""
        node = self._made(value, *_GROUPED, "aten.add.Tensor")
        if node.op in _GROUPED:
            return node, None
        require(len(node.args) == 2 and not node.kwargs)
        product = self._made(node.args[0], *_GROUPED)
        taken = self._made(node.args[1], "aten.index.Tensor")
        bias = taken.args[0]
        require(_only(taken.args[1]).tensor == self._made(order, "aten.sort.default").outputs[0])
        require(self._shape(bias) == (self._shape(product.args[1])[0], self._shape(product.args[1])[2]))
        return product, Ref(bias.tensor)

    def _made(self, value: Any, *ops: str) -> Node:
        """The node that makes a tensor, which must be one of these operators."""
        node = self.graph.producers.get(value.tensor) if isinstance(value, Ref) else None
        require(node is not None and node.op in ops)
        assert node is not None
        return node

    def _shape(self, value: Any) -> tuple[int, ...]:
        require(isinstance(value, Ref))
        return self.graph.tensors[value.tensor].shape

    def _flat(self, value: Any, shape: tuple[int, ...]) -> Ref:
        """What a flat tensor was before it was flattened."""
        source = self._made(value, "aten.reshape.default").args[0]
        require(self._shape(source) == shape)
        return Ref(source.tensor)

    def _sorted(self, order: Ref) -> Any:
        """What was sorted into the order, ascending."""
        node = self._made(order, "aten.sort.default", "aten.argsort.default")
        require(node.outputs[-1] == order.tensor and len(node.args) == 1 and not node.kwargs)
        return node.args[0]

    def _rows(self, value: Any, order: Ref) -> Any:
        """The tensor whose rows were taken in the order."""
        node = self._made(value, "aten.index.Tensor")
        require(_only(node.args[1]) == order)
        return node.args[0]

    def _unsqueezed(self, value: Any) -> Any:
        node = self._made(value, "aten.unsqueeze.default")
        require(node.args[1] in (-1, 1))
        return node.args[0]

    def _inverse(self, value: Any) -> Ref:
        """The order that a permutation undoes: back[order] = arange."""
        node = self._made(value, "aten.index_put.default")
        require(len(node.args) == 3 and not node.kwargs)
        order, numbers = _only(node.args[1]), self._made(node.args[2], "aten.arange.default")
        require(isinstance(order, Ref) and self._shape(order) == (numbers.args[0],) == self._shape(value))
        return Ref(order.tensor)

    def _chosen_tokens(self, rows: Any, order: Ref, choices: int) -> Ref:
        """The tokens whose rows were taken, one for each choice, in the order."""
        node = self._made(rows, "aten.index.Tensor")
        which = self._made(_only(node.args[1]), "aten.floor_divide.default")
        require(which.args == (order, choices) and len(self._shape(node.args[0])) == 2)
        return Ref(node.args[0].tensor)

    def _check_ends(self, ends: Any, order: Ref, num_experts: int) -> None:
        """Where each expert's rows end: the running sum of how often each number occurs."""
        total = self._made(ends, "aten.cumsum.default")
        require(total.args[1] == 0)
        counts = self._made(total.args[0], "aten.histc.default")
        require(tuple(counts.args[1:]) == (num_experts, 0, num_experts - 1) and not counts.kwargs)
        source = self.graph.producers.get(counts.args[0].tensor)
        numbers = source.args[0] if source is not None and source.op == "aten._to_copy.default" else counts.args[0]
        require(numbers.tensor == self._made(order, "aten.sort.default").outputs[0])


def _only(indices: Any) -> Any:
    """The index of a tensor's first dim, when there is no other."""
    require(isinstance(indices, tuple) and len(indices) == 1)
    return indices[0]


def _plain(node: Node) -> tuple[Any, Any, Any]:
    """Rows, matrices and ends of a grouped product without further options."""
    require(len(node.args) == 3 and not node.kwargs)
    rows, matrices, ends = node.args
    return rows, matrices, ends
