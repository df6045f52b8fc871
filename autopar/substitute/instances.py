"""Random instances of rules: sizes and attributes that meet every condition and guard, and tensors of those sizes.

Sizes are small and uneven, zero now and then; attributes of convolutions differ between height and width, groups go
to 3, constants and elements are negative as often as not. Instances of a seed are the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.substitute.algebra import operator_of
from autopar.substitute.expressions import (
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
from autopar.substitute.formed import rule_conditions, rule_guards
from autopar.substitute.shapes import AXES, STACK
from autopar.substitute.terms import Apply, Rule, Size, Sort, Term, Unknown, Variable, subterms
from autopar.substitute.values import Field, Integers, Values, pair

DTYPES = ("float16", "bfloat16", "float32", "float64")
_TRIES = 200
_SIZES = (1, 2, 3, 1, 2, 3, 4, 5, 2, 3, 0)
_STACKS = ((), (2,), (3, 1), (2, 3), (), (1,), (0,))


class Contradiction(Exception):
    """What was drawn so far cannot be completed."""


@dataclass
class Drawing:
    """What it takes to draw instances of one rule: its conditions, and the kind of each symbol to be bound."""

    rule: Rule
    equalities: list[tuple[Expression, Expression]]
    guards: list[Guard]
    kinds: dict[Symbol, str]
    defined: list[Expression]

    @classmethod
    def of(cls, rule: Rule) -> Drawing:
        """Everything that instances of the rule must meet. Raises PlanError where the rule is ill formed."""
        guards = rule_guards(rule)
        conditions = rule_conditions(rule)
        equalities = list(conditions.equalities)
        equalities += [(guard.left, guard.right) for guard in guards if guard.relation == "=="]
        return cls(rule, equalities, guards, _kinds(rule, equalities, guards), conditions.defined)

    def binding(self, random: random.Random) -> dict[Symbol, Any] | None:
        """A random binding of every symbol that meets all conditions and guards; None where a try failed."""
        binding: dict[Symbol, Any] = {}
        try:
            self.propagate(binding)
            for symbol, kind in self.kinds.items():
                if symbol not in binding:
                    binding[symbol] = _random_value(kind, random)
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
    for term in _all_subterms(rule):
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


def _all_subterms(rule: Rule) -> Iterator[Term]:
    for term in (*rule.source, *rule.target):
        yield from subterms(term)


def _random_value(kind: str, random: random.Random) -> Any:
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
        case "height" | "width":
            return random.randint(1, 5)
        case _:
            return random.choice(_SIZES)


@dataclass(frozen=True)
class Instance:
    """One instance of a rule: values of its symbols and tensors for its variables."""

    binding: Binding
    arrays: Mapping[str, Any]

    def __str__(self) -> str:
        bound = {str(symbol): value for symbol, value in self.binding.items() if not str(symbol).startswith("?_")}
        return ", ".join(f"{symbol} = {value}" for symbol, value in bound.items())


def instances(rule: Rule, values: Values, seed: int = 0) -> Iterator[Instance]:
    """Random instances of a rule without end. Stops early where a whole round of tries finds none."""
    drawing = Drawing.of(rule)
    choose, numbers = random.Random(seed), np.random.default_rng(seed)
    casts = any(kind == "dtype" for kind in drawing.kinds.values()) or "cast[" in str(rule)
    while True:
        found = (drawing.binding(choose) for _ in range(_TRIES))
        binding = next((binding for binding in found if binding is not None), None)
        if binding is None:
            return
        arrays = {name: values.array(tensor_lengths(name, sort, binding), numbers) for name, sort in rule.sorts.items()}
        if casts and isinstance(values, Integers):
            arrays = {name: _rounded(name, array * 9973, binding, values) for name, array in arrays.items()}
        yield Instance(binding, arrays)


def _rounded(name: str, array: Any, binding: Binding, values: Values) -> Any:
    dtype = binding.get(Size(name, "dtype"))
    return array if dtype is None else values.cast(dtype, array)


def tensor_lengths(name: str, sort: Sort, binding: Binding) -> tuple[int, ...]:
    """The lengths of all dims of a variable."""
    stack = binding[Size(name, STACK)] if sort == "matrix" else ()
    return (*stack, *(binding[Size(name, axis)] for axis in AXES[sort]))


def evaluate(term: Term, instance: Instance, values: Values, known: dict[Term, Any] | None = None) -> Any:
    """The value of a term on an instance; `known` keeps the values of terms seen before."""
    known = {} if known is None else known
    if isinstance(term, Variable):
        return instance.arrays[term.name]
    if term not in known:
        operands = [evaluate(operand, instance, values, known) for operand in term.operands]
        attributes = tuple(value_of(attribute, instance.binding) for attribute in term.attributes)
        known[term] = operator_of(term).compute(values, attributes, *operands)
    return known[term]


def exact_values(rule: Rule) -> Values:
    """Integers, or a finite field where a rule divides."""
    return Field() if operators(rule) & {"mean", "avg_pool"} else Integers()


def operators(rule: Rule) -> set[str]:
    """Names of the operators on both sides."""
    return {term.op for term in _all_subterms(rule) if isinstance(term, Apply)}


def torch_can(instance: Instance, rule: Rule) -> bool:
    """Whether torch takes the attributes: its poolings pad by at most half a window."""
    pools = [t for t in _all_subterms(rule) if isinstance(t, Apply) and t.op in ("max_pool", "avg_pool")]
    for pool in pools:
        size, _, padding = (pair(value_of(attribute, instance.binding)) for attribute in pool.attributes)
        if any(2 * pad > length for length, pad in zip(size, padding, strict=True)):
            return False
    return True


def counterexample(rule: Rule, num_instances: int, seed: int = 0, values: Values | None = None) -> str | None:
    """A random instance on which the sides of a rule differ, in words; None where all of `num_instances` agree.

    A rule that has no instance at all is not vouched for: that is said too.
    """
    values = exact_values(rule) if values is None else values
    drawn = 0
    for drawn, instance in zip(range(1, num_instances + 1), instances(rule, values, seed), strict=False):  # noqa: B007
        found = difference(rule, instance, values)
        if found is not None:
            return found
    return None if drawn == num_instances else f"only {drawn} of {num_instances} instances were found"


def difference(rule: Rule, instance: Instance, values: Values) -> str | None:
    """Where the sides of a rule differ on an instance, in words; None where they agree."""
    known: dict[Term, Any] = {}
    for source, target in zip(rule.source, rule.target, strict=True):
        left, right = (evaluate(term, instance, values, known) for term in (source, target))
        if left.shape != right.shape:
            return f"{source} has shape {tuple(left.shape)}, {target} has {tuple(right.shape)}, where {instance}"
        if not (left == right).all():
            return f"{source} differs from {target} where {instance}"
    return None
