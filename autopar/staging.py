"""Cuts a model into stages of equal numbers of repeated blocks, and a plan of its whole into one of given stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.interop import Members, block_layers
from autopar.ir.graph import Graph
from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import P, Placement
from autopar.ir.plan import Plan, Stage
from autopar.ir.verifier import output_placement


def equal_stages(graph: Graph, block_paths: Sequence[str], count: int) -> Members:
    """The stages of each node when each of `count` stages has as many blocks as the others.

    block_paths: module paths of the repeated blocks. Raises PlanError when their number is not a multiple of `count`.
    """
    layers = block_layers(graph, block_paths)
    if not layers.count or layers.count % count:
        raise PlanError(
            f"expected a number of repeated blocks that {count} stages divide equally, found {layers.count} "
            "(numbered modules that run something); choose a number of stages that divides it"
        )
    return layers.members(graph, [layer * count // layers.count for layer in range(layers.count)])


# The plan ----------------------------------------

Pair = tuple[str, Placement]
"""A tensor, and a placement that it is needed in."""


def cut(graph: Graph, plan: Plan, members: Members, first_ranks: Sequence[int], schedule: str) -> Plan:
    """The plan of one stage as one of several, each with the plan's axes, from the given ranks on."""
    reads = [_reads(graph, plan, members, index, len(first_ranks)) for index in range(len(first_ranks))]
    received = [_received(graph, plan, members, pairs, index) for index, pairs in enumerate(reads)]
    stages = tuple(_stage(graph, plan, members, reads, received, *item) for item in enumerate(first_ranks))
    return replace(
        plan, axes=(), inputs={}, storage={}, nodes={}, redistributes=(), stages=stages, schedule=schedule
    )  # fmt: skip


def _reads(graph: Graph, plan: Plan, members: Members, index: int, count: int) -> dict[Pair, None]:
    """Everything that the stage's nodes read, and what must leave the model from it."""
    found: dict[Pair, None] = {}
    for node in graph.nodes:
        if index in members[node.name]:
            found |= dict.fromkeys(zip(node.operands, plan.nodes[node.name].operands, strict=True))
    for name in (*graph.outputs, *graph.mutations.values()):
        node_of = graph.producers.get(name)
        if (index in members[node_of.name]) if node_of else index == count - 1:
            found[name, output_placement(graph, plan, name)] = None
    return found


def _received(
    graph: Graph, plan: Plan, members: Members, reads: Mapping[Pair, None], index: int
) -> dict[str, Placement]:
    """What comes from earlier stages, as it comes: as it was made, but summands are summed before they are sent."""
    found: dict[str, Placement] = {}
    for name in dict.fromkeys(name for name, _ in reads):
        maker = graph.producers.get(name)
        if maker is None or index in members[maker.name]:
            continue
        made = plan.nodes[maker.name].results[maker.results.index(name)]
        wanted = [placement for read, placement in reads if read == name]
        found[name] = wanted[0] if len(wanted) == 1 and _has_summands(made, plan) else made
    return found


def _has_summands(placement: Placement, plan: Plan) -> bool:
    return any(t == P and axis.name != MICROBATCH for t, axis in zip(placement, plan.axes, strict=True))


def _stage(
    graph: Graph, plan: Plan, members: Members, reads: Sequence[Mapping[Pair, None]],
    received: Sequence[Mapping[str, Placement]], index: int, first_rank: int,
) -> Stage:  # fmt: skip
    nodes = {node.name: plan.nodes[node.name] for node in graph.nodes if index in members[node.name]}
    have = dict(plan.inputs) | {name: kept.placement for name, kept in plan.storage.items()}
    have.update(received[index])
    for name, placed in nodes.items():
        have.update(zip(graph.node_by_name[name].results, placed.results, strict=True))
    made = {name for node in nodes for name in graph.node_by_name[node].results}
    sent = [pair for later in received[index + 1 :] for pair in later.items() if pair[0] in made]
    wanted = dict.fromkeys([*reads[index], *sent])
    names = {name for name, _ in reads[index]}
    known = {(item.tensor, item.target): item for item in plan.redistributes}
    return Stage(
        first_rank=first_rank,
        axes=plan.axes,
        inputs={**{name: plan.inputs[name] for name in graph.inputs if name in names}, **received[index]},
        storage={name: kept for name, kept in plan.storage.items() if name in names},
        nodes=nodes,
        redistributes=tuple(known[pair] for pair in wanted if have[pair[0]] != pair[1]),
    )
