"""Graphs whose tokens are exchanged for experts in chunks: of each, one travels while another is computed.

routed_experts(x, …)  →  routed_experts(x, …, chunks=4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.ops.experts import MOST_CHUNKS, ROUTED_EXPERTS

RULE = "exchange-in-chunks"
STATEMENT = "routed experts => the same, whose tokens are exchanged in chunks"


def routed(graph: Graph) -> tuple[str, ...]:
    """The names of the operators that route tokens to experts."""
    return tuple(node.name for node in graph.nodes if node.op == ROUTED_EXPERTS)


def in_chunks(graph: Graph, names: Sequence[str], chunks: int) -> Graph:
    """The graph in which these exchange tokens in so many chunks. Raises PlanError where one cannot."""
    wrong = sorted(set(names) - set(routed(graph)))
    if wrong:
        raise PlanError(f"expected routed experts at {wrong[0]!r}, found none; plan again")
    check_chunks(chunks)
    return replace(graph, nodes=tuple(_told(node, chunks) if node.name in names else node for node in graph.nodes))


def check_chunks(chunks: object) -> None:
    """Raises PlanError unless tokens may be exchanged in so many chunks."""
    if type(chunks) is not int or not 1 <= chunks <= MOST_CHUNKS:
        raise PlanError(f"expected 1 to {MOST_CHUNKS} chunks in which tokens are exchanged, found {chunks!r}")


def _told(node: Node, chunks: int) -> Node:
    kwargs = {**dict(node.kwargs), "chunks": chunks}
    return replace(node, kwargs=tuple(kwargs.items()))
