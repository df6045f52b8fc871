"""exchange: the best plan whose tokens travel to experts → the same in as many chunks as are fastest; and templates of
expert parallelism, so that none of one line beats the answer.

Chunks let experts compute beside what travels, and start more collectives. No placement depends on them, so that
nothing is solved again: each number is a simulation. More chunks are tried while they gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autopar.clock import is_interrupted
from autopar.driver import Candidate, Context, Front, of_plan, outline_of
from autopar.errors import AutoparError
from autopar.families import faster_templates
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.ops.experts import MOST_CHUNKS, ROUTED_EXPERTS, exchanged_over
from autopar.passes.template import is_open
from autopar.rewrites import in_chunks
from autopar.simulate import predict, simulate, traffic, traffic_by_submesh
from autopar.substitute import GraphCandidate, exchanges


def experts(front: Front, context: Context) -> Iterator[Candidate]:
    """Templates of the model's own graph whose ranks share the experts, where constraints leave them open."""
    given = front.given.graph
    fewest = min((int(node.args[7]) for node in given.nodes if node.op == ROUTED_EXPERTS), default=0)
    if front.round > 1 or not fewest or not is_open(context.request):
        return
    best = front.best_of(front.given)
    rows, found = faster_templates(given, None if best is None else best.plan, context.request, experts=fewest)
    context.rows += rows
    yield from (of_plan(front.given, *one) for one in found)


def exchange(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan in chunks, where it is faster so and they are not more than one already."""
    best = front.best
    if best is None or not exchanges_tokens(best.graph, best.plan) or _is_in_chunks(best):
        return
    fastest_ns, chunks = best.step_ns, 2
    while chunks <= MOST_CHUNKS and not is_interrupted():
        found = _in_chunks(best, chunks, context)
        if found is None or found.step_ns >= fastest_ns:
            return
        yield found
        fastest_ns, chunks = found.step_ns, 2 * chunks


def exchanges_tokens(graph: Graph, plan: Plan) -> bool:
    """Whether some rank sends tokens to the experts of another."""
    layers = exchanges.routed(graph)
    return any(
        stage.axes[axis].size > 1
        for stage in plan.stages
        for name in layers
        if name in stage.nodes
        for axis in exchanged_over(stage.nodes[name].operands)
    )


def _is_in_chunks(candidate: Candidate) -> bool:
    return any(step.rule == exchanges.RULE for step in candidate.variant.steps)


def _in_chunks(best: Candidate, chunks: int, context: Context) -> Candidate | None:
    """The best plan with its tokens in so many chunks, simulated; None where it does not fit so."""
    graph, steps = in_chunks(best.graph, chunks)
    asked = Candidate(GraphCandidate(graph, (*best.variant.steps, *steps), best.variant.cost_ns))
    plan = replace(best.plan, fingerprint=graph.fingerprint)
    try:
        plan = _simulated(graph, plan, context)
    except AutoparError:
        return None
    if plan.predicted.peak_bytes > plan.memory_limit:
        return None
    return replace(of_plan(asked, outline_of(plan), plan, partial(_with_traffic, graph, plan, context)), rank=best.rank)


def _simulated(graph: Graph, plan: Plan, context: Context) -> Plan:
    part = divided_graph(graph, plan.microbatches)
    return replace(plan, predicted=predict(simulate(part, plan, context.profiles)))


def _with_traffic(graph: Graph, plan: Plan, context: Context) -> Plan:
    """The plan with the exact bytes that it sends; of several stages, of the submesh that sends most."""
    if len(plan.stages) == 1:
        by_submesh = [traffic(graph, plan)]
    else:
        played = simulate(divided_graph(graph, plan.microbatches), plan, context.profiles)
        by_submesh = traffic_by_submesh(graph, plan, played)
    sent = max(by_submesh, key=lambda counts: sum(counts.values()))
    return replace(plan, predicted=replace(plan.predicted, comm_bytes=sent))
