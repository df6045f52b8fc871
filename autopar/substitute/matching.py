"""Where a rule applies: values whose definitions have the form of the rule's source.

A match says which values the source's outputs are, and what its variables and unknown attributes stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.errors import PlanError
from autopar.ir.graph import Tensor
from autopar.ir.placement import Shape
from autopar.substitute.defined import Values
from autopar.substitute.fitting import Misfit, dim_of
from autopar.substitute.rules.expressions import Guard, Symbol, parse_guard, solve, symbols
from autopar.substitute.rules.terms import Apply, Attribute, Rule, Size, Sort, Term, Unknown, Variable, subterms

COMMUTATIVE = frozenset({"add", "mul"})
Binding = Mapping[str, Any]
"""Variables by name to values, unknowns by "?name" to attributes."""


class HasTensors(Protocol):
    """Values, or classes of them, whose shapes and dtypes are known."""

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Match:
    """A rule, and where: the values that its source's outputs are, and what it binds."""

    rule: Rule
    roots: tuple[str, ...]
    binding: Binding


class Matcher:
    """Finds the matches of one rule. pinned: values that no match may hold, as an output or as a variable."""

    def __init__(self, rule: Rule, pinned: frozenset[str] = frozenset()) -> None:
        self.rule, self.pinned = rule, pinned
        self.guards = [parse_guard(text) for text in rule.guards]
        self.is_symmetric = _is_symmetric(rule)
        terms = (term for source in rule.source for term in subterms(source))
        self.operators = frozenset(term.op for term in terms if isinstance(term, Apply))

    def matches(self, values: Values) -> Iterator[Match]:
        """Every match, in an order that follows from the values' order alone."""
        if not self.operators <= values.by_op.keys():
            return
        for roots, binding in self._roots(values, 0, (), {}):
            solved = solved_binding(self.guards, values, binding) if self._is_free(values, roots, binding) else None
            if solved is not None:
                yield Match(self.rule, roots, solved)

    def _is_free(self, values: Values, roots: tuple[str, ...], binding: Binding) -> bool:
        """Whether it touches nothing that is pinned: activations may be read."""
        if not self.pinned:
            return True
        stored = [name for name in binding.values() if name in values.graph.stored_by_tensor]
        return self.pinned.isdisjoint(roots) and self.pinned.isdisjoint(stored)

    def at(self, values: Values, roots: tuple[str, ...], binding: Binding) -> Match:
        """The match at a place that is given. Raises PlanError when the rule does not apply there."""
        for number, root in enumerate(roots):
            if not any(True for _ in self._term(self.rule.source[number], root, values, binding)):
                raise PlanError(f"expected {self.rule.source[number]} at {root}, found another computation")
        if len(roots) != len(self.rule.source) or solved_binding(self.guards, values, binding) is None:
            raise PlanError(f"expected a place where the guards of {self.rule.name} hold, found {', '.join(roots)}")
        return Match(self.rule, roots, binding)

    def _roots(
        self, values: Values, number: int, roots: tuple[str, ...], binding: Binding
    ) -> Iterator[tuple[tuple[str, ...], Binding]]:
        if number == len(self.rule.source):
            yield roots, binding
            return
        for name in self._candidates(values, number, roots, binding):
            if name not in roots:
                for found in self._term(self.rule.source[number], name, values, binding):
                    yield from self._roots(values, number + 1, (*roots, name), found)

    def _candidates(self, values: Values, number: int, roots: tuple[str, ...], binding: Binding) -> tuple[str, ...]:
        """Values that the next output may be. Of outputs that may change places, the earlier value comes first."""
        term = self.rule.source[number]
        if isinstance(term, Variable):
            return (binding[term.name],) if term.name in binding else ()
        known = values.by_op.get(term.op, ())
        bound = [item.name for item in term.operands if isinstance(item, Variable) and item.name in binding]
        if bound and number:
            readers = values.readers.get(binding[bound[0]], ())
            known = tuple(name for name in readers if values.definitions[name].op == term.op)
        if number and self.is_symmetric and roots[-1] in known:
            known = known[known.index(roots[-1]) + 1 :]
        return known

    def _term(self, term: Term, name: str, values: Values, binding: Binding) -> Iterator[Binding]:
        """Bindings under which a term is the value."""
        if isinstance(term, Variable):
            if term.name in binding:
                if binding[term.name] == name:
                    yield binding
            elif is_of_sort(values.tensor(name).shape, self.rule.sorts.get(term.name, "matrix")):
                yield {**binding, term.name: name}
            return
        made = values.definitions.get(name)
        if made is None or made.op != term.op or len(made.operands) != len(term.operands):
            return
        orders = [made.operands]
        if made.op in COMMUTATIVE and _may_turn(made.operands, values):
            orders.append(made.operands[::-1])
        for operands in orders:
            yield from self._operands(term, made.attributes, operands, values, binding)

    def _operands(
        self,
        term: Apply,
        attributes: tuple[Attribute, ...],
        operands: tuple[str, ...],
        values: Values,
        binding: Binding,
    ) -> Iterator[Binding]:
        found: list[Binding] = [binding]
        for inner, operand in zip(term.operands, operands, strict=True):
            found = [new for old in found for new in self._term(inner, operand, values, old)]
        for one in found:
            bound = bound_attributes(term.attributes, attributes, values, one)
            if bound is not None:
                yield bound


def _may_turn(operands: tuple[str, ...], values: Values) -> bool:
    """Whether operands may change places: a row that is broadcast is second."""
    first, second = (values.tensor(name).shape for name in operands)
    return first == second and operands[0] != operands[1]


def bound_attributes(
    wanted: tuple[Attribute, ...], found: tuple[Attribute, ...], values: HasTensors, binding: Binding
) -> Binding | None:
    """The binding with what unknown attributes are; None where an attribute is another one."""
    if len(wanted) != len(found):
        return None
    bound = dict(binding)
    for want, have in zip(wanted, found, strict=True):
        if isinstance(want, Unknown):
            if bound.setdefault(str(want), have) != have:
                return None
        elif attribute(want, values, bound) != have:
            return None
    return bound


def attribute(wanted: Attribute, values: HasTensors, binding: Binding) -> Attribute | None:
    """What an attribute of a rule stands for under a binding; None for an unknown that is not bound."""
    if isinstance(wanted, Unknown):
        found: Attribute | None = binding.get(str(wanted))
        return found
    if isinstance(wanted, Size):
        return size_of(wanted, values, binding)
    return wanted


def size_of(size: Size, values: HasTensors, binding: Binding) -> int | None:
    """The length of a bound variable along an axis."""
    if size.variable not in binding:
        return None
    shape = values.tensor(binding[size.variable]).shape
    try:
        return shape[dim_of(size.axis, shape)]
    except Misfit:
        return None


_RANKS: dict[Sort, Callable[[Shape], bool]] = {
    "matrix": lambda shape: len(shape) >= 2,
    "weight": lambda shape: len(shape) == 2,
    "vector": lambda shape: len(shape) == 1,
    "image": lambda shape: len(shape) == 4,
    "kernel": lambda shape: len(shape) == 4,
}


def is_of_sort(shape: Shape, sort: Sort) -> bool:
    """Whether a variable of the sort may stand for a tensor of the shape."""
    return _RANKS[sort](shape)


def solved_binding(guards: Sequence[Guard], values: HasTensors, binding: Binding) -> Binding | None:
    """The binding with what guards define; None where one does not hold."""
    if not guards:
        return binding
    known: dict[Symbol, Any] = {Unknown(key[1:]): value for key, value in binding.items() if key[0] == "?"}
    for symbol in (symbol for guard in guards for side in (guard.left, guard.right) for symbol in symbols(side)):
        if isinstance(symbol, Size):
            known[symbol] = _fact(symbol, values, binding)
    found = solve(guards, known)
    if found is None:
        return None
    return {**binding, **{str(symbol): value for symbol, value in found.items() if isinstance(symbol, Unknown)}}


def _fact(symbol: Size, values: HasTensors, binding: Binding) -> Any:
    """What a guard reads of a variable: a length, or its dtype."""
    if symbol.axis == "dtype":
        return values.tensor(binding[symbol.variable]).dtype
    return size_of(symbol, values, binding)


def _is_symmetric(rule: Rule) -> bool:
    """Whether two outputs may change places with the rule the same but for names: linear(x, w1), linear(x, w2)."""
    if len(rule.source) != 2 or len(rule.target) != 2:
        return False
    first, second = rule.source
    names: dict[str, str] = {}
    return _same_form(first, second, names) and names == {new: old for old, new in names.items()}


def _same_form(one: Term, other: Term, names: dict[str, str]) -> bool:
    if isinstance(one, Variable) and isinstance(other, Variable):
        known = names.setdefault(one.name, other.name)
        return known == other.name and names.setdefault(other.name, one.name) == one.name
    if isinstance(one, Apply) and isinstance(other, Apply):
        alike = one.op == other.op and one.attributes == other.attributes and len(one.operands) == len(other.operands)
        return alike and all(_same_form(a, b, names) for a, b in zip(one.operands, other.operands, strict=True))
    return False
