"""Tensors of polynomials: every element its own unknown, so that one computation speaks for all values at once.

Both sides of an equation, computed on such tensors, have equal polynomials exactly where they agree on all numbers. A
function of which nothing is known (map, rsqrt, max) becomes an unknown of its own, named by its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from autopar.substitute.rules.terms import Attribute
from rulemaking.shapes import axis_index
from rulemaking.values import Values

Monomial = tuple[Any, ...]


class Polynomial:
    """A sum of products of unknowns with rational coefficients, kept without zeros."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, Any]) -> None:
        self.terms = {monomial: value for monomial, value in terms.items() if value}

    def __add__(self, other: Any) -> Polynomial:
        terms = dict(self.terms)
        for monomial, value in polynomial(other).terms.items():
            terms[monomial] = terms.get(monomial, 0) + value
        return Polynomial(terms)

    def __mul__(self, other: Any) -> Polynomial:
        terms: dict[Monomial, Any] = {}
        for left, value in self.terms.items():
            for right, factor in polynomial(other).terms.items():
                monomial = tuple(sorted(left + right, key=str))
                terms[monomial] = terms.get(monomial, 0) + value * factor
        return Polynomial(terms)

    def __neg__(self) -> Polynomial:
        return self * -1

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __str__(self) -> str:
        return (
            " + ".join(
                f"{value}{''.join(f'·{part}' for part in parts)}"
                for parts, value in sorted(self.terms.items(), key=str)
            )
            or "0"
        )


def polynomial(value: Any) -> Polynomial:
    """A number as a polynomial, or a polynomial itself."""
    return value if isinstance(value, Polynomial) else Polynomial({(): value})


def unknown(name: str) -> Polynomial:
    """A polynomial that is one unknown."""
    return Polynomial({(name,): 1})


class Polynomials(Values):
    """Arrays of polynomials. `outside` of a max pooling is a polynomial that no maximum counts."""

    def __init__(self) -> None:
        self.drawn = 0

    def array(self, shape: Sequence[int], random: Any) -> Any:
        """Elements that are each an unknown never used before."""
        found = np.empty(tuple(shape), dtype=object)
        for place in np.ndindex(*shape):
            self.drawn += 1
            found[place] = unknown(f"a{self.drawn}")
        return found

    def map(self, function: Any, x: Any) -> Any:
        return _each(x, lambda element: unknown(f"{function}({element})"))

    def relu(self, x: Any) -> Any:
        return self.map("relu", x)

    def cast(self, dtype: Any, x: Any) -> Any:
        return self.map(f"cast {dtype}", x)

    def inverse(self, count: int) -> Any:
        return Fraction(1, count)

    def number(self, value: Any) -> Any:
        return polynomial(value)

    def largest(self, x: Any, dim: int, keep: bool = False) -> Any:
        moved = np.moveaxis(x, dim, -1)
        found = np.empty(moved.shape[:-1], dtype=object)
        for place in np.ndindex(*found.shape):
            found[place] = unknown(f"max{sorted({str(element) for element in moved[place]} - {str(_OUTSIDE)})}")
        return np.expand_dims(found, dim) if keep else found

    def padded(self, x: Any, padding: tuple[int, int], outside: int) -> Any:
        value = _OUTSIDE if outside else polynomial(0)
        height, width = padding
        return np.pad(x, ((0, 0), (0, 0), (height, height), (width, width)), constant_values=value)  # type: ignore[call-overload]

    def full(self, value: int, rows: int, columns: int) -> Any:
        return _each(np.full((rows, columns), value, dtype=object), polynomial)

    def eye(self, rows: int) -> Any:
        return _each(np.eye(rows, dtype=np.int64).astype(object), polynomial)

    def sum(self, axis: Attribute, x: Any) -> Any:
        return x.sum(axis_index(axis), keepdims=True)


_OUTSIDE = unknown("outside")


def _each(x: Any, function: Any) -> Any:
    found = np.empty(x.shape, dtype=object)
    for place in np.ndindex(*x.shape):
        found[place] = function(x[place])
    return found
