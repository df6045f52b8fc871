"""Plans under a training algorithm: what may cross the axis of copies, and how a step runs without what does not.

Copies of the parameters differ between two of their meetings. What is computed of them is then equal on no two ranks of
the axis, whatever its type says, so nothing that follows from parameters crosses it in a step but what the loss is the
sum of. Counts of targets and whatever else follows from inputs alone crosses as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.algorithm import ADASUM, BACKUP, PIPEDREAM, Algorithm
from autopar.ir.graph import Graph, Node
from autopar.ir.offload import stored_on_host
from autopar.ir.placement import I, P, R
from autopar.ir.plan import Plan, Redistribute, Stage
from autopar.ir.redistribution import Step
from autopar.ir.stages import stage_graph
from autopar.ir.structure import tensors_of_inputs
from autopar.ops.backup import check_backup
from autopar.ops.communication import inner_communication
from autopar.ops.lookup import axis_rules
from autopar.ops.pipedream import check_pipedream

_REMEDY = "leave the algorithm out, or plan copies that meet nowhere else: dp without sharding over it"


def num_copies(plan: Plan) -> int:
    """The size of the axis of copies. Raises PlanError where a stage has none, or stages have unequal ones."""
    assert plan.algorithm is not None, "asked for of plans under an algorithm"
    sizes = [{axis.name: axis.size for axis in stage.axes}.get(plan.algorithm.axis, 1) for stage in plan.stages]
    if len(set(sizes)) > 1 or sizes[0] < 2:
        raise PlanError(
            f"expected at least 2 copies of the parameters for {plan.algorithm}, on an axis {plan.algorithm.axis!r} of "
            f"each stage, found {' and '.join(map(str, dict.fromkeys(sizes)))}; use dp=2 or more, and with zero "
            "hsdp, so that there are copies of what is sharded"
        )
    return sizes[0]


def check_copies(graph: Graph, plan: Plan) -> None:
    """Raises PlanError for a plan under an algorithm whose copies depend on each other within a step.

    graph: of one microbatch.
    """
    algorithm = plan.algorithm
    if algorithm is None:
        return
    if algorithm.name == PIPEDREAM:
        check_pipedream(graph, plan)
        return
    size = num_copies(plan)
    if plan.mode != "train":
        raise PlanError(f"expected a plan that trains with {algorithm}, found one for {plan.mode}")
    if algorithm.name == ADASUM and size & (size - 1):
        raise PlanError(f"expected 2, 4, 8, … copies, which {algorithm} combines two by two, found {size}")
    stored = [name for stage in plan.stages for name in stage.storage if name in _trained(graph)]
    for name in (name for name in stored if stored.count(name) > 1):
        raise PlanError(
            f"expected parameters of one stage each with {algorithm}, found {graph.stored_by_tensor[name].name} in "
            "several; use one stage, or untie it"
        )
    if any(map(stored_on_host, plan.stages)):
        raise PlanError(f'expected copies of the parameters on devices with {algorithm}, found some on the host; leave '
                        'out offload="optimizer", or the algorithm')  # fmt: skip
    for index, stage in enumerate(plan.stages):
        _check_stage(stage_graph(graph, plan, index), stage, algorithm)
    if algorithm.name == BACKUP:
        check_backup(graph, plan, size)


def _trained(graph: Graph) -> set[str]:
    return {item.tensor for item in graph.parameters if item.requires_grad}


def _check_stage(graph: Graph, stage: Stage, algorithm: Algorithm) -> None:
    axis = [item.name for item in stage.axes].index(algorithm.axis)
    trained, known = _trained(graph), tensors_of_inputs(graph)

    def refused(what: str, found: str) -> PlanError:
        return PlanError(f"expected {what} over {algorithm.axis}, whose ranks train copies of their own ({algorithm}), "
                         f"found {found}; {_REMEDY}")  # fmt: skip

    if stage.axes[axis].shares or any(fork.axis == algorithm.axis for fork in stage.forks):
        raise refused("equal parts of the batch, and the same operators on all ranks", "others")
    for name in trained & stage.storage.keys():
        own = graph.stored_by_tensor[name].name
        if stage.storage[name].placement[axis] != I:
            raise refused(f"parameter {own} stored whole (I)", str(stage.storage[name].placement[axis]))
        for node, position in graph.consumers[name]:
            if stage.nodes[node.name].operands[position][axis] != R:
                used = stage.nodes[node.name].operands[position][axis]
                raise refused(f"parameter {own} used whole by each rank for itself (R)", f"{used} by {_at(node)}")
    for item in stage.redistributes:
        kinds = [(step.before, step.after) for step in item.steps if step.axis == axis]
        if item.tensor in trained and kinds and kinds != [(I, R)]:
            way = ", ".join(f"{before} -> {after}" for before, after in kinds)
            raise refused(f"parameter {graph.stored_by_tensor[item.tensor].name} used as it is (I -> R)", way)
        if not kinds or item.tensor in known or item.tensor in graph.stored_by_tensor or algorithm.is_compressed:
            continue
        readers = [n for n, at in graph.consumers[item.tensor] if stage.nodes[n.name].operands[at] == item.target]
        if readers and not (kinds[0][0] == P and _is_summed_later(graph, item, readers)):
            raise refused("nothing exchanged that follows from parameters", f"{item.tensor}, for {_at(readers[0])}")
    for node in graph.nodes if not algorithm.is_compressed else ():
        forward, backward = inner_communication(graph, node, stage.nodes[node.name].operands, stage.axes)
        if any(inner.axis == axis for inner in (*forward, *backward)):
            raise refused("operators that work on the samples of their rank", _at(node))


def _at(node: Node) -> str:
    return f"node {node.name} ({node.op}) at {node.source or 'an unknown line'}"


def _is_summed_later(graph: Graph, item: Redistribute, readers: list[Node]) -> bool:
    """Whether the loss would be the same if summands went through all readers, and were added up at the end."""
    waiting, seen = [(item.tensor, node) for node in readers], set[tuple[str, str]]()
    while waiting:
        name, node = waiting.pop()
        if (name, node.name) in seen:
            continue
        seen.add((name, node.name))
        at = [position for position, operand in enumerate(node.operands) if operand == name]
        if not any(
            all(rule.operands[position] == P for position in at) and all(type_ == P for type_ in rule.results)
            for rule in axis_rules(graph, node)
        ):
            return False
        waiting += [(result, reader) for result in node.results for reader, _ in graph.consumers.get(result, ())]
    return True


def in_copies(graph: Graph, plan: Plan, algorithm: Algorithm) -> Plan:
    """The plan under an algorithm: each copy uses the parameters as they are, where the sum of their gradients may have
    taken two steps, by slices."""
    if algorithm.name == PIPEDREAM:
        return replace(plan, algorithm=algorithm)
    trained, stages = _trained(graph), []
    for stage in plan.stages:
        names = [item.name for item in stage.axes]
        if algorithm.axis not in names:
            stages.append(stage)
            continue
        axis = names.index(algorithm.axis)
        told = tuple(
            replace(item, steps=(Step(axis, I, R), *(s._replace(parts=1) for s in item.steps if s.axis != axis)))
            if item.tensor in trained and _comes_home(item, stage, axis) else item
            for item in stage.redistributes
        )  # fmt: skip
        stages.append(replace(stage, redistributes=told))
    return replace(plan, stages=tuple(stages), algorithm=algorithm)


def _comes_home(item: Redistribute, stage: Stage, axis: int) -> bool:
    kept = stage.storage.get(item.tensor)
    return kept is not None and kept.placement[axis] == I and item.target[axis] == R


def without_sums(plan: Plan) -> Plan:
    """The plan as its steps run under its algorithm: gradients are not summed over copies. What it is simulated as."""
    if plan.algorithm is None:
        return plan
    if plan.algorithm.name == PIPEDREAM:
        return replace(plan, algorithm=None)
    return replace(plan, algorithm=None, stages=tuple(_apart(stage, plan.algorithm.axis) for stage in plan.stages))


def _apart(stage: Stage, name: str) -> Stage:
    """Parameters that are stored R on the axis: each rank uses what it has, and keeps the gradient that it made."""
    axis = [item.name for item in stage.axes].index(name)
    storage = {
        tensor: replace(kept, placement=(*kept.placement[:axis], R, *kept.placement[axis + 1 :]))
        if kept.placement[axis] == I else kept
        for tensor, kept in stage.storage.items()
    }  # fmt: skip
    return replace(stage, storage=storage, redistributes=tuple(_without(stage, axis)))


def _without(stage: Stage, axis: int) -> Iterator[Redistribute]:
    for item in stage.redistributes:
        steps = item.steps
        if item.tensor in stage.storage:
            steps = tuple(s for s in steps if (s.axis, s.before, s.after) != (axis, I, R))
        if steps:
            yield replace(item, steps=steps)
