"""A backward pass in two parts: first what earlier stages wait for, later the gradients of parameters.

    way      every node of the graph that leads from the roots to what the stage has received
    branch   from one node of the way to parameters, meeting the way nowhere else
    first    runs along the way, and keeps the gradient that comes by at each branch
    second   runs the branches, each by itself

A parameter that several branches lead to, such as a bias that all attention layers share, or that is reached beside the
way, is put on the way: its gradient is made in the first part. So is one that a function of the runtime reads, which
makes all of its gradients at once, and would send again what it sends for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root = tuple[GradientEdge, Tensor]
"""Where gradients come in, and the gradient; the tensor itself is not kept for that."""

AccumulateGrad = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


class SplitBackward:
    """One microbatch's backward pass. received: what gradients are handed back of; leaves: of parameters.

    outlines: what is known of the graphs of earlier microbatches; this one's is added.
    """

    def __init__(
        self, roots: Sequence[Root], received: Sequence[Tensor], leaves: Sequence[Tensor],
        outlines: list[BackwardOutline] | None = None,
    ) -> None:  # fmt: skip
        self._roots, self._received = list(roots), list(received)
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._outlines = [] if outlines is None else outlines
        self._aside: list[tuple[Tensor, Tensor | None]] = []  # leaves on the way, with their gradients
        self._kept: list[tuple[BackwardBranch, tuple[Tensor | None, ...]]] = []  # the gradients that came by at each

    def first(self) -> None:
        """The gradients of what was received, as their `grad`."""
        if not self._roots:
            return
        ends, gradients = zip(*self._roots, strict=True)
        branches, aside = self._branches(ends)
        passed = chain.from_iterable(branch.edges for branch in branches)
        wanted: list[Any] = [*self._received, *aside, *passed]
        found = iter(torch.autograd.grad(ends, wanted, gradients, retain_graph=True, allow_unused=True))
        for tensor in self._received:
            tensor.grad = next(found)
        self._aside = [(leaf, next(found)) for leaf in aside]
        self._kept = [(branch, tuple(islice(found, len(branch.edges)))) for branch in branches]
        self._roots = []

    def second(self) -> None:
        """The gradients of parameters, handed to their leaves one after the other, alike on all ranks.

        From the last branch on, so that what is above can be given back.
        """
        _hand_over(self._aside)
        self._aside = []
        while self._kept:
            branch, kept = self._kept.pop()
            came = [(edge, grad) for edge, grad in zip(branch.edges, kept, strict=True) if grad is not None]
            if came:
                starts, gradients = zip(*came, strict=True)
                torch.autograd.backward(starts, gradients, inputs=branch.leaves)

    def _branches(self, ends: Sequence[GradientEdge]) -> tuple[list[BackwardBranch], list[Tensor]]:
        """The branches, and the leaves on the way: read off an outline that the graph has."""
        for outline in self._outlines:
            nodes = outline.matched(ends, self._received, self._leaves)
            if nodes is not None:
                return outline.branches(nodes, self._leaves), [self._leaves[n] for n in outline.aside]
        self._outlines.append(BackwardOutline(ends, self._received, self._leaves))
        return self._branches(ends)


class BackwardBranch(NamedTuple):
    """Where the gradients come by that a branch starts from, and the leaves that it leads to."""

    edges: tuple[GradientEdge, ...]
    leaves: list[Tensor]


class BackwardOutline:
    """The form of a graph, and where its branches are: nodes by number, leaves by their place among those of the stage.

    A stage runs one program, so the graphs of its microbatches have one form: branches are searched for once, and a
    later graph is only walked through, to see that it is alike, edge by edge. Holds no tensor and no node.
    """

    def __init__(self, roots: Sequence[GradientEdge], received: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        edges = _edges(roots)
        number: dict[Node | None, int] = {}
        self._steps: list[tuple[type[Node], int]] = []  # of each node, its kind, and which edge leads to it first
        for place, (node, _) in enumerate(edges):
            if node is not None and node not in number:
                number[node] = len(number)
                self._steps.append((type(node), place))
                edges += node.next_functions  # the loop goes on through these
        self._edges = [(number.get(node), position) for node, position in edges]
        self._ends = _ends(number, received, leaves)
        found, aside = _find_branches({root.node for root in roots}, received, leaves)
        order = {id(leaf): n for n, leaf in enumerate(leaves)}
        self.aside = [order[id(leaf)] for leaf in aside]
        self._branches = [
            (number[node], len(node._input_metadata), [order[id(leaf)] for leaf in led]) for node, led in found.items()
        ]

    def matched(
        self, roots: Sequence[GradientEdge], received: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> list[Node] | None:
        """The nodes of a graph that has this form and leads to these tensors; None where it has another."""
        edges = _edges(roots)
        nodes: list[Node] = []
        for kind, place in self._steps:
            node = edges[place][0] if place < len(edges) else None
            if node is None or type(node) is not kind:
                return None
            nodes.append(node)
            edges += node.next_functions
        number: dict[Node | None, int] = {node: n for n, node in enumerate(nodes)}
        if [(number.get(node), position) for node, position in edges] != self._edges:
            return None
        return nodes if _ends(nodes, received, leaves) == self._ends else None

    def branches(self, nodes: Sequence[Node], leaves: Sequence[Tensor]) -> list[BackwardBranch]:
        """The branches of a graph that is alike."""
        return [
            BackwardBranch(tuple([GradientEdge(nodes[start], n) for n in range(count)]), [leaves[n] for n in led])
            for start, count, led in self._branches
        ]


def _edges(roots: Sequence[GradientEdge]) -> list[tuple[Node | None, int]]:
    return [(root.node, root.output_nr) for root in roots]


def _ends(nodes: Iterable[object], received: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[int | None]:
    """Of each node that adds to a gradient, the place of its tensor."""
    places = {id(tensor): n for n, tensor in enumerate((*received, *leaves))}
    return [places.get(id(getattr(node, "variable"))) for node in nodes if type(node) is AccumulateGrad]  # noqa: B009


def _find_branches(
    roots: set[Node], received: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
    """The branches with the leaves that each leads to, and the leaves on the way: the way grows with each of these,
    until none is left to add."""
    before = _before(roots)
    ends, aside = [_node(tensor) for tensor in received], list[Tensor]()
    rest = [(leaf, node) for leaf in leaves if (node := _node(leaf)) in before or node in roots]
    while True:
        way = _closure(ends, lambda node: before.get(node, []))
        places = [_place(node, before, way, roots) for _, node in rest]
        more = [item for item, place in zip(rest, places, strict=True) if place is None]
        if not more:
            break
        aside += [leaf for leaf, _ in more]
        ends += [node for _, node in more]
        rest = [item for item, place in zip(rest, places, strict=True) if place is not None]
    branches: dict[Node, list[Tensor]] = {}
    for (leaf, _), place in zip(rest, places, strict=True):
        assert place is not None
        branches.setdefault(place, []).append(leaf)
    return branches, aside


def _hand_over(gradients: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    for leaf, gradient in gradients:
        if gradient is not None:
            torch.autograd.backward([leaf], [gradient])


def _place(node: Node, before: dict[Node, list[Node]], way: set[Node], roots: set[Node]) -> Node | None:
    """The one node of the way that a leaf's branch starts from; None where there are more, a root beside the way, or a
    function in Python."""
    starts: set[Node] = set()
    beside: list[Node] = []

    def up(other: Node) -> list[Node]:
        if other in roots:
            beside.append(other)
        above = before.get(other, [])
        starts.update(node for node in above if node in way)
        return [node for node in above if node not in way]

    if node in way:
        return None
    _closure([node], up)
    if len(starts) != 1 or beside:
        return None
    start = starts.pop()
    return None if _is_in_python(start) else start


def _is_in_python(node: object) -> bool:
    return isinstance(node, BackwardCFunction)


def _node(tensor: Tensor) -> Node:
    """The node that makes a tensor, or that adds to the gradient of a leaf."""
    return get_gradient_edge(tensor).node


def _before(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """For each node of the graph but the roots, those that hand it a gradient."""
    found: dict[Node, list[Node]] = {}

    def after(node: Node) -> list[Node]:
        nodes = [other for other, _ in node.next_functions if other is not None]
        for other in nodes:
            found.setdefault(other, []).append(node)
        return nodes

    _closure(roots, after)
    return found


def _closure(start: Iterable[Node], after: Callable[[Node], list[Node]]) -> set[Node]:
    """The nodes, and all that follow."""
    found: set[Node] = set()
    pending = list(start)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += after(node)
    return found
