"""Rewrites by hand that move parameters' elements: parallel linears merged, fused ones split, matrices transposed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Node, Ref, Scope, Tensor
from autopar.ir.sharing import share
from autopar.trace.clean import clean

LINEAR, ADDMM, SPLIT = "aten.linear.default", "aten.addmm.default", "aten.split_with_sizes.default"


class Rewriter:
    """Nodes of a graph replaced by others, with the tensors that these make."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.tensors = graph, dict(graph.tensors)
        self.instead: dict[str, list[Node]] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def node(
        self, op: str, args: tuple[Any, ...], like: Node, shapes: Sequence[tuple[int, ...]],
        outputs: Sequence[str] | None = None, scope: Scope | None = None,
    ) -> Node:  # fmt: skip
        """A node of the original's scope, with outputs of these shapes; new ones where they are not named."""
        name = f"{like.name}_{op.split('.')[1]}_{len(self.tensors)}"
        made = tuple(outputs or (f"{name}_{number}" for number in range(len(shapes))))
        dtype = self.tensors[like.results[0]].dtype
        self.tensors |= {one: Tensor(one, shape, dtype, True) for one, shape in zip(made, shapes, strict=True)}
        return Node(name, op, args, (), made, scope or like.scope, like.source)

    def graph_with(self, old: Node, new: list[Node]) -> None:
        self.instead[old.name] = new

    def done(self) -> Graph:
        nodes = (item for node in self.graph.nodes for item in self.instead.get(node.name, [node]))
        return share(clean(replace(self.graph, nodes=tuple(nodes), tensors=self.tensors)))


def merged(graph: Graph) -> Graph:
    """linear(x, w1), linear(x, w2), … → split(linear(x, cat(w1, w2, …))), of weights and of biases."""
    parallel: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == LINEAR and all(name in graph.stored_by_tensor for name in node.operands[1:]):
            parallel[node.operands[0], len(node.operands)].append(node)
    rewriter = Rewriter(graph)
    for nodes in (nodes for nodes in parallel.values() if len(nodes) > 1):
        _merge(rewriter, nodes)
    return rewriter.done()


def _merge(rewriter: Rewriter, nodes: list[Node]) -> None:
    first, shape = nodes[0], rewriter.shape
    scope = Scope(first.scope.path[:-1])
    sizes = [shape(node.operands[1])[0] for node in nodes]
    cats = []
    for position in range(1, len(first.operands)):
        rest = shape(first.operands[position])[1:]
        parts = tuple(Ref(node.operands[position]) for node in nodes)
        cats.append(rewriter.node("aten.cat.default", (parts,), first, [(sum(sizes), *rest)], scope=scope))
    made = shape(first.results[0])
    args = tuple(Ref(cat.results[0]) for cat in cats)
    linear = rewriter.node(
        LINEAR, (Ref(first.operands[0]), *args), first, [(*made[:-1], sum(sizes))], scope=scope
    )  # fmt: skip
    outputs = [node.results[0] for node in nodes]
    split = rewriter.node(
        SPLIT, (Ref(linear.results[0]), tuple(sizes), -1), first, [shape(name) for name in outputs], outputs, scope
    )  # fmt: skip
    rewriter.graph_with(first, [*cats, linear, split])
    for node in nodes[1:]:
        rewriter.graph_with(node, [])


def split(graph: Graph) -> Graph:
    """split(reshape(addmm(b, x, w))) → reshape(addmm(bᵢ, x, wᵢ)) for each slice of w's columns."""
    rewriter = Rewriter(graph)
    for addmm, reshape, cut in _fused(graph):
        _split(rewriter, addmm, reshape, cut)
    return rewriter.done()


def _fused(graph: Graph) -> Iterator[tuple[Node, Node, Node]]:
    for cut in (node for node in graph.nodes if node.op == "aten.split.Tensor"):
        reshape = graph.producers[cut.operands[0]]
        addmm = graph.producers[reshape.operands[0]]
        if addmm.op == ADDMM:
            yield addmm, reshape, cut


def _split(rewriter: Rewriter, addmm: Node, reshape: Node, cut: Node) -> None:
    bias, x, weight = addmm.operands
    rows = rewriter.shape(weight)[0]
    sizes = [rewriter.shape(name)[-1] for name in cut.results]
    biases = rewriter.node(SPLIT, (Ref(bias), tuple(sizes), 0), addmm, [(size,) for size in sizes])
    weights = rewriter.node(SPLIT, (Ref(weight), tuple(sizes), 1), addmm, [(rows, size) for size in sizes])
    nodes = [biases, weights]
    for b, w, out, size in zip(biases.results, weights.results, cut.results, sizes, strict=True):
        flat = (rewriter.shape(addmm.results[0])[0], size)
        part = rewriter.node(ADDMM, (Ref(b), Ref(x), Ref(w)), addmm, [flat])
        shape = rewriter.shape(out)
        nodes += [part, rewriter.node(reshape.op, (Ref(part.results[0]), shape), addmm, [shape], [out], reshape.scope)]
    rewriter.graph_with(addmm, [])
    rewriter.graph_with(reshape, [])
    rewriter.graph_with(cut, nodes)


def transposed(graph: Graph) -> Graph:
    """addmm(b, x, w) → linear(x, t(w), b): what is stored is the transpose."""
    rewriter = Rewriter(graph)
    for node in (node for node in graph.nodes if node.op == ADDMM):
        bias, x, weight = node.operands
        turned = rewriter.node("aten.t.default", (Ref(weight),), node, [rewriter.shape(weight)[::-1]])
        args = (Ref(x), Ref(turned.results[0]), Ref(bias))
        made = [rewriter.shape(node.results[0])]
        rewriter.graph_with(node, [turned, rewriter.node(LINEAR, args, node, made, node.results)])
    return rewriter.done()


REWRITES: dict[str, Callable[[Graph], Graph]] = {"merged": merged, "split": split, "transposed": transposed}
