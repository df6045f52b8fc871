"""Graphs whose tokens are exchanged for experts in chunks: of each, one travels while another is computed.

routed_experts(x, …)  →  routed_experts(x, …, chunks=4)

Or by the load that ranks see when they run, as a table says:

routed_experts(x, …)  →  routed_experts(x, …, exchange="0:flat:1;4096:two-level:4")

And where experts are sliced over ranks that have tokens of their own, what travels by the load:

routed_experts(x, …)  →  routed_experts(x, …, slices="0:tensor;4096:data")

Or with replicas of the experts that most tokens choose, of which none travel:

routed_experts(x, …)  →  routed_experts(x, …, replicas=2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.exchange_table import MOST_CHUNKS, ExchangeTable
from autopar.ir.graph import BY_LOAD, REPLICAS, SLICES, Graph, Node
from autopar.ir.slice_table import SliceTable
from autopar.ops.experts import ROUTED_EXPERTS

RULE, LOAD_RULE = "exchange-in-chunks", "exchange-by-load"
STATEMENT = "routed experts => the same, whose tokens are exchanged in chunks"
SLICE_RULE = "slices-by-load"
SLICE_STATEMENT = "routed experts => the same, of which rows or slices travel as their load asks for"
REPLICA_RULE = "replicate-experts"
REPLICA_STATEMENT = "routed experts => the same, of which those with most rows are computed where the tokens are"
LOAD_STATEMENT = "routed experts => the same, whose tokens are exchanged as their load asks for"


def routed(graph: Graph) -> tuple[str, ...]:
    """The names of the operators that route tokens to experts."""
    return tuple(node.name for node in graph.nodes if node.op == ROUTED_EXPERTS)


def in_chunks(graph: Graph, names: Sequence[str], chunks: int) -> Graph:
    """The graph in which these exchange tokens in so many chunks. Raises PlanError where one cannot."""
    check_chunks(chunks)
    return _with(graph, names, "chunks", chunks)


def by_load(graph: Graph, names: Sequence[str], table: str) -> Graph:
    """The graph in which these exchange tokens as a table (its text) says. Raises PlanError where one cannot."""
    return _with(graph, names, BY_LOAD, ExchangeTable.parse(table).text)


def by_slices(graph: Graph, names: Sequence[str], table: str) -> Graph:
    """The graph in which rows or slices of these travel as a table (its text) says. Raises PlanError where none can."""
    return _with(graph, names, SLICES, SliceTable.parse(table).text)


def with_replicas(graph: Graph, names: Sequence[str], replicas: int) -> Graph:
    """The graph in which every rank that exchanges tokens for these computes so many experts itself, those with most
    rows. Raises PlanError where there are no more experts than that."""
    check_replicas(graph, names, replicas)
    if not replicas:
        return replace(graph, nodes=tuple(_without(node, REPLICAS) for node in graph.nodes))
    return _with(graph, names, REPLICAS, replicas)


def check_replicas(graph: Graph, names: Sequence[str], replicas: object) -> None:
    """Raises PlanError unless these have more experts than so many."""
    fewest = min((int(node.args[7]) for node in graph.nodes if node.name in names), default=1)
    if type(replicas) is not int or not 0 <= replicas < fewest:
        raise PlanError(
            f"expected replicas of 0 to {fewest - 1} of {fewest} experts, found {replicas!r}; with ep=1 every rank has "
            "all of them"
        )


def check_chunks(chunks: object) -> None:
    """Raises PlanError unless tokens may be exchanged in so many chunks."""
    if type(chunks) is not int or not 1 <= chunks <= MOST_CHUNKS:
        raise PlanError(f"expected 1 to {MOST_CHUNKS} chunks in which tokens are exchanged, found {chunks!r}")


def _with(graph: Graph, names: Sequence[str], key: str, value: object) -> Graph:
    wrong = sorted(set(names) - set(routed(graph)))
    if wrong:
        raise PlanError(f"expected routed experts at {wrong[0]!r}, found none; plan again")
    return replace(graph, nodes=tuple(_told(node, key, value) if node.name in names else node for node in graph.nodes))


def _without(node: Node, key: str) -> Node:
    return replace(node, kwargs=tuple(item for item in node.kwargs if item[0] != key))


def _told(node: Node, key: str, value: object) -> Node:
    """With an argument, in one order whichever was told first."""
    told = {**dict(node.kwargs), key: value}
    return replace(node, kwargs=tuple(sorted(told.items(), key=lambda item: _ORDER.get(item[0], 0))))


_ORDER = {"chunks": 1, BY_LOAD: 2, SLICES: 3, REPLICAS: 4}
