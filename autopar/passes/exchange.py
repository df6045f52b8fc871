"""exchange: the best plan whose tokens travel to experts → the same in as many chunks as are fastest; and templates of
expert parallelism, so that none of one line beats the answer.

Chunks let experts compute beside what travels, and start more collectives. No placement depends on them, so that
nothing is solved again: the operators are priced in each number, and the plan is simulated in the one that is cheapest;
in more and more, as long as they gain, where an operator's ranks are no neighbours, so that it has no price. Where the
loads that the routing draws ask for different ways, the plan may read them from a table when it runs: it is taken where
it gains in their mean. And where the busiest rank has much more to do than others, replicas of the experts that most
tokens choose are priced, at the 99th percentile of the routing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from autopar.clock import is_interrupted
from autopar.cost.exchanges import (
    PlacedExperts,
    beyond_mean_ns,
    cheapest_replicas,
    placed_experts,
    priced_tables,
    prices_in_chunks,
)
from autopar.cost.slices import PlacedSlices, gain_by_load_ns, sliced_tables
from autopar.driver import Candidate, Context, Front, of_plan, outline_of
from autopar.errors import AutoparError
from autopar.ir.exchange_table import MOST_CHUNKS, ExchangeTable, ExchangeWay
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Substitution
from autopar.ir.slice_table import SliceTable
from autopar.microbatch import divided_graph
from autopar.ops.experts import exchanged_over
from autopar.ops.replicas import replicas_of
from autopar.ops.sliced import slice_table_of
from autopar.passes.shared_experts import templates_with_experts
from autopar.passes.template import bounds_stages, is_open
from autopar.rewrites import by_load, by_slices, in_chunks, with_replicas
from autopar.simulate import Timeline, predict, simulate, traffic, traffic_by_submesh
from autopar.substitute import GraphCandidate, exchanges
from autopar.substitute.backtracking import RESOLUTION

FIXED_WAY = (exchanges.LOAD_RULE, exchanges.REPLICA_RULE)
"""What a plan has that is not to be exchanged by load, or that already is."""

BY_LOAD_RULES = (exchanges.LOAD_RULE, exchanges.SLICE_RULE)
"""What a plan has whose experts get no replicas."""


def experts(front: Front, context: Context) -> Iterator[Candidate]:
    """Templates of the model's own graph whose ranks share the experts, where constraints leave them open; on many
    devices they came first (`template.outset`)."""
    if front.round <= 1 and is_open(context.request) and not bounds_stages(context):
        best = front.best_of(front.given)
        yield from templates_with_experts(front.given, context, None if best is None else best.plan)


def exchange(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan in chunks, where it is faster so and they are not more than one already."""
    best = front.best
    if best is None or not exchanges_tokens(best.graph, best.plan) or _has(best, (exchanges.RULE,)):
        return
    priced = _cheapest_chunks(best, context)
    fastest_ns, chunks = best.step_ns, priced or 2
    while 1 < chunks <= MOST_CHUNKS and not is_interrupted():
        found = _in_chunks(best, chunks, context)
        if found is None or found.step_ns >= fastest_ns:
            return
        yield found
        if priced:
            return
        fastest_ns, chunks = found.step_ns, 2 * chunks


def _cheapest_chunks(best: Candidate, context: Context) -> int | None:
    """The number of chunks in which the plan's operators together take least at their mean load; None where one has no
    price."""
    part = divided_graph(best.graph, best.plan.microbatches)
    placed = placed_experts(part, best.plan, context.profiles)
    if len(placed) < len(exchanges.routed(best.graph)):
        return None
    prices = prices_in_chunks(placed.values())
    return min(prices, key=prices.__getitem__)


def replicate(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan with replicas of the experts that most tokens choose, of as many as is fastest, or of none."""
    best = front.best
    if best is None or is_interrupted() or not exchanges_tokens(best.graph, best.plan) or _has(best, BY_LOAD_RULES):
        return
    part = divided_graph(best.graph, best.plan.microbatches)
    placed = placed_experts(part, best.plan, context.profiles)
    if len(placed) < len(exchanges.routed(best.graph)):
        return
    replicas = cheapest_replicas(placed.values())
    if replicas != max(replicas_of(one.node) for one in placed.values()):
        graph, steps = with_replicas(best.graph, replicas)
        others = tuple(step for step in best.variant.steps if step.rule != exchanges.REPLICA_RULE)
        found = _simulated_as(best, graph, (*others, *steps), context)
        if found is not None and found.step_ns < best.step_ns * (1 - RESOLUTION):
            yield found


def adapt(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan with its tokens exchanged as the load asks for, and rows or slices of experts sent as it does,
    where the routing's loads ask for several ways: as fast as it is simulated, and as much faster as the mean over
    loads is than what both take at the mean load."""
    best = front.best
    if best is None or is_interrupted() or _has(best, FIXED_WAY) or not exchanges.routed(best.graph):
        return
    graph, steps, gain_ns = _by_load(best.graph, best.plan, context)
    graph, told, more_ns = _by_slices(graph, best.plan, context)
    found = _simulated_as(best, graph, (*best.variant.steps, *steps, *told), context) if steps or told else None
    if found is None:
        return
    plan = best.plan
    gain_ns = (gain_ns + more_ns) * plan.microbatches // len({stage.first_rank for stage in plan.stages})
    if found.step_ns - gain_ns < best.step_ns * (1 - RESOLUTION):
        yield replace(found, step_ns=found.step_ns - gain_ns)


_ByLoad = tuple[Graph, tuple[Substitution, ...], int]
"""A graph with tables, what makes it, and what loads that differ gain by them beside what their mean does."""


def _by_load(graph: Graph, plan: Plan, context: Context) -> _ByLoad:
    """With the tables by which rows are exchanged, of operators whose loads ask for several ways."""
    placed = placed_experts(divided_graph(graph, plan.microbatches), plan, context.profiles)
    tables = {name: table for name, table in priced_tables(placed).items() if len(_ways(placed[name], table)) > 1}
    gain_ns = sum(
        beyond_mean_ns(placed[name], _as_it_is(placed[name]), placed[name].loads)
        - beyond_mean_ns(placed[name], table, placed[name].loads)
        for name, table in tables.items()
    )  # fmt: skip
    return *by_load(graph, tables), gain_ns


def _ways(one: PlacedExperts, table: ExchangeTable) -> set[tuple[str, int]]:
    """Those that the routing's loads ask for."""
    return {table.at(rows)[1:] for rows in one.loads}


def _differs(one: PlacedExperts, table: SliceTable) -> bool:
    """Whether another way than that which it goes now is asked for by some of the routing's loads."""
    now = slice_table_of(one.node)
    return any(now.at(rows) != table.at(rows) for rows in one.loads)


def _by_slices(graph: Graph, plan: Plan, context: Context) -> _ByLoad:
    """With the tables by which rows or slices of experts travel, where some load asks for another
    way than what the operator does."""
    placed = placed_experts(divided_graph(graph, plan.microbatches), plan, context.profiles, PlacedSlices)
    tables = {name: own for name, own in sliced_tables(placed).items() if _differs(placed[name], own)}
    gain_ns = sum(
        gain_by_load_ns(one, tables[name]) for name, one in placed.items() if name in tables
    )  # fmt: skip
    return *by_slices(graph, tables), gain_ns


def _as_it_is(one: PlacedExperts) -> ExchangeTable:
    """The one way of an operator that exchanges the same at any load."""
    return ExchangeTable((ExchangeWay(0, one.along_axes, int(dict(one.node.kwargs).get("chunks", 1))),))


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


def _has(candidate: Candidate, rules: Collection[str]) -> bool:
    return any(step.rule in rules for step in candidate.variant.steps)


def _in_chunks(best: Candidate, chunks: int, context: Context) -> Candidate | None:
    """The best plan with its tokens in so many chunks, simulated; None where it does not fit so."""
    graph, steps = in_chunks(best.graph, chunks)
    return _simulated_as(best, graph, (*best.variant.steps, *steps), context)


def _simulated_as(best: Candidate, graph: Graph, steps: tuple[Substitution, ...], context: Context) -> Candidate | None:
    """The best plan for another graph, simulated; None where it does not fit so."""
    asked = Candidate(GraphCandidate(graph, steps, best.variant.cost_ns))
    plan = replace(best.plan, fingerprint=graph.fingerprint)
    try:
        played = simulate(divided_graph(graph, plan.microbatches), plan, context.profiles)
    except AutoparError:
        return None
    plan = replace(plan, predicted=predict(played))
    if plan.predicted.peak_bytes > plan.memory_limit:
        return None
    return replace(of_plan(asked, outline_of(plan), plan, partial(_with_traffic, graph, plan, played)), rank=best.rank)


def _with_traffic(graph: Graph, plan: Plan, played: Timeline) -> Plan:
    """The plan with the exact bytes that it sends; of several stages, of the submesh that sends most."""
    by_submesh = [traffic(graph, plan)] if len(plan.stages) == 1 else traffic_by_submesh(graph, plan, played)
    sent = max(by_submesh, key=lambda counts: sum(counts.values()))
    return replace(plan, predicted=replace(plan.predicted, comm_bytes=sent))
