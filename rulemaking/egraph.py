"""A small e-graph: many equal terms at once, closed under rules, to see whether one rule follows from others.

Classes of equal terms hold nodes (operator, attributes, classes of operands); a node in two classes joins them
(congruence). Sizes and attributes are plain numbers here: a rule is looked at for one choice of large sizes drawn at
random, among which equalities hold that follow from the rule's conditions and, but for a chance of about 1 in a
million, no others. What is not well formed for them is not added. Willsey et al., egg (POPL'21); rules of several
outputs as in Yang et al., Tensat (MLSys'21).
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.errors import PlanError
from autopar.substitute.rules.expressions import Expression, Guard, Symbol, Undefined, solve, value_of
from autopar.substitute.rules.terms import Apply, Rule, Size, Sort, Term, Unknown, Variable
from rulemaking.algebra import OPERATORS
from rulemaking.drawing import Drawing
from rulemaking.formed import rule_guards
from rulemaking.shapes import Conditions, Shape, variable_shape

Substitution = dict[Any, Any]
"""Classes by variable name, and values by unknown."""


class Node(NamedTuple):
    """An operator with its attributes, applied to classes; a variable is an operator of no operands."""

    op: str
    attributes: tuple[Any, ...]
    operands: tuple[int, ...]


class Known(Conditions):
    """Conditions on plain numbers: what does not hold raises PlanError at once."""

    def equal(self, left: Expression, right: Expression) -> None:
        if value_of(left, {}) != value_of(right, {}):
            raise PlanError(f"{left} is not {right}")

    def rest(self, length: Expression, part: Expression) -> Expression:
        rest: int = value_of(length, {}) - value_of(part, {})
        if rest < 0:
            raise PlanError(f"{part} does not fit {length}")
        return rest

    def quotient(self, length: Expression, count: Expression) -> Expression:
        whole, divisor = value_of(length, {}), value_of(count, {})
        if divisor == 0 or whole % divisor:
            raise PlanError(f"{count} does not divide {length}")
        return int(whole // divisor)

    def popped(self, stack: Expression) -> tuple[Expression, Expression]:
        found = value_of(stack, {})
        if not found:
            raise PlanError("a plain matrix has no heads")
        return found[:-1], found[-1]


class EGraph:
    """Classes of equal terms, with the shape of each class."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.shapes: list[Shape] = []
        self.classes: dict[Node, int] = {}
        self.stale = False

    def find(self, index: int) -> int:
        """The class that an index stands for now."""
        while self.parents[index] != index:
            self.parents[index] = self.parents[self.parents[index]]
            index = self.parents[index]
        return index

    def add(self, node: Node, shape: Shape | None = None) -> int:
        """The class of a node, made where there is none. Raises PlanError where the node is ill formed."""
        node = Node(node.op, node.attributes, tuple(self.find(operand) for operand in node.operands))
        if node not in self.classes:
            shape = self._shape(node) if shape is None else shape
            self.classes[node] = len(self.parents)
            self.parents.append(len(self.parents))
            self.shapes.append(shape)
        return self.find(self.classes[node])

    def _shape(self, node: Node) -> Shape:
        operands = [self.shapes[self.find(operand)] for operand in node.operands]
        conditions = Known()
        found = OPERATORS[node.op].shape(conditions, node.attributes, *operands)
        try:
            for expression in conditions.defined:
                value_of(expression, {})
            return found.resized({axis: value_of(length, {}) for axis, length in found.sizes.items()})
        except Undefined as reason:
            raise PlanError(str(reason)) from None

    def add_term(self, term: Term, substitution: Mapping[Any, Any]) -> int:
        """The class of a term, its variables and unknowns replaced. Raises PlanError where it is ill formed."""
        if isinstance(term, Variable):
            return self.find(substitution[term.name])
        operands = tuple(self.add_term(operand, substitution) for operand in term.operands)
        return self.add(Node(term.op, self._attributes(term, substitution), operands))

    def _attributes(self, term: Apply, substitution: Mapping[Any, Any]) -> tuple[Any, ...]:
        return tuple(self.attribute(attribute, substitution) for attribute in term.attributes)

    def attribute(self, attribute: Any, substitution: Mapping[Any, Any]) -> Any:
        """The value of an attribute where variables stand for classes."""
        if isinstance(attribute, Size):
            return self.shapes[self.find(substitution[attribute.variable])][attribute.axis]
        return substitution[attribute] if isinstance(attribute, Unknown) else attribute

    def union(self, left: int, right: int) -> None:
        """Says that two classes are equal. Classes of different shapes are not: PlanError."""
        left, right = self.find(left), self.find(right)
        if left != right:
            if self.shapes[left] != self.shapes[right]:
                raise PlanError("terms of different shapes cannot be equal")
            self.parents[max(left, right)] = min(left, right)
            self.stale = True

    def rebuild(self) -> None:
        """Joins the classes of nodes that have become the same node, until none is left."""
        while self.stale:
            self.stale = False
            before, self.classes = self.classes, {}
            for node, index in before.items():
                same = Node(node.op, node.attributes, tuple(self.find(operand) for operand in node.operands))
                if self.classes.setdefault(same, self.find(index)) != self.find(index):
                    self.union(self.classes[same], index)
            self.classes = {node: self.find(index) for node, index in self.classes.items()}

    def by_operator(self) -> dict[str, list[tuple[Node, int]]]:
        """All nodes and their classes by operator."""
        found = defaultdict(list)
        for node, index in self.classes.items():
            found[node.op].append((node, index))
        return found


_LATER = "sizes of variables that are bound later"


@dataclass
class Matcher:
    """Finds where patterns occur in an e-graph as it is now."""

    graph: EGraph
    nodes: dict[str, list[tuple[Node, int]]] = field(init=False)
    within: dict[int, dict[str, list[Node]]] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = self.graph.by_operator()
        self.within = defaultdict(lambda: defaultdict(list))
        for op, found in self.nodes.items():
            for node, index in found:
                self.within[index][op].append(node)

    def matches(self, patterns: Sequence[Term], sorts: Mapping[str, Sort]) -> Iterator[tuple[list[int], Substitution]]:
        """The classes of patterns that match together, each another class, with what their variables stand for."""
        yield from self._together(patterns, sorts, [], {})

    def _together(
        self, patterns: Sequence[Term], sorts: Mapping[str, Sort], roots: list[int], bound: Substitution
    ) -> Iterator[tuple[list[int], Substitution]]:
        if len(roots) == len(patterns):
            if all(self.graph.attribute(size, bound) == value for size, value in bound.get(_LATER, ())):
                yield roots, bound
            return
        pattern = patterns[len(roots)]
        assert isinstance(pattern, Apply), "the source of a rule applies an operator"
        for node, index in self.nodes.get(pattern.op, ()):
            if index not in roots:
                for extended in self._node(pattern, node, sorts, bound):
                    yield from self._together(patterns, sorts, [*roots, index], extended)

    def _node(
        self, pattern: Apply, node: Node, sorts: Mapping[str, Sort], bound: Substitution
    ) -> Iterator[Substitution]:
        for attribute, value in zip(pattern.attributes, node.attributes, strict=True):
            if not isinstance(attribute, Unknown | Size) and attribute != value:
                return
        found = [bound]
        for operand, index in zip(pattern.operands, node.operands, strict=True):
            found = [more for known in found for more in self._class(operand, index, sorts, known)]
        for known in found:
            extended = self._attributes(pattern, node, known)
            if extended is not None:
                yield extended

    def _class(
        self, pattern: Term, index: int, sorts: Mapping[str, Sort], bound: Substitution
    ) -> Iterator[Substitution]:
        if isinstance(pattern, Variable):
            if pattern.name in bound:
                if bound[pattern.name] == index:
                    yield bound
            elif _fits(self.graph.shapes[index].sort, sorts[pattern.name]):
                yield {**bound, pattern.name: index}
            return
        for node in self.within[index].get(pattern.op, ()):
            yield from self._node(pattern, node, sorts, bound)

    def _attributes(self, pattern: Apply, node: Node, bound: Substitution) -> Substitution | None:
        extended = dict(bound)
        for attribute, value in zip(pattern.attributes, node.attributes, strict=True):
            if isinstance(attribute, Unknown):
                if extended.setdefault(attribute, value) != value:
                    return None
            elif isinstance(attribute, Size):
                if attribute.variable not in extended:
                    extended[_LATER] = (*extended.get(_LATER, ()), (attribute, value))
                elif self.graph.attribute(attribute, extended) != value:
                    return None
        return extended


def _fits(found: Sort, expected: Sort) -> bool:
    return found == expected or (found, expected) == ("weight", "matrix")


@dataclass(frozen=True)
class Compiled:
    """A rule with its guards parsed."""

    rule: Rule
    guards: Sequence[Guard]

    @classmethod
    def of(cls, rule: Rule) -> Compiled:
        """A rule ready to be applied."""
        return cls(rule, rule_guards(rule))


@dataclass(frozen=True)
class Limits:
    """Where to stop: rounds of all rules, nodes, and seconds."""

    rounds: int = 4
    nodes: int = 1500
    seconds: float = 1.0


def saturate(graph: EGraph, rules: Sequence[Compiled], goals: Sequence[tuple[int, int]], limits: Limits) -> bool:
    """Applies rules wherever they match until all goals are met (true), nothing changes, or a limit is reached."""
    end = time.perf_counter() + limits.seconds
    for _ in range(limits.rounds):
        if _met(graph, goals):
            return True
        before = (len(graph.classes), len({graph.find(index) for index in graph.classes.values()}))
        matcher = Matcher(graph)
        for compiled in rules:
            for roots, bound in list(matcher.matches(compiled.rule.source, compiled.rule.sorts)):
                _apply(graph, compiled, roots, bound)
                if len(graph.classes) > limits.nodes or time.perf_counter() > end:
                    graph.rebuild()
                    return _met(graph, goals)
        graph.rebuild()
        if before == (len(graph.classes), len({graph.find(index) for index in graph.classes.values()})):
            break
    return _met(graph, goals)


def _met(graph: EGraph, goals: Sequence[tuple[int, int]]) -> bool:
    return all(graph.find(left) == graph.find(right) for left, right in goals)


def _apply(graph: EGraph, compiled: Compiled, roots: Sequence[int], bound: Substitution) -> None:
    """Joins a match with the rule's target, where its guards hold and the target is well formed."""
    binding: dict[Symbol, Any] = {key: value for key, value in bound.items() if isinstance(key, Unknown)}
    for name in compiled.rule.sorts:
        if name in bound:
            sizes = graph.shapes[graph.find(bound[name])].sizes
            binding.update({Size(name, axis): length for axis, length in sizes.items()})
    try:
        solved = solve(compiled.guards, binding)
        if solved is not None:
            for root, target in zip(roots, compiled.rule.target, strict=True):
                graph.union(root, graph.add_term(target, {**bound, **solved}))
    except PlanError:  # not well formed, or of another shape, for these sizes: the rule says nothing here
        return


def derivable(rule: Rule, rules: Sequence[Compiled], limits: Limits = Limits(), seed: int = 0) -> bool:
    """Whether a rule follows from others: its two sides meet in an e-graph that starts with both of them."""
    binding = large_binding(rule, seed)
    if binding is None:
        return False
    graph = EGraph()
    known: dict[Any, Any] = {symbol: value for symbol, value in binding.items() if isinstance(symbol, Unknown)}
    for name, sort in rule.sorts.items():
        known[name] = graph.add(Node(f"${name}", (), ()), plain_shape(name, sort, binding))
    sides = zip(rule.source, rule.target, strict=True)
    goals = [(graph.add_term(source, known), graph.add_term(target, known)) for source, target in sides]
    return saturate(graph, rules, goals, limits)


def plain_shape(name: str, sort: Sort, binding: Mapping[Symbol, Any]) -> Shape:
    """The shape of a variable in plain numbers."""
    shape = variable_shape(name, sort)
    return Shape(sort, {axis: value_of(length, binding) for axis, length in shape.sizes.items()})


def large_binding(rule: Rule, seed: int = 0) -> dict[Symbol, Any] | None:
    """Sizes and attributes that meet a rule's conditions and are otherwise large and without relation."""
    drawing, choose = Drawing.of(rule), random.Random(seed)
    found = (drawing.binding(choose, large_value) for _ in range(50))
    return next((binding for binding in found if binding is not None), None)


def large_value(kind: str, choose: random.Random) -> Any:
    """A value of a symbol that no other symbol is likely to have."""
    match kind:
        case "stack":
            return (choose.randrange(10**3, 10**6),)
        case "function" | "dtype":
            return f"{kind}{choose.randrange(10**6)}"
        case "height" | "width":  # of images or of kernels, which must be smaller
            return choose.choice([choose.randrange(2, 100), choose.randrange(10**5, 10**6)])
        case "pair" | "padding":
            return (choose.randrange(2, 50), choose.randrange(2, 50))
        case _:
            return choose.randrange(10**3, 10**6)
