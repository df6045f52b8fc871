"""Mutations of a plan, around each of its redistributions: dropped, swapped, reordered, moved, detoured.

*Strict* mutations change what they name and nothing else; nearly all of them are badly typed. *Consistent* ones
change a type on one axis and then everything that must follow: the operands that read the tensor (`same readers`),
or a node's whole rule or a tensor's storage, with the conversions around it routed anew (`rerouted`). Those are
other programs that claim to compute the same, and most of them verify.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations

from autopar.ir.graph import Graph, Node
from autopar.ir.placement import I, P, Placement, R, S, Type, format_placement
from autopar.ir.plan import NodePlan, Plan, Redistribute, Storage
from autopar.ir.redistribution import Step, cheapest_path
from autopar.ir.verifier import output_placement
from autopar.ops import axis_rules
from autopar.ops.notation import AxisRule

Value = tuple[str, Placement]  # a tensor in one of its placements


@dataclass(frozen=True)
class Reach:
    """Nodes, tensors and values (a tensor in a placement) that a mutation changes, and those that it reads.

    Who changes a tensor meets all who deal with it. Several operators that read one value may change together: what
    is then converted and read by each is the same as when they change one by one.
    """

    changed: frozenset[object] = frozenset()
    read: frozenset[object] = frozenset()

    def meets(self, other: Reach) -> bool:
        """Whether one changes what the other changes or reads."""
        mine, others = self.changed | self.read, other.changed | other.read
        return bool(self.changed & others or other.changed & mine)

    def joined(self, other: Reach) -> Reach:
        return Reach(self.changed | other.changed, self.read | other.read)


@dataclass(frozen=True)
class Mutation:
    """What replaces entries of a plan; None removes a conversion."""

    what: str
    conversions: Mapping[Value, Redistribute | None] = field(default_factory=dict)
    nodes: Mapping[str, NodePlan] = field(default_factory=dict)
    storage: Mapping[str, Storage] = field(default_factory=dict)
    inputs: Mapping[str, Placement] = field(default_factory=dict)

    def apply(self, plan: Plan) -> Plan:
        """The mutated plan."""
        conversions = {(r.tensor, r.target): r for r in plan.stage.redistributes} | dict(self.conversions)
        return plan.placed(
            inputs={**plan.stage.inputs, **self.inputs},
            storage={**plan.stage.storage, **self.storage},
            nodes={**plan.stage.nodes, **self.nodes},
            redistributes=tuple(r for r in conversions.values() if r is not None),
        )

    def around(self, graph: Graph) -> set[str]:
        """The tensors whose placements or conversions may have to follow."""
        nodes = [graph.node_by_name[name] for name in self.nodes]
        read_or_made = {tensor for node in nodes for tensor in (*node.operands, *node.results)}
        return read_or_made | {tensor for tensor, _ in self.conversions} | set(self.storage) | set(self.inputs)

    def reach(self, graph: Graph, plan: Plan) -> Reach:
        """What it changes and what it reads, by which it is seen whether two mutations meet."""
        nodes = [graph.node_by_name[name] for name in self.nodes]
        made = {tensor for node in nodes for tensor in node.results}
        read = {
            pair for node in nodes for pair in zip(node.operands, plan.stage.nodes[node.name].operands, strict=True)
        }
        changed = {*self.nodes, *made, *self.storage, *self.inputs, *self.conversions}
        return Reach(frozenset(changed), frozenset({*read, *self.around(graph)}))

    @property
    def key(self) -> tuple[frozenset[object], ...]:
        """What it changes, whatever it is called."""
        parts = (self.conversions, self.nodes, self.storage, self.inputs)
        return tuple(frozenset(part.items()) for part in parts)


@dataclass(frozen=True)
class Site:
    """One redistribution with the placement it starts from and the operands that read its result."""

    graph: Graph
    plan: Plan
    redistribute: Redistribute
    source: Placement
    readers: tuple[tuple[Node, int], ...]

    @property
    def value(self) -> Value:
        return self.redistribute.tensor, self.redistribute.target

    def types_but(self, *excluded: Type) -> list[Type]:
        return all_types(self.graph, self.redistribute.tensor, *excluded)

    def with_steps(self, what: str, steps: tuple[Step, ...]) -> Mutation:
        return Mutation(f"{self}: {what}", {self.value: replace(self.redistribute, steps=steps)})

    def read_as(self, target: Placement) -> dict[str, NodePlan]:
        """The readers' plans with another placement where they read this value."""
        found: dict[str, NodePlan] = {}
        for node, position in self.readers:
            before = found.get(node.name, self.plan.stage.nodes[node.name])
            operands = (*before.operands[:position], target, *before.operands[position + 1 :])
            found[node.name] = replace(before, operands=operands)
        return found

    def __str__(self) -> str:
        return f"{self.redistribute.tensor} [{format_placement(self.source)} -> {format_placement(self.value[1])}]"


def all_types(graph: Graph, tensor: str, *excluded: Type) -> list[Type]:
    """Every type but some, with one S(d) too many: a dim that the tensor does not have."""
    types = [R, I, P, *(S(dim) for dim in range(len(graph.tensors[tensor].shape) + 1))]
    return [type_ for type_ in types if type_ not in excluded]


def left_at(placement: Placement, axis: int, type_: Type) -> Placement:
    """The placement with another type on one axis."""
    return (*placement[:axis], type_, *placement[axis + 1 :])


def sources(graph: Graph, plan: Plan) -> dict[str, Placement]:
    """The placement in which each tensor is stored, comes in or is left by its operator."""
    found = dict(plan.stage.inputs) | {name: storage.placement for name, storage in plan.stage.storage.items()}
    for node in graph.nodes:
        found.update(zip(node.results, plan.stage.nodes[node.name].results, strict=True))
    return found


def sites(graph: Graph, plan: Plan) -> list[Site]:
    """Every redistribution of the plan."""
    placed = sources(graph, plan)
    readers: dict[Value, list[tuple[Node, int]]] = {}
    for node in graph.nodes:
        for position, value in enumerate(zip(node.operands, plan.stage.nodes[node.name].operands, strict=True)):
            readers.setdefault(value, []).append((node, position))
    return [
        Site(graph, plan, r, placed[r.tensor], tuple(readers.get((r.tensor, r.target), ())))
        for r in plan.stage.redistributes
    ]


# strict mutations


def drop(site: Site) -> Iterator[Mutation]:
    yield Mutation(f"{site}: dropped", {site.value: None})


def drop_step(site: Site) -> Iterator[Mutation]:
    steps = site.redistribute.steps
    for i in range(len(steps)):
        yield site.with_steps(f"step {i} dropped", (*steps[:i], *steps[i + 1 :]))


def swap_step(site: Site) -> Iterator[Mutation]:
    steps = site.redistribute.steps
    for i, step in enumerate(steps):
        for type_ in site.types_but():
            for other in (step._replace(before=type_), step._replace(after=type_)):
                if other != step:
                    text = f"step {i} swapped to {other.before} -> {other.after}"
                    yield site.with_steps(text, (*steps[:i], other, *steps[i + 1 :]))


def move_step(site: Site) -> Iterator[Mutation]:
    steps = site.redistribute.steps
    for i, step in enumerate(steps):
        for axis in range(-1, len(site.plan.stage.axes) + 1):
            if axis != step.axis:
                moved = (*steps[:i], step._replace(axis=axis), *steps[i + 1 :])
                yield site.with_steps(f"step {i} on axis {axis}", moved)


def swap_target(site: Site) -> Iterator[Mutation]:
    target = site.value[1]
    for axis in range(len(target)):
        for type_ in site.types_but(target[axis]):
            other = left_at(target, axis, type_)
            new = replace(site.redistribute, target=other)
            yield Mutation(f"{site}: target {format_placement(other)}", {site.value: None, (new.tensor, other): new})


def swap_source(site: Site) -> Iterator[Mutation]:
    """The stored, given or produced type alone, with the first step that follows it."""
    tensor, steps = site.redistribute.tensor, site.redistribute.steps
    for axis in range(len(site.source)):
        for type_ in site.types_but(site.source[axis]):
            change = _left_as(site, tensor, left_at(site.source, axis, type_))
            first = next((i for i, step in enumerate(steps) if step.axis == axis), None)
            text = f"{site}: starts as {type_} on axis {axis}"
            yield replace(change, what=text)
            if first is not None:
                started = (*steps[:first], steps[first]._replace(before=type_), *steps[first + 1 :])
                following = {site.value: replace(site.redistribute, steps=started)}
                yield replace(change, what=f"{text}, step {first} too", conversions=following)


def _left_as(site: Site, tensor: str, placement: Placement) -> Mutation:
    plan = site.plan
    if tensor in plan.stage.inputs:
        return Mutation("", inputs={tensor: placement})
    if tensor in plan.stage.storage:
        return Mutation("", storage={tensor: replace(plan.stage.storage[tensor], placement=placement)})
    node = site.graph.producers[tensor]
    before = plan.stage.nodes[node.name]
    results = tuple(
        placement if name == tensor else old for name, old in zip(node.results, before.results, strict=True)
    )
    return Mutation("", nodes={node.name: replace(before, results=results)})


# other ways between the same ends


def reorder(site: Site) -> Iterator[Mutation]:
    steps = site.redistribute.steps
    for other in permutations(steps):
        if other != steps:
            yield site.with_steps("steps reordered", other)


def detour(site: Site) -> Iterator[Mutation]:
    """Each step through a third type; each two steps of one axis through another type, or at once."""
    steps = site.redistribute.steps
    for i, (axis, before, after, *_) in enumerate(steps):
        for type_ in site.types_but(before, after):
            way = (Step(axis, before, type_), Step(axis, type_, after))
            yield site.with_steps(f"step {i} by way of {type_}", (*steps[:i], *way, *steps[i + 1 :]))
    for i, (first, second) in enumerate(pairwise(steps)):
        if first.axis == second.axis:
            for type_ in site.types_but(first.after):
                way = (first._replace(after=type_), second._replace(before=type_))
                yield site.with_steps(f"steps {i} and {i + 1} by way of {type_}", (*steps[:i], *way, *steps[i + 2 :]))
            at_once = Step(first.axis, first.before, second.after)
            yield site.with_steps(f"steps {i} and {i + 1} at once", (*steps[:i], at_once, *steps[i + 2 :]))


def in_parts(site: Site) -> Iterator[Mutation]:
    """The last steps as a sum by levels, of elements in so many parts."""
    steps = site.redistribute.steps
    for count in (1, 2):
        if len(steps) >= count:
            for parts in (2, 3):
                told = (*steps[:-count], *(step._replace(parts=parts) for step in steps[-count:]))
                yield site.with_steps(f"the last {count} in {parts} parts", told)


# consistent mutations


def drop_for_readers(site: Site) -> Iterator[Mutation]:
    """The readers take the tensor as it is."""
    yield Mutation(f"{site}: dropped, same readers", {site.value: None}, site.read_as(site.source))


def drop_step_for_readers(site: Site) -> Iterator[Mutation]:
    """The readers take the tensor as the last step but one leaves it."""
    *steps, last = site.redistribute.steps
    target = left_at(site.value[1], last.axis, last.before)
    if steps:
        new = Redistribute(site.redistribute.tensor, target, tuple(steps))
        conversions = {site.value: None, (new.tensor, target): new}
        yield Mutation(f"{site}: last step dropped, same readers", conversions, site.read_as(target))


def swap_for_readers(site: Site) -> Iterator[Mutation]:
    """Another target, which the readers then read: by the same steps but the last, or by the cheapest."""
    tensor, target = site.value
    *steps, last = site.redistribute.steps
    for axis in range(len(target)):
        for type_ in site.types_but(target[axis]):
            other = left_at(target, axis, type_)
            ways = [_way(site.source, other)]
            if axis == last.axis:
                ways.append((*steps, last._replace(after=type_)))
            for way in filter(None, ways):
                conversions = {site.value: None, (tensor, other): Redistribute(tensor, other, way)}
                what = f"{site}: target {format_placement(other)}, same readers"
                yield Mutation(what, conversions, site.read_as(other))


def swap_reader_rule(site: Site) -> Iterator[Mutation]:
    for node in dict.fromkeys(node for node, _ in site.readers):
        yield from swap_rule(site.graph, site.plan, node)


def swap_source_rule(site: Site) -> Iterator[Mutation]:
    node = site.graph.producers.get(site.redistribute.tensor)
    if node is not None:
        yield from swap_rule(site.graph, site.plan, node)
    else:
        yield from swap_given(site.graph, site.plan, site.redistribute.tensor)


def flags(site: Site) -> Iterator[Mutation]:
    """When a stored tensor is gathered and its gradient reduced."""
    tensor = site.redistribute.tensor
    storage = site.plan.stage.storage.get(tensor)
    for regather in (False, True):
        for reduce in (False, True):
            other = storage and replace(storage, regather=regather, reduce_each_microbatch=reduce)
            if other is not None and other != storage:
                what = f"{site}: regather={regather}, reduce_each_microbatch={reduce}"
                yield Mutation(what, storage={tensor: other})


STRICT = (drop, drop_step, swap_step, move_step, swap_target, swap_source)
CONSISTENT = (reorder, detour, in_parts, drop_for_readers, drop_step_for_readers, swap_for_readers, swap_reader_rule,
              swap_source_rule, flags)  # fmt: skip


def swap_rule(graph: Graph, plan: Plan, node: Node) -> Iterator[Mutation]:
    """The node by each other rule of its operator on each axis, rerouted."""
    before = plan.stage.nodes[node.name]
    for axis in range(len(plan.stage.axes)):
        own = AxisRule(tuple(p[axis] for p in before.operands), tuple(p[axis] for p in before.results))
        for rule in axis_rules(graph, node):
            if rule == own:
                continue
            operands = (left_at(p, axis, t) for p, t in zip(before.operands, rule.operands, strict=True))
            results = (left_at(p, axis, t) for p, t in zip(before.results, rule.results, strict=True))
            other = NodePlan(tuple(operands), tuple(results))
            text = f"{', '.join(map(str, rule.operands))} -> {', '.join(map(str, rule.results))}"
            yield from rerouted(
                graph, plan, Mutation(f"{node.name} by {text} on axis {axis}", nodes={node.name: other})
            )


def swap_given(graph: Graph, plan: Plan, tensor: str) -> Iterator[Mutation]:
    """A stored tensor or an input in each other type on each axis, rerouted."""
    storage = plan.stage.storage.get(tensor)
    placement = storage.placement if storage else plan.stage.inputs[tensor]
    for axis in range(len(plan.stage.axes)):
        for type_ in all_types(graph, tensor, placement[axis]):
            other = left_at(placement, axis, type_)
            what = f"{tensor} given as {format_placement(other)}"
            if storage:
                mutation = Mutation(what, storage={tensor: replace(storage, placement=other)})
            else:
                mutation = Mutation(what, inputs={tensor: other})
            yield from rerouted(graph, plan, mutation)


def rerouted(graph: Graph, plan: Plan, mutation: Mutation) -> Iterator[Mutation]:
    """The mutation with conversions to all placements that are wanted then; nothing where there is no way."""
    changed = mutation.apply(plan)
    old, new = sources(graph, plan), sources(graph, changed)
    conversions: dict[Value, Redistribute | None] = {}
    existing = [(r.tensor, r.target) for r in plan.stage.redistributes]
    for tensor in sorted(mutation.around(graph)):
        wanted = _wanted(graph, changed, tensor)
        stale = [value for value in existing if value[0] == tensor and value not in wanted]
        conversions.update(dict.fromkeys(stale))
        for value in wanted:
            if value == (tensor, new[tensor]) or (old[tensor] == new[tensor] and value in existing):
                continue
            steps = _way(new[tensor], value[1])
            if steps is None:
                return
            conversions[value] = Redistribute(*value, steps)
        if (tensor, new[tensor]) in existing:
            conversions[tensor, new[tensor]] = None
    yield replace(mutation, conversions=conversions)


def _wanted(graph: Graph, plan: Plan, tensor: str) -> list[Value]:
    read = [(tensor, plan.stage.nodes[node.name].operands[position]) for node, position in graph.consumers[tensor]]
    if tensor in (*graph.outputs, *graph.mutations.values()):
        read.append((tensor, output_placement(graph, plan.stage, tensor)))
    return list(dict.fromkeys(read))


def _way(source: Placement, target: Placement) -> tuple[Step, ...] | None:
    return cheapest_path(source, target, lambda placement, step: 1)


def mutations(graph: Graph, plan: Plan) -> list[Mutation]:
    """All mutations of a plan, each once. A plan without redistributions is mutated at every operator and tensor."""
    found: list[Mutation] = []
    for site in sites(graph, plan):
        for mutate in (*STRICT, *CONSISTENT):
            found += mutate(site)
    if not plan.stage.redistributes:
        for node in graph.nodes:
            found += swap_rule(graph, plan, node)
        for tensor in (*plan.stage.inputs, *plan.stage.storage):
            found += swap_given(graph, plan, tensor)
    return list({mutation.key: mutation for mutation in found}.values())
