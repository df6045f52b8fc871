"""A plan with branches put at coordinates of an axis: before → after.

    before   every rank of the axis runs a share of each operator, as the plan says
    after    an operator of a branch runs on one coordinate: operands R (P from the same branch) → results P on the axis

On the other axes all stays as it is. What enters and leaves is redistributed anew, by the cheapest steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.errors import PlacementError
from autopar.ir.branches import Home, axis_position, homes, in_order
from autopar.ir.conversions import needed_conversions
from autopar.ir.graph import Graph
from autopar.ir.placement import I, P, Placement, R, Type
from autopar.ir.plan import Fork, NodePlan, Plan, Redistribute, Stage, Storage
from autopar.ir.redistribution import Path, Step
from autopar.ir.verifier import ending

Joins = Mapping[str, str]
"""Operators that read what branches make, and run on summands on the axis."""


def put_in_branches(
    graph: Graph, plan: Plan, forks: Iterable[Fork], path: Path, keeps_whole: bool = False, joins: Joins | None = None,
) -> Plan:  # fmt: skip
    """The plan with further forks.

    keeps_whole: parameters that branches alone read are stored whole on the axis, not as they were. joins: operators
    that then read and make P on the axis.
    Raises PlacementError where something cannot be brought to where it is read.
    """
    before = plan.stage
    after = replace(before, forks=(*before.forks, *forks))
    known, forked = homes(after), homes(before)
    nodes = {name: _moved(graph, after, name, known[name]) for name in known if name not in forked}
    nodes |= {name: _all_summands(before, name, axis) for name, axis in (joins or {}).items()}
    after = replace(after, nodes={**before.nodes, **nodes})
    if keeps_whole:
        after = replace(after, storage=_kept_whole(graph, after, known))
    return replace(plan, stages=(replace(after, redistributes=_redistributes(graph, after, path)),))


def _moved(graph: Graph, stage: Stage, name: str, home: Home) -> NodePlan:
    """What a node of a branch reads and makes."""
    node, position = graph.node_by_name[name], axis_position(stage.axes, home.axis)
    inside = {tensor for other in stage.forks[home.fork].branches[home.branch].nodes
              for tensor in graph.node_by_name[other].results}  # fmt: skip
    old = stage.nodes[name]
    operands = [_with(p, position, P if tensor in inside else R)
                for tensor, p in zip(node.operands, old.operands, strict=True)]  # fmt: skip
    return NodePlan(tuple(operands), tuple(_with(p, position, P) for p in old.results))


def _all_summands(stage: Stage, name: str, axis: str) -> NodePlan:
    position, old = axis_position(stage.axes, axis), stage.nodes[name]
    operands, results = (tuple(_with(p, position, P) for p in side) for side in (old.operands, old.results))
    return NodePlan(operands, results)


def _with(placement: Placement, position: int, type_: Type) -> Placement:
    return (*placement[:position], type_, *placement[position + 1 :])


def _kept_whole(graph: Graph, stage: Stage, known: Mapping[str, Home]) -> dict[str, Storage]:
    storage = dict(stage.storage)
    for name, kept in stage.storage.items():
        readers = {known.get(node.name) for node, _ in graph.consumers[name]}
        home = readers.pop() if len(readers) == 1 else None
        if home is not None:
            whole = I if graph.tensors[name].differentiable else R
            storage[name] = replace(kept, placement=_with(kept.placement, axis_position(stage.axes, home.axis), whole))
    return storage


def _redistributes(graph: Graph, stage: Stage, path: Path) -> tuple[Redistribute, ...]:
    """Steps that the plan has already stay as they are."""
    known = {(item.tensor, item.target): item.steps for item in stage.redistributes}
    entering = dict(stage.inputs) | {name: kept.placement for name, kept in stage.storage.items()}
    found = []
    for name, source, target in needed_conversions(in_order(graph, stage), stage.nodes, entering, ending(graph, stage)):
        steps = known.get((name, target), ())
        if not _leads(steps, source, target):
            steps = path(graph.tensors[name], source, target) or ()
        if not steps:
            raise PlacementError(f"expected a way for {name} from {source} to {target}, found none")
        found.append(Redistribute(name, target, steps))
    return tuple(found)


def _leads(steps: tuple[Step, ...], source: Placement, target: Placement) -> bool:
    """Whether the steps lead from one placement to another."""
    for step in steps:
        if source[step.axis] != step.before:
            return False
        source = _with(source, step.axis, step.after)
    return source == target
