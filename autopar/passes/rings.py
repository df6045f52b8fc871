"""rings: the best plan, where it splits sequences → the same with keys gathered where they pass in a ring, or the other
way about, operator by operator as a step takes less.

Graphs are opened with what attention takes by itself among the devices of a node (`contexts.by_price`). Here it is on
the axes of the plan and beside what else it does: operators that are alike are changed together, each kind once, and
stay so where the simulated step is faster and fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autopar.clock import is_interrupted
from autopar.contexts import Steps, gathered, in_rings
from autopar.driver import Candidate, Context, Front, of_plan, outline_of
from autopar.ir.graph import Graph, Node
from autopar.ir.placement import S
from autopar.ir.plan import Plan
from autopar.ops import call_key
from autopar.ops.context import CONTEXT_ATTENTION
from autopar.ops.window_attention import WINDOWED
from autopar.simulate import predict, traffic, traffic_by_submesh
from autopar.step import simulated_step
from autopar.substitute import GraphCandidate


def rings(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan changed, once no graph is open."""
    best = None if front.opened else front.best
    if best is None or not context.request.mesh.is_homogeneous or _is_pinned(context):
        return
    graph, plan, steps = best.graph, best.plan, best.variant.steps
    for names in _kinds(graph, plan):
        if is_interrupted():
            break
        changed, more = _changed(graph, names)
        other = _on(changed, plan)
        if other.predicted.step_time_ns < plan.predicted.step_time_ns and _fits(other, context):
            graph, plan, steps = changed, other, (*steps, *more)
    if graph is not best.graph:
        asked = Candidate(GraphCandidate(graph, steps, best.variant.cost_ns))
        yield replace(of_plan(asked, outline_of(plan), plan, partial(_stated, graph, plan)), rank=best.rank)


def _is_pinned(context: Context) -> bool:
    return any(rule.context is not None for rule in context.request.constraints)


def _kinds(graph: Graph, plan: Plan) -> list[list[str]]:
    """The attention operators whose keys are split by positions and have no mask: by what is priced the same."""
    found = dict[object, list[str]]()
    for stage in plan.stages:
        for name, placed in stage.nodes.items():
            node = graph.node_by_name.get(name)
            if node is None or not _has_both_ways(node):
                continue
            along = S(len(graph.tensors[node.operands[1]].shape) - 2)
            if along in placed.operands[1]:
                found.setdefault((call_key(graph, node), stage.axes, placed), []).append(name)
    return [*found.values()]


def _has_both_ways(node: Node) -> bool:
    return node.op in WINDOWED or (node.op == CONTEXT_ATTENTION and len(node.operands) == 3)


def _changed(graph: Graph, names: list[str]) -> tuple[Graph, Steps]:
    is_ring = dict(graph.node_by_name[names[0]].kwargs).get("ring", False)
    return gathered(graph, names) if is_ring else in_rings(graph, names)


def _on(graph: Graph, plan: Plan) -> Plan:
    """The plan of an equal graph with operators of the same names, simulated."""
    plan = replace(plan, fingerprint=graph.fingerprint)
    return replace(plan, predicted=predict(simulated_step(graph, plan)))


def _fits(plan: Plan, context: Context) -> bool:
    return plan.predicted.peak_bytes <= context.limit_bytes(range(1))


def _stated(graph: Graph, plan: Plan) -> Plan:
    """The plan with the bytes that it sends, of several stages those of the submesh that sends most."""
    if len(plan.stages) == 1:
        sent = traffic(graph, plan)
    else:
        sent = max(traffic_by_submesh(graph, plan, simulated_step(graph, plan)), key=lambda one: sum(one.values()))
    return replace(plan, predicted=replace(plan.predicted, comm_bytes=sent))
