"""Plans of several copies of the parameters that meet by a training algorithm: of one copy's plan, or of a template.

A copy is what one of n equal groups of devices trains, on one of n equal parts of the batch. Its plan is of that part
of the graph; that of all of them has one axis more, the outermost, on which nothing is chosen: samples are split, the
parameters whole, and what follows from inputs alone may be counted over all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.algorithm import Algorithm
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.structure import batch_inputs
from autopar.microbatch import check_plan, divided_graph, on_outer_axis
from autopar.odds import with_odds
from autopar.ops.copies import in_copies
from autopar.step import simulated_again, with_simulator

COPIES = "copies"
"""The axis of copies of plans that a search finds."""


def check_goes_alone(algorithm: object, others: Mapping[str, Any]) -> None:
    """Raises PlanError where something is given that does not go with an algorithm."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise PlanError(f"expected algorithm={algorithm!r} without {given[0]}=, found both; leave one of them out")


def copies_of(mesh: Mesh) -> int:
    """One a node, where devices of a copy would meet over slow links otherwise; one a device of one node."""
    nodes = sum(group.nodes for group in mesh.groups)
    return nodes if nodes > 1 else mesh.num_devices


def one_copy(graph: Graph, mesh: Mesh, count: int, algorithm: Algorithm) -> Graph:
    """The graph of one copy's part of the batch. Raises PlanError where there are no such parts of it, or devices."""
    if not mesh.is_homogeneous or mesh.num_devices % count or count < 2:
        raise PlanError(
            f"expected equal devices in at least 2 equal groups, a copy of the parameters each, for {algorithm}, found "
            f"{count} copies on {mesh}; give the number as copies=, such as local_sgd(8, copies=2)"
        )
    try:
        return divided_graph(graph, count)
    except PlanError as error:
        raise PlanError(
            f"expected a model whose batch can be split into {count} copies' parts for {algorithm}: {error}"
        ) from None


def with_copies(graph: Graph, plan: Plan, mesh: Mesh, count: int, algorithm: Algorithm) -> Plan:
    """The plan of all copies, of the plan of one, which has one stage. graph: of the whole batch."""
    stage = on_outer_axis(graph, plan, count, algorithm.axis)
    names = (*graph.inputs, *(item.tensor for item in graph.stored))
    batch = batch_inputs(graph) if plan.microbatches > 1 else ()
    found = replace(
        plan, mesh=mesh, stages=(stage,), fingerprint=graph.fingerprint, algorithm=algorithm, microbatch_inputs=batch,
        types={name: str(graph.kept(name)) for name in names}, simulator=None,
    )  # fmt: skip
    check_plan(graph, found)
    return with_simulator(found, graph)


def under_algorithm(graph: Graph, plan: Plan, algorithm: Algorithm) -> Plan:
    """A plan by hand whose copies meet by the algorithm. Raises PlanError where they depend on each other otherwise,
    InfeasibleError where what meeting takes does not fit."""
    plan = in_copies(graph, plan, algorithm)
    check_plan(graph, plan)
    found = simulated_again(plan, graph)
    if found.predicted.peak_bytes > found.memory_limit:
        raise InfeasibleError(
            f"expected at most {found.memory_limit:,} bytes a device, found {found.predicted.peak_bytes:,} with the "
            f"buffers in which copies meet under {algorithm}",
            found.predicted.peak_bytes,
        )
    return with_simulator(with_odds(found, graph), graph)
