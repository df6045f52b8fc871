"""The step at the 99th percentile of routings, beside its mean: where experts are routed, a step is a distribution.

`step_time_p99_ns` is simulated with the load that the busiest rank has in all but one routing in a hundred, in every
layer and microbatch at once: layers that are seldom busiest together take less. Memory is counted so in any case.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import EXPECTED, Graph, Node
from autopar.ir.plan import Plan
from autopar.ir.routing import BALANCED, P99
from autopar.microbatch import divided_graph
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.profiler import profiles_of
from autopar.simulate import simulate


def with_p99(plan: Plan, graph: Graph) -> Plan:
    """The plan with its step at the 99th percentile, where experts are routed. graph: the plan's, of a whole batch."""
    if all(node.op != ROUTED_EXPERTS for node in graph.nodes):
        return plan
    part = divided_graph(at_p99(graph), plan.microbatches)
    step_ns = simulate(part, plan, profiles_of(plan.mesh)).step_time_ns
    return replace(plan, predicted=replace(plan.predicted, step_time_p99_ns=max(step_ns, plan.predicted.step_time_ns)))


def at_p99(graph: Graph) -> Graph:
    """The graph whose routed experts have the loads of the 99th percentile."""
    return replace(graph, nodes=tuple(map(_at_p99, graph.nodes)))


def _at_p99(node: Node) -> Node:
    if node.op != ROUTED_EXPERTS:
        return node
    given = dict(node.kwargs)
    text = given.get(EXPECTED, BALANCED).removesuffix(P99) + P99
    return replace(node, kwargs=tuple({**given, EXPECTED: text}.items()))
