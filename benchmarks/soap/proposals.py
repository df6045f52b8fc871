"""Random well-typed proposals: one operator's placements, or how one tensor is stored, changed in one layer or in all.

What a proposal leaves alone stays the very object that it was, as in a search.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.errors import PlacementError
from autopar.intraop.strategies import permitted
from autopar.ir.graph import Graph, Node
from autopar.ir.placement import I, Placement, R, S, leaves_none_empty
from autopar.ir.plan import NodePlan, Plan, Redistribute, Storage
from autopar.ir.redistribution import Step as Step
from autopar.ir.redistribution import cheapest_path, transfer_bytes
from autopar.ops import admits, axis_rules
from autopar.ops.notation import AxisRule
from autopar.planning import DividedGraph
from autopar.simulate.facts import graph_facts
from autopar.zero import recomputable

_TRIES = 20


class Proposer:
    """Proposals for plans of one microbatch of a part. equal: what changes does in all equal layers at once."""

    def __init__(self, part: DividedGraph, plan: Plan, seed: int = 0) -> None:
        self.part, self.graph, self.axes, self._rng = part, part.graph, plan.stage.axes, random.Random(seed)
        self._twins = _twins(part.graph, plan)
        self._known: dict[tuple[str, Placement, Placement], Redistribute | None] = {}
        self._rules: dict[str, Sequence[AxisRule]] = {}
        paths = [path for group in part.blocks.paths for path in group] if plan.mode == "train" else []
        again = recomputable(part.whole, paths)
        self._blocks = [groups for groups in (again.full, again.attention) if groups]

    def propose(self, plan: Plan, equal: bool = False, stores: float = 0.2, recomputes: float = 0.02) -> Plan:
        """A plan that differs from the one given; stores, recomputes: how often a stored tensor's storage does, or what
        is computed again."""
        while True:
            if self._blocks and self._rng.random() < recomputes:
                return self._recomputed(plan, equal)
            changed = self._storage(plan, equal) if self._rng.random() < stores else self._operator(plan, equal)
            if changed is not None:
                return changed

    def _operator(self, plan: Plan, equal: bool) -> Plan | None:
        node = self._rng.choice([node for node in self.graph.nodes if node.operands])
        old = plan.stage.nodes[node.name]
        for _ in range(_TRIES):
            new = self._random(node, old)
            if new != old and self._fits(node, new):
                twins = self._twins[node.name] if equal else [node.name]
                return self._redone(plan.placed(nodes={**plan.stage.nodes, **dict.fromkeys(twins, new)}))
        return None

    def _recomputed(self, plan: Plan, equal: bool) -> Plan:
        """One layer, or a part of it, is computed again that was not, or no more; all equal ones."""
        groups = self._rng.choice(self._blocks)
        own = [module for group in (groups if equal else [self._rng.choice(groups)]) for module in group]
        again = plan.recompute
        if set(own) <= set(again):
            return replace(plan, recompute=tuple(module for module in again if module not in own))
        kept = [module for module in again if not any(_is_around(module, m) or _is_around(m, module) for m in own)]
        return replace(plan, recompute=(*kept, *own))

    def _random(self, node: Node, old: NodePlan) -> NodePlan:
        """Another rule on one axis."""
        rules = self._rules.get(node.name)
        if rules is None:
            rules = self._rules[node.name] = axis_rules(self.part.whole, node)
        rule, at = self._rng.choice(rules), self._rng.randrange(len(self.axes))

        def changed(placements: tuple[Placement, ...], types: Sequence[object]) -> tuple[Placement, ...]:
            pairs = zip(placements, types, strict=True)
            return tuple((*placement[:at], type_, *placement[at + 1 :]) for placement, type_ in pairs)  # type: ignore[misc]

        return NodePlan(changed(old.operands, rule.operands), changed(old.results, rule.results))

    def _fits(self, node: Node, plan: NodePlan) -> bool:
        ends = {*self.graph.outputs, *self.graph.mutations.values()}
        for name, placement in zip(node.results, plan.results, strict=True):
            constraints = [c for c in self.part.constraints if c.matches(name)]
            if not all(permitted(constraint, placement, self.axes) for constraint in constraints):
                return False
            if name in ends and any(type_.kind == "P" for type_ in placement):
                return False
        pairs = zip((*node.operands, *node.results), (*plan.operands, *plan.results), strict=True)
        if not all(
            leaves_none_empty(self.graph.tensors[name].shape, placement, self.axes) for name, placement in pairs
        ):
            return False
        return admits(self.part.whole, node, plan.operands, plan.results, self.axes) is None

    def _storage(self, plan: Plan, equal: bool) -> Plan | None:
        stored = self._rng.choice(self.graph.stored)
        tensor, is_trained = self.graph.tensors[stored.tensor], stored.kind == "parameter"
        if stored.name in self.graph.mutations:
            return None
        whole, dims = (I if tensor.differentiable else R), range(len(tensor.shape))
        placement = tuple(S(self._rng.choice(dims)) if dims and self._rng.random() < 0.5 else whole for _ in self.axes)
        if not leaves_none_empty(tensor.shape, placement, self.axes):
            return None
        flags = [(False, False), (True, True), (False, True)]
        is_cut = is_trained and any(type_.kind == "S" for type_ in placement)
        new = Storage(placement, *(self._rng.choice(flags) if is_cut else flags[0]))
        if new == plan.stage.storage[stored.tensor]:
            return None
        twins = self._twins[stored.tensor] if equal else [stored.tensor]
        return self._redone(plan.placed(storage={**plan.stage.storage, **dict.fromkeys(twins, new)}))

    def _redone(self, plan: Plan) -> Plan | None:
        """With the conversions that it needs; None where there is no way."""
        placements = dict(plan.stage.inputs) | {name: kept.placement for name, kept in plan.stage.storage.items()}
        found: dict[tuple[str, Placement], Redistribute] = {}
        for name, wanted in self._needs(plan, placements):
            if placements[name] != wanted and (name, wanted) not in found:
                conversion = self._conversion(name, placements[name], wanted)
                if conversion is None:
                    return None
                found[name, wanted] = conversion
        return plan.placed(redistributes=tuple(found.values()))

    def _needs(self, plan: Plan, placements: dict[str, Placement]) -> Iterator[tuple[str, Placement]]:
        for node in self.graph.nodes:
            yield from zip(node.operands, plan.stage.nodes[node.name].operands, strict=True)
            placements.update(zip(node.results, plan.stage.nodes[node.name].results, strict=True))
        for name in (*self.graph.outputs, *self.graph.mutations.values()):
            yield name, (I if self.graph.tensors[name].differentiable else R,) * len(self.axes)

    def _conversion(self, name: str, have: Placement, wanted: Placement) -> Redistribute | None:
        key = name, have, wanted
        if key not in self._known:
            tensor = self.graph.tensors[name]

            def cost(placement: Placement, step: Step) -> int:
                return sum(transfer_bytes(tensor.shape, tensor.itemsize, placement, self.axes, step))

            try:
                steps = cheapest_path(have, wanted, cost)
            except PlacementError:
                steps = None
            self._known[key] = None if steps is None else Redistribute(name, wanted, steps)
        return self._known[key]


def _is_around(module: str, other: str) -> bool:
    return f"{other}.".startswith(f"{module}.")


def _twins(graph: Graph, plan: Plan) -> dict[str, list[str]]:
    """For each node and stored tensor, those at its place in equal layers, itself included."""
    places = graph_facts(graph, "cuda").twins(plan.blocks)
    nodes: dict[object, list[str]] = defaultdict(list)
    for node in graph.nodes:
        nodes[places.get(node.name, node.name)].append(node.name)
    found = {name: names for names in nodes.values() for name in names}
    for names in nodes.values():
        for operands in zip(*(graph.node_by_name[name].operands for name in names), strict=True):
            if operands[0] in graph.stored_by_tensor:
                together = [*dict.fromkeys(operands)]
                found.update((name, together) for name in operands)
    return found | {s.tensor: [s.tensor] for s in graph.stored if s.tensor not in found}
