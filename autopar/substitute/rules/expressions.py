"""Sizes and guards: sums and products of attributes, `w1.row + w2.row`, and relations between them.

A guard is `left relation right`. `==` with an unknown alone on its left defines that unknown where nothing else binds
it: `?c == ?a * ?b`. `?e holds ?d` says that every value of dtype ?d is a value of dtype ?e.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.errors import PlanError
from autopar.substitute.rules.terms import Attribute, Size, Unknown

Symbol: TypeAlias = Size | Unknown
Binding: TypeAlias = Mapping[Symbol, Any]


@dataclass(frozen=True)
class Operation:
    """A function of expressions: sums, products, and what the shapes of operators need besides."""

    sign: str
    operands: tuple[Expression, ...]

    def __str__(self) -> str:
        if self.sign in "+*":
            return f" {self.sign} ".join(map(str, self.operands))
        return f"{self.sign}({', '.join(map(str, self.operands))})"


Expression: TypeAlias = Attribute | tuple[()] | Operation
"""An attribute, the empty stack `()` of a plain matrix, or an operation on expressions."""


@dataclass(frozen=True)
class Guard:
    """A relation that must hold between two expressions."""

    left: Expression
    relation: str
    right: Expression

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"


class Undefined(Exception):
    """An expression has no value: a symbol is unbound, or a window is larger than its image."""


def value_of(expression: Expression, binding: Binding) -> Any:
    """The value of an expression. Raises Undefined where it has none."""
    if isinstance(expression, Operation):
        return OPERATIONS[expression.sign](*(value_of(operand, binding) for operand in expression.operands))
    if isinstance(expression, Size | Unknown):
        if expression not in binding:
            raise Undefined(f"{expression} is not bound")
        return binding[expression]
    return expression


def symbols(expression: Expression) -> Iterator[Symbol]:
    """The sizes and unknowns that an expression reads, from the left, repeated where used twice."""
    if isinstance(expression, Operation):
        for operand in expression.operands:
            yield from symbols(operand)
    elif isinstance(expression, Size | Unknown):
        yield expression


def conv_size(length: int, size: int, stride: int, padding: int, dilation: int) -> int:
    """How many windows of `size` fit a padded length. Raises Undefined where none does."""
    room = length + 2 * padding - dilation * (size - 1) - 1
    if room < 0:
        raise Undefined(f"a window of {size} does not fit a length of {length}")
    return room // stride + 1


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "+": lambda left, right: left + right,
    "*": lambda left, right: left * right,
    "push": lambda stack, heads: (*stack, heads),
    "conv_size": conv_size,
    "height": lambda pair: pair[0] if isinstance(pair, tuple) else pair,
    "width": lambda pair: pair[1] if isinstance(pair, tuple) else pair,
}

_HELD_BY = {
    "bool": "bool uint8 int8 int16 int32 int64 bfloat16 float16 float32 float64",
    "bfloat16": "bfloat16 float32 float64",
    "float16": "float16 float32 float64",
    "float32": "float32 float64",
    "float64": "float64",
    "int32": "int32 int64 float64",
    "int64": "int64",
}


def dtype_holds(wide: str, narrow: str) -> bool:
    """Whether every value of the dtype `narrow` is a value of the dtype `wide`."""
    return wide in _HELD_BY.get(narrow, narrow).split()


RELATIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": lambda left, right: bool(left == right),
    "!=": lambda left, right: bool(left != right),
    "<=": lambda left, right: bool(left <= right),
    ">=": lambda left, right: bool(left >= right),
    "<": lambda left, right: bool(left < right),
    ">": lambda left, right: bool(left > right),
    "holds": dtype_holds,
}


def guard_holds(guard: Guard, binding: Binding) -> bool:
    """Whether a guard holds where all that it reads is bound. Raises Undefined where something is not."""
    return RELATIONS[guard.relation](value_of(guard.left, binding), value_of(guard.right, binding))


def solve(guards: Sequence[Guard], binding: Binding) -> dict[Symbol, Any] | None:
    """The binding with every unknown that the guards define; None where a guard does not hold.

    Guards are read in their order, so that one may use what an earlier one defines. Raises PlanError where a guard
    reads what neither the binding nor a guard before it binds.
    """
    solved = dict(binding)
    for guard in guards:
        if not _satisfied(guard, solved):
            return None
    return solved


def _satisfied(guard: Guard, solved: dict[Symbol, Any]) -> bool:
    try:
        right = value_of(guard.right, solved)
        if guard.relation == "==" and isinstance(guard.left, Unknown) and guard.left not in solved:
            solved[guard.left] = right
            return True
        return guard_holds(guard, solved)
    except Undefined as reason:
        raise PlanError(f"the guard {guard} cannot be checked: {reason}; bind it first") from None


_TOKEN = re.compile(
    r"\s*(?:\?(?P<unknown>[A-Za-z_]\w*)|(?P<name>[A-Za-z_]\w*)(?:\.(?P<axis>\w+))?|(?P<number>-?\d+(?:\.\d+)?)"
    r"|(?P<sign>[+*]))\s*"
)
_RELATION = re.compile(r"==|!=|<=|>=|<|>|\bholds\b")


def parse_guard(text: str) -> Guard:
    """The guard that a text states. Raises PlanError where it cannot be read."""
    relations = list(_RELATION.finditer(text))
    if len(relations) != 1:
        raise PlanError(f"expected one of {', '.join(RELATIONS)} in the guard {text!r}, found {len(relations)}")
    (found,) = relations
    return Guard(parse_expression(text[: found.start()]), found.group(), parse_expression(text[found.end() :]))


def parse_expression(text: str) -> Expression:
    """Sums of products of attributes, read from a text. Raises PlanError where it cannot be read."""
    tokens, position = [], 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise PlanError(f"expected an attribute, + or * at position {position} of {text!r}")
        tokens.append(found)
        position = found.end()
    return _sum(tokens, text)


def _sum(tokens: list[re.Match[str]], text: str) -> Expression:
    """The expression of tokens: operands and signs in turn, products before sums."""
    if len(tokens) % 2 == 0 or any((token["sign"] is None) == bool(i % 2) for i, token in enumerate(tokens)):
        raise PlanError(f"expected attributes joined by + or *, found {text!r}")
    summands: list[Expression] = [_atom(tokens[0])]
    for sign, operand in zip(tokens[1::2], tokens[2::2], strict=True):
        if sign["sign"] == "*":
            summands[-1] = Operation("*", (summands[-1], _atom(operand)))
        else:
            summands.append(_atom(operand))
    total = summands[0]
    for summand in summands[1:]:
        total = Operation("+", (total, summand))
    return total


def _atom(token: re.Match[str]) -> Attribute:
    if token["number"]:
        return float(token["number"]) if "." in token["number"] else int(token["number"])
    if token["unknown"]:
        return Unknown(token["unknown"])
    return Size(token["name"], token["axis"]) if token["axis"] else str(token["name"])
