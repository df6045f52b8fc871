"""Microbatches as one more, outermost mesh axis whose "ranks" run one after another: gradient accumulation, typed.

    inputs S(0) · parameters stored I, used R (their gradients P: summed over the microbatches) · the loss ends P
    sums of what follows from inputs alone (counts of targets, weights, masks): P → R before the first microbatch
    what is the same in all, such as a penalty on parameters, R → P: the first adds it

On this axis nothing is searched: what an operator does follows from its operands (`microbatch_types`). The other
axes are planned on the graph of one microbatch (`one_microbatch`), and the plan is then stated on all axes
(`over_microbatches`), where the verifier checks it like any other. A tensor that is made for the whole step may be
sliced for a microbatch, never the other way: microbatches cannot see each other.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.buffers import update_line
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node, Tensor
from autopar.ir.mesh import MICROBATCH, LogicalMesh
from autopar.ir.placement import Axis, I, P, Placement, R, S, Type, local_shape
from autopar.ir.plan import NodePlan, Plan, Redistribute, Stage, Storage
from autopar.ir.redistribution import Step, cheapest_path
from autopar.ir.structure import batch_inputs, is_random, tensors_of_inputs
from autopar.ir.verifier import update_placement
from autopar.ops import axis_rules
from autopar.ops.call import call_of
from autopar.ops.communication import is_mean_over_samples
from autopar.ops.table import operator

Types = Mapping[str, NodePlan]
"""Placements of each node on the microbatch axis alone."""


def microbatch_axis(count: int, num_devices: int) -> Axis:
    """The outermost axis."""
    return Axis(MICROBATCH, count, num_devices)


def divisible(graph: Graph, count: int) -> bool:
    """Whether `count` microbatches are possible: the batch divides, and each part can be followed to the loss."""
    try:
        microbatch_types(graph, count)
    except PlanError:
        return False
    return True


def microbatch_types(graph: Graph, count: int) -> Types:
    """How each node runs on the microbatch axis.

    Raises PlanError where the batch does not divide into `count`, where an operator mixes samples (batch statistics, a
    product of two sums over the batch), or where what forward makes of a stored tensor depends on the batch, naming
    node and source line.
    """
    key = "microbatch types", str(count)
    if key not in graph.found:
        graph.found[key] = _find_types(graph, count)
    found: Types = graph.found[key]
    return found


def divided_graph(graph: Graph, count: int) -> Graph:
    """That of one of so many microbatches: one for all who ask. Raises PlanError as `microbatch_types` does."""
    key = "microbatch", str(count)
    if key not in graph.found:
        graph.found[key] = one_microbatch(graph, microbatch_types(graph, count), count)
    found: Graph = graph.found[key]
    return found


def _find_types(graph: Graph, count: int) -> Types:
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
                best = slices, NodePlan(tuple((t,) for t in rule.operands), tuple((t,) for t in rule.results))
        best_rules[key] = None if best is None else best[1]
    found: NodePlan | None = best_rules[key]
    return found


def _followed(graph: Graph, node: Node, current: Mapping[str, Type], count: int) -> NodePlan:
    """The node's best rule. Raises PlanError where it has none that keeps the microbatches apart."""
    have = [current.get(name, R) for name in node.operands]
    best = _best_rule(graph, node, have, count, tensors_of_inputs(graph))
    if best is None or _mixes_samples(graph, node, best):
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


def _mixes_samples(graph: Graph, node: Node, plan: NodePlan) -> bool:
    """Batch statistics are reduced inside the operator, over ranks only; in evaluation there are none."""
    mixes = operator(node.op).mixes_samples
    return mixes is not None and plan.operands[0] == (S(0),) and mixes(call_of(graph, node))


# Between the step and one microbatch ----------------------------------------


def one_microbatch(graph: Graph, types: Types, count: int) -> Graph:
    """The graph of one microbatch: the same nodes, on tensors cut as they are needed."""
    axes = (microbatch_axis(count, 1),)
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
    return replace(graph, tensors=tensors, whole_shapes=made)


def cut_constraints(graph: Graph, types: Types) -> tuple[Constraint, ...]:
    """What is cut for a microbatch must not already be cut along that dim by ranks: microbatches are the outer cut."""
    made = {name: placement[0] for node in graph.nodes
            for name, placement in zip(node.results, types[node.name].results, strict=True)}  # fmt: skip
    found = {}
    for node in graph.nodes:
        for name, placement in zip(node.operands, types[node.name].operands, strict=True):
            if placement[0].kind == "S" and made.get(name) == R:
                others = (str(S(dim)) for dim in range(len(graph.tensors[name].shape)) if S(dim) != placement[0])
                found[name] = Constraint(name, ("R", "I", "P", *others))
    return tuple(found.values())


def over_microbatches(graph: Graph, plan: Plan, types: Types, count: int) -> Plan:
    """A plan for one microbatch, stated on the microbatch axis as well."""
    stage = plan.stage
    axes = (microbatch_axis(count, plan.mesh.num_devices), *stage.axes)
    batch = batch_inputs(graph)
    nodes = {name: _joined(types[name], node) for name, node in stage.nodes.items()}
    whole = {
        name: replace(kept, placement=(I if graph.tensors[name].differentiable else R, *kept.placement))
        for name, kept in stage.storage.items()
    }
    full = replace(
        stage,
        axes=axes,
        inputs={name: (S(0) if name in batch else R, *placement) for name, placement in stage.inputs.items()},
        storage=whole,
        nodes=nodes,
    )
    known = {(item.tensor, item.target): item.steps for item in stage.redistributes}
    full = replace(full, redistributes=_redistributes(graph, full, known))
    return replace(plan, stages=(full,), microbatches=count, microbatch_inputs=batch)


def _joined(types: NodePlan, plan: NodePlan) -> NodePlan:
    operands = zip(types.operands, plan.operands, strict=True)
    results = zip(types.results, plan.results, strict=True)
    return NodePlan(tuple((*a, *b) for a, b in operands), tuple((*a, *b) for a, b in results))


def _redistributes(
    graph: Graph, stage: Stage, known: Mapping[tuple[str, Placement], tuple[Step, ...]]
) -> tuple[Redistribute, ...]:
    placements = dict(stage.inputs) | {name: kept.placement for name, kept in stage.storage.items()}
    found: dict[tuple[str, Placement], Redistribute] = {}

    def need(name: str, wanted: Placement) -> None:
        have = placements[name]
        if have != wanted and (name, wanted) not in found:
            found[name, wanted] = Redistribute(name, wanted, _steps(name, have, wanted, known))

    for node in graph.nodes:
        for name, wanted in zip(node.operands, stage.nodes[node.name].operands, strict=True):
            need(name, wanted)
        placements.update(zip(node.results, stage.nodes[node.name].results, strict=True))
    for name in graph.outputs:
        first = P if name == graph.loss else placements[name][0]
        rest = I if graph.tensors[name].differentiable else R
        need(name, (first, *(rest for _ in stage.axes[1:])))
    for stored, name in graph.mutations.items():
        need(name, (R, *update_placement(graph, stage, stored)[1:]))
    return tuple(found.values())


def _steps(
    name: str, have: Placement, wanted: Placement, known: Mapping[tuple[str, Placement], tuple[Step, ...]]
) -> tuple[Step, ...]:
    """The microbatch axis first, then one microbatch's own steps; a search where inner slices stand in the way."""
    inner = known.get((name, wanted[1:]), ()) if have[1:] != wanted[1:] else ()
    moved = tuple(step._replace(axis=step.axis + 1) for step in inner)
    if have[0] == wanted[0]:
        return moved
    if not (wanted[0].kind == "S" and wanted[0] in have[1:]):
        return (Step(0, have[0], wanted[0]), *moved)
    found = cheapest_path(have, wanted, lambda _, step: 0 if step.axis == 0 else 1)
    assert found is not None, f"no way from {have} to {wanted} for {name}"
    return found


def axes_of_parts(plan: Plan) -> list[LogicalMesh]:
    """Of each stage, or of the only one, the axes that its ranks are on: all but that of microbatches."""
    return [stage.axes if plan.microbatches == 1 else stage.axes[1:] for stage in plan.stages]


def one_microbatch_plan(plan: Plan) -> Plan:
    """The plan as one microbatch sees it, without the microbatch axis: what is simulated `plan.microbatches` times."""
    if plan.microbatches == 1:
        return plan
    return replace(plan, stages=tuple(map(_inner, plan.stages)))


def _inner(placed: Stage) -> Stage:
    """Everything that has the microbatch axis, without it."""
    kept = (replace(item, target=item.target[1:], steps=_inner_steps(item.steps)) for item in placed.redistributes)
    different = {id(node): node for node in placed.nodes.values()}  # equal layers have the same
    nodes = {number: _inner_node(node) for number, node in different.items()}
    return replace(
        placed,
        axes=placed.axes[1:],
        inputs={name: placement[1:] for name, placement in placed.inputs.items()},
        storage={name: _inner_storage(storage) for name, storage in placed.storage.items()},
        nodes={name: nodes[id(node)] for name, node in placed.nodes.items()},
        redistributes=tuple(item for item in kept if item.steps),
    )


def _inner_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(step._replace(axis=step.axis - 1) for step in steps if step.axis)


def _inner_storage(storage: Storage) -> Storage:
    return replace(storage, placement=storage.placement[1:])


def _inner_node(node: NodePlan) -> NodePlan:
    return NodePlan(tuple(p[1:] for p in node.operands), tuple(p[1:] for p in node.results))


def types_of(plan: Plan) -> Types:
    """What a plan says of each node on the microbatch axis."""
    return {
        name: NodePlan(tuple(p[:1] for p in node.operands), tuple(p[:1] for p in node.results))
        for placed in plan.stages
        for name, node in placed.nodes.items()
    }
