"""The bytes that one rank hands to each collective in a step, exactly as the emitted program sends them.

Activations: each redistribution once a microbatch, both directions where a gradient flows; forward once more in a call
that runs again (`recomputation`). Parameters: once a step; regathered ones each microbatch, as often as `regathering`
counts. What inference keeps of parameters is sent when these are loaded, in none of the steps after that.
Operators that communicate inside add what they declare. Byte conventions: `ir.redistribution.transfer_bytes`.
"""

from __future__ import annotations

from collections import Counter

from autopar.ir.branches import converted_inside, coordinates_of, homes, is_idle
from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Placement, evenly
from autopar.ir.plan import Plan, Redistribute, StagePlan
from autopar.ir.redistribution import Step, apply, transfer_bytes
from autopar.ir.stages import stage_graph
from autopar.ir.structure import block_paths, computed_once, folded_tensors, is_cut
from autopar.ir.verifier import MICROBATCH
from autopar.ops.call import call_of
from autopar.ops.communication import count_of_targets, inner_communication, is_mean_over_samples
from autopar.ops.inner import Sent
from autopar.simulate.recomputation import Recomputation
from autopar.simulate.regathering import Regathering
from autopar.simulate.timeline import Timeline


def traffic(graph: Graph, plan: Plan, rank: int = 0) -> dict[str, int]:
    """Bytes by collective, a rank (the first) of the only stage and step. Others may have shorter slices, and run other
    branches."""
    return _total(_moved(graph, plan.parts[0], rank), _inside(graph, plan.parts[0], rank))


def traffic_over_microbatches(whole: Graph, full: StagePlan, part: Graph, plan: StagePlan) -> dict[str, int]:
    """As `traffic`, of a plan stated on the microbatch axis too (`full`), where `plan` is that of one microbatch.

    A tensor that ranks share along the dim that microbatches cut is gathered whole before it is cut.
    """
    return _total(_moved(whole, full), _inside(part, plan))


def traffic_by_submesh(whole: Graph, full: Plan, part: Graph, plan: Plan, timeline: Timeline) -> list[dict[str, int]]:
    """As `traffic_over_microbatches`, of a plan of several stages, for each lane of its timeline."""
    found = []
    for lane in timeline.lanes:
        sent = Counter(lane.bytes_between)
        for index, stage in enumerate(full.stages):
            if stage.first_rank == lane.ranks.start:
                graphs = stage_graph(whole, full, index), stage_graph(part, plan, index)
                sent.update(traffic_over_microbatches(graphs[0], full.parts[index], graphs[1], plan.parts[index]))
        found.append(_total(sent))
    return found


def _total(*parts: Counter[str]) -> dict[str, int]:
    return {kind: size for kind, size in sorted(sum(parts, Counter[str]()).items()) if size}


def _moved(graph: Graph, plan: StagePlan, rank: int = 0) -> Counter[str]:
    """What redistributions send, but for those in branches that other ranks run."""
    place = coordinates_of(plan, rank)
    left_out = {value for value, home in converted_inside(graph, plan).items() if is_idle(home, place)}
    counts: Counter[str] = Counter()
    placements = _placements(graph, plan)
    once, folded = computed_once(graph, plan), folded_tensors(graph)
    reached = reached_tensors(graph) if plan.mode == "train" else set()
    recomputation = Recomputation(graph, plan, reached)
    regathering = Regathering(graph, plan, reached, recomputation)
    counted = _counting_path(graph, plan)
    for redistribute in plan.redistributes:
        name = redistribute.tensor
        if (name, redistribute.target) in left_out or name in folded:
            continue
        forward, backward = _step_counts(graph, plan, redistribute, regathering, recomputation, reached, once)
        if (name, redistribute.target) in counted:
            forward += plan.microbatches
        _add(counts, graph, plan, name, placements[name], redistribute.steps, forward, backward, rank)
    return counts


def _inside(graph: Graph, plan: StagePlan, rank: int = 0) -> Counter[str]:
    """What operators send inside."""
    counts: Counter[str] = Counter()
    known, place, folded = homes(plan), coordinates_of(plan, rank), folded_tensors(graph)
    reached = reached_tensors(graph) if plan.mode == "train" else set()
    recomputation = Recomputation(graph, plan, reached)
    for node in graph.nodes:
        if is_idle(known.get(node.name), place) or not folded.isdisjoint(node.results):
            continue
        forward, backward = inner_collectives(graph, node, plan)
        trains = not reached.isdisjoint(node.results)
        again = recomputation.computes_again(node.name)
        for inner in [*forward, *(forward if again else []), *(backward if trains else [])]:
            counts[inner.collective] += inner.num_bytes * plan.microbatches
        if plan.microbatches > 1:  # once for all of them
            for inner in count_of_targets(call_of(graph, node), plan.nodes[node.name].operands):
                counts[inner.collective] += inner.num_bytes
    return counts


def _placements(graph: Graph, plan: StagePlan) -> dict[str, Placement]:
    found = dict(plan.inputs) | {name: storage.placement for name, storage in plan.storage.items()}
    for node in graph.nodes:
        found.update(zip(node.results, plan.nodes[node.name].results, strict=True))
    return found


def reached_tensors(graph: Graph) -> set[str]:
    """The tensors whose gradient the backward pass computes: those that the loss (or what a stage sends) depends on,
    but for what is cut off by a comparison or a detached value."""
    found = set(graph.gradient_sources)
    for node in reversed(graph.nodes):
        if not found.isdisjoint(node.results):
            found.update(name for name in node.operands if graph.tensors[name].differentiable)
    return found


def _step_counts(
    graph: Graph, plan: StagePlan, redistribute: Redistribute, regathering: Regathering, recomputation: Recomputation,
    reached: set[str], once: set[str],
) -> tuple[int, int]:  # fmt: skip
    """How often a step a redistribution runs forward and backward."""
    name = redistribute.tensor
    trains = name in reached and _brings_gradient(graph, plan, redistribute, reached)
    stored = graph.stored_by_tensor.get(name)
    if name in once and not is_cut(plan, redistribute.target):
        return 1, 0  # in the first step; the later ones keep the result
    if stored is None or stored.kind != "parameter":
        again = recomputation.converts_again((name, redistribute.target))
        return plan.microbatches * (2 if again else 1), plan.microbatches if trains else 0
    storage = plan.storage[name]
    gathers = plan.microbatches * regathering.count(redistribute) if storage.regather else 1
    reductions = plan.microbatches if storage.regather or storage.reduce_each_microbatch else 1
    return gathers, reductions if trains else 0


def _brings_gradient(graph: Graph, plan: StagePlan, redistribute: Redistribute, reached: set[str]) -> bool:
    """Whether some reader of the redistributed tensor has a gradient to hand back; who makes the loss has."""
    readers = [
        node for node, position in graph.consumers[redistribute.tensor]
        if plan.nodes[node.name].operands[position] == redistribute.target
    ]  # fmt: skip
    leaves = (redistribute.tensor, redistribute.target) in graph.answered
    return redistribute.tensor == graph.loss or leaves or any(not reached.isdisjoint(node.results) for node in readers)


def _add(
    counts: Counter[str], graph: Graph, plan: StagePlan, name: str, placement: Placement, steps: tuple[Step, ...],
    forward: int, backward: int, rank: int,
) -> None:  # fmt: skip
    shape, itemsizes = graph.tensors[name].shape, graph.itemsizes(name)
    axes = evenly(plan.axes) if name in plan.storage else plan.axes
    coordinate = tuple(rank // axis.stride % axis.size if axis.name != MICROBATCH else 0 for axis in axes)
    for step in steps:
        if plan.axes[step.axis].name == MICROBATCH:  # microbatches follow each other: nothing is sent
            placement = apply(step, placement)
            continue
        sizes = transfer_bytes(shape, itemsizes, placement, axes, step, coordinate)
        for transfer, size, times in zip(step.transfers, sizes, (forward, backward), strict=True):
            if transfer.collective:
                counts[transfer.collective] += size * times
        placement = apply(step, placement)


def _counting_path(graph: Graph, plan: StagePlan) -> set[tuple[str, Placement]]:
    """The redistributions that lead to the targets of a mean loss: several microbatches count these first."""
    nodes = graph.nodes if plan.microbatches > 1 else ()
    pending = [node for node in nodes if is_mean_over_samples(call_of(graph, node))]
    found: set[tuple[str, Placement]] = set()
    needed = {(node.operands[1], plan.nodes[node.name].operands[1]) for node in pending}
    while needed:
        tensor, placement = needed.pop()
        found.add((tensor, placement))
        producer = graph.producers.get(tensor)
        if producer is not None:
            needed |= set(zip(producer.operands, plan.nodes[producer.name].operands, strict=True)) - found
    return found


def inner_collectives(graph: Graph, node: Node, plan: StagePlan) -> Sent:
    """What an operator sends inside, in the forward and the backward pass of a microbatch.

    A mean loss counts its targets in the forward pass, unless several microbatches share the count: along the first
    axis early where it can be (`emit.early`), then along the others.
    """
    operands = plan.nodes[node.name].operands
    forward, backward = inner_communication(graph, node, operands, plan.axes, plan.mode == "train")
    counts = count_of_targets(call_of(graph, node), operands) if plan.microbatches == 1 else []
    counts = [inner for inner in counts if plan.axes[inner.axis].size > 1]
    if counts and _is_counted_early(graph, node, plan):
        counts[0] = counts[0]._replace(is_early=True)
    return [*forward, *counts], backward


def _is_counted_early(graph: Graph, loss: Node, plan: StagePlan) -> bool:
    """Whether the targets follow from inputs and constants outside of blocks, where the loss lies, too."""
    if len(loss.operands) > 2:  # weights of classes
        return False
    blocks, needed = block_paths(graph, plan.recompute), [loss.operands[1]]
    makers = [loss]
    while needed:
        name = needed.pop()
        if name in graph.stored_by_tensor or name in graph.received:
            return False
        producer = graph.producers.get(name)
        if producer is not None and producer not in makers:
            makers.append(producer)
            needed += producer.operands
    return all(path not in blocks for maker in makers for path, _ in maker.scope.path if path)
