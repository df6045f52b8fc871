"""The bytes that one rank hands to each collective in a step, exactly as the emitted program sends them.

Activations: each redistribution once a microbatch, both directions where a gradient flows. Parameters: once a step;
gathered again for the backward pass, each microbatch, when regathered inside a block (the root block keeps its own).
Operators that communicate inside add what they declare. Byte conventions: `ir.redistribution.transfer_bytes`.
"""

from __future__ import annotations

import math
from collections import Counter

from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Placement, S, local_shape
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Step, apply, transfer_bytes
from autopar.ir.structure import block_paths
from autopar.ops.call import Call


def traffic(graph: Graph, plan: Plan) -> dict[str, int]:
    """Bytes by collective, a rank (the first) and step."""
    counts: Counter[str] = Counter()
    placements = _placements(graph, plan)
    units = block_paths(graph)
    for redistribute in plan.redistributes:
        name = redistribute.tensor
        times = _step_counts(graph, plan, name, units)
        _add(counts, graph, plan, name, placements[name], redistribute.steps, *times)
    counted = _counting_path(graph, plan)
    for redistribute in plan.redistributes:
        if (redistribute.tensor, redistribute.target) in counted:
            name = redistribute.tensor
            _add(counts, graph, plan, name, placements[name], redistribute.steps, plan.microbatches, 0)
    for node in graph.nodes:
        for collective, _, size in inner_collectives(graph, node, plan):
            counts[collective] += size * plan.microbatches
        if plan.microbatches > 1:
            counts["all_reduce"] += sum(size for _, size in _counts(graph, node, plan))  # once for all of them
    return {kind: size for kind, size in sorted(counts.items()) if size}


def _placements(graph: Graph, plan: Plan) -> dict[str, Placement]:
    found = dict(plan.inputs) | {name: storage.placement for name, storage in plan.storage.items()}
    for node in graph.nodes:
        found.update(zip(node.results, plan.nodes[node.name].results, strict=True))
    return found


def _step_counts(graph: Graph, plan: Plan, name: str, units: set[str]) -> tuple[int, int]:
    """How often a step a tensor's redistribution runs forward and backward."""
    trains = plan.mode == "train" and graph.tensors[name].differentiable
    stored = graph.stored_by_tensor.get(name)
    if stored is None:
        return plan.microbatches, plan.microbatches if trains else 0
    storage = plan.storage[name]
    in_unit = any(stored.name.startswith(unit + ".") for unit in units)
    gathers = plan.microbatches * (2 if in_unit and trains else 1) if storage.regather else 1
    reductions = plan.microbatches if storage.regather or storage.reduce_each_microbatch else 1
    return gathers, reductions if trains else 0


def _add(
    counts: Counter[str], graph: Graph, plan: Plan, name: str, placement: Placement, steps: tuple[Step, ...],
    forward: int, backward: int,
) -> None:  # fmt: skip
    shape, itemsizes = graph.tensors[name].shape, graph.itemsizes(name)
    for step in steps:
        sizes = transfer_bytes(shape, itemsizes, placement, plan.axes, step)
        for transfer, size, times in zip(step.transfers, sizes, (forward, backward), strict=True):
            if transfer.collective:
                counts[transfer.collective] += size * times
        placement = apply(step, placement)


def _counting_path(graph: Graph, plan: Plan) -> set[tuple[str, Placement]]:
    """The redistributions that lead to the targets of a mean loss: several microbatches count these first."""
    pending = [] if plan.microbatches == 1 else [node for node in graph.nodes if _counts_targets(graph, node)]
    found: set[tuple[str, Placement]] = set()
    needed = {(node.operands[1], plan.nodes[node.name].operands[1]) for node in pending}
    while needed:
        tensor, placement = needed.pop()
        found.add((tensor, placement))
        producer = graph.producers.get(tensor)
        if producer is not None:
            needed |= set(zip(producer.operands, plan.nodes[producer.name].operands, strict=True)) - found
    return found


def _counts_targets(graph: Graph, node: Node) -> bool:
    return node.op == "aten.cross_entropy_loss.default" and Call(graph, node).arguments["reduction"] == 1


def inner_collectives(graph: Graph, node: Node, plan: Plan) -> list[tuple[str, int, int]]:
    """What an operator sends in the forward pass of a microbatch: (collective, position of the mesh axis, bytes) each.

    Cross-entropy: maximum and two sums a sample over axes that split classes; over axes that split samples the count
    of valid targets, which several microbatches share.
    """
    if node.op != "aten.cross_entropy_loss.default":
        return []
    logits = plan.nodes[node.name].operands[0]
    tensor = graph.tensors[node.operands[0]]
    local = local_shape(tensor.shape, logits, plan.axes)
    size = math.prod(local) // local[1] * max(tensor.itemsize, 4)  # halves are summed as float32
    classes = [axis for axis, type_ in enumerate(logits) if type_ == S(1)]
    sent = [("all_reduce", axis, size) for axis in classes for _ in range(3)]
    counts = _counts(graph, node, plan) if plan.microbatches == 1 else []
    return sent + [("all_reduce", axis, size) for axis, size in counts]


def _counts(graph: Graph, node: Node, plan: Plan) -> list[tuple[int, int]]:
    """Mesh axes over which a mean loss counts its valid targets, and the bytes of a float32."""
    if not _counts_targets(graph, node):
        return []
    logits = plan.nodes[node.name].operands[0]
    return [(axis, 4) for axis, type_ in enumerate(logits) if type_.kind == "S" and type_ != S(1)]
