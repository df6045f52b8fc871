"""How values lie in memory that a plan's conversions have made anew, where the graph's own tensors lie otherwise.

A conversion that makes memory leaves its result contiguous. What the graph alone reshapes without a copy, since it lies
as a transposed tensor does (attention's results lie as its queries), may then have to be copied. Only such values are
followed; all others lie as `ops.layout` says of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from autopar.ir.graph import Graph, Node
from autopar.ops.call import base_name
from autopar.ops.layout import RESHAPES, Strides, contiguous_strides, copied, view_strides


class Laid(NamedTuple):
    """Of an operator's results: whether it copies its operand, though the graph says that it does not, and how they lie
    (None: as in the graph)."""

    is_copy: bool
    strides: Strides | None


AS_IN_GRAPH = Laid(False, None)


class Layouts:
    """Follows the values of one program, by number."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._permuted = graph, copied(graph).permuted
        self._strides: dict[int, Strides] = {}

    def begin(self) -> None:
        """Another program, whose values have other numbers."""
        self._strides = {}

    def converted(self, value: int, tensor: str) -> None:
        """A conversion has made memory of its own for the tensor."""
        if tensor in self._permuted:
            self._strides[value] = contiguous_strides(self._graph.tensors[tensor].shape)

    def of_view(self, value: int) -> Laid:
        """How it lies what a conversion hands on in the same memory."""
        return Laid(False, self._strides.get(value))

    def of_results(self, node: Node, first: int) -> Laid:
        """How results lie of an operator whose first operand is that value."""
        if first not in self._strides:
            return AS_IN_GRAPH
        found = view_strides(node, self._graph, {node.operands[0]: self._strides[first]})
        if found is None and base_name(node.op) in RESHAPES:
            return Laid(True, contiguous_strides(self._graph.tensors[node.results[0]].shape))
        return Laid(False, found)

    def made(self, values: Iterable[int], laid: Laid) -> None:
        """The results' numbers."""
        if laid.strides is not None:
            self._strides.update(dict.fromkeys(values, laid.strides))
