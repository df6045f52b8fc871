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

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

Root = tuple[GradientEdge, Tensor]
"""Where gradients come in, and the gradient; the tensor itself is not kept for that."""


class SplitBackward:
    """One microbatch's backward pass. received: what gradients are handed back of; leaves: of parameters."""

    def __init__(self, roots: Sequence[Root], received: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self._roots, self._received = list(roots), list(received)
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._aside: list[tuple[Tensor, Tensor | None]] = []  # leaves on the way, with their gradients
        self._branches: dict[Node, list[Tensor]] = {}  # the leaves that each leads to
        self._kept: dict[Node, tuple[Tensor | None, ...]] = {}

    def first(self) -> None:
        """The gradients of what was received, as their `grad`."""
        if not self._roots:
            return
        ends, gradients = zip(*self._roots, strict=True)
        aside = self._find_branches({end.node for end in ends})
        handles = [node.register_prehook(_keeper(self._kept, node)) for node in self._branches]
        wanted = [*self._received, *aside]
        found = torch.autograd.grad(ends, wanted, gradients, retain_graph=True, allow_unused=True)
        for handle in handles:
            handle.remove()
        for tensor, gradient in zip(self._received, found, strict=False):
            tensor.grad = gradient
        self._aside = list(zip(aside, found[len(self._received) :], strict=True))
        self._roots = []

    def second(self) -> None:
        """The gradients of parameters, handed to their leaves one after the other, alike on all ranks.

        From the last branch on, so that what is above can be given back.
        """
        _hand_over(self._aside)
        self._aside = []
        while self._branches:
            node, leaves = self._branches.popitem()
            edges = [(GradientEdge(node, n), grad) for n, grad in enumerate(self._kept.pop(node)) if grad is not None]
            starts, gradients = zip(*edges, strict=True)
            torch.autograd.backward(starts, gradients, inputs=leaves)

    def _find_branches(self, roots: set[Node]) -> list[Tensor]:
        """Fills in the branches; returns the leaves on the way: the way grows with each, until none is left to add."""
        before = _before(roots)
        ends, aside = [_node(tensor) for tensor in self._received], list[Tensor]()
        rest = [(leaf, node) for leaf in self._leaves if (node := _node(leaf)) in before or node in roots]
        while True:
            way = _closure(ends, lambda node: before.get(node, []))
            places = [_place(node, before, way, roots) for _, node in rest]
            more = [item for item, place in zip(rest, places, strict=True) if place is None]
            if not more:
                break
            aside += [leaf for leaf, _ in more]
            ends += [node for _, node in more]
            rest = [item for item, place in zip(rest, places, strict=True) if place is not None]
        for (leaf, _), place in zip(rest, places, strict=True):
            assert place is not None
            self._branches.setdefault(place, []).append(leaf)
        return aside


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


def _keeper(kept: dict[Node, tuple[Tensor | None, ...]], node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        kept[node] = gradients

    return keep


def _node(tensor: Tensor) -> Node:
    """The node that makes a tensor, or that adds to the gradient of a leaf."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    view = tensor.view_as(tensor).grad_fn
    node = view.next_functions[0][0] if view is not None else None
    assert node is not None, "a tensor that requires a gradient"
    return node


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
