"""The step at the 99th percentile of routings, beside its mean: where experts are routed, a step is a distribution.

A step is simulated with the load that the busiest rank has in the mean, and again with that of all but one routing in a
hundred, in every layer and microbatch at once. Layers choose experts independently of each other and are seldom busiest
together, so that a step takes less than that: of what the second takes beyond the first, the part that the sum over
layers has at its 99th percentile (`ops.loads.excess_of_sum`). A layer's microbatches are taken to be alike. Of several
stages the slowest counts, and the one with fewest layers of experts. Memory is counted with every layer at its most.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.graph import EXPECTED, Graph, Node
from autopar.ir.placement import S
from autopar.ir.plan import Plan, Stage
from autopar.ir.routing import BALANCED, P99, Routing
from autopar.microbatch import divided_graph
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.loads import excess_of_sum
from autopar.ops.replicas import replicas_of
from autopar.profiler import profiles_of
from autopar.simulate import simulate


def with_p99(plan: Plan, graph: Graph) -> Plan:
    """The plan with its step at the 99th percentile, where experts are routed. graph: the plan's, of a whole batch."""
    if all(node.op != ROUTED_EXPERTS for node in graph.nodes):
        return plan
    part = divided_graph(at_p99(graph), plan.microbatches)
    mean_ns = plan.predicted.step_time_ns
    beyond_ns = max(0, simulate(part, plan, profiles_of(plan.mesh)).step_time_ns - mean_ns)
    step_ns = mean_ns + round(beyond_ns * _excess(plan, graph))
    return replace(plan, predicted=replace(plan.predicted, step_time_p99_ns=step_ns))


def _excess(plan: Plan, graph: Graph) -> float:
    """Of all layers at their 99th percentile, what is left where they are not there together: the most of any stage."""
    found = [own for own in (_routed_in(stage, graph) for stage in plan.stages) if own]
    return max(
        (
            excess_of_sum(*_drawn_from(stage, graph, node, plan.microbatches), len(own), len(found), replicas_of(node))
            for own in found
            for stage, node in own[:1]
        ),
        default=1.0,
    )


def _routed_in(stage: Stage, graph: Graph) -> list[tuple[Stage, Node]]:
    return [(stage, node) for node in graph.nodes if node.op == ROUTED_EXPERTS and node.name in stage.nodes]


def _drawn_from(stage: Stage, graph: Graph, node: Node, microbatches: int) -> tuple[Routing, int, int, int, int]:
    """What the load of an operator's busiest rank is drawn from."""
    operands, axes = stage.nodes[node.name].operands, stage.axes
    tokens, choices = graph.tensors[node.operands[1]].shape
    apart = math.prod(
        axis.size for axis, ids, up in zip(axes, operands[1], operands[3], strict=True) if ids == S(0) != up
    )
    ranks = math.prod(axis.size for axis, up in zip(axes, operands[3], strict=True) if up == S(0))
    routing = Routing.parse(dict(node.kwargs).get(EXPECTED, BALANCED))
    return routing, max(1, tokens // microbatches // apart), choices, int(node.args[7]), ranks


def at_p99(graph: Graph) -> Graph:
    """The graph whose routed experts have the loads of the 99th percentile."""
    return replace(graph, nodes=tuple(map(_at_p99, graph.nodes)))


def _at_p99(node: Node) -> Node:
    if node.op != ROUTED_EXPERTS:
        return node
    given = dict(node.kwargs)
    text = given.get(EXPECTED, BALANCED).removesuffix(P99) + P99
    return replace(node, kwargs=tuple({**given, EXPECTED: text}.items()))
