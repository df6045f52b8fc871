"""The bytes that one rank hands to each collective in a step, exactly as the emitted program sends them.

Activations: each redistribution once a microbatch, both directions where a gradient flows. Parameters: once a step;
gathered again for the backward pass, each microbatch, when regathered inside a block (the root block keeps its own).
Operators that communicate inside add what they declare. Byte conventions: `ir.redistribution.transfer_bytes`.
"""

from __future__ import annotations

import math
from collections import Counter

from autopar.ir.graph import Graph, Node, Tensor
from autopar.ir.placement import Placement, S, local_shape
from autopar.ir.plan import Plan, Redistribute
from autopar.ir.redistribution import Step, apply, transfer_bytes
from autopar.ir.structure import block_paths, constant_tensors
from autopar.ops.call import Call


def traffic(graph: Graph, plan: Plan) -> dict[str, int]:
    """Bytes by collective, a rank (the first) and step."""
    counts: Counter[str] = Counter()
    placements = _placements(graph, plan)
    units, constants = block_paths(graph), constant_tensors(graph)
    reached = _reached(graph) if plan.mode == "train" else set()
    for redistribute in plan.redistributes:
        tensor = graph.tensors[redistribute.tensor]
        forward, backward = _step_counts(graph, plan, redistribute, units, reached, constants)
        _add(counts, plan, tensor, placements[redistribute.tensor], redistribute.steps, forward, backward)
    counted = _counting_path(graph, plan)
    for redistribute in plan.redistributes:
        if (redistribute.tensor, redistribute.target) in counted:
            tensor, source = graph.tensors[redistribute.tensor], placements[redistribute.tensor]
            _add(counts, plan, tensor, source, redistribute.steps, plan.microbatches, 0)
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


def _reached(graph: Graph) -> set[str]:
    """The tensors whose gradient the backward pass computes: those that the loss depends on, but for what is cut off
    by a comparison or a detached value."""
    found = {graph.loss} if graph.loss is not None else set()
    for node in reversed(graph.nodes):
        if not found.isdisjoint(node.results):
            found.update(name for name in node.operands if graph.tensors[name].differentiable)
    return found


def _step_counts(
    graph: Graph, plan: Plan, redistribute: Redistribute, units: set[str], reached: set[str], constants: set[str]
) -> tuple[int, int]:
    """How often a step a redistribution runs forward and backward."""
    name = redistribute.tensor
    trains = name in reached and _brings_gradient(graph, plan, redistribute, reached)
    stored = graph.stored_by_tensor.get(name)
    if name in constants:
        return 1, 0  # in the first step; the later ones keep the result
    if stored is None or stored.kind != "parameter":
        return plan.microbatches, plan.microbatches if trains else 0
    storage = plan.storage[name]
    unit = max((unit for unit in units if stored.name.startswith(unit + ".")), key=len, default=None)
    again = unit is not None and any(
        _runs_in(node, unit) and not reached.isdisjoint(node.results) for node in graph.nodes
    )
    gathers = plan.microbatches * (2 if again else 1) if storage.regather else 1
    reductions = plan.microbatches if storage.regather or storage.reduce_each_microbatch else 1
    return gathers, reductions if trains else 0


def _brings_gradient(graph: Graph, plan: Plan, redistribute: Redistribute, reached: set[str]) -> bool:
    """Whether some reader of the redistributed tensor has a gradient to hand back; who makes the loss has."""
    readers = [
        node for node, position in graph.consumers[redistribute.tensor]
        if plan.nodes[node.name].operands[position] == redistribute.target
    ]  # fmt: skip
    return redistribute.tensor == graph.loss or any(not reached.isdisjoint(node.results) for node in readers)


def _runs_in(node: Node, unit: str) -> bool:
    return any(path == unit for path, _ in node.scope.path)


def _add(
    counts: Counter[str], plan: Plan, tensor: Tensor, placement: Placement, steps: tuple[Step, ...], forward: int,
    backward: int,
) -> None:  # fmt: skip
    for step in steps:
        sizes = transfer_bytes(tensor.shape, tensor.itemsize, placement, plan.axes, step)
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
    size = math.prod(local) // local[1] * tensor.itemsize
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
