"""Which graphs equal to a traced model's may be faster: found on one device, for the whole batch and for a share of it.

What is best depends on how much there is to do: folding an adapter into its weight pays where many samples go through
it, and not where each of eight ranks has an eighth of them. So substitutions are looked for on both. What gains less
than a profile can tell apart is not looked at further; and fused weights that are taken apart are, gain or not, for
what that is worth shows only where they are sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autopar.cost import Profile
from autopar.cost.memory import optimizer_of
from autopar.errors import PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.exchange_table import EVERY_WAY, FLAT, MOST_CHUNKS, ExchangeTable, ExchangeWay
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Substitution
from autopar.ir.routing import Routing
from autopar.ir.slice_table import DATA, TENSOR, SliceTable, SliceWay
from autopar.microbatch import divided_graph
from autopar.ops.experts import with_routing
from autopar.planning import pinned_tensors
from autopar.profiler import load_profile
from autopar.request import Request
from autopar.substitute import (
    GraphCandidate,
    Substituted,
    async_linears,
    bands,
    exchanges,
    load_rules,
    placing,
    replayed,
    rows,
    sequences,
    sinks,
    substituted,
    triangles,
)
from autopar.substitute.lifting import lifted
from autopar.substitute.masks import RULE, STATEMENT, under_causal_masks, without_masks
from autopar.substitute.pricing import Pricer
from autopar.substitute.searching import SHORT
from autopar.trace import find_blocks
from autopar.tunables import SUBSTITUTION_S, SUBSTITUTION_SHARE


class Rewrites(NamedTuple):
    """Graphs equal to a traced model's that may be faster, the fastest on one device first; what the model's own takes
    there (ns); how many graphs were met, and why the search for more ended."""

    candidates: tuple[GraphCandidate, ...]
    before_ns: int
    seen: int
    stop: str


def rewrites(graph: Graph, request: Request) -> Rewrites:
    """Graphs equal to a traced model's that may be faster. What constraints speak of stays as it is, and so do
    parameters of an optimizer that would notice if they were stored in another way."""
    pinned = pinned_tensors(graph, request.constraints)
    if request.mode == "train" and not optimizer_of(request.optimizer).is_elementwise:
        pinned |= {item.tensor for item in graph.parameters}
    pricer = Pricer(_profile(request), request.mode == "train")
    searches = [_search(graph, request, pinned)]
    found = [*searches[0].candidates]
    share = _share(graph, request.mesh.num_devices)
    if share is not None:
        searches.append(_search(share, request, pinned))
        found += _on_whole(graph, searches[1].best, pricer)
    distinct = {candidate.graph.fingerprint: candidate for candidate in reversed(found)}
    distinct.pop(graph.fingerprint, None)
    ordered = sorted(distinct.values(), key=lambda candidate: candidate.cost_ns)
    return Rewrites(
        tuple(ordered),
        pricer(lifted(graph)),
        sum(search.seen for search in searches),
        "; ".join(dict.fromkeys(part for search in searches for part in search.stop.split("; "))),
    )


def _profile(request: Request) -> Profile:
    return load_profile(request.mesh.groups[0].profile)


def _search(graph: Graph, request: Request, pinned: set[str]) -> Substituted:
    """What is found for blocks that are equal whatever constraints say, since plans are replayed without these: what is
    pinned in one of them stays as it is in all."""
    blocks, budget = find_blocks(graph), request.budget
    pinned = pinned | {blocks.representative_tensor(name) for name in pinned}
    seconds = SUBSTITUTION_SHARE * budget.seconds
    limits: dict[str, Any] = {"seconds": min(seconds, SUBSTITUTION_S), "limits": SHORT}
    if budget.everywhere:
        limits = {"seconds": seconds}
    return substituted(
        graph, blocks.paths, blocks.node_representative, load_rules(), _profile(request),
        trains=request.mode == "train", pinned=pinned, **limits,
    )  # fmt: skip


def _share(graph: Graph, num_devices: int) -> Graph | None:
    """The graph of one device's part of the batch, where all devices divide it."""
    if num_devices == 1:
        return None
    try:
        return divided_graph(graph, num_devices)
    except PlanError:
        return None


def _on_whole(graph: Graph, found: GraphCandidate, pricer: Pricer) -> list[GraphCandidate]:
    """What was found for a part of the batch, for all of it; nothing where it speaks of the part's sizes."""
    if not found.steps:
        return []
    with contextlib.suppress(PlanError):
        whole = _replayed(graph, found.steps)
        return [GraphCandidate(whole, found.steps, pricer(lifted(whole)))]
    return []


def with_causal_attention(graph: Graph, constraints: Sequence[Constraint]) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph whose attention operators know that they are causal, and the substitutions that say so, if any: of all
    that a search finds, so that none is chosen for masks that nobody has to read. Of long sequences, windows of half
    the keys or less are known, too, and sinks; where attention is written out otherwise, its mask is that of one
    sample. What constraints speak of stays."""
    steps = list[Substitution]()
    for rule, statement, found, told in (
        (RULE, STATEMENT, under_causal_masks, without_masks),
        (bands.RULE, bands.STATEMENT, bands.over_narrow_windows, bands.with_windows),
        (sinks.RULE, sinks.STATEMENT, sinks.over_long_sinks, sinks.with_sinks),
        (triangles.RULE, triangles.STATEMENT, triangles.under_expanded_masks, triangles.with_triangles),
    ):
        pinned = pinned_tensors(graph, constraints)
        names = tuple(name for name in found(graph) if pinned.isdisjoint(graph.node_by_name[name].results))
        if names:
            modules = tuple(graph.node_by_name[name].scope.module for name in names)
            steps.append(Substitution(rule, statement, "proved", "", modules, names, {}))
            graph = told(graph, names)
    return graph, tuple(steps)


def in_chunks(graph: Graph, chunks: int) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph whose tokens are exchanged in so many chunks, and the substitution that makes it."""
    exchanges.check_chunks(chunks)
    names = exchanges.routed(graph)
    if chunks == 1 or not names:
        return graph, ()
    modules = tuple(graph.node_by_name[name].scope.module for name in names)
    step = Substitution(exchanges.RULE, exchanges.STATEMENT, "proved", "", modules, names, {"chunks": chunks})
    return exchanges.in_chunks(graph, names, chunks), (step,)


def with_replicas(graph: Graph, replicas: int) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph with replicas of so many experts, and the substitution that makes it. Raises PlanError."""
    names = exchanges.routed(graph)
    graph = exchanges.with_replicas(graph, names, replicas)
    modules = tuple(graph.node_by_name[name].scope.module for name in names)
    rule, statement, binding = exchanges.REPLICA_RULE, exchanges.REPLICA_STATEMENT, {"replicas": replicas}
    return graph, (Substitution(rule, statement, "proved", "", modules, names, binding),) if replicas else ()


def any_way(graph: Graph) -> Graph:
    """The graph whose tokens are exchanged flat, in memory that does for every way."""
    table = ExchangeTable((ExchangeWay(0, FLAT, 1), ExchangeWay(EVERY_WAY, FLAT, MOST_CHUNKS)))
    return exchanges.by_load(graph, exchanges.routed(graph), table.text)


def by_load(graph: Graph, tables: Mapping[str, ExchangeTable]) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph whose tokens are exchanged by load, each operator's (by name) by its table, and the substitutions that
    make it: one for all of a table."""
    steps = []
    for table in dict.fromkeys(tables.values()):
        names = tuple(name for name, own in tables.items() if own == table)
        modules = tuple(graph.node_by_name[name].scope.module for name in names)
        binding = {"table": table.text}
        steps.append(Substitution(exchanges.LOAD_RULE, exchanges.LOAD_STATEMENT, "proved", "", modules, names, binding))
        graph = exchanges.by_load(graph, names, table.text)
    return graph, tuple(steps)


def by_slices(graph: Graph, tables: Mapping[str, SliceTable]) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph whose rows or slices travel by load, each operator's (by name) by its table, and the substitutions that
    make it: one for all of a table."""
    steps = []
    for table in dict.fromkeys(tables.values()):
        names = tuple(name for name, own in tables.items() if own == table)
        modules = tuple(graph.node_by_name[name].scope.module for name in names)
        binding = {"table": table.text}
        rule, statement = exchanges.SLICE_RULE, exchanges.SLICE_STATEMENT
        steps.append(Substitution(rule, statement, "proved", "", modules, names, binding))
        graph = exchanges.by_slices(graph, names, table.text)
    return graph, tuple(steps)


def with_slices(graph: Graph, experts: str) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph of which rows ("tensor") or slices ("data") travel where experts are sliced, in memory that does for
    both where it may be either ("adaptive"), and the substitutions that make it; itself where experts are whole."""
    either = (SliceWay(0, TENSOR), SliceWay(EVERY_WAY, DATA))
    ways = {TENSOR: (SliceWay(0, TENSOR),), DATA: (SliceWay(0, DATA),)}.get(experts, either)
    return by_slices(graph, {} if experts == "whole" else dict.fromkeys(exchanges.routed(graph), SliceTable(ways)))


def graph_of(plan: Plan, graph: Graph) -> Graph:
    """The graph that a plan is for: a model's traced graph with the plan's routing, after its substitutions. Raises
    PlanError."""
    placed = [step for step in plan.substitutions if step.rule == placing.RULE]
    rest = [step for step in plan.substitutions if step.rule != placing.RULE]
    return _replayed(with_routing(placing.with_placed(graph, placed), plan.routing), tuple(rest))


def under_routing(
    graph: Graph, routing: Routing | None, optimizer: str | None
) -> tuple[Graph, tuple[Substitution, ...]]:
    """A traced graph that knows how tokens choose experts, these placed by it, and the substitutions that do that.
    Experts stay as they are for an optimizer that would notice if parameters were stored in another way."""
    steps = placing.placements(graph, routing) if optimizer_of(optimizer).is_elementwise else ()
    return with_routing(placing.with_placed(graph, steps), routing), steps


def _replayed(graph: Graph, steps: tuple[Substitution, ...]) -> Graph:
    told = {
        RULE: without_masks, triangles.RULE: triangles.with_triangles, rows.RULE: rows.with_rows,
        bands.RULE: bands.with_windows, sequences.RULE: sequences.with_sequences,
        sequences.RING_RULE: sequences.with_rings, sequences.GATHER_RULE: sequences.with_gathers,
        sinks.RULE: sinks.with_sinks,
        exchanges.RULE: exchanges.in_chunks, exchanges.LOAD_RULE: exchanges.by_load,
        exchanges.SLICE_RULE: exchanges.by_slices, exchanges.REPLICA_RULE: exchanges.with_replicas,
        async_linears.GATHER_RULE: async_linears.with_gathers, async_linears.SCATTER_RULE: async_linears.with_scatters,
    }  # fmt: skip
    for step in steps:
        if step.rule in told:
            graph = told[step.rule](graph, step.roots, **step.binding)  # type: ignore[operator] # checked there
    rest = [step for step in steps if step.rule not in told]
    if not rest:
        return graph
    blocks = find_blocks(graph)
    return replayed(graph, blocks.paths, blocks.node_representative, rest, load_rules())
