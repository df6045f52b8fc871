"""Templates whose ranks share the experts, each with its tokens in as many chunks as cost least: plans of a graph, or
of the same with replicas of the experts that most tokens choose, where some are busy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.clock import is_interrupted
from autopar.cost.exchanges import REPLICATED
from autopar.driver import Candidate, Context, of_plan
from autopar.families import faster_templates
from autopar.ir.graph import EXPECTED, Graph
from autopar.ir.plan import Plan
from autopar.ir.routing import BALANCED, Routing
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.loads import busiest
from autopar.rewrites import in_chunks, with_replicas
from autopar.substitute import GraphCandidate
from autopar.tunables import REPLICA_GAIN


def templates_with_experts(
    given: Candidate, context: Context, plan: Plan | None, likely_ns: float = math.inf
) -> Iterator[Candidate]:
    """Those of an open graph that may be faster than a plan, if there is one. likely_ns: as in `families.Family`."""
    nodes = [node for node in given.graph.nodes if node.op == ROUTED_EXPERTS]
    if not nodes:
        return
    fewest = min(int(node.args[7]) for node in nodes)
    yield from _found(given, plan, fewest, context, likely_ns)
    replicas = likely_replicas(given.graph, context.request.mesh.devices_per_node)
    if replicas and not is_interrupted():
        asked = Candidate(GraphCandidate(*with_replicas(given.graph, replicas), 0))
        yield from _found(asked, plan, fewest, context, likely_ns)


def _found(
    asked: Candidate, plan: Plan | None, experts: int, context: Context, likely_ns: float
) -> Iterator[Candidate]:  # fmt: skip
    """Each as a plan of the open graph, which is stated of the same in chunks."""
    rows, found = faster_templates(asked.graph, plan, context.request, experts=experts, likely_ns=likely_ns)
    context.rows += rows
    variants, own = {1: asked.variant}, asked.variant
    for one in found:
        chunks = one.template.exchange_chunks
        if chunks not in variants:
            graph, steps = in_chunks(own.graph, chunks)
            variants[chunks] = GraphCandidate(graph, (*own.steps, *steps), own.cost_ns)
        yield replace(of_plan(asked, *one[1:]), variant=variants[chunks])


def likely_replicas(graph: Graph, ranks: int) -> int:
    """Of how many experts replicas are likely to gain where so many ranks share them: one more, as long as that takes
    from the busiest rank's rows a good part at the 99th percentile. None where all are about as busy."""
    nodes = [node for node in graph.nodes if node.op == ROUTED_EXPERTS]
    fewest = min(nodes, key=lambda node: int(node.args[7]))
    routing, num_experts = Routing.parse(dict(fewest.kwargs).get(EXPECTED, "")), int(fewest.args[7])
    if routing.kind == BALANCED or ranks < 2:
        return 0
    tokens, choices = graph.tensors[fewest.operands[1]].shape

    def busiest_rows(replicas: int) -> float:
        return busiest(routing, tokens, choices, num_experts, ranks, replicas).p99

    found, rows = 0, busiest_rows(0)
    for replicas in (number for number in REPLICATED if 2 * number <= num_experts):
        fewer = busiest_rows(replicas)
        if fewer > (1 - REPLICA_GAIN) * rows:
            break
        found, rows = replicas, fewer
    return found
