"""How the values of a plan's ranks lie in memory, where the graph's own tensors lie otherwise.

A conversion that makes memory leaves its result contiguous, but for slices, which keep the order of the dims. What the
graph alone reshapes without a copy, since it lies as a transposed tensor does (attention's results lie as its
queries), may then have to be copied, and what it copies need not be. Nor need what a rank has one element of along a
dim: one expert, one head or one sample has no order among others. Only such values are followed; all others lie as
`ops.layout` says of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Shape
from autopar.ir.redistribution import Step
from autopar.ops.call import base_name
from autopar.ops.layout import (
    PRODUCTS,
    RESHAPES,
    Strides,
    contiguous_strides,
    copied,
    copied_operands,
    dense_strides,
    strides_of_part,
    view_strides,
)
from autopar.ops.saved import Saved, each_once, factors_and_copies

COPYING = RESHAPES | PRODUCTS | {"einsum"}


class Laid(NamedTuple):
    """Of an operator: the positions of the operands that it copies (None: as in the graph), and how its results lie
    (None: as in the graph)."""

    copies: tuple[int, ...] | None
    strides: Strides | None


AS_IN_GRAPH = Laid(None, None)


class Layouts:
    """Follows the values of one program, each by any key."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._copied = graph, copied(graph)
        self._copying = {node.name for node in graph.nodes if node.operands and base_name(node.op) in COPYING}
        self._reshapes = {node.name for node in graph.nodes if base_name(node.op) in RESHAPES}
        self._strides: dict[Hashable, Strides] = {}

    def begin(self) -> None:
        """Another program, whose values have other keys."""
        self._strides = {}

    def converted(self, value: Hashable, tensor: str, steps: Sequence[Step]) -> None:
        """A conversion has made memory of its own for the tensor."""
        own = self._copied.permuted.get(tensor)
        if own is not None:
            shape = self._graph.tensors[tensor].shape
            cuts = all(step.before.kind in "IR" and step.after.kind in "IRS" for step in steps)
            self._strides[value] = dense_strides(shape, own) if cuts else contiguous_strides(shape)

    def of_view(self, value: Hashable) -> Laid:
        """How it lies what a conversion hands on in the same memory."""
        return Laid(None, self._strides.get(value))

    def of_results(self, node: Node, values: Sequence[Hashable], shapes: Sequence[Shape], made: Shape) -> Laid:
        """How an operator works on the values of its operands, of which a rank has slices of these shapes.

        made: the shape of the slice of its first result.
        """
        copies = self._copies(node, values, shapes, made) if node.name in self._copying else None
        if not values or values[0] not in self._strides:
            return AS_IN_GRAPH if copies is None else Laid(copies, None)
        found = view_strides(node, self._graph, {node.operands[0]: self._strides[values[0]]})
        if node.name in self._reshapes and (copies or found is None):
            found = contiguous_strides(self._graph.tensors[node.results[0]].shape)
        return Laid(copies, found)

    def _copies(
        self, node: Node, values: Sequence[Hashable], shapes: Sequence[Shape], made: Shape
    ) -> tuple[int, ...] | None:
        wholes = [self._graph.tensors[name].shape for name in node.operands]
        if self._strides.keys().isdisjoint(values) and not any(map(_is_thin, wholes, shapes)):
            return None
        if node.name in self._reshapes and math.prod(shapes[0]) != math.prod(made):
            return None  # parts that are padded
        strides = [
            strides_of_part(whole, self._strides.get(value) or self._of_graph(name), shape)
            for name, value, whole, shape in zip(node.operands, values, wholes, shapes, strict=True)
        ]
        return copied_operands(node, shapes, strides, made)

    def _of_graph(self, name: str) -> Strides:
        return self._copied.permuted.get(name) or contiguous_strides(self._graph.tensors[name].shape)

    def is_view(self, node: Node, laid: Laid, usual: bool) -> bool:
        """Whether results share the memory of the first operand. usual: whether they do in the graph."""
        return usual if laid.copies is None or node.name not in self._reshapes else not laid.copies

    def kept(self, node: Node, laid: Laid, kept: tuple[Saved, ...]) -> tuple[Saved, ...]:
        """What an operator keeps, of what it keeps in the graph: operands, or the copies that are made of them."""
        if not kept or laid.copies is None or node.name in self._reshapes:
            return kept
        return each_once(factors_and_copies(node, self._graph, laid.copies))

    def made(self, values: Iterable[Hashable], laid: Laid) -> None:
        """The results' keys."""
        if laid.strides is not None:
            self._strides.update(dict.fromkeys(values, laid.strides))


def _is_thin(whole: Shape, part: Shape) -> bool:
    """Whether a part has one element along a dim of several."""
    return 1 in part and any(length == 1 < full for full, length in zip(whole, part, strict=True))
