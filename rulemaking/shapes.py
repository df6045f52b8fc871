"""Sorts and sizes of terms as expressions of the sizes of variables, and every condition that well-formed terms need.

A condition is an equality of two expressions. "At least n" is written with a fresh unknown: x.col == n + ?_1, which
stands for a number of at least 0, so that the same conditions are drawn from, checked, and told to a solver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.substitute.rules.expressions import Expression, Operation
from autopar.substitute.rules.terms import Attribute, Size, Sort, Term, Unknown

AXES: Mapping[Sort, tuple[str, ...]] = {
    "matrix": ("row", "col"),
    "weight": ("row", "col"),
    "vector": ("col",),
    "image": ("batch", "channel", "height", "width"),
    "kernel": ("out", "in", "height", "width"),
}
"""Names of the dims of each sort, in order; a matrix has a stack of any dims before them."""

STACK = "stack"
"""Name of the size of a matrix that holds all dims before its last two: a tuple."""


@dataclass(frozen=True)
class Shape:
    """Sort of a term and its sizes by axis; matrices and weights have a stack too, () for a weight."""

    sort: Sort
    sizes: Mapping[str, Expression]

    def __getitem__(self, axis: str) -> Expression:
        if axis not in self.sizes:
            raise PlanError(f"a {self.sort} has no axis {axis!r}; its axes are {', '.join(self.sizes)}")
        return self.sizes[axis]

    def resized(self, lengths: Mapping[str, Expression]) -> Shape:
        """The same sort with other lengths along some axes; a matrix with an empty stack is a weight."""
        changed = {**self.sizes, **lengths}
        return Shape(self.sort, changed) if self.sort not in ("matrix", "weight") else matrix(changed)

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows, columns and a stack."""
        return self.sort in ("matrix", "weight")


def matrix(sizes: Mapping[str, Expression]) -> Shape:
    """The shape of a matrix, a weight where its stack is ()."""
    return Shape("weight" if sizes[STACK] == () else "matrix", sizes)


def variable_shape(name: str, sort: Sort) -> Shape:
    """The shape of a variable, whose every size is its own symbol."""
    sizes: dict[str, Expression] = {axis: Size(name, axis) for axis in AXES[sort]}
    if sort == "matrix":
        sizes[STACK] = Size(name, STACK)
    elif sort == "weight":
        sizes[STACK] = ()
    return Shape(sort, sizes)


@dataclass
class Conditions:
    """What must hold for the terms shaped so far to be well formed.

    equalities: pairs of sizes. defined: sizes that must have a value, as windows must fit their image. known: shapes of
    those terms, so that a term that occurs again has the same fresh unknowns.
    """

    equalities: list[tuple[Expression, Expression]] = field(default_factory=list)
    defined: list[Expression] = field(default_factory=list)
    num_fresh: int = 0
    known: dict[Term, Shape] = field(default_factory=dict)

    def equal(self, left: Expression, right: Expression) -> None:
        """Two sizes must be equal."""
        if left != right and (left, right) not in self.equalities:
            self.equalities.append((left, right))

    def fresh(self, kind: str = "") -> Unknown:
        """An unknown that no rule uses: a number of at least 0, or a stack where kind is "stack"."""
        self.num_fresh += 1
        return Unknown(f"_{kind}{self.num_fresh}")

    def rest(self, length: Expression, part: Expression) -> Expression:
        """What is left of a length after `part`, which must fit."""
        if isinstance(length, Operation) and length.sign == "+" and length.operands[0] == part:
            return length.operands[1]
        found = next((e for whole, e in self.equalities if whole == length and _begins(e, part)), None)
        if isinstance(found, Operation):
            return found.operands[1]
        rest = self.fresh()
        self.equal(length, Operation("+", (part, rest)))
        return rest

    def quotient(self, length: Expression, count: Expression) -> Expression:
        """A length divided by a count, which must divide it."""
        quotient = self.fresh()
        self.equal(length, Operation("*", (count, quotient)))
        return quotient

    def popped(self, stack: Expression) -> tuple[Expression, Expression]:
        """A stack without its last dim, and that dim, which it must have."""
        if isinstance(stack, Operation):
            return stack.operands[0], stack.operands[1]
        rest, heads = self.fresh(STACK), self.fresh()
        self.equal(stack, Operation("push", (rest, heads)))
        return rest, heads

    def same(self, left: Shape, right: Shape, *but: str) -> None:
        """Two shapes must be of one sort, and equal along all axes but some."""
        if left.sort != right.sort:
            raise PlanError(f"expected two operands of one sort, found a {left.sort} and a {right.sort}")
        for axis in left.sizes:
            if axis not in but:
                self.equal(left[axis], right[axis])


def _begins(expression: Expression, part: Expression) -> bool:
    return isinstance(expression, Operation) and expression.sign == "+" and expression.operands[0] == part


def axis_index(axis: Attribute) -> int:
    """The dim of an axis by its name: "row" is -2, "col" is -1, "batch" and "out" 0, "channel" and "in" 1."""
    indices = {"row": -2, "col": -1, "batch": 0, "out": 0, "channel": 1, "in": 1, "height": 2, "width": 3}
    if not isinstance(axis, str) or axis not in indices:
        raise PlanError(f"expected an axis, one of {', '.join(indices)}; found {axis!r}")
    return indices[axis]
