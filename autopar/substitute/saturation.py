"""Equality saturation: all forms of a small graph that rules lead to at once, in an e-graph.

A class holds nodes (operator, attributes, classes of operands) that compute equal values; a rule adds nodes and joins
classes, and takes nothing away. So no substitution is in another's way, as it is where graphs are rewritten one by
one. Each node remembers which application of a rule brought it, which is how a choice of nodes becomes substitutions
again (`extraction`). Nothing in the graph may be pinned. Willsey et al., egg (POPL'21); rules of several outputs as in
Yang et al., Tensat (MLSys'21); why two classes are equal as in Nieuwenhuis and Oliveras, Proof-producing congruence
closure (RTA'05).
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple, TypeAlias

from autopar.ir.graph import Tensor
from autopar.substitute.defined import Values
from autopar.substitute.fitting import Misfit, made_shape
from autopar.substitute.matching import (
    COMMUTATIVE,
    Binding,
    Matcher,
    attribute,
    bound_attributes,
    is_of_sort,
    solved_binding,
)
from autopar.substitute.rules.terms import Apply, Attribute, Rule, Term, Variable

MOST_NODES = 600
MOST_MATCHES = 40
"""Of one rule in one round: rules that apply everywhere must not leave the others without room."""
MOST_ROUNDS = 6


Place: TypeAlias = tuple[str, tuple[str, ...], tuple[tuple[str, object], ...]]


class ENode(NamedTuple):
    """An operator with its attributes, applied to classes."""

    op: str
    attributes: tuple[Attribute, ...]
    operands: tuple[str, ...]


class Link(NamedTuple):
    """A node that a rule's source stands for: the class that it was looked for in, and where it came from.

    born: the class that it was made in. maker: the application that brought it; None where it was given.
    """

    sought: str
    born: str
    maker: int | None


class Application(NamedTuple):
    """A rule at classes. links: what it was applied to."""

    rule: Rule
    roots: tuple[str, ...]
    binding: Binding
    links: tuple[Link, ...]


class EMatch(NamedTuple):
    """Where a rule applies: classes, what is bound, and the nodes that its source stands for."""

    roots: tuple[str, ...]
    binding: Binding
    links: tuple[Link, ...]


class Birth(NamedTuple):
    """How a node was made: in which class, of which classes, by which application."""

    name: str
    operands: tuple[str, ...]
    maker: int | None


class Edge(NamedTuple):
    """Why a class equals another: an application said so, or pairs of operands are equal. time: applications then."""

    other: str
    application: int | None
    pairs: tuple[tuple[str, str], ...]
    time: int


class EGraph:
    """Classes by name: that of a value of the graph, or a number for what rules made."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.parents: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.nodes: dict[ENode, str] = {}
        self.births: dict[ENode, Birth] = {}
        self.edges: dict[str, list[Edge]] = defaultdict(list)
        self.applications: list[Application] = []
        self.given: dict[ENode, str] = {}
        for name in values.live:
            self.parents[name], self.tensors[name] = name, values.tensor(name)
            made = values.definitions.get(name)
            if made is not None:
                node = ENode(made.op, made.attributes, made.operands)
                self.nodes[node] = self.nodes.get(node, name)
                self._place(node, name, None)
                self.given.setdefault(node, name)
        self.rebuild()

    def find(self, name: str) -> str:
        """The class that a name stands for now."""
        while self.parents[name] != name:
            self.parents[name] = self.parents[self.parents[name]]
            name = self.parents[name]
        return name

    def tensor(self, name: str) -> Tensor:
        """Shape and dtype of a class."""
        return self.tensors[self.find(name)]

    def _place(self, node: ENode, name: str, maker: int | None) -> None:
        """Notes how a node was made; one that was made before says that both classes are equal."""
        known = self.births.setdefault(node, Birth(name, node.operands, maker))
        if known.name != name:
            self._equal(known.name, name, None, tuple(zip(known.operands, node.operands, strict=True)))

    def _equal(self, one: str, other: str, application: int | None, pairs: tuple[tuple[str, str], ...]) -> None:
        """Joins two classes, and notes why."""
        if one != other:
            time = len(self.applications)
            self.edges[one].append(Edge(other, application, pairs, time))
            self.edges[other].append(Edge(one, application, tuple(pair[::-1] for pair in pairs), time))
        self.parents[self.find(other)] = self.find(one)

    def rebuild(self) -> None:
        """Joins the classes of nodes that have become the same node, until none is left."""
        is_new = True
        while is_new:
            is_new = False
            nodes, births = self.nodes, self.births
            self.nodes, self.births = {}, {}
            for node, name in nodes.items():
                same, birth = self._now(node), births[node]
                known = self.births.setdefault(same, birth)
                if self.find(known.name) != self.find(birth.name):
                    self._equal(known.name, birth.name, None, tuple(zip(known.operands, birth.operands, strict=True)))
                    is_new = True
                self.nodes[same] = self.find(name)
        self.nodes = {node: self.find(name) for node, name in self.nodes.items()}
        self.given = {self._now(node): name for node, name in reversed(self.given.items())}
        self._index()

    def _now(self, node: ENode) -> ENode:
        return ENode(node.op, node.attributes, tuple(map(self.find, node.operands)))

    def _index(self) -> None:
        self.by_op: dict[str, list[tuple[ENode, str]]] = defaultdict(list)
        self.within: dict[str, dict[str, list[ENode]]] = defaultdict(lambda: defaultdict(list))
        for node, name in self.nodes.items():
            self.by_op[node.op].append((node, name))
            self.within[name][node.op].append(node)

    # rules

    def saturate(self, matchers: Sequence[Matcher], seconds: float, most: int = MOST_NODES) -> str:
        """Applies rules in rounds, each wherever it matches, until nothing is new or a limit is reached: which."""
        end = time.monotonic() + seconds
        done: set[Place] = set()
        for _ in range(MOST_ROUNDS):
            before = len(self.nodes), len(self.applications)
            found = []
            for matcher in matchers:
                new = (match for match in self.matches(matcher) if self._place_of(matcher.rule, match) not in done)
                found.append([(matcher.rule, match) for match in islice(new, MOST_MATCHES)])
                if time.monotonic() > end:
                    return f"the time limit of {seconds:.3g} s"
            for rule, match in (item for turn in zip_longest(*found) for item in turn if item is not None):
                done.add(self._place_of(rule, match))
                self._apply(rule, match)
                if len(self.nodes) >= most:
                    self.rebuild()
                    return f"the limit of {most} nodes"
            self.rebuild()
            if before == (len(self.nodes), len(self.applications)):
                return "saturated"
        return f"the limit of {MOST_ROUNDS} rounds"

    def _place_of(self, rule: Rule, match: EMatch) -> Place:
        """Equal for matches that would bring the same."""
        binding = {k: value if k[0] == "?" else self.find(value) for k, value in match.binding.items()}
        return rule.name, tuple(map(self.find, match.roots)), tuple(sorted(binding.items()))

    def _apply(self, rule: Rule, match: EMatch) -> None:
        """Adds the targets of a rule and joins them with its roots; nothing where they do not fit these shapes."""
        number = len(self.applications)
        added: list[ENode] = []
        try:
            made = [self._add(term, match.binding, added) for term in rule.target]
            roots = [self.tensor(root) for root in match.roots]
            fits = all(self._alike(self.tensor(one), root) for one, root in zip(made, roots, strict=True))
        except Misfit:
            fits = False
        if not fits:
            for node in added:
                del self.nodes[node], self.births[node]
            return
        self.applications.append(Application(rule, match.roots, match.binding, match.links))
        for root, target in zip(match.roots, made, strict=True):
            self._equal(root, target, number, ())

    @staticmethod
    def _alike(one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and one.dtype == other.dtype

    def _add(self, term: Term, binding: Binding, added: list[ENode]) -> str:
        """The class of a term. Raises Misfit where it is ill formed."""
        if isinstance(term, Variable):
            variable: str = binding[term.name]
            return variable
        operands = tuple(self._add(operand, binding, added) for operand in term.operands)
        attributes = []
        for item in term.attributes:
            found = attribute(item, self, binding)
            if found is None:
                raise Misfit(f"{item}")
            attributes.append(found)
        node = ENode(term.op, tuple(attributes), tuple(map(self.find, operands)))
        if node not in self.nodes:
            tensors = [self.tensor(operand) for operand in operands]
            if len({tensor.dtype for tensor in tensors}) != 1:
                raise Misfit
            shape = made_shape(node.op, node.attributes, [tensor.shape for tensor in tensors])
            name = f"~{len(self.parents)}"
            self.parents[name] = name
            self.tensors[name] = Tensor(name, shape, tensors[0].dtype, any(t.differentiable for t in tensors))
            self.nodes[node] = name
            self.births[node] = Birth(name, operands, len(self.applications))
            added.append(node)
        return self.births[node].name

    # matching

    def matches(self, matcher: Matcher) -> Iterator[EMatch]:
        """Where a rule applies to the nodes that were there when the round began."""
        for found in self._roots(matcher, EMatch((), {}, ())):
            solved = solved_binding(matcher.guards, self, found.binding)
            if solved is not None:
                yield found._replace(binding=solved)

    def _roots(self, matcher: Matcher, so_far: EMatch) -> Iterator[EMatch]:
        number = len(so_far.roots)
        if number == len(matcher.rule.source):
            yield so_far
            return
        term = matcher.rule.source[number]
        if not isinstance(term, Apply):
            return
        for node, name in self.by_op.get(term.op, ()):
            before = tuple(map(self.find, so_far.roots))
            if name in before or (number and matcher.is_symmetric and name < before[-1]):
                continue
            root = self.births[node].name
            for binding, links in self._node(term, node, root, matcher.rule, so_far.binding, so_far.links):
                yield from self._roots(matcher, EMatch((*so_far.roots, root), binding, links))

    def _node(
        self, term: Apply, node: ENode, sought: str, rule: Rule, binding: Binding, links: tuple[Link, ...]
    ) -> Iterator[tuple[Binding, tuple[Link, ...]]]:
        birth = self.births[node]
        links = (*links, Link(sought, birth.name, birth.maker))
        orders = [birth.operands]
        if node.op in COMMUTATIVE and len({self.tensor(name).shape for name in node.operands}) == 1:
            orders.append(birth.operands[::-1])
        for operands in dict.fromkeys(orders):
            found = [(binding, links)]
            for inner, operand in zip(term.operands, operands, strict=True):
                found = [new for old in found for new in self._class(inner, operand, rule, *old)]
            for known, held in found:
                bound = bound_attributes(term.attributes, node.attributes, self, known)
                if bound is not None:
                    yield bound, held

    def _class(
        self, term: Term, sought: str, rule: Rule, binding: Binding, links: tuple[Link, ...]
    ) -> Iterator[tuple[Binding, tuple[Link, ...]]]:
        name = self.find(sought)
        if isinstance(term, Variable):
            if term.name in binding:
                if self.find(binding[term.name]) == name:
                    yield binding, (*links, Link(binding[term.name], sought, None))
            elif is_of_sort(self.tensor(name).shape, rule.sorts.get(term.name, "matrix")):
                yield {**binding, term.name: sought}, links
            return
        for node in self.within[name][term.op] if name in self.within else ():
            if len(node.operands) == len(term.operands):
                yield from self._node(term, node, sought, rule, binding, links)

    # why

    def reasons(self, one: str, other: str, before: int) -> set[int]:
        """Applications by which two classes are equal, of those that there were by then."""
        found, stack, seen = set[int](), [(one, other)], set[tuple[str, str]]()
        while stack:
            pair = stack.pop()
            if pair[0] != pair[1] and pair not in seen:
                seen.add(pair)
                for edge in self._path(*pair, before):
                    stack += edge.pairs
                    found |= set() if edge.application is None else {edge.application}
        return found

    def _path(self, one: str, other: str, before: int) -> list[Edge]:
        """The shortest way from one class to another along what is known to be equal; [] where there is none."""
        came: dict[str, tuple[str, Edge] | None] = {one: None}
        queue = deque([one])
        while queue and other not in came:
            name = queue.popleft()
            for edge in self.edges.get(name, ()):
                if edge.other not in came and edge.time <= before:
                    came[edge.other] = name, edge
                    queue.append(edge.other)
        path = []
        step = came.get(other)
        while step is not None:
            path.append(step[1])
            step = came[step[0]]
        return path
