"""All terms of a world up to a number of operators, and which of them have the same value.

A term is enlarged only where it is the first of its value, so that what follows by replacing a part with an equal part
is not found again. Parts that occur twice count once. Two outputs that cut one tensor in halves make up the rules of
several outputs: any other outputs are equal or not each on its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.substitute.rules.expressions import value_of
from autopar.substitute.rules.terms import Apply, Attribute, Size, Term, Unknown, Variable
from rulemaking.algebra import OPERATORS
from rulemaking.shapes import axis_index
from rulemaking.worlds import LENGTHS, World

_COMMUTATIVE = {"add", "mul"}
_HALVES = {2 * half: unknown for unknown, half in LENGTHS.items()}


@dataclass(frozen=True)
class Found:
    """A term with its value: sort, numbers, the operators inside, and the names of its variables."""

    term: Term
    sort: str
    array: Any = field(compare=False, repr=False)
    parts: frozenset[Term] = field(compare=False, repr=False)
    order: int = field(compare=False, default=0)

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for equal values of one sort and shape, and hardly ever for others."""
        return (self.sort, self.array.shape, hash(np.ascontiguousarray(self.array).tobytes()))


@dataclass
class Enumeration:
    """Terms by number of operators, the first of each value, and the pairs of terms whose values are equal."""

    world: World
    levels: list[list[Found]] = field(default_factory=list)
    first: dict[tuple[Any, ...], Found] = field(default_factory=dict)
    pairs: list[tuple[Found, Found]] = field(default_factory=list)
    num_terms: int = 0

    def run(self, num_operators: int, only: Sequence[str] = ()) -> None:
        """Enumerates all terms of up to so many operators, of the operators named alone where some are."""
        random = np.random.default_rng(0)
        operators = [(op, attributes) for op, attributes in self.world.operators if not only or op in only]
        self.levels.append([])
        for name, (sort, lengths) in self.world.variables.items():
            self._keep(Found(Variable(name), sort, self.world.values.array(lengths, random), frozenset()), 0)
        for size in range(1, num_operators + 1):
            self.levels.append([])
            for op, attributes in operators:
                for operands in self._operands(OPERATORS[op].arity, size):
                    self._apply(op, attributes, operands, size)

    def _operands(self, arity: int, size: int) -> Iterator[tuple[Found, ...]]:
        """Operands that make a term of `size` operators."""
        if arity == 0:
            yield from [()] if size == 1 else []
        elif arity == 1:
            yield from ((found,) for found in self.levels[size - 1])
        elif arity == 2:
            yield from self._two(size)
        else:
            vectors = [found for found in self.levels[0] if found.sort == "vector"]
            for first, second in self._two(size):
                yield from ((first, second, vector) for vector in vectors)

    def _two(self, size: int) -> Iterator[tuple[Found, Found]]:
        for left in range(size):
            for first in self.levels[left]:
                for second in self.levels[size - 1 - left]:
                    if left in (0, size - 1) or not first.parts & second.parts:
                        yield first, second
        whole = {found.term: found for level in self.levels[1:size] for found in level}
        for first in self.levels[size - 1] if size > 1 else ():
            for part in first.parts:
                if part in whole:
                    yield first, whole[part]
                    if part != first.term:
                        yield whole[part], first

    def _apply(self, op: str, attributes: tuple[Attribute, ...], operands: tuple[Found, ...], size: int) -> None:
        if op in _COMMUTATIVE and operands[0].sort == operands[1].sort and operands[0].order > operands[1].order:
            return
        sort = _result(op, attributes, operands)
        if op in ("first", "second") and sort:
            cut = _HALVES.get(operands[0].array.shape[axis_index(attributes[0])])
            if cut is None:
                return
            attributes = (attributes[0], cut)
        if sort:
            term = Apply(op, attributes, tuple(found.term for found in operands))
            parts = frozenset((term,)).union(*(found.parts for found in operands))
            values = tuple(self._value(attribute) for attribute in attributes)
            array = OPERATORS[op].compute(self.world.values, values, *(found.array for found in operands))
            if array.size:
                self._keep(Found(term, sort, array, parts, self.num_terms), size)

    def _value(self, attribute: Attribute) -> Any:
        if isinstance(attribute, Size):
            return 4
        return value_of(attribute, self.world.attributes)

    def _keep(self, found: Found, size: int) -> None:
        self.num_terms += 1
        fingerprint = found.fingerprint
        known = self.first.get(fingerprint)
        if known is None:
            self.first[fingerprint] = found
            self.levels[size].append(found)
        else:
            self.pairs.append((known, found))

    def halves(self, num_operators: int) -> Iterator[tuple[Found, Found, Term, Term]]:
        """Pairs of terms that are the two halves of one larger term, with those halves."""
        values = self.world.values
        for found in (found for level in self.levels[1:num_operators] for found in level):
            for axis in _AXES[found.sort]:
                cut = _HALVES.get(found.array.shape[axis_index(axis)])
                if cut is None:
                    continue
                cuts = [values.part(axis, found.array, *at) for at in ((0, LENGTHS[cut]), (LENGTHS[cut], None))]
                known = [
                    self.first.get(Found(found.term, found.sort, array, frozenset()).fingerprint) for array in cuts
                ]
                if known[0] is not None and known[1] is not None:
                    terms = (Apply(op, (axis, cut), (found.term,)) for op in ("first", "second"))
                    yield (known[0], known[1], *terms)  # type: ignore[misc]


_AXES: dict[str, tuple[str, ...]] = defaultdict(
    tuple, matrix=("row", "col"), weight=("row", "col"), image=("channel",), kernel=("out",)
)
_MATRICES = ("matrix", "weight")


def _result(op: str, attributes: tuple[Attribute, ...], operands: tuple[Found, ...]) -> str | None:
    """The sort of the result where the operands fit, else None."""
    sorts = [found.sort for found in operands]
    shapes = [found.array.shape for found in operands]
    axis = attributes[0] if attributes and isinstance(attributes[0], str) else None
    if not operands:
        return "weight"
    if axis is not None and op not in ("scale_along", "shift_along") and axis not in _ALL_AXES[sorts[0]]:
        return None
    match op:
        case "linear" | "affine":
            fits = sorts[0] in _MATRICES and sorts[1] == "weight" and shapes[0][-1] == shapes[1][-1]
            return sorts[0] if fits and (op == "linear" or shapes[1][0] == shapes[2][0]) else None
        case "matmul":
            fits = set(sorts) <= set(_MATRICES) and shapes[0][-1] == shapes[1][-2] and _stacks_fit(sorts, shapes)
            return ("weight" if set(sorts) == {"weight"} else "matrix") if fits else None
        case "add" | "mul":
            rows = sorts[1] == "vector" and sorts[0] in _MATRICES and shapes[0][-1] == shapes[1][0]
            return sorts[0] if rows or (sorts[0] == sorts[1] and shapes[0] == shapes[1]) else None
        case "sub":
            return sorts[0] if sorts[0] == sorts[1] and shapes[0] == shapes[1] else None
        case "concat":
            dim = axis_index(str(axis))
            cut = [(*shape[:dim], *(shape[dim + 1 :] if dim != -1 else ())) for shape in shapes]
            return sorts[0] if sorts[0] == sorts[1] and cut[0] == cut[1] else None
        case "conv" | "conv_affine":
            fits = sorts[0] == "image" and sorts[1] == "kernel" and shapes[0][1] == shapes[1][1]
            return "image" if fits and (op == "conv" or shapes[1][0] == shapes[2][0]) else None
        case "scale_along" | "shift_along":
            fits = sorts[1] == "vector" and str(axis) in _ALL_AXES[sorts[0]]
            return sorts[0] if fits and shapes[0][axis_index(str(axis))] == shapes[1][0] else None
        case "split_heads":
            return "matrix" if sorts[0] in _MATRICES and shapes[0][-1] % 2 == 0 else None
        case "merge_heads":
            return "matrix" if sorts[0] == "matrix" and len(shapes[0]) > 2 else None
        case "transpose":
            return sorts[0] if sorts[0] in _MATRICES else None
        case "max_pool" | "avg_pool":
            return "image" if sorts[0] == "image" and min(shapes[0][2:]) > 1 else None
        case "relu" | "map" | "mul":
            return sorts[0] if sorts[0] in ("matrix", "weight", "image") else None
        case _:
            return sorts[0]


_ALL_AXES: dict[str, tuple[str, ...]] = {
    "matrix": ("row", "col"),
    "weight": ("row", "col"),
    "vector": ("col",),
    "image": ("batch", "channel"),
    "kernel": ("out", "in"),
}


def _stacks_fit(sorts: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> bool:
    return "weight" in sorts or shapes[0][:-2] == shapes[1][:-2]


def unknowns_of(term: Term) -> set[Unknown]:
    """The unknown attributes of a term."""
    if isinstance(term, Variable):
        return set()
    found = {attribute for attribute in term.attributes if isinstance(attribute, Unknown)}
    return found.union(*(unknowns_of(operand) for operand in term.operands))
