"""The values of a graph's constants, where they are small, or alike in what they are large in: see `intervals`.

    full, ones, zeros             → one number, expanded
    comparisons of positions      → intervals of columns (`Intervals`), by way of outer sums (`Outer`)
    tril, triu of one number      → an interval
    and, or, where, fill, a · x   → of intervals, or of what is inside and outside of them
    views and slices              → the same, or some rows and columns of it

What is made of them otherwise is computed, if it is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Graph, Node, Ref, needed
from autopar.ir.structure import OWN_BACKWARD, constant_tensors
from autopar.ops import overload, run
from autopar.substitute.intervals import (
    TURNED,
    Intervals,
    Outer,
    common,
    compared,
    of_rows,
    parted_alike,
    together,
    true_in,
)

MOST_ELEMENTS = 1 << 27
"""Larger tensors are not made."""
_FILLED = {"full": 1, "new_full": 2, "full_like": 1}
"""Operators that make one number of all elements, by where they have it among their arguments."""
_ONE_NUMBER = {"ones": 1, "new_ones": 1, "ones_like": 1, "zeros": 0, "new_zeros": 0, "zeros_like": 0}
_KEEPS_MATRICES = {
    "alias", "clone", "contiguous", "detach", "expand", "lift_fresh_copy", "reshape", "squeeze", "unsqueeze", "view",
    "_unsafe_view",
}  # fmt: skip
_ON_EACH = {"masked_fill", "_to_copy", "where"}
_AND, _OR = {"__and__", "bitwise_and", "logical_and"}, {"__or__", "bitwise_or", "logical_or"}

Value = Tensor | Intervals | Outer | None
"""Of a constant; None where it is not known."""


class Constants:
    """What is the same at every step, whatever inputs, parameters and chance are: values by name, each found when it is
    asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._constants, self._known = graph, constant_tensors(graph), dict[str, Value](graph.values)

    def __getitem__(self, name: str) -> Value:
        if name not in self._constants:
            return None
        if name not in self._known:
            for node in needed(self._graph.nodes, {name}):
                if any(result not in self._known for result in node.results):
                    self._known.update(self._results(node))
        return self._known.get(name)

    def _results(self, node: Node) -> dict[str, Value]:
        unknown: dict[str, Value] = dict.fromkeys(node.results)
        operands = {name: self._known.get(name) for name in node.operands}
        if node.op in OWN_BACKWARD or any(value is None for value in operands.values()):
            return unknown
        if len(node.outputs) == 1 and len(node.results) == 1:
            found = _OfOperator(self._graph, node, operands).value
            if found is not None:
                return {node.results[0]: found}
        made = {name: self._made(name, value) for name, value in operands.items()}
        if any(value is None for value in made.values()) or not self._is_small(node):
            return unknown
        results = zip(node.outputs, run(node, made.__getitem__, "cpu"), strict=True)
        return {name: value for name, value in results if name is not None}

    def _made(self, name: str, value: Value) -> Tensor | None:
        """The tensor itself, where it is small."""
        if isinstance(value, Tensor) or value is None:
            return value
        tensor = self._graph.tensors[name]
        return value.matrix.expand(tensor.shape) if tensor.num_elements <= MOST_ELEMENTS else None

    def _is_small(self, node: Node) -> bool:
        """Whether results are, or take no memory of their own."""
        tensors = [self._graph.tensors[name] for name in node.results]
        return _name(node) in ("expand", "alias") or all(one.num_elements <= MOST_ELEMENTS for one in tensors)


class _OfOperator:
    """What an operator makes of one number, or of matrices that are alike, as such."""

    def __init__(self, graph: Graph, node: Node, operands: Mapping[str, Value]) -> None:
        self._node, self._name, self._operands = node, _name(node), operands
        self._made = graph.tensors[node.results[0]]
        self._shapes = {name: graph.tensors[name].shape for name in operands}
        self._arguments = [operands[one.tensor] if isinstance(one, Ref) else one for one in node.args]

    @property
    def value(self) -> Value:
        """None where it is none of these."""
        if not self._operands or self._name in _FILLED or self._name in _ONE_NUMBER:
            return self._filled()
        if len(self._made.shape) < 2 or min(self._made.shape[-2:]) < 2:
            return None
        ways = (self._moved, self._triangle, self._compared, self._summed, self._joined, self._alike)
        return next((found for found in (way() for way in ways) if found is not None), None)

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._made.dtype)
        return found

    def _filled(self) -> Value:
        """All elements are one number."""
        number = self._node.args[_FILLED[self._name]] if self._name in _FILLED else _ONE_NUMBER.get(self._name)
        if not isinstance(number, (bool, int, float)):
            return None
        return torch.full((), number, dtype=self._dtype).expand(self._made.shape)

    def _moved(self) -> Value:
        """Matrices that stay as they are, or of which some rows, or columns in a row, are left."""
        if not isinstance(value := self._arguments[0], Intervals):
            return None
        before, after = self._shapes[self._node.operands[0]], self._made.shape
        if self._name == "slice":
            return self._sliced(value, len(before))
        return value if self._name in _KEEPS_MATRICES and before[-2:] == after[-2:] else None

    def _sliced(self, value: Intervals, num_dims: int) -> Value:
        given: list[Any] = [*self._node.args[1:]]
        dim, begin, end, step = given + [0, None, None, 1][len(given) :]
        dim = dim % num_dims - num_dims
        if dim == -2:
            return replace(value, first=value.first[begin:end:step], after=value.after[begin:end:step])
        if dim == -1 and step == 1:
            begin, end, _ = slice(begin, end).indices(value.columns)
            first, after = (edge.clamp(begin, end) - begin for edge in (value.first, value.after))
            return replace(value, first=first, after=after, columns=end - begin)
        return value if dim < -2 else None

    def _triangle(self) -> Value:
        """What is on one side of a diagonal, of one number or of what is 0 outside; and 0."""
        if self._name not in ("tril", "triu"):
            return None
        rows, columns = self._made.shape[-2:]
        value = self._arguments[0]
        diagonal = int(self._node.args[1]) if len(self._node.args) > 1 else 0
        number = value.inside if isinstance(value, Intervals) else one_number(value)
        if number is None or (isinstance(value, Intervals) and bool(value.outside != 0)):
            return None
        edge = (torch.arange(rows) + diagonal + (self._name == "tril")).clamp(0, columns)
        ends = torch.zeros_like(edge), torch.full_like(edge, columns)
        first, after = (ends[0], edge) if self._name == "tril" else (edge, ends[1])
        side = Intervals(first, after, columns, number, torch.zeros_like(number))
        return common(side, value) if isinstance(value, Intervals) else side

    def _compared(self) -> Value:
        """A column of rows against a row of columns, or an outer sum against one number."""
        if self._name not in TURNED:
            return None
        one, other = self._arguments[:2]
        for left, right, way in ((one, other, self._name), (other, one, TURNED[self._name])):
            if isinstance(left, Outer) and (number := one_number(right)) is not None:
                return left.compared(number, way)
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                columns, rows = self._along(left, -1), self._along(right, -2)
                if columns is not None and rows is not None:
                    return compared(columns, rows, way)
        return None

    def _summed(self) -> Value:
        """The sum or difference of whole numbers, one of each row and one of each column; how far that is from 0."""
        one, other = [*self._arguments, None][:2]
        if self._name == "abs" and isinstance(one, Outer):
            return replace(one, is_distance=True)
        if self._name not in ("add", "sub") or self._node.kwargs or len(self._arguments) != 2:
            return None
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or {one.dtype, other.dtype} != {torch.int64}:
            return None
        sign = -1 if self._name == "sub" else 1
        for left, right, signs in ((one, other, (1, sign)), (other, one, (sign, 1))):
            rows, columns = self._along(left, -2), self._along(right, -1)
            if rows is not None and columns is not None:
                return Outer(signs[0] * rows, signs[1] * columns)
        return None

    def _joined(self) -> Value:
        """What two masks have in common, or together."""
        if self._name not in _AND | _OR or not any(isinstance(value, Intervals) for value in self._arguments):
            return None
        one, other = (self._mask(value) for value in self._arguments[:2])
        if one is None or other is None:
            return None
        return common(one, other) if self._name in _AND else together(one, other)

    def _mask(self, value: Any) -> Intervals | None:
        """By what is true in it, where that is an interval in each row."""
        if isinstance(value, Intervals):
            return true_in(value) if value.inside.dtype == torch.bool else None
        if not isinstance(value, Tensor) or value.dtype != torch.bool:
            return None
        rows, columns = self._made.shape[-2:]
        if (of_row := self._along(value, -2)) is not None:
            return of_rows(of_row[:, None], columns)
        if (of_column := self._along(value, -1)) is not None:
            found = of_rows(of_column[None])
            return found and replace(found, first=found.first.expand(rows), after=found.after.expand(rows))
        alike = _matrix(value)
        return None if alike is None else of_rows(alike.expand(rows, columns))

    def _alike(self) -> Value:
        """An operator on each element, where matrices are parted alike, or are one number: on what is inside, and on
        what is outside."""
        seen = {name: value for name, value in self._operands.items() if isinstance(value, Intervals)}
        numbers = {name: one_number(value) for name, value in self._operands.items() if name not in seen}
        is_pointwise = torch.Tag.pointwise in overload(self._node.op).tags or self._name in _ON_EACH
        if not is_pointwise or any(number is None for number in numbers.values()):
            return None
        if not seen:
            return self._of_one(numbers).expand(self._made.shape)
        first, *others = seen.values()
        if not all(parted_alike(first, other) for other in others):
            return None
        inside = self._of_one(numbers | {name: value.inside for name, value in seen.items()})
        outside = self._of_one(numbers | {name: value.outside for name, value in seen.items()})
        return replace(first, inside=inside, outside=outside)

    def _of_one(self, numbers: Mapping[str, Any]) -> Tensor:
        """Of one element of each operand, with as many dims as that has: these decide the dtype."""
        ones = {name: number.reshape([1] * len(self._shapes[name])) for name, number in numbers.items()}
        (made,) = run(self._node, ones.__getitem__, "cpu")
        found: Tensor = made.reshape(())
        return found

    def _along(self, value: Tensor, dim: int) -> Tensor | None:
        """One number of each row (-2) or column (-1) of the result's matrices, where a tensor has no others."""
        return _along(value, dim, self._made.shape[dim])


def _name(node: Node) -> str:
    """Of an operator, without library and overload."""
    return node.op.split(".")[1] if node.op.startswith("aten.") else ""


def one_number(value: Any) -> Tensor | None:
    """What all elements are, as a tensor of no dims."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value)
    if not isinstance(value, Tensor) or not value.numel():
        return None
    value = _without_copies(value)
    first = value.reshape(-1)[0]
    return first if value.numel() == 1 or (value.numel() <= MOST_ELEMENTS and bool((value == first).all())) else None


def _without_copies(value: Tensor) -> Tensor:
    """What is there by expansion, once."""
    for dim in range(value.dim()):
        if value.stride(dim) == 0:
            value = value.narrow(dim, 0, 1)
    return value


def _along(value: Tensor, dim: int, size: int) -> Tensor | None:
    """The numbers of one dim, where these are alike in all other dims."""
    value = _without_copies(value)
    if value.numel() > MOST_ELEMENTS or (value.is_floating_point() and bool(value.isnan().any())):
        return None
    if value.dim() < -dim:
        return value.reshape(-1)[:1].expand(size) if value.numel() == 1 else None
    lines = value.movedim(dim, -1).reshape(-1, value.shape[dim])
    if lines.shape[0] > 1 and not bool((lines == lines[:1]).all()):
        return None
    return lines[0].expand(size)


def _matrix(value: Tensor) -> Tensor | None:
    """The last two dims, where they are alike in all others."""
    value = _without_copies(value)
    if value.dim() < 2 or value.numel() > MOST_ELEMENTS:
        return None
    every = value.reshape(-1, *value.shape[-2:])
    return every[0] if bool((every == every[:1]).all()) else None
