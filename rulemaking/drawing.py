"""Random sizes and attributes of a rule that meet every condition and guard: drawn, completed, and checked.

Sizes are small and uneven, zero now and then; attributes of convolutions differ between height and width, groups go
to 3, constants are negative as often as not. What a seed draws is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.substitute.rules.expressions import (
    Binding,
    Expression,
    Guard,
    Operation,
    Symbol,
    Undefined,
    guard_holds,
    symbols,
    value_of,
)
from autopar.substitute.rules.terms import Apply, Rule, Size, Term, Unknown, subterms
from rulemaking.algebra import operator_of
from rulemaking.elimination import eliminated
from rulemaking.formed import rule_conditions, rule_guards
from rulemaking.shapes import AXES, STACK

DTYPES = ("float16", "bfloat16", "float32", "float64")
TRIES = 200
"""Draws until one meets all conditions, before a rule is held to have no instance."""

_SIZES = (1, 2, 3, 1, 2, 3, 4, 5, 2, 3, 0)
_STACKS = ((), (2,), (3, 1), (2, 3), (), (1,), (0,))


def random_value(kind: str, random: random.Random) -> Any:
    """A small value of a symbol of some kind."""
    match kind:
        case "stack":
            return random.choice(_STACKS)
        case "number":
            return random.randint(-3, 3)
        case "count":
            return random.randint(1, 3)
        case "function":
            return f"f{random.randrange(1000)}"
        case "dtype":
            return random.choice(DTYPES)
        case "pair":
            return random.choice([1, 2, (1, 2), (2, 1)])
        case "padding":
            return random.choice([0, 1, 2, (1, 0), (0, 2)])
        case "height" | "width":
            return random.randint(1, 5)
        case _:
            return random.choice(_SIZES)


class Contradiction(Exception):
    """What was drawn so far cannot be completed."""


@dataclass
class Drawing:
    """What it takes to draw instances of one rule: its conditions, and the kind of each symbol to be bound.

    entangled: symbols that others are solved for once they are drawn; of sums, the last one drawn says all.
    """

    rule: Rule
    equalities: list[tuple[Expression, Expression]]
    guards: list[Guard]
    kinds: dict[Symbol, str]
    defined: list[Expression]
    entangled: set[Symbol]

    @classmethod
    def of(cls, rule: Rule) -> Drawing:
        """Everything that instances of the rule must meet. Raises PlanError where the rule is ill formed."""
        guards = rule_guards(rule)
        conditions = rule_conditions(rule)
        equalities = list(conditions.equalities)
        equalities += [(guard.left, guard.right) for guard in guards if guard.relation == "=="]
        solved, last = eliminated(equalities)
        kinds = _kinds(rule, solved, guards)
        free = [symbol for symbol in kinds if symbol not in last]
        ordered = {symbol: kinds[symbol] for symbol in (*free, *(symbol for symbol in kinds if symbol in last))}
        entangled = set(free[-1:]) if len(solved) == len(last) else set(kinds)
        return cls(rule, solved, guards, ordered, conditions.defined, entangled)

    def binding(
        self, random: random.Random, draw: Callable[[str, random.Random], Any] = random_value
    ) -> dict[Symbol, Any] | None:
        """A random binding of every symbol that meets all conditions and guards; None where a try failed."""
        binding: dict[Symbol, Any] = {}
        try:
            self.propagate(binding)
            for symbol, kind in self.kinds.items():
                if symbol not in binding:
                    binding[symbol] = draw(kind, random)
                    if symbol in self.entangled:
                        self.propagate(binding)
            return binding if self.holds(binding) else None
        except (Contradiction, Undefined):
            return None

    def propagate(self, binding: dict[Symbol, Any]) -> None:
        """Binds what the equalities leave no choice of."""
        before = -1
        while before != len(binding):
            before = len(binding)
            for left, right in self.equalities:
                _equate(left, right, binding)

    def holds(self, binding: Binding) -> bool:
        """Whether a binding of every symbol meets all conditions and guards."""
        if not all(guard_holds(guard, binding) for guard in self.guards):
            return False
        for expression in self.defined:
            value_of(expression, binding)
        return all(value_of(left, binding) == value_of(right, binding) for left, right in self.equalities)


def _equate(left: Expression, right: Expression, binding: dict[Symbol, Any]) -> None:
    known = [all(symbol in binding for symbol in symbols(side)) for side in (left, right)]
    if all(known):
        if value_of(left, binding) != value_of(right, binding):
            raise Contradiction
    elif known[1]:
        _assign(left, value_of(right, binding), binding)
    elif known[0]:
        _assign(right, value_of(left, binding), binding)


def _assign(expression: Expression, value: Any, binding: dict[Symbol, Any]) -> None:
    """Solves expression == value where one symbol of it is unbound and the operations can be undone."""
    if isinstance(expression, Size | Unknown):
        if isinstance(value, int) and value < 0 and isinstance(expression, Size):
            raise Contradiction
        binding[expression] = value
    elif isinstance(expression, Operation) and expression.sign == "push":
        if value == ():
            raise Contradiction
        for part, piece in zip(expression.operands, (value[:-1], value[-1]), strict=True):
            _equate(part, piece, binding)
    elif isinstance(expression, Operation) and expression.sign in "+*":
        unknown = [part for part in expression.operands if any(s not in binding for s in symbols(part))]
        if len(unknown) == 1:
            (known,) = (value_of(part, binding) for part in expression.operands if part is not unknown[0])
            _assign(unknown[0], _undone(expression.sign, value, known), binding)


def _undone(sign: str, value: Any, known: Any) -> Any:
    if sign == "+":
        if value < known:
            raise Contradiction
        return value - known
    if not known or value % known:
        raise Contradiction
    return value // known


def _kinds(rule: Rule, equalities: list[tuple[Expression, Expression]], guards: list[Guard]) -> dict[Symbol, str]:
    """Every symbol with its kind, in the order in which to draw: attributes, what operations read, other sizes."""
    kinds: dict[Symbol, str] = {}
    for term in all_subterms(rule):
        if isinstance(term, Apply):
            for attribute, kind in zip(term.attributes, operator_of(term).attributes, strict=True):
                if isinstance(attribute, Unknown):
                    kinds[attribute] = kind
    sides = [side for equality in equalities for side in equality]
    for side in sorted(sides, key=lambda side: not isinstance(side, Operation)):
        kinds.update({symbol: _kind_of(symbol) for symbol in symbols(side) if symbol not in kinds})
    for guard in guards:
        found = (*symbols(guard.left), *symbols(guard.right))
        kinds.update({symbol: _kind_of(symbol) for symbol in found if symbol not in kinds})
    for name, sort in rule.sorts.items():
        axes = (*AXES[sort], STACK) if sort == "matrix" else AXES[sort]
        kinds.update({Size(name, axis): axis for axis in axes if Size(name, axis) not in kinds})
    return kinds


def _kind_of(symbol: Symbol) -> str:
    if isinstance(symbol, Size):
        return symbol.axis
    return STACK if symbol.name.startswith(f"_{STACK}") else "size"


def all_subterms(rule: Rule) -> Iterator[Term]:
    """Every term inside either side of a rule."""
    for term in (*rule.source, *rule.target):
        yield from subterms(term)
