"""The type checker over (graph, plan): walks once and names the node and source line of the first violation.

A plan is well typed when
  1. it is for this graph, and every node, parameter and input has its placements on every axis;
  2. every operand has the placement that its producer left, or one that a listed redistribution brings it to;
  3. every redistribution is a sequence of legal steps of the table from the producer's placement to its target;
  4. every node's placements follow one of its operator's rules on each axis, and its local shapes exist;
  5. the outputs end whole: I where a gradient enters, R elsewhere; what parameters become, as these are stored;
  6. what is recomputed are modules that run, none inside of another, and operators in blocks that read what they make;
  7. axes with shares cut activations alone, in whole parts (`shares.check_shares`);
  8. branches run at one coordinate of an axis, and may (`branches.check_forks`);
  9. of several stages, each is well typed, and receives what it reads as it was sent (`stages.check_stages`);
  10. each element of the model's parameters is stored in one place (`packed.check_packing`);
  11. what is copied to the host are modules that run, in ways that are built (`copied_out.check_copied_out`).
Together with the rules' own proofs this makes the emitted program equal to the model.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Mapping

from autopar.errors import PlacementError, PlanError
from autopar.ir.branches import branch_rule, check_forks, check_inner_conversions, homes, in_order
from autopar.ir.copied_out import check_copied_out
from autopar.ir.graph import Graph, Node, Tensor
from autopar.ir.mesh import MICROBATCH, LogicalMesh, check_axis_names
from autopar.ir.offload import stored_on_host
from autopar.ir.packed import check_packing
from autopar.ir.placement import I, P, Placement, R, format_placement, of_new_value
from autopar.ir.plan import Plan, Redistribute, Stage, StagePlan, Storage
from autopar.ir.recompute import (
    is_operator_call,
    modules_again,
    node_of_call,
    operator_call,
    refusal_again,
    tensors_again,
)
from autopar.ir.redistribution import apply, by_levels, is_legal, over_servers
from autopar.ir.shares import check_axes_with_shares, check_shares
from autopar.ir.stages import check_stages, stage_graph
from autopar.ir.structure import block_paths

Admits = Callable[[Graph, Node, tuple[Placement, ...], tuple[Placement, ...], LogicalMesh], str | None]


def verify(graph: Graph, plan: Plan, admits: Admits) -> None:
    """Raises PlacementError where a plan is not well typed, PlanError where parts of it do not go together.

    graph: of one microbatch (`microbatch.divided_graph`); that the plan is for it `check_identity` has found.
    `admits(graph, node, operands, results, axes)` says why a node must not run so, or None (`ops.admits`).
    """
    check_packing(graph)
    _check_recompute(graph, plan)
    check_copied_out(graph, plan)
    check_axes_with_shares(plan)
    _check_servers(plan)
    if len(plan.stages) > 1:
        check_stages(graph, plan)
    for index, stage in enumerate(plan.parts):
        part = stage_graph(graph, plan, index)
        _verify_stage(part, stage, admits)
        check_shares(part, stage)


def _verify_stage(graph: Graph, stage: StagePlan, admits: Admits) -> None:
    """One stage by itself; what it receives comes in as `check_stages` has found it to be sent."""
    for node in graph.nodes:
        _check_rank(node, stage.nodes[node.name].operands, stage.nodes[node.name].results, len(stage.axes))
    if crossing := sorted(tensors_again(graph, stage.recompute) & {*graph.received, *graph.sent}):
        raise PlanError(f"expected stages to keep what they send, found {crossing[0]} computed again")
    check_forks(graph, stage)
    is_unlike = bool(stage.forks) or any(axis.shares for axis in stage.axes) or stage.plan.algorithm is not None
    if is_unlike and (found := stored_on_host(stage)):
        raise PlanError(
            f"expected equal ranks that all run the same, with gradients that are summed, where parameters are on the "
            f"host, found {found[0]} there, and branches, unequal shares of the batch or copies that meet by an "
            "algorithm; keep it on the device"
        )
    placements, branched = _sources(graph, stage), homes(stage)
    arrived = {(r.tensor, r.target) for r in stage.redistributes}
    if len(arrived) != len(stage.redistributes):
        raise PlacementError("expected one redistribution for each tensor and target, found a repeated one")
    for node in in_order(graph, stage):
        node_plan = stage.nodes[node.name]
        for name, wanted in zip(node.operands, node_plan.operands, strict=True):
            if placements[name] != wanted and (name, wanted) not in arrived:
                raise _error(
                    node,
                    f"operand {name} as {_text(wanted)}",
                    f"it is {_text(placements[name])} and nothing redistributes it",
                )
        own, axes, reason = node_plan, stage.axes, None
        if node.name in branched:
            own, axes, reason = branch_rule(graph, stage, node, branched)
        reason = reason or admits(graph, node, own.operands, own.results, axes)
        if reason is not None:
            raise _error(node, "placements that follow a rule", reason)
        placements.update(zip(node.results, node_plan.results, strict=True))
    for redistribute in stage.redistributes:
        _check_steps(graph, stage, placements, redistribute)
    check_inner_conversions(graph, stage)
    _check_outputs(graph, stage, placements, arrived)


def check_identity(graph: Graph, plan: Plan) -> None:
    """Raises PlanError when the plan is for another graph than this one, of a step, or for another mesh."""
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(_difference(graph, plan))
    if not plan.stages:
        raise PlanError("expected a stage at least, found none")
    for stage in plan.stages:
        _check_axes(plan, stage)
    if len(plan.stages) == 1:
        _check_whole(graph, plan.stage)


def _check_whole(graph: Graph, stage: Stage) -> None:
    """That the only stage has everything of the graph, what nothing reads too."""
    expected = {node.name for node in graph.nodes}
    if set(stage.nodes) != expected:
        odd = sorted(set(stage.nodes) ^ expected)[:3]
        raise PlanError(f"expected one entry for each of {len(expected)} nodes, found a difference at {odd}")
    if stage.first_rank:
        raise PlanError(f"expected the only stage on all ranks, found it from rank {stage.first_rank} on")
    names = {s.tensor for s in graph.stored}
    if set(stage.storage) != names or set(stage.inputs) != set(graph.inputs):
        odd = sorted((set(stage.storage) ^ names) | (set(stage.inputs) ^ set(graph.inputs)))[:3]
        raise PlanError(f"expected a storage for each parameter and a placement for each input, found {odd} to differ")


def _check_recompute(graph: Graph, plan: Plan) -> None:
    if not plan.recompute:
        return
    running = {path for node in graph.nodes for path, _ in node.scope.path if path}
    modules = modules_again(plan.recompute)
    for path in modules:
        if path not in running:
            near = ", ".join(difflib.get_close_matches(path, running)) or "none of a name like that"
            raise PlanError(f"expected modules that run something to recompute, found {path!r}; there is {near}")
    counts, of_modules = Counter(plan.recompute), frozenset(modules)
    for path in plan.recompute:
        parts = path.split(".")
        around = {".".join(parts[:count]) for count in range(1, len(parts))}
        inside = around & of_modules
        if inside or counts[path] > 1:
            raise PlanError(
                f"expected each module to recompute once, found {path} inside of {inside.pop() if inside else 'itself'}"
            )
    _check_operators_again(graph, plan)


def _check_operators_again(graph: Graph, plan: Plan) -> None:
    """That operators that are computed again by themselves are some, in blocks that make all of what reads them."""
    names = [name for name in plan.recompute if is_operator_call(name)]
    blocks = block_paths(graph) if names else set[str]()
    for name in names:
        node = graph.node_by_name.get(node_of_call(name))
        if node is None or operator_call(node) != name:
            known = [operator_call(node) for node in graph.nodes]
            near = ", ".join(difflib.get_close_matches(name, known)) or "none of a name like that"
            raise PlanError(f"expected operators of the model to recompute, found {name!r}; there is {near}")
        if (objection := refusal_again(graph, node, blocks)) is not None:
            raise PlanError(f"expected operators that can run again by themselves, found {name!r}: {objection}")


def _check_axes(plan: Plan, stage: Stage) -> None:
    """The axes are the submesh, row-major, and those of the only stage are the mesh."""
    axes, num_devices = stage.axes, plan.mesh.num_devices if len(plan.stages) == 1 else stage.num_ranks
    check_axis_names([axis.name for axis in axes])
    sizes = [axis.size for axis in axes]
    row_major = [math.prod(sizes[position + 1 :]) for position in range(len(sizes))]
    if math.prod(sizes) != num_devices or [axis.stride for axis in axes] != row_major:
        found = " × ".join(f"{axis.name}={axis.size} (stride {axis.stride})" for axis in axes) or "none"
        raise PlanError(
            f"expected axes whose sizes multiply to the {num_devices} devices of {plan.mesh}, the last one "
            f"of stride 1, found {found}; plan again for this mesh"
        )


def _difference(graph: Graph, plan: Plan) -> str:
    planned_operators = Counter(plan.scope(name)[1] for name in plan.scopes)
    details = [
        *_names("parameters", Counter(plan.parameters.keys()), Counter(s.tensor for s in graph.stored)),
        *(_names("inputs", Counter(plan.stage.inputs.keys()), Counter(graph.inputs)) if len(plan.stages) == 1 else []),
        *_other_types(graph, plan),
        *_names("operators", planned_operators, Counter(node.op for node in graph.nodes)),
    ]
    return (
        f"expected a plan for this model ({graph.model_name}, fingerprint {graph.fingerprint}), found one for "
        f"{plan.model} (fingerprint {plan.fingerprint}): {'; '.join(details) or 'arguments of operators differ'}. "
        "Plan again, or use the model and batch that the plan was made for."
    )


def _names(what: str, planned: Counter[str], own: Counter[str]) -> list[str]:
    """What only one of the two has, three names each."""
    sides = (("the plan has", "the model lacks", planned - own), ("the model has", "the plan lacks", own - planned))
    return [
        f"{has} {what} {lacks}: {', '.join(sorted(odd)[:3])}{' …' if len(odd) > 3 else ''}"
        for has, lacks, odd in sides
        if odd
    ]


def _other_types(graph: Graph, plan: Plan) -> list[str]:
    pairs = [(name, type_, str(graph.kept(name))) for name, type_ in plan.types.items() if name in graph.tensors]
    odd = [f"{name} is {own} here and {planned} in the plan" for name, planned, own in pairs if own != planned]
    return odd[:3] + ([f"{len(odd) - 3} more tensors differ"] if len(odd) > 3 else [])


def _sources(graph: Graph, stage: StagePlan) -> dict[str, Placement]:
    sources = dict(stage.inputs)
    for stored in graph.stored:
        storage = stage.storage[stored.tensor]
        _check_storage(graph, graph.tensors[stored.tensor], storage, stage.axes)
        is_updated = stored.name in graph.mutations and stored.name not in graph.kept_in_parts
        if storage.on_host and (stored.kind != "parameter" or not stored.requires_grad or stage.mode != "train"):
            where = _maker(graph, stored.tensor)
            raise PlanError(
                f"expected parameters that are trained on the host, found {stored.name}{where}; keep it on the device"
            )
        if is_updated and any(type_.kind == "S" for type_ in storage.placement):
            where = _maker(graph, stored.tensor)
            raise PlacementError(
                f"expected {stored.name}{where}, which forward updates, stored as R, found {_text(storage.placement)}"
            )
        sources[stored.tensor] = storage.placement
    for name, placement in stage.inputs.items():
        tensor = graph.tensors[name]
        if name in graph.received:
            continue
        if any(type_.kind not in "RS" for type_ in placement) or not _dims_exist(tensor, placement, stage.axes):
            where = _maker(graph, name)
            raise PlacementError(f"expected input {name}{where} as R or S(d) on each axis, found {_text(placement)}")
    return sources


def _check_storage(graph: Graph, tensor: Tensor, storage: Storage, axes: LogicalMesh) -> None:
    whole = I if tensor.differentiable else R
    fine = all(type_ == whole or type_.kind == "S" for type_ in storage.placement)
    if not fine or not _dims_exist(tensor, storage.placement, axes):
        raise PlacementError(
            f"expected {tensor.name}{_maker(graph, tensor.name)} stored as {whole} or S(d) on each of {len(axes)} "
            f"axes, found {_text(storage.placement)}"
        )


def _dims_exist(tensor: Tensor, placement: Placement, axes: LogicalMesh) -> bool:
    return len(placement) == len(axes) and all(
        type_.kind != "S" or 0 <= type_.dim < len(tensor.shape) for type_ in placement
    )


def _check_rank(node: Node, operands: tuple[Placement, ...], results: tuple[Placement, ...], num_axes: int) -> None:
    if len(operands) != len(node.operands) or len(results) != len(node.results):
        raise _error(
            node,
            f"{len(node.operands)} operand and {len(node.results)} result placements",
            f"{len(operands)} and {len(results)}",
        )
    for placement in (*operands, *results):
        if len(placement) != num_axes:
            raise _error(node, f"a type for each of {num_axes} axes", _text(placement))


def _check_steps(graph: Graph, stage: Stage, placements: dict[str, Placement], redistribute: Redistribute) -> None:
    name = redistribute.tensor
    placement = placements.get(name)
    if placement is None:
        raise PlacementError(f"expected a redistribution of a tensor of the model, found {name!r}")
    where = f"redistribution of {name} to {_text(redistribute.target)}{_reader(graph, stage, redistribute)}"
    for step in redistribute.steps:
        if not (0 <= step.axis < len(stage.axes) and is_legal(step, placement)):
            raise PlacementError(
                f"{where}: expected a step of the table from {_text(placement)}, "
                f"found {step.before} -> {step.after} on axis {step.axis}"
            )
        placement = apply(step, placement)
        if not _dims_exist(graph.tensors[name], placement, stage.axes):
            dims = len(graph.tensors[name].shape)
            raise PlacementError(f"{where}: expected dims of a tensor that has {dims}, found {_text(placement)}")
    _check_levels(graph, stage, redistribute, where)
    _check_served(graph, stage, redistribute, where)
    if placement != redistribute.target:
        raise PlacementError(f"{where}: expected its steps to end there, found {_text(placement)}")


def _check_levels(graph: Graph, stage: Stage, redistribute: Redistribute, where: str) -> None:
    """That what is summed by levels is a parameter's gradient, over all of the last axes that it is summed over."""
    if all(step.parts == 1 for step in redistribute.steps):
        return
    plain = tuple(step._replace(parts=1) for step in redistribute.steps)
    stored = graph.stored_by_tensor.get(redistribute.tensor)
    if stored is None or stored.kind != "parameter" or any(axis.shares for axis in stage.axes):
        raise PlacementError(
            f"{where}: expected a sum by levels of a parameter's gradient, over equal ranks, found none"
        )
    others = (other.steps for other in stage.redistributes if other.tensor == redistribute.tensor)
    if any(by_levels(steps, stage.axes) and all(step.parts == 1 for step in steps) for steps in others):
        raise PlacementError(
            f"{where}: expected all uses of a parameter to sum its gradient by levels, found one not to"
        )
    if stage.storage[redistribute.tensor].on_host:
        raise PlacementError(
            f"{where}: expected a parameter kept on its device where its gradient is summed by levels, found it on the "
            "host; shard it (zero=1 or more), or take one data-parallel axis"
        )
    if redistribute.steps != by_levels(plain, stage.axes):
        found = ", ".join(f"{step.before} -> {step.after} in {step.parts}" for step in redistribute.steps)
        raise PlacementError(
            f"{where}: expected a sum by levels over two axes at least, in as many parts as ranks of all its axes but "
            f"that of its first step, found {found}"
        )


def _check_servers(plan: Plan) -> None:
    """That there are servers where something is summed over them, and that all ranks of the mesh run one stage."""
    if not plan.uses_servers:
        return
    if plan.mesh.servers is None:
        raise PlanError(
            f"expected a mesh with servers for gradients that are summed over them, found {plan.mesh}; give servers=, "
            "or plan again"
        )
    if len(plan.stages) > 1 or plan.algorithm is not None:
        found = f"{len(plan.stages)} stages" if plan.algorithm is None else str(plan.algorithm)
        raise PlanError(
            f"expected one stage, whose gradients are summed as they are, with sums over servers, found {found}; plan "
            "on a mesh without servers"
        )


def _check_served(graph: Graph, stage: Stage, redistribute: Redistribute, where: str) -> None:
    """That what is summed over servers is a parameter's gradient, over one axis, when it begins its way home."""
    if not any(step.is_served for step in redistribute.steps):
        return
    plain = tuple(step._replace(is_served=False) for step in redistribute.steps)
    stored = graph.stored_by_tensor.get(redistribute.tensor)
    is_trained = stored is not None and stored.kind == "parameter" and stored.requires_grad
    if not is_trained or any(axis.shares for axis in stage.axes) or stage.storage[redistribute.tensor].on_host:
        raise PlacementError(
            f"{where}: expected a sum over servers of the gradient of a parameter that is trained, on its device, over "
            "equal ranks, found none"
        )
    if redistribute.steps != over_servers(plain, stage.axes):
        raise PlacementError(
            f"{where}: expected a sum over servers in the last step that sends, over one axis alone, found others"
        )


def _reader(graph: Graph, stage: Stage, redistribute: Redistribute) -> str:
    """The first operator that a redistribution is for, else the one that makes the tensor, as part of a message."""
    for node, position in graph.consumers[redistribute.tensor]:
        if stage.nodes[node.name].operands[position] == redistribute.target:
            return f" for {_node(node)}"
    return _maker(graph, redistribute.tensor)


def _maker(graph: Graph, tensor: str) -> str:
    """The operator that makes or first reads a tensor, as part of a message."""
    if tensor in graph.producers:
        return f" from {_node(graph.producers[tensor])}"
    return f" for {_node(graph.consumers[tensor][0][0])}" if graph.consumers[tensor] else ""


def _check_outputs(
    graph: Graph, stage: Stage, placements: dict[str, Placement], arrived: set[tuple[str, Placement]]
) -> None:
    for name, target in ending(graph, stage):
        if placements[name] != target and (name, target) not in arrived:
            raise PlacementError(
                f"expected output {name}{_maker(graph, name)} to end as {_text(target)}, "
                f"found {_text(placements[name])} and nothing redistributes it"
            )


def ending(graph: Graph, stage: Stage) -> list[tuple[str, Placement]]:
    """What must be there at the end of a step, and as what: outputs, and what buffers and parameters become."""
    outputs = [(name, output_placement(graph, stage, name)) for name in graph.returned]
    updates = [(value, update_placement(graph, stage, name)) for name, value in graph.mutations.items()]
    return list(dict.fromkeys([*outputs, *updates]))


def update_placement(graph: Graph, stage: Stage, name: str, storage: Mapping[str, Storage] | None = None) -> Placement:
    """The placement of what a buffer or parameter, by its name in the model, becomes. storage: if not the plan's."""
    kept = graph.kept_in_parts.get(name)
    if kept is None:
        return output_placement(graph, stage, graph.mutations[name])
    return of_new_value((storage or stage.storage)[kept.tensor].placement, stage.axes)


def output_placement(graph: Graph, stage: Stage, name: str) -> Placement:
    """The placement in which an output leaves the program: whole on every rank; a loss sums over microbatches, where
    the stage is stated on their axis."""
    whole = I if graph.tensors[name].differentiable else R
    return tuple(P if axis.name == MICROBATCH and name == graph.loss else whole for axis in stage.axes)


def _error(node: Node, expected: str, found: str) -> PlacementError:
    return PlacementError(f"{_node(node)}: expected {expected}, found {found}")


def _node(node: Node) -> str:
    return f"node {node.name} ({node.op})" + (f" at {node.source}" if node.source else "")


def _text(placement: Placement) -> str:
    return f"[{format_placement(placement)}]"
