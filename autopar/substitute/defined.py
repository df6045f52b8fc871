"""A graph as the values that it computes: for each tensor, the operator of the algebra that defines it.

A rule says that values may be defined in another way. So names of tensors stay what they mean; a substitution
redefines some, adds others, and leaves all that reads them as it is. An operator that the algebra does not know
defines its results as parts of itself, which no rule touches. Values that the graph has no tensor for, such as what
is left of a tensor after the first of three parts, are called virtual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.ir.graph import Graph, Node, Tensor
from autopar.substitute.rules.terms import Attribute

OPAQUE = "part"
"""What a result of an operator outside of the algebra is: part number `attributes[0]` of node `attributes[1]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One value: an operator of the algebra, its attributes and operands, and the tensor that it makes.

    node: of the graph that was given, which computes just this; None where a rule has defined the value.
    through: values that this node reads instead of the operands, where the definition looks through them.
    """

    op: str
    attributes: tuple[Attribute, ...]
    operands: tuple[str, ...]
    tensor: Tensor
    node: Node | None = None
    through: tuple[str, ...] = ()

    def says(self, op: str, attributes: tuple[Attribute, ...], operands: tuple[str, ...]) -> bool:
        """Whether the value is computed in exactly this way."""
        return self.op == op and self.operands == operands and self.attributes == attributes


@dataclass(frozen=True)
class Values:
    """All values of a graph. `graph` is the one that was given, without identity nodes.

    definitions: of every value but inputs and stored tensors. renamed: values that are another one now.
    virtual: those that the graph has no tensor for. number: of values made by rules so far.
    """

    graph: Graph
    definitions: Mapping[str, Definition]
    virtual: frozenset[str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    number: int = 0

    def tensor(self, name: str) -> Tensor:
        """Shape and dtype of a value."""
        made = self.definitions.get(name)
        return self.graph.tensors[name] if made is None else made.tensor

    def now(self, name: str) -> str:
        """The value that a name stands for."""
        while name in self.renamed:
            name = self.renamed[name]
        return name

    @cached_property
    def by_op(self) -> Mapping[str, tuple[str, ...]]:
        """The live values of each operator, operands before what reads them."""
        found: dict[str, list[str]] = {}
        for name in self.live:
            definition = self.definitions.get(name)
            if definition is not None:
                found.setdefault(definition.op, []).append(name)
        return {op: tuple(names) for op, names in found.items()}

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The values that leave the graph."""
        graph = self.graph
        return tuple(self.now(name) for name in dict.fromkeys((*graph.outputs, *graph.mutations.values())))

    @cached_property
    def live(self) -> tuple[str, ...]:
        """Every value that something needs, operands before what reads them."""
        return tuple(reached(self.ends, self.definitions))

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """The live values that are computed from each."""
        found: dict[str, list[str]] = {}
        for name in self.live:
            if name in self.definitions:
                for operand in dict.fromkeys(self.definitions[name].operands):
                    found.setdefault(operand, []).append(name)
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def has_cycle(self) -> bool:
        """Whether a value is needed for itself: what two redefinitions together may bring about."""
        place = {name: number for number, name in enumerate(self.live)}
        return any(
            place[operand] >= place[name]
            for name in self.live
            if name in self.definitions
            for operand in (*self.definitions[name].operands, *self.definitions[name].through)
        )

    def is_given(self, name: str) -> bool:
        """Whether the value is computed as in the graph that was given."""
        made = self.definitions.get(name)
        if made is None:
            return name not in self.virtual
        return made.node is not None and all(self.is_given(o) for o in made.operands if o in self.virtual)

    def defined(self, new: Mapping[str, Definition], number: int) -> Values:
        """With other definitions of some values."""
        return replace(self, definitions={**self.definitions, **new}, number=number)

    def same(self, name: str, other: str) -> Values:
        """With `other` wherever `name` was read."""

        def now(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(other if one == name else one for one in names)

        changed = {
            key: replace(made, operands=now(made.operands), through=now(made.through))
            for key, made in self.definitions.items()
            if name in made.operands or name in made.through
        }
        left = {key: made for key, made in self.definitions.items() if key != name}
        return replace(self, definitions={**left, **changed}, renamed={**self.renamed, name: other})


def reached(ends: Iterable[str], definitions: Mapping[str, Definition]) -> list[str]:
    """Everything that the ends are computed from, in an order of computation (without recursion: graphs are deep)."""
    order: dict[str, None] = {}
    visited: set[str] = set()
    stack = list(ends)[::-1]
    while stack:
        name = stack[-1]
        if name in visited:
            stack.pop()
            order.setdefault(name)
            continue
        visited.add(name)
        made = definitions.get(name)
        if made is not None:
            stack += [operand for operand in (made.operands + made.through)[::-1] if operand not in visited]
    return list(order)
