"""Plans whose products compute beside what they send, instead of before and after it (asynchronous tensor parallelism).

    before   x S(d) → R, linear with weights S(0)         linear with weights S(1), its summands P → S(d)
    after    x S(d), gathered_linears with the same       scattered_linear with the same → S(d)

What is alike, in what it computes and where it lies, is changed together. Nothing else of the plan changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.cost.collectives import redistribution
from autopar.errors import PlacementError, PlanError
from autopar.ir.conversions import Conversion, needed_conversions
from autopar.ir.graph import IDENTITY, Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.placement import P, Placement, R, S, Type
from autopar.ir.plan import NodePlan, Plan, Redistribute, Stage, Substitution
from autopar.ir.schedule import SCHEDULES
from autopar.microbatch import check_plan, divided_graph
from autopar.ops import call_key, coverage
from autopar.profiler import profile_of
from autopar.step import simulated_again
from autopar.substitute.async_linears import (
    GATHER_RULE,
    GATHER_STATEMENT,
    SCATTER_RULE,
    SCATTER_STATEMENT,
    is_linear,
    siblings,
    together,
    with_gathers,
    with_scatters,
)


class RowSending(NamedTuple):
    """Linear operators around which rows travel: of one tensor whose rows are gathered for them, or one whose summands
    are scattered; along which axis (by position) of their stage, and which dim. shared: of rows that are
    gathered, the operator that passes them on to all, "" where there is none; None of summands."""

    names: tuple[str, ...]
    axis: int
    dim: int
    shared: str | None

    @property
    def gathers(self) -> bool:
        """Whether rows are."""
        return self.shared is not None


def kinds_of_sending(graph: Graph, plan: Plan, apart: bool = True) -> list[list[RowSending]]:
    """Those of a plan that may compute beside what they send, by what is alike. None of a plan whose backward pass
    comes in two parts, in which products would be asked for twice. apart: rows come for each large product by itself
    (`substitute.async_linears.together`), not once for all."""
    if SCHEDULES[plan.schedule].splits_backward or SCHEDULES[plan.schedule].splits_some:
        return []
    graph = divided_graph(graph, plan.microbatches)
    found = dict[object, list[RowSending]]()
    for stage in plan.stages:
        forked = {name for fork in stage.forks for branch in fork.branches for name in branch.nodes}
        for one in _in_stage(graph, stage, forked, apart):
            calls = tuple(call_key(graph, graph.node_by_name[name]) for name in one.names)
            placed = tuple(stage.nodes[name] for name in one.names)
            found.setdefault((calls, placed, stage.axes, one.axis, one.dim, one.gathers), []).append(one)
    return [*found.values()]


def beside_products(graph: Graph, plan: Plan, sent: Iterable[RowSending]) -> tuple[Graph, Plan]:
    """The graph in which these are told, and the plan in which they send so, not simulated yet. Raises PlanError or
    PlacementError where one cannot."""
    sent = [*sent]
    gathers = [one for one in sent if one.gathers]
    told, steps = graph, list[Substitution]()
    if gathers:
        names = tuple(name for one in gathers for name in one.names)
        groups = " ".join(str(len(one.names)) for one in gathers)
        told = with_gathers(told, names, groups)
        steps.append(_substitution(graph, GATHER_RULE, GATHER_STATEMENT, names, {"groups": groups}))
    for dim in sorted({one.dim for one in sent if not one.gathers}):
        names = tuple(one.names[0] for one in sent if not one.gathers and one.dim == dim)
        told = with_scatters(told, names, dim)
        steps.append(_substitution(graph, SCATTER_RULE, SCATTER_STATEMENT, names, {"dim": dim}))
    by_name = {one.names[0]: one for one in sent}
    gone = {name for one in gathers for name in one.names[1:]}
    plan = replace(
        plan,
        fingerprint=told.fingerprint,
        stages=tuple(_sending(told, stage, by_name, gone, plan.mesh) for stage in plan.stages),
        recompute=_still_again(plan.recompute, gathers),
        substitutions=(*plan.substitutions, *steps),
        coverage=coverage(told),
        scopes={name: _scope(told, name, text) for name, text in plan.scopes.items() if name not in gone},
        choices=tuple(choice for choice in plan.choices if choice.name not in by_name and choice.name not in gone),
    )
    return told, plan


def with_async_tp(graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """The same for all that may, predicted: with rows that come for each large product by itself, or once for all,
    whichever is faster. Raises PlanError where nothing may."""
    found = list[tuple[Graph, Plan]]()
    for apart in (True, False):
        every = [one for kind in kinds_of_sending(graph, plan, apart) for one in kind]
        if not every:
            raise PlanError(
                "expected products between which rows are split by tensor-parallel ranks for async_tp, found none in "
                "this plan; give tp=2 or more with sequence_parallel=True, and a schedule of whole backward passes"
            )
        told, changed = beside_products(graph, plan, every)
        check_plan(told, changed)
        found.append((told, simulated_again(changed, told)))
    return min(found, key=lambda one: one[1].predicted.step_time_ns)


# Finding them ----------------------------------------


def _in_stage(graph: Graph, stage: Stage, forked: Collection[str], apart: bool) -> Iterator[RowSending]:
    made = _made(graph, stage)
    seen = set[str]()
    for name in stage.nodes:
        node = graph.node_by_name[name]
        if name in seen or name in forked or not is_linear(graph, node):
            continue
        found = _gather(graph, stage, node, made) or _scatter(graph, stage, node)
        if found is not None and set(found.names).isdisjoint(forked):
            seen.update(found.names)
            groups = together(graph, found.names, apart) if found.gathers else [found.names]
            yield from (found._replace(names=group) for group in groups)


def _made(graph: Graph, stage: Stage) -> dict[str, Placement]:
    """Where each tensor of a stage lies as it is made or comes in."""
    found = dict(stage.inputs) | {name: kept.placement for name, kept in stage.storage.items()}
    for name, placed in stage.nodes.items():
        found.update(zip(graph.node_by_name[name].results, placed.results, strict=True))
    return found


def _gather(graph: Graph, stage: Stage, node: Node, made: Mapping[str, Placement]) -> RowSending | None:
    shared = _passed_on(graph, stage, node.operands[0])
    read = made[node.operands[0] if shared is None else shared.operands[0]]
    for place, axis in enumerate(stage.axes):
        if axis.size == 1 or read[place].kind != "S" or stage.nodes[node.name].operands[1][place] != S(0):
            continue
        names = siblings(graph, node.name) if _is_even(graph, stage, node.operands[0], read, place) else ()
        plans = [stage.nodes.get(name) for name in names]
        if names and all(own is not None and _reads_rows(own, plans[0], place) for own in plans):
            return RowSending(names, place, read[place].dim, "" if shared is None else shared.name)
    return None


def _is_even(graph: Graph, stage: Stage, tensor: str, placement: Placement, axis: int) -> bool:
    """Whether an axis alone splits a dim, which is not the last, into equal parts."""
    dim, own, shape = placement[axis].dim, stage.axes[axis], graph.tensors[tensor].shape
    alone = all(type_ != placement[axis] or place == axis for place, type_ in enumerate(placement))
    return alone and not own.shares and dim < len(shape) - 1 and shape[dim] % own.size == 0


def _passed_on(graph: Graph, stage: Stage, tensor: str) -> Node | None:
    """The operator that passes a tensor on to several (`ir.graph.IDENTITY`), where one makes it: rows are gathered
    before it."""
    node = graph.producers.get(tensor)
    return node if node is not None and node.op == IDENTITY and node.name in stage.nodes else None


def _reads_rows(own: NodePlan, first: NodePlan | None, axis: int) -> bool:
    """Whether it reads whole rows on an axis that splits its results, and all else as the first of its siblings."""
    stored = {placement[axis] for placement in own.operands[1:]}
    return (
        first is not None and own.operands[0] == first.operands[0] and own.operands[0][axis] == R and stored == {S(0)}
    )


def _scatter(graph: Graph, stage: Stage, node: Node) -> RowSending | None:
    placed, name = stage.nodes[node.name], node.results[0]
    for place, axis in enumerate(stage.axes):
        if axis.size == 1 or placed.operands[1][place] != S(1) or placed.results[0][place] != P:
            continue
        wanted = _read_as(graph, stage, name, place)
        if wanted is None or wanted.kind != "S":
            continue
        if _is_even(graph, stage, name, _with(placed.results[0], place, wanted), place):
            return RowSending((node.name,), place, wanted.dim, None)
    return None


def _read_as(graph: Graph, stage: Stage, tensor: str, axis: int) -> Type | None:
    """How all that read a tensor, in its stage, want it on an axis; None where they differ, or others read it, too."""
    readers = [(reader.name, position) for reader, position in graph.consumers[tensor]]
    if (
        tensor in graph.outputs
        or tensor in graph.mutations.values()
        or any(name not in stage.nodes for name, _ in readers)
    ):
        return None
    wanted = {stage.nodes[name].operands[position][axis] for name, position in readers}
    return wanted.pop() if len(wanted) == 1 else None


# Changing the plan ----------------------------------------


def _substitution(
    graph: Graph, rule: str, statement: str, names: tuple[str, ...], binding: Mapping[str, Any]
) -> Substitution:
    modules = tuple(graph.node_by_name[name].scope.module for name in names)
    return Substitution(rule, statement, "proved", "", modules, names, binding)


def _still_again(recompute: tuple[str, ...], gathers: Iterable[RowSending]) -> tuple[str, ...]:
    """Operators that are told together are computed again where all of them were."""
    asked = set(recompute)
    for one in gathers:
        if not asked.issuperset(one.names):
            asked -= {*one.names}
        asked -= {*one.names[1:]}
    return tuple(name for name in recompute if name in asked)


def _scope(graph: Graph, name: str, text: str) -> str:
    node = graph.node_by_name.get(name)
    return text if node is None else f"{node.scope.module}|{node.op}|{node.source.replace('|', '¦')}"


def _sending(graph: Graph, stage: Stage, sent: Mapping[str, RowSending], gone: Collection[str], mesh: Mesh) -> Stage:
    """A stage in which these, by name of the first, send so. What they read and make is brought anew to who reads it;
    all else as it was."""
    nodes, moved = dict[str, NodePlan](), set[str]()
    passing = {one.shared: one for one in sent.values() if one.shared}
    for name, placed in stage.nodes.items():
        if name in sent:
            one, node = sent[name], graph.node_by_name[name]
            nodes[name] = _gathered(stage, one) if one.gathers else _scattered(placed, one)
            moved |= {node.operands[0]} if one.gathers else {*node.results, *node.operands[2:]}
        elif name in passing:
            one, node = passing[name], graph.node_by_name[name]
            read, made = (_with(side[0], one.axis, S(one.dim)) for side in (placed.operands, placed.results))
            nodes[name] = NodePlan((read,), (made,))
            moved |= {*node.operands, *node.results}
        elif name not in gone:
            nodes[name] = placed
    kept = tuple(old for old in stage.redistributes if old.tensor not in moved)
    stage = replace(stage, nodes=nodes)
    order = [node for node in graph.nodes if node.name in nodes]
    entering = dict(stage.inputs) | {name: stored.placement for name, stored in stage.storage.items()}
    anew = [one for one in needed_conversions(order, nodes, entering, ()) if one.tensor in moved]
    return replace(stage, redistributes=(*kept, *(_brought(graph, stage, one, mesh) for one in anew)))


def _brought(graph: Graph, stage: Stage, one: Conversion, mesh: Mesh) -> Redistribute:
    tensor, profile = graph.tensors[one.tensor], profile_of(mesh)
    route = redistribution(
        tensor.shape, tensor.itemsize, one.source, one.target, stage.axes, mesh.devices_per_node, profile,
        tensor.differentiable,
    )  # fmt: skip
    if route is None:
        raise PlacementError(f"expected a way for {one.tensor} from {one.source} to {one.target}, found none")
    return Redistribute(one.tensor, one.target, route.steps)


def _gathered(stage: Stage, one: RowSending) -> NodePlan:
    plans = [stage.nodes[name] for name in one.names]
    rows = _with(plans[0].operands[0], one.axis, S(one.dim))
    weights, biases = (tuple(own.operands[place] for own in plans if len(own.operands) > place) for place in (1, 2))
    return NodePlan((rows, *weights, *biases), tuple(own.results[0] for own in plans))


def _scattered(placed: NodePlan, one: RowSending) -> NodePlan:
    rows, weight, *bias = placed.operands
    whole = (_with(placement, one.axis, R) for placement in bias)
    return NodePlan((rows, weight, *whole), (_with(placed.results[0], one.axis, S(one.dim)),))


def _with(placement: Placement, axis: int, type_: Type) -> Placement:
    return (*placement[:axis], type_, *placement[axis + 1 :])
