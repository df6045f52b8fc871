"""Terms, sizes and axioms as formulas of z3: operators are functions of which nothing is known but the axioms.

One z3 sort each for matrices (weights are matrices with an empty stack), vectors, images and kernels; sizes are
integers, products of sizes an unknown function. An axiom becomes a quantified implication from all conditions on sizes
that its two sides need; z3 applies it where one of its sides occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import z3

from autopar.errors import PlanError
from autopar.substitute.rules.expressions import Expression, Guard, Operation, symbols
from autopar.substitute.rules.terms import Apply, Attribute, Rule, Size, Sort, Term, Unknown, Variable, subterms
from rulemaking.algebra import OPERATORS, operator_of
from rulemaking.formed import rule_conditions, rule_guards
from rulemaking.shapes import AXES, STACK, Conditions, Shape, variable_shape

Environment = dict[Any, Any]
"""What stands for each variable name and each unknown."""


class Encoder:
    """Formulas of one z3 context; keeps each function it makes, so that its shape can be axiomatised."""

    def __init__(self) -> None:
        self.sorts = {name: z3.DeclareSort(name) for name in ("M", "vector", "image", "kernel")}
        self.made: dict[str, tuple[Any, str, tuple[Attribute, ...], tuple[str, ...]]] = {}
        self.words: dict[str, int] = {}

    def sort(self, sort: str) -> Any:
        """The z3 sort of a sort of the algebra."""
        return self.sorts[_joined(sort)]

    def size(self, tensor: Any, axis: str) -> Any:
        """The length of a tensor along an axis."""
        return z3.Function(f"{axis}.{tensor.sort()}", tensor.sort(), z3.IntSort())(tensor)

    def term(self, term: Term, sorts: Mapping[str, Sort], environment: Environment) -> tuple[Any, Shape]:
        """The expression of a term, and its shape."""
        if isinstance(term, Variable):
            return environment[term.name], variable_shape(term.name, sorts[term.name])
        encoded = [self.term(operand, sorts, environment) for operand in term.operands]
        operator = operator_of(term)
        shape = operator.shape(Conditions(), term.attributes, *(found for _, found in encoded))
        words = tuple(a if kind == "axis" else "" for a, kind in zip(term.attributes, operator.attributes, strict=True))
        function = self.function(term.op, words, tuple(_joined(found.sort) for _, found in encoded), shape.sort)
        kinds = zip(term.attributes, operator.attributes, strict=True)
        attributes = [self.expression(a, environment, kind) for a, kind in kinds if kind != "axis"]
        operands = [found for found, _ in encoded]
        return function(*attributes, *operands), shape

    def function(self, op: str, axes: tuple[Any, ...], operands: tuple[str, ...], result: str) -> Any:
        """The function of an operator with given axes, on operands of given sorts."""
        name = f"{op}[{','.join(axes)}]({','.join(operands)})"
        if name not in self.made:
            kinds = [_number_sort(kind) for kind in OPERATORS[op].attributes if kind != "axis"]
            domain = [*kinds, *(self.sort(sort) for sort in operands)]
            self.made[name] = (z3.Function(name, *domain, self.sort(result)), op, axes, operands)
        return self.made[name][0]

    def expression(self, expression: Expression, environment: Environment, kind: str = "size") -> Any:
        """The expression of a size, a number or another attribute."""
        match expression:
            case Size(variable, axis):
                return self.size(environment[variable], axis)
            case Unknown():
                return environment[expression]
            case Operation(sign, operands):
                return self._operation(sign, [self.expression(operand, environment, kind) for operand in operands])
            case str():
                return z3.IntVal(1000 + self.words.setdefault(expression, len(self.words)))
            case ():
                return z3.IntVal(0)
            case _:
                return z3.RealVal(expression) if kind == "number" else z3.IntVal(expression)

    def _operation(self, sign: str, operands: list[Any]) -> Any:
        if sign == "+":
            return operands[0] + operands[1]
        if sign == "*" and any(z3.is_real(operand) for operand in operands):
            return operands[0] * operands[1]
        integers = [z3.IntSort()] * (len(operands) + 1)
        return z3.Function(f"{sign}/{len(operands)}", *integers)(*operands)

    def conditions(self, conditions: Conditions, environment: Environment) -> list[Any]:
        """Formulas of all conditions; binds their fresh unknowns in the environment, as functions of what is known."""
        found = []
        for left, right in conditions.equalities:
            length = self.expression(left, environment)
            fresh = [p for p in right.operands if _is_fresh(p, environment)] if isinstance(right, Operation) else []
            if isinstance(right, Operation) and fresh:
                self._bind(right, length, environment)
                found += [environment[unknown] >= 0 for unknown in fresh if right.sign == "+"]
            found.append(length == self.expression(right, environment))
        return found

    def _bind(self, part: Operation, length: Any, environment: Environment) -> None:
        """Binds what is fresh in length == part: the difference, the quotient, or the two halves of a stack."""
        first, second = part.operands
        if part.sign == "+":
            environment[second] = length - self.expression(first, environment)
        elif part.sign == "*":
            environment[second] = self._operation("quotient", [length, self.expression(first, environment)])
        else:
            environment[first] = self._operation("lower", [length])
            environment[second] = self._operation("heads", [length])

    def guard(self, guard: Guard, environment: Environment, numbers: bool) -> Any:
        """The formula of a guard."""
        kind = "number" if numbers else "size"
        left, right = (self.expression(side, environment, kind) for side in (guard.left, guard.right))
        match guard.relation:
            case "==":
                return left == right
            case "!=":
                return left != right
            case "holds":
                return z3.Function("holds", z3.IntSort(), z3.IntSort(), z3.BoolSort())(left, right)
            case relation:
                return {"<=": left <= right, ">=": left >= right, "<": left < right, ">": left > right}[relation]

    def environment(self, rule: Rule, make: Any) -> Environment:
        """A constant for each variable and each unknown of a rule, made by `make(name, sort)`."""
        environment: Environment = {name: make(name, self.sort(sort)) for name, sort in rule.sorts.items()}
        environment.update({u: make(str(u), _number_sort(kind)) for u, kind in unknowns(rule).items()})
        return environment

    def assumptions(self, rule: Rule, environment: Environment, given: Sequence[Unknown] = ()) -> list[Any]:
        """All that a rule may rely on: sizes of both sides, guards, and weights having no stack.

        Guards that define one of the unknowns `given` bind it instead.
        """
        kinds: Mapping[Any, str] = unknowns(rule)
        found = [self.size(environment[n], STACK) == 0 for n, sort in rule.sorts.items() if sort == "weight"]
        for guard in rule_guards(rule):
            numbers = any(kinds.get(symbol) == "number" for symbol in symbols(guard.left))
            if guard.left in given:
                environment[guard.left] = self.expression(guard.right, environment, "number" if numbers else "size")
            else:
                found.append(self.guard(guard, environment, numbers))
        return found + self.conditions(rule_conditions(rule), environment)

    def axiom(self, rule: Rule) -> Iterator[Any]:
        """Quantified formulas of an axiom: one for each of its sides whose occurrence decides all of its variables."""
        sides = [rule.source[0], rule.target[0]]
        triggers = [side for side in sides if isinstance(side, Apply)]
        if len(triggers) == 1:
            triggers += [t for t in subterms(triggers[0]) if isinstance(t, Apply) and t != triggers[0] and t.operands]
        for trigger in triggers:
            parts = [t for side in sides if side != trigger and isinstance(side, Apply) for t in side.operands]
            for together in ([trigger], [trigger, *(t for t in parts if isinstance(t, Apply))]):
                formula = self._triggered(*_without_sizes(rule, together))
                if formula is not None:
                    yield formula
                    break

    def _triggered(self, rule: Rule, triggers: Sequence[Term]) -> Any | None:
        environment = self.environment(rule, lambda name, sort: z3.Const(name, sort))
        seen = set().union(*map(_symbols_of, triggers))
        defined = [g.left for g in rule_guards(rule) if g.relation == "==" and isinstance(g.left, Unknown)]
        given = [unknown for unknown in defined if unknown not in seen]
        free = [symbol for symbol in environment if symbol not in given]
        if not all(symbol in seen for symbol in free):
            return None
        bound = [environment[symbol] for symbol in free]
        assumed = self.assumptions(rule, environment, given)
        terms = (*rule.source, *rule.target, *triggers)
        source, target, *found = (self.term(t, rule.sorts, environment)[0] for t in terms)
        pattern = z3.MultiPattern(*found) if len(found) > 1 else found[0]
        return z3.ForAll(bound, z3.Implies(z3.And(assumed), source == target), patterns=[pattern], qid=rule.name)

    def shapes(self) -> Iterator[Any]:
        """Quantified formulas of the sizes of every function made so far, and that no size is negative."""
        for function, op, axes, operands in list(self.made.values()):
            for sorts in product(*(("matrix", "weight") if sort == "M" else (sort,) for sort in operands)):
                yield from self._shape(function, op, axes, sorts)
        for name, sort in self.sorts.items():
            tensor = z3.Const("t", sort)
            for axis in AXES["matrix" if name == "M" else name]:  # type: ignore[index]
                size = self.size(tensor, axis)
                yield z3.ForAll([tensor], size >= 0, patterns=[size])
        length = z3.Int("n")
        for sign, operands in (("*", (z3.IntVal(1), length)), ("quotient", (length, z3.IntVal(1)))):
            single = self._operation(sign, list(operands))
            yield z3.ForAll([length], single == length, patterns=[single])

    def _shape(self, function: Any, op: str, axes: tuple[Any, ...], sorts: tuple[Any, ...]) -> Iterator[Any]:
        kinds = OPERATORS[op].attributes
        attributes = tuple(axis or Unknown(f"u{i}") for i, axis in enumerate(axes))
        names = {f"t{i}": sort for i, sort in enumerate(sorts)}
        environment: Environment = {name: z3.Const(name, self.sort(sort)) for name, sort in names.items()}
        unknown = [(a, kind) for a, kind in zip(attributes, kinds, strict=True) if isinstance(a, Unknown)]
        environment.update({a: z3.Const(f"{a}", _number_sort(kind)) for a, kind in unknown})
        conditions, bound = Conditions(), list(environment.values())
        try:
            shape = OPERATORS[op].shape(conditions, attributes, *(variable_shape(n, s) for n, s in names.items()))
        except PlanError:  # this mixture of matrices and weights is ill sorted, and stands in no term
            return
        assumed = [self.size(environment[n], STACK) == 0 for n, sort in names.items() if sort == "weight"]
        assumed += self.conditions(conditions, environment)
        applied = function(*(environment[a] for a, _ in unknown), *(environment[name] for name in names))
        sizes = [
            self.size(applied, axis) == self.expression(length, environment) for axis, length in shape.sizes.items()
        ]
        if not bound:
            yield z3.And(sizes)
        else:
            yield z3.ForAll(bound, z3.Implies(z3.And(assumed), z3.And(sizes)), patterns=[applied])


def _joined(sort: str) -> str:
    return "M" if sort in ("matrix", "weight") else sort


def _number_sort(kind: str) -> Any:
    return z3.RealSort() if kind == "number" else z3.IntSort()


def _is_fresh(part: Expression, environment: Environment) -> bool:
    return isinstance(part, Unknown) and part.name.startswith("_") and part not in environment


def unknowns(rule: Rule) -> dict[Unknown, str]:
    """The unknown attributes of a rule with their kinds."""
    found: dict[Unknown, str] = {}
    for side in (*rule.source, *rule.target):
        for term in subterms(side):
            if isinstance(term, Apply):
                kinds = zip(term.attributes, operator_of(term).attributes, strict=True)
                found.update({attribute: kind for attribute, kind in kinds if isinstance(attribute, Unknown)})
    return found


def _symbols_of(trigger: Term) -> set[Any]:
    """Names of the variables of a term, and its unknowns."""
    found: set[Any] = set()
    for term in subterms(trigger):
        found |= {term.name} if isinstance(term, Variable) else {a for a in term.attributes if isinstance(a, Unknown)}
    return found


def _without_sizes(rule: Rule, triggers: Sequence[Term]) -> tuple[Rule, list[Term]]:
    """A rule and triggers with an unknown for each size that a trigger reads, and guards that say what it is."""
    inside = [t for trigger in triggers for t in subterms(trigger) if isinstance(t, Apply)]
    sizes = {a for t in inside for a in t.attributes if isinstance(a, Size)}
    names = {size: Unknown(f"size_{size.variable}_{size.axis}") for size in sorted(sizes)}
    guards = tuple(f"{size} == {name}" for size, name in names.items())
    source, target = (tuple(_renamed(t, names) for t in side) for side in (rule.source, rule.target))
    changed = replace(rule, source=source, target=target, guards=(*rule.guards, *guards))
    return changed, [_renamed(trigger, names) for trigger in triggers]


def _renamed(term: Term, names: Mapping[Size, Unknown]) -> Term:
    if isinstance(term, Variable):
        return term
    attributes = tuple(names.get(a, a) if isinstance(a, Size) else a for a in term.attributes)
    return Apply(term.op, attributes, tuple(_renamed(operand, names) for operand in term.operands))
