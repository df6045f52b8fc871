"""What a plan may be changed to: the options of every decision, and the plan that follows from a change.

    operator     the strategies that its rules and shapes allow on the mesh: sample, attribute and parameter dims
    parameter    how it is stored (ZeRO 0 to 3 along each of its dims)
    input        which slice of it each rank is given
    modules      whose activations are computed again

Redistributions are no decision: they follow from what producers leave and consumers read, and a change makes anew those
of the tensors that it touches alone. A change is typed because strategies are, and because a tensor that cannot be
brought from one placement to another has no plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

from autopar.errors import AutoparError
from autopar.ir.branches import check_forks, homes, in_order
from autopar.ir.conversions import needed_conversions
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement
from autopar.ir.plan import Fork, NodePlan, Plan, Redistribute, Storage
from autopar.ir.redistribution import Path
from autopar.ir.verifier import ending, output_placement, update_placement

Modules = tuple[str, ...]

Option = NodePlan | Storage | Placement
"""Of a node, of a stored tensor, of an input."""


def option_of(plan: Plan, name: str) -> Option:
    """What a plan has decided of a node, a stored tensor or an input."""
    if name in plan.stage.nodes:
        return plan.stage.nodes[name]
    return plan.stage.storage[name] if name in plan.stage.storage else plan.stage.inputs[name]


class Twins(Protocol):
    """Which nodes and tensors stand in the same place of equal blocks: they have one representative."""

    def representative_node(self, name: str) -> str: ...
    def representative_tensor(self, name: str) -> str: ...


class LinkEnd(NamedTuple):
    """A place at which a decision touches a tensor: which result or operand of a node; or what is stored, or fed."""

    kind: str  # "result", "operand", "stored" or "input"
    position: int


class DecisionLink(NamedTuple):
    """Two decisions that meet at a tensor: own end, the other's name (a node or tensor) and its end."""

    own: LinkEnd
    other: str
    end: LinkEnd


@dataclass(frozen=True)
class Change:
    """What a proposal sets, by name; `recompute` where it sets that. kind: of proposal; name: what it began with;
    together: names are representatives, and what is set is set for all that they stand for."""

    kind: str
    name: str
    options: Mapping[str, Option] = field(default_factory=dict)
    together: bool = False
    recompute: Modules | None = None


@dataclass(frozen=True, eq=False)
class Draft:
    """A plan of one stage, with its redistributions by tensor, which is how changes find them."""

    plan: Plan
    conversions: Mapping[str, tuple[Redistribute, ...]]


@dataclass(frozen=True, eq=False)
class Space:
    """All plans of a graph on one logical mesh.

    strategies, storages: by representative; what is missing there cannot be chosen. recomputable: groups of modules
    that are computed again together, of equal blocks one after another.
    """

    graph: Graph
    twins: Twins
    strategies: Mapping[str, tuple[NodePlan, ...]]
    storages: Mapping[str, tuple[Storage, ...]]
    inputs: Mapping[str, tuple[Placement, ...]]
    path: Path
    recomputable: tuple[tuple[Modules, ...], ...] = ()
    _ways: dict[tuple[str, Placement, Placement], Redistribute | None] = field(default_factory=dict, repr=False)

    # Decisions ----------------------------------------

    @cached_property
    def equals(self) -> Mapping[str, tuple[str, ...]]:
        """By representative: the nodes, or stored tensors, that it stands for, itself first."""
        found: dict[str, list[str]] = defaultdict(list)
        for node in self.graph.nodes:
            found[self.twins.representative_node(node.name)].append(node.name)
        for stored in self.graph.stored:
            found[self.twins.representative_tensor(stored.tensor)].append(stored.tensor)
        return {name: tuple(names) for name, names in found.items()}

    def representative(self, name: str) -> str:
        """Of a node, or of a stored tensor."""
        if name in self.graph.node_by_name:
            return self.twins.representative_node(name)
        return self.twins.representative_tensor(name)

    @cached_property
    def operators(self) -> tuple[str, ...]:
        """The representatives with a choice of strategy."""
        return _open(self.strategies)

    @cached_property
    def stored(self) -> tuple[str, ...]:
        """The representatives with a choice of storage."""
        return _open(self.storages)

    @cached_property
    def fed(self) -> tuple[str, ...]:
        """The inputs with a choice of placement."""
        return _open(self.inputs)

    def held(self, plan: Plan) -> frozenset[str]:
        """Nodes and tensors that stay as they are since a branch runs, reads or makes them."""
        if plan.stage.forks not in self._held:
            self._held[plan.stage.forks] = frozenset(self._held_by(homes(plan.stage)))
        return self._held[plan.stage.forks]

    @cached_property
    def _held(self) -> dict[tuple[Fork, ...], frozenset[str]]:
        return {(): frozenset()}

    def _held_by(self, names: Iterable[str]) -> Iterable[str]:
        for name in names:
            node = self.graph.node_by_name[name]
            yield name
            for tensor in node.operands:
                yield self.graph.producers[tensor].name if tensor in self.graph.producers else tensor
            for tensor in node.results:
                yield from (reader.name for reader, _ in self.graph.consumers[tensor])

    def links(self, name: str) -> tuple[DecisionLink, ...]:
        """What a node, stored tensor or input meets at the tensors that it makes or reads."""
        if name not in self._links:
            self._links[name] = tuple(self._find_links(name))
        return self._links[name]

    @cached_property
    def _links(self) -> dict[str, tuple[DecisionLink, ...]]:
        return {}

    def _find_links(self, name: str) -> Iterable[DecisionLink]:
        node = self.graph.node_by_name.get(name)
        if node is None:
            own = LinkEnd("input" if name in self.graph.inputs else "stored", 0)
            yield from self._read_by(name, own, name)
            return
        for position, tensor in enumerate(node.results):
            yield from self._read_by(tensor, LinkEnd("result", position), name)
        for position, tensor in enumerate(node.operands):
            own = LinkEnd("operand", position)
            producer = self.graph.producers.get(tensor)
            if producer is not None:
                yield DecisionLink(own, producer.name, LinkEnd("result", producer.results.index(tensor)))
            else:
                yield DecisionLink(own, tensor, LinkEnd("input" if tensor in self.graph.inputs else "stored", 0))

    def _read_by(self, tensor: str, own: LinkEnd, name: str) -> Iterable[DecisionLink]:
        for reader, position in self.graph.consumers[tensor]:
            if reader.name != name:
                yield DecisionLink(own, reader.name, LinkEnd("operand", position))

    # Plans ----------------------------------------

    def draft(self, plan: Plan) -> Draft:
        """A plan, ready to be changed. Its redistributions stay as they are, and are made so wherever needed again."""
        found: dict[str, list[Redistribute]] = defaultdict(list)
        for item in plan.stage.redistributes:
            found[item.tensor].append(item)
            self._ways.setdefault((item.tensor, self._source(plan, item.tensor), item.target), item)
        return Draft(plan, {name: tuple(items) for name, items in found.items()})

    def changed(self, draft: Draft, change: Change) -> Draft | None:
        """The draft with a change, itself where that sets nothing; None where a tensor cannot be brought to where it is
        read."""
        plan = draft.plan
        if change.recompute is not None:
            plan = replace(plan, recompute=change.recompute)
        if not change.options:
            if plan is draft.plan:
                return draft
            return Draft(plan, draft.conversions) if self._may_branch(plan) else None
        set_to = self._each(change)
        nodes, storage, inputs = dict(plan.stage.nodes), dict(plan.stage.storage), dict(plan.stage.inputs)
        for name, option in set_to.items():
            if isinstance(option, NodePlan):
                nodes[name] = option
            elif isinstance(option, Storage):
                storage[name] = option
            else:
                inputs[name] = option
        conversions = dict(draft.conversions)
        for tensor in self._touched(set_to):
            found = self._conversions(plan, tensor, nodes, storage, inputs)
            if found is None:
                return None
            conversions[tensor] = found
        every = tuple(chain.from_iterable(conversions.values()))
        plan = plan.placed(nodes=nodes, storage=storage, inputs=inputs, redistributes=every)
        return Draft(plan, conversions) if self._may_branch(plan) else None

    def _each(self, change: Change) -> Mapping[str, Option]:
        """What is set, by each name of its own."""
        if not change.together:
            return change.options
        equals = self.equals
        return {one: option for name, option in change.options.items() for one in equals.get(name, (name,))}

    def admits(self, plan: Plan) -> bool:
        """Whether every decision of a plan is one of the options here; of what is in a branch, or has no other option,
        any."""
        held, inputs = self.held(plan), self.inputs
        return (
            all(
                placed in self.strategies[self.representative(n)]
                for n, placed in plan.stage.nodes.items()
                if n not in held
            )
            and all(
                kept in self.storages[self.representative(n)] for n, kept in plan.stage.storage.items() if n not in held
            )
            and all(placed in inputs[name] for name, placed in plan.stage.inputs.items())
        )

    def redistributed(self, plan: Plan) -> Plan | None:
        """The plan with the redistributions that its decisions need; None where something cannot be brought to where it
        is read."""
        entering = dict(plan.stage.inputs) | {name: kept.placement for name, kept in plan.stage.storage.items()}
        order, ends = in_order(self.graph, plan.stage), ending(self.graph, plan.stage)
        found = [self.conversion(*needed) for needed in needed_conversions(order, plan.stage.nodes, entering, ends)]
        return None if None in found else plan.placed(redistributes=tuple([one for one in found if one is not None]))

    def _may_branch(self, plan: Plan) -> bool:
        """Whether its branches may be beside what else the plan does."""
        if not plan.stage.forks:
            return True
        try:
            check_forks(self.graph, plan.parts[0])
        except AutoparError:
            return False
        return True

    def _touched(self, names: Iterable[str]) -> Iterable[str]:
        meets = self._meets
        return dict.fromkeys(tensor for name in names for tensor in meets.get(name, (name,)))

    def _conversions(
        self, plan: Plan, tensor: str, nodes: Mapping[str, NodePlan], storage: Mapping[str, Storage],
        inputs: Mapping[str, Placement],
    ) -> tuple[Redistribute, ...] | None:  # fmt: skip
        """From what a tensor is made, stored or fed as to each placement that it is read in: of one tensor, as
        `needed_conversions` of all."""
        maker, position, readers = self._read[tensor]
        if maker is not None:
            source = nodes[maker].results[position]
        else:
            source = inputs[tensor] if tensor in inputs else storage[tensor].placement
        wanted: dict[Placement, None] = {}
        for name, operand in readers:
            target = nodes[name].operands[operand]
            if target is not source and target != source:
                wanted[target] = None
        if tensor in self.graph.returned:
            wanted[output_placement(self.graph, plan.stage, tensor)] = None
        for stored in self.graph.updates.get(tensor, ()):
            wanted[update_placement(self.graph, plan.stage, stored, storage)] = None
        wanted.pop(source, None)
        if not wanted:
            return ()
        found = [self.conversion(tensor, source, target) for target in wanted]
        return None if None in found else tuple([one for one in found if one is not None])

    def _source(self, plan: Plan, tensor: str) -> Placement:
        """As what a tensor is made, stored or fed."""
        maker, position, _ = self._read[tensor]
        if maker is not None:
            return plan.stage.nodes[maker].results[position]
        return plan.stage.inputs[tensor] if tensor in plan.stage.inputs else plan.stage.storage[tensor].placement

    @cached_property
    def _read(self) -> dict[str, tuple[str | None, int, tuple[tuple[str, int], ...]]]:
        """By tensor: what makes it, as which result; what reads it, as which operand."""
        found: dict[str, tuple[str | None, int, tuple[tuple[str, int], ...]]] = {}
        for name in self.graph.tensors:
            maker = self.graph.producers.get(name)
            position = 0 if maker is None else maker.results.index(name)
            readers = tuple((reader.name, operand) for reader, operand in self.graph.consumers[name])
            found[name] = (None if maker is None else maker.name, position, readers)
        return found

    @cached_property
    def _meets(self) -> dict[str, tuple[str, ...]]:
        """By node: what it reads and makes; by parameter or cache that forward updates: itself and what it becomes."""
        nodes = {node.name: tuple(dict.fromkeys((*node.operands, *node.results))) for node in self.graph.nodes}
        updated = ((item, self.graph.mutations.get(name)) for name, item in self.graph.kept_in_parts.items())
        return nodes | {item.tensor: (item.tensor, new) for item, new in updated if new is not None}

    def conversion(self, tensor: str, source: Placement, target: Placement) -> Redistribute | None:
        """How a tensor is brought from one placement to another; None where it cannot be. One object for equal ones,
        so that what is the same in two plans is seen at once."""
        key = tensor, source, target
        if key not in self._ways:
            steps = self.path(self.graph.tensors[tensor], source, target)
            self._ways[key] = None if steps is None else Redistribute(tensor, target, steps)
        return self._ways[key]

    def in_order(self, draft: Draft) -> Plan:
        """The draft's plan, with its redistributions in the order in which they are read."""
        entering = dict(draft.plan.stage.inputs) | {
            name: kept.placement for name, kept in draft.plan.stage.storage.items()
        }
        needed = needed_conversions(in_order(self.graph, draft.plan.stage), draft.plan.stage.nodes, entering, ())
        rank = {(tensor, target): number for number, (tensor, _, target) in enumerate(needed)}
        items = sorted(draft.plan.stage.redistributes, key=lambda item: rank.get((item.tensor, item.target), len(rank)))
        return draft.plan.placed(redistributes=tuple(items))


def _open(options: Mapping[str, Sequence[object]]) -> tuple[str, ...]:
    return tuple(name for name, found in options.items() if len(found) > 1)
