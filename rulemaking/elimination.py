"""Equalities between sums of sizes, solved for as many sizes as there are equalities, so that drawing seldom fails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from autopar.substitute.rules.expressions import Expression, Operation, Symbol
from autopar.substitute.rules.terms import Size, Unknown

Equality: TypeAlias = tuple[Expression, Expression]
Sum: TypeAlias = "Counter[Symbol | None]"
"""How often each symbol is added; under None, the number that is added."""


def eliminated(equalities: Iterable[Equality]) -> tuple[list[Equality], set[Symbol]]:
    """The same equalities, the linear ones solved for one symbol each, and those symbols.

    Those that no symbol can be solved for without a division that leaves a rest stay: 2 x == 3 y, and 0 == 1.
    What remains free can be drawn at will, but for signs and for products: x + y == n + y becomes n == x.
    """
    solved: dict[Symbol, Sum] = {}
    others: list[Equality] = []
    for left, right in equalities:
        sums = _sum(left), _sum(right)
        if sums[0] is None or sums[1] is None:
            others.append((left, right))
        else:
            left_over = _solve(_difference(sums[0], sums[1]), solved)
            others += [_sides(left_over)] if left_over else []
    return [_equality(symbol, total) for symbol, total in solved.items()] + others, set(solved)


def _sum(expression: Expression) -> Sum | None:
    """An expression as a sum; None where it is none."""
    match expression:
        case Size(_, axis) if axis in ("stack", "dtype"):
            return None
        case Size() | Unknown():
            return Counter({expression: 1})
        case bool() | float():
            return None
        case int():
            return Counter({None: expression})
        case Operation("+", (left, right)):
            sums = _sum(left), _sum(right)
            return None if sums[0] is None or sums[1] is None else _difference(sums[0], _times(sums[1], -1))
        case _:
            return None


def _solve(zero: Sum, solved: dict[Symbol, Sum]) -> Sum | None:
    """Takes in that a sum is zero: solves it for a symbol, and puts that into what was solved before.

    Returns what says something and can be solved for no symbol.
    """
    for symbol, total in solved.items():
        zero = _difference(zero, _times(_with(symbol, total), zero[symbol]))
    divisor = math.gcd(*zero.values())
    zero = Counter({symbol: count // divisor for symbol, count in zero.items()})
    units = [symbol for symbol, count in zero.items() if symbol is not None and abs(count) == 1]
    if not units:
        return zero or None
    pivot = max(units, key=lambda symbol: (_is_positive(zero, symbol), isinstance(symbol, Size)))
    total = _times(_without(zero, pivot), -zero[pivot])
    for symbol, known in solved.items():
        count = known[pivot]
        if count:
            solved[symbol] = _difference(_without(known, pivot), _times(total, -count))
    solved[pivot] = total
    return None


def _is_positive(zero: Sum, pivot: Symbol) -> bool:
    return all(count * zero[pivot] < 0 for symbol, count in zero.items() if symbol != pivot)


def _with(symbol: Symbol, total: Sum) -> Sum:
    """The sum that is zero where a symbol is a total."""
    return _difference(Counter({symbol: 1}), total)


def _without(total: Sum, symbol: Symbol) -> Sum:
    return Counter({other: count for other, count in total.items() if other != symbol})


def _times(total: Sum, factor: int) -> Sum:
    return Counter({symbol: count * factor for symbol, count in total.items() if count * factor})


def _difference(left: Sum, right: Sum) -> Sum:
    symbols = [*left, *(symbol for symbol in right if symbol not in left)]
    return Counter({symbol: left[symbol] - right[symbol] for symbol in symbols if left[symbol] != right[symbol]})


def _equality(symbol: Symbol, total: Sum) -> Equality:
    """symbol == total, with what is subtracted on the left."""
    return _sides(_difference(Counter({symbol: 1}), total))


def _sides(zero: Sum) -> Equality:
    """That a sum is zero, with what is subtracted on the right."""
    return _expression(_part(zero, 1)), _expression(_times(_part(zero, -1), -1))


def _part(total: Sum, sign: int) -> Sum:
    return Counter({symbol: count for symbol, count in total.items() if count * sign > 0})


def _expression(total: Sum) -> Expression:
    parts: list[Expression] = []
    for symbol, count in total.items():
        parts += [count] if symbol is None else [symbol] * count
    found: Expression = parts[0] if parts else 0
    for part in parts[1:]:
        found = Operation("+", (found, part))
    return found
