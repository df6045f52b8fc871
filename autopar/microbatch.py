"""Microbatches as one more, outermost mesh axis whose "ranks" run one after another: gradient accumulation, typed.

    inputs S(0) · parameters stored I, used R (their gradients P: summed over the microbatches) · the loss ends P
    sums of what follows from inputs alone (counts of targets, weights, masks): P → R before the first microbatch
    what is the same in all, such as a penalty on parameters, R → P: the first adds it

On this axis nothing is searched: what an operator does follows from its operands (`microbatch_types`), and so from the
graph and a count. A plan is of one microbatch: it is planned, checked and simulated on the graph of one
(`divided_graph`). What is emitted, and the bytes that are sent, are of the step: there, `on_microbatch_axis` states the
plan on this axis too. A tensor that is made for the whole step may be sliced for a microbatch, never the other way:
microbatches cannot see each other.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from autopar.cost.eight_bits import check_in_eight_bits
from autopar.errors import PlacementError, PlanError
from autopar.ir.buffers import update_line
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node, Tensor, found_once
from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import Axis, I, P, Placement, R, S, Type, format_placement, local_shape
from autopar.ir.plan import NodePlan, Plan, Redistribute, Stage
from autopar.ir.redistribution import Step, cheapest_path
from autopar.ir.schedule import SCHEDULES
from autopar.ir.stages import leaving_values, stage_graph
from autopar.ir.structure import batch_inputs, is_random, tensors_of_inputs
from autopar.ir.verifier import Admits, check_identity, ending, verify
from autopar.ops import admits, axis_rules, shape_error
from autopar.ops.call import call_of
from autopar.ops.communication import gathered_rows, inner_communication, is_mean_over_samples
from autopar.ops.compact import check_in_bits
from autopar.ops.copies import check_copies
from autopar.ops.lowering import local_arguments
from autopar.ops.table import operator

Types = Mapping[str, NodePlan]
"""Placements of each node on the microbatch axis alone."""


def divisible(graph: Graph, count: int) -> bool:
    """Whether `count` microbatches are possible: the batch divides, and each part can be followed to the loss."""
    try:
        microbatch_types(graph, count)
    except PlanError:
        return False
    return True


@found_once
def microbatch_types(graph: Graph, count: int) -> Types:
    """How each node runs on the microbatch axis.

    Raises PlanError where the batch does not divide into `count`, where an operator mixes samples (batch statistics, a
    product of two sums over the batch), or where what forward makes of a stored tensor depends on the batch, naming
    node and source line.
    """
    inputs = batch_inputs(graph)
    batch = graph.tensors[inputs[0]].shape[0] if inputs else 0
    if not batch or batch % count:
        raise PlanError(f"expected a number of microbatches that divides the batch of {batch}, found {count}")
    current: dict[str, Type] = {name: S(0) if name in inputs else R for name in graph.inputs}
    types = {}
    for node in graph.nodes:
        types[node.name] = found = _followed(graph, node, current, count)
        current.update((name, placement[0]) for name, placement in zip(node.results, found.results, strict=True))
    if graph.loss is not None and current[graph.loss] not in (P, R):
        raise PlanError(
            f"expected a loss that is a sum or mean over the batch, found one that is {current[graph.loss]} over "
            "microbatches: return a mean over samples from forward, or use microbatches=1"
        )
    _check_updates(graph, current)
    return types


def divided_graph(graph: Graph, count: int) -> Graph:
    """That of one of so many microbatches, one for all who ask: the same nodes, on tensors cut as they are needed.

    The graph itself for one. Raises PlanError as `microbatch_types` does.
    """
    return graph if count == 1 else _one_microbatch(graph, count)


def _check_updates(graph: Graph, types: Mapping[str, Type]) -> None:
    """That each microbatch makes the same of buffers and parameters, from what they were before the step."""
    drawn: set[str] = set()
    for node in graph.nodes:
        if is_random(node) or not drawn.isdisjoint(node.operands):
            drawn.update(node.results)
    odd = [name for name, value in graph.mutations.items() if types.get(value, R) != R or value in drawn]
    if odd:
        names = ", ".join(f"{name}{update_line(graph, name)}" for name in sorted(odd)[:3])
        raise PlanError(
            f"expected a model whose forward changes nothing that is stored by the batch or by chance, found that it "
            f"changes {names}: the value would depend on the number of microbatches. Use microbatches=1, or keep it "
            "fixed."
        )


def _check_mean(graph: Graph, node: Node, plan: NodePlan) -> None:
    """That the targets of a mean cross-entropy, which all microbatches count together, are known before the first."""
    if not is_mean_over_samples(call_of(graph, node)) or plan.operands[0][0].kind != "S":
        return
    known = tensors_of_inputs(graph)
    if not known.issuperset(node.operands[1:]):
        raise PlanError(
            f"expected the targets of {node.name} at {node.source or 'an unknown line'} to follow from the inputs "
            "alone, since they are counted over all microbatches; use microbatches=1"
        )


def batch_types(graph: Graph) -> dict[str, Type]:
    """How each tensor that is made of the batch is cut when its samples are: sliced, or summands.

    Tensors are missing where samples meet in a way that no rule of an operator has; lengths need not divide.
    """
    inputs = batch_inputs(graph)
    current: dict[str, Type] = {name: S(0) if name in inputs else R for name in graph.inputs}
    for node in graph.nodes:
        found = _best_rule(graph, node, [current.get(name, R) for name in node.operands], 1)
        if found is not None:
            current.update((name, placement[0]) for name, placement in zip(node.results, found.results, strict=True))
    return {name: type_ for name, type_ in current.items() if type_.kind in "SP" and name not in graph.inputs}


def _best_rule(
    graph: Graph, node: Node, have: list[Type], count: int, known: Container[str] | None = None
) -> NodePlan | None:
    """The node's rule for what its operands are, with the fewest slices of what is whole; stored tensors are whole.

    known: of which the sum over all microbatches is there before; then what is whole may be the first's summand, too.
    """
    rules = axis_rules(graph, node)  # the same tuple for equal calls
    is_known = None if known is None else tuple([name in known for name in node.operands])
    key, best_rules = (id(rules), *have, count, is_known), graph.found.setdefault(("best rules", ""), {})
    if key not in best_rules:
        best: tuple[int, NodePlan] | None = None
        for rule in rules:
            slices = _slices(graph, node, have, rule.operands, count, known)
            if slices is None or not _divides(graph, node.results, rule.results, count):
                continue
            if best is None or slices < best[0]:
                plan = NodePlan(tuple((t,) for t in rule.operands), tuple((t,) for t in rule.results))
                if shape_error(graph, node, plan.operands, (Axis(MICROBATCH, count, 1),)) is None:
                    best = slices, plan
        best_rules[key] = None if best is None else best[1]
    found: NodePlan | None = best_rules[key]
    return found


def _followed(graph: Graph, node: Node, current: Mapping[str, Type], count: int) -> NodePlan:
    """The node's best rule. Raises PlanError where it has none that keeps the microbatches apart."""
    have = [current.get(name, R) for name in node.operands]
    best = _best_rule(graph, node, have, count, tensors_of_inputs(graph))
    if best is None or _mixes_samples(graph, node, best, count):
        found = ", ".join(f"{name}: {type_}" for name, type_ in zip(node.operands, have, strict=True))
        raise PlanError(
            f"node {node.name} ({node.op}) at {node.source or 'an unknown line'}: expected an operator that works on "
            f"each microbatch by itself, or on sums over inputs alone, found one that mixes samples (operands over "
            f"microbatches: {found}). Use microbatches=1, which goes with data and tensor parallelism and with stages "
            "of one microbatch."
        )
    _check_mean(graph, node, best)
    return best


def _slices(
    graph: Graph, node: Node, have: list[Type], wanted: tuple[Type, ...], count: int, known: Container[str] | None
) -> int | None:
    """How many operands must be sliced, or summed, for a rule; None when the operands cannot be what it wants."""
    slices = 0
    for name, own, want in zip(node.operands, have, wanted, strict=True):
        if own == want:
            continue
        if known is not None and ((own, want) == (R, P) or ((own, want) == (P, R) and name in known)):
            slices += 1
            continue
        sliceable = own == R and want.kind == "S" and name not in graph.stored_by_tensor
        if not sliceable or graph.tensors[name].shape[want.dim] % count:
            return None
        slices += 1
    return slices


def _divides(graph: Graph, names: tuple[str, ...], types: tuple[Type, ...], count: int) -> bool:
    pairs = zip(names, types, strict=True)
    return all(type_.kind != "S" or graph.tensors[name].shape[type_.dim] % count == 0 for name, type_ in pairs)


def _mixes_samples(graph: Graph, node: Node, plan: NodePlan, count: int) -> bool:
    """What operators send inside, such as statistics or the borders of images, they send to ranks; microbatches, which
    run one after another, cannot."""
    axes, mixes = (Axis(MICROBATCH, count, 1),), operator(node.op).mixes_samples
    sends = any(inner_communication(graph, node, plan.operands, axes))
    return sends or (mixes is not None and mixes(call_of(graph, node), plan.operands, axes))


# Between the step and one microbatch ----------------------------------------


@found_once
def _one_microbatch(graph: Graph, count: int) -> Graph:
    types, axes = microbatch_types(graph, count), (Axis(MICROBATCH, count, 1),)
    cut: dict[str, Placement] = {name: (S(0),) for name in batch_inputs(graph)}
    for node in graph.nodes:
        cut.update(zip(node.results, types[node.name].results, strict=True))
    whole = {name for name in graph.producers if cut[name] == (R,)}
    for node in graph.nodes:  # what is made for the whole step is cut where it is read
        for name, placement in zip(node.operands, types[node.name].operands, strict=True):
            if placement[0].kind == "S":
                cut[name] = placement

    def small(tensor: Tensor) -> Tensor:
        placement = cut.get(tensor.name, (R,))
        return replace(tensor, shape=local_shape(tensor.shape, placement, axes))

    made = {name: graph.tensors[name].shape for name in graph.producers if name in whole and cut[name] != (R,)}
    tensors = {name: small(tensor) for name, tensor in graph.tensors.items()}
    nodes = tuple(_in_groups(graph, node, tensors) for node in graph.nodes)
    return replace(graph, nodes=nodes, tensors=tensors, whole_shapes=made)


def _in_groups(graph: Graph, node: Node, tensors: Mapping[str, Tensor]) -> Node:
    """The node with as many groups of channels as a microbatch has, where samples are channels."""
    if operator(node.op).groups is None:
        return node
    args, kwargs = local_arguments(graph, node, tuple(tensors[name].shape for name in node.results))
    return node if (args, kwargs) == (node.args, node.kwargs) else replace(node, args=args, kwargs=kwargs)


def cut_constraints(graph: Graph, count: int) -> tuple[Constraint, ...]:
    """What is cut for a microbatch must not already be cut along that dim by ranks: microbatches are the outer cut."""
    if count == 1:
        return ()
    types = microbatch_types(graph, count)
    made = {name: placement[0] for node in graph.nodes
            for name, placement in zip(node.results, types[node.name].results, strict=True)}  # fmt: skip
    found = {}
    for node in graph.nodes:
        for name, placement in zip(node.operands, types[node.name].operands, strict=True):
            if placement[0].kind == "S" and made.get(name) == R:
                others = (str(S(dim)) for dim in range(len(graph.tensors[name].shape)) if S(dim) != placement[0])
                found[name] = Constraint(name, ("R", "I", "P", *others))
    return tuple(found.values())


def on_microbatch_axis(graph: Graph, plan: Plan) -> Plan:
    """A plan that is well typed for one microbatch, stated on the microbatch axis as well: what is emitted.

    The plan itself where there is one microbatch. Raises PlanError where the graph has no microbatch types,
    PlacementError where a stage would sum over all microbatches what it receives in each.
    """
    if plan.microbatches == 1:
        return plan
    return replace(plan, stages=tuple(_stated(graph, plan, index) for index in range(len(plan.stages))))


def on_outer_axis(graph: Graph, plan: Plan, count: int, name: str) -> Stage:
    """The stage of a plan of one stage, which is for one of `count` equal parts of the batch, stated for all of them:
    parts are on an outermost axis of that name and size, each on as many ranks as the plan has. graph: of the whole.

    Raises PlanError where parts are not independent of each other but for sums of what follows from inputs alone.
    """
    part, stage = divided_graph(graph, plan.microbatches), plan.stage
    types, batch = microbatch_types(part, count), batch_inputs(part)
    full = replace(
        stage,
        axes=(Axis(name, count, stage.num_ranks), *stage.axes),
        inputs={k: (S(0) if k in batch else R, *placement) for k, placement in stage.inputs.items()},
        storage={
            k: replace(kept, placement=(_whole(part.tensors[k]), *kept.placement)) for k, kept in stage.storage.items()
        },
        nodes={k: _joined(types[k], node) for k, node in stage.nodes.items()},
    )
    known = {(item.tensor, item.target): item.steps for item in stage.redistributes}
    return replace(full, redistributes=_redistributes(part, full, known, ()))


def types_of_stage(graph: Graph, plan: Plan, index: int) -> Stage:
    """What a stage's placements are on the microbatch axis alone."""
    stage, types = plan.stages[index], microbatch_types(graph, plan.microbatches)
    batch = batch_inputs(graph)
    given: dict[str, Placement] = {name: (S(0) if name in batch else R,) for name in graph.inputs}
    return Stage(
        stage.first_rank,
        (Axis(MICROBATCH, plan.microbatches, plan.mesh.num_devices),),
        {name: given[name] if name in given else (_sent(graph, types, name),) for name in stage.inputs},
        {name: replace(kept, placement=(_whole(graph.tensors[name]),)) for name, kept in stage.storage.items()},
        {name: types[name] for name in stage.nodes},
    )


def _sent(graph: Graph, types: Types, name: str) -> Type:
    """How a tensor leaves a stage: as it is made, but for sums over all microbatches, which are made before the first
    of them, where the inputs are."""
    node = graph.producers[name]
    (made,) = types[node.name].results[node.results.index(name)]
    return R if made == P and name in tensors_of_inputs(graph) else made


def _whole(tensor: Tensor) -> Type:
    return I if tensor.differentiable else R


def _stated(graph: Graph, plan: Plan, index: int) -> Stage:
    """A stage with the type of everything on the microbatch axis before those on others."""
    stage, over = plan.stages[index], types_of_stage(graph, plan, index)
    joined: dict[tuple[int, int], NodePlan] = {}  # equal layers have the same
    for name, node in stage.nodes.items():
        key = id(over.nodes[name]), id(node)
        if key not in joined:
            joined[key] = _joined(over.nodes[name], node)
    full = replace(
        stage,
        axes=over.axes + stage.axes,
        inputs={name: over.inputs[name] + placement for name, placement in stage.inputs.items()},
        storage={
            name: replace(kept, placement=over.storage[name].placement + kept.placement)
            for name, kept in stage.storage.items()
        },
        nodes={name: joined[id(over.nodes[name]), id(node)] for name, node in stage.nodes.items()},
    )
    types = microbatch_types(graph, plan.microbatches)
    leaving = [
        (name, (_sent(graph, types, name), *placement)) for name, placement in leaving_values(graph, plan, index)
    ]
    known = {(item.tensor, item.target): item.steps for item in stage.redistributes}
    return replace(full, redistributes=_redistributes(stage_graph(graph, plan, index), full, known, leaving))


def _joined(types: NodePlan, plan: NodePlan) -> NodePlan:
    operands = zip(types.operands, plan.operands, strict=True)
    results = zip(types.results, plan.results, strict=True)
    return NodePlan(
        tuple((*a, *b) for a, b in operands), tuple((*a, *b) for a, b in results), plan.in_bits,
        plan.in_eight_bits,
    )  # fmt: skip


Known = Mapping[tuple[str, Placement], tuple[Step, ...]]
"""The steps that one microbatch takes for a tensor to a placement."""


def _redistributes(
    graph: Graph, stage: Stage, known: Known, leaving: Iterable[tuple[str, Placement]]
) -> tuple[Redistribute, ...]:
    """All that the stage's nodes read, that its graph ends with, and that later stages read (`leaving`)."""
    placements = dict(stage.inputs) | {name: kept.placement for name, kept in stage.storage.items()}
    found: dict[tuple[str, Placement], Redistribute] = {}

    def need(name: str, wanted: Placement) -> None:
        have = placements[name]
        if have != wanted and (name, wanted) not in found:
            _check_sum(graph, name, have[0], wanted[0])
            found[name, wanted] = Redistribute(name, wanted, _steps(name, have, wanted, known))

    for node in graph.nodes:
        for name, wanted in zip(node.operands, stage.nodes[node.name].operands, strict=True):
            need(name, wanted)
        placements.update(zip(node.results, stage.nodes[node.name].results, strict=True))
    for name, target in ending(graph, stage):
        _check_end(graph, name, placements[name][0], target[0])
        need(name, target)
    for name, target in leaving:
        need(name, target)
    return tuple(found.values())


def _check_sum(graph: Graph, name: str, before: Type, after: Type) -> None:
    """That what microbatches are summed over is there before the first of them, in this stage."""
    if (before, after) == (P, R) and name not in graph.stored_by_tensor and name not in tensors_of_inputs(graph):
        node = graph.producers.get(name)
        raise PlacementError(
            f"expected {name}{f' from node {node.name} ({node.op}) at {node.source}' if node else ''} to follow from "
            "the inputs of its stage alone, since it is summed over all microbatches before the first, found that it "
            "is received in each; take one stage, or microbatches=1"
        )


def _check_end(graph: Graph, name: str, type_: Type, wanted: Type) -> None:
    """That what a step leaves, but for the loss, is the same in all microbatches."""
    if type_ != wanted and name != graph.loss:
        node = graph.producers.get(name)
        raise PlacementError(
            f"expected output {name}{f' from node {node.name} ({node.op}) at {node.source}' if node else ''} to be the "
            f"same in all microbatches ({wanted}), found that it is {type_} over them; use microbatches=1"
        )


def _steps(name: str, have: Placement, wanted: Placement, known: Known) -> tuple[Step, ...]:
    """The microbatch axis first, then one microbatch's own steps; a search where inner slices stand in the way."""
    inner = known.get((name, wanted[1:])) if have[1:] != wanted[1:] else ()
    if inner is None:
        raise PlanError(f"expected a redistribution of {name} to [{format_placement(wanted[1:])}], found none")
    moved = tuple(step._replace(axis=step.axis + 1) for step in inner)
    if have[0] == wanted[0]:
        return moved
    if not (wanted[0].kind == "S" and wanted[0] in have[1:]):
        return (Step(0, have[0], wanted[0]), *moved)
    found = cheapest_path(have, wanted, lambda _, step: 0 if step.axis == 0 else 1)
    assert found is not None, f"no way from {have} to {wanted} for {name}"
    return found


# The check ----------------------------------------


def check_plan(graph: Graph, plan: Plan, admits: Admits = admits) -> None:
    """Raises PlanError when the plan is for another graph or in microbatches that this one cannot be divided into,
    PlacementError where it is not well typed, with node and source line."""
    check_identity(graph, plan)
    part = divided_graph(graph, plan.microbatches)
    verify(part, plan, admits)
    check_in_bits(part, plan)
    check_in_eight_bits(part, plan)
    check_copies(part, plan)
    _check_parts(part, plan)
    if plan.microbatches > 1:
        _check_inputs(graph, plan)
        on_microbatch_axis(graph, plan)
    _check_told(graph, plan)


def _check_parts(graph: Graph, plan: Plan) -> None:
    """That where backward passes come in two parts, no gradient of a weight meets as factors: both would be made by one
    function, in the first. graph: of a microbatch."""
    if not SCHEDULES[plan.schedule].splits_backward or len(plan.stages) == 1:
        return
    for stage in plan.stages:
        for name, placed in stage.nodes.items():
            node = graph.node_by_name[name]
            if gathered_rows(node, placed.operands, stage.axes) > 1:
                raise PlanError(
                    f"node {name} ({node.op}) at {node.source or 'an unknown line'}: expected a weight that is used R "
                    f"under schedule {plan.schedule}, whose backward passes come in two parts, found I, so that its "
                    "gradient meets as factors; take another schedule, such as 1f1b, or use the weight R"
                )


def _check_inputs(graph: Graph, plan: Plan) -> None:
    batch = batch_inputs(graph)
    if plan.microbatch_inputs != batch:
        raise PlanError(
            f"expected microbatches to divide the inputs {', '.join(batch)}, found "
            f"{', '.join(plan.microbatch_inputs) or 'none'}"
        )


def _check_told(graph: Graph, plan: Plan) -> None:
    """That a file of an earlier version says of the microbatch axis what follows from the graph."""
    for index, told in enumerate(plan.told):
        own = types_of_stage(graph, plan, index)
        for what in ("inputs", "storage", "nodes"):
            said, found = getattr(told, what), getattr(own, what)
            odd = next((name for name in said if said[name] != found.get(name)), None)
            if odd is not None:
                raise PlanError(
                    f"expected {odd} over microbatches as follows from the model, {found.get(odd)}, found "
                    f"{said[odd]} in the file; plan again"
                )
