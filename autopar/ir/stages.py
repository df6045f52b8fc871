"""What one stage of a plan computes, as a graph of its own, and what must hold between stages.

A stage reads inputs of the model, stored tensors, and tensors that earlier stages made and *send*; the gradients of
these come back. Rank k of a stage sends to rank k of another stage of equal axes: the placement stays what it is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.errors import PlacementError, PlanError
from autopar.ir.buffers import update_line
from autopar.ir.graph import Graph, Node, Tensor, found_once
from autopar.ir.mesh import MICROBATCH, LogicalMesh
from autopar.ir.placement import Placement, Type, format_placement
from autopar.ir.plan import Plan, Stage, Storage
from autopar.ir.schedule import PLAIN, SCHEDULES, check_microbatches
from autopar.ir.structure import runs_once


def stage_graph(graph: Graph, plan: Plan, index: int) -> Graph:
    """The graph of one stage: `received` are inputs that earlier stages made, `sent` are outputs that later ones read.

    The whole graph for a plan of one stage.
    """
    if len(plan.stages) == 1:
        return graph
    stage = plan.stages[index]
    nodes = tuple(stage_nodes(graph, stage))
    made = {name: None for node in nodes for name in node.results}
    last_reader = _wiring(plan).last_reader
    sent = tuple(name for name in made if last_reader.get(name, -1) > index)
    passed = (*stage.inputs, *stage.storage) if index == len(plan.stages) - 1 else ()
    ends = tuple(name for name in graph.outputs if name in made or (name in passed and name not in graph.producers))
    names = dict.fromkeys((*stage.inputs, *stage.storage, *(name for node in nodes for name in node.operands), *made))
    return replace(
        graph,
        inputs=tuple(stage.inputs),
        stored=tuple(item for item in graph.stored if item.tensor in stage.storage),
        nodes=nodes,
        outputs=tuple(dict.fromkeys((*ends, *sent))),
        tensors={name: graph.tensors[name] for name in names},
        loss=graph.loss if graph.loss in made else None,
        mutations={buffer: name for buffer, name in graph.mutations.items() if name in made},
        received=tuple(name for name in stage.inputs if name not in graph.inputs),
        sent=sent,
        answered=answered_values(graph, plan, index),
        ends=ends,
    )


def stage_nodes(graph: Graph, stage: Stage) -> list[Node]:
    """What runs in a stage, in the order of the graph."""
    position = _positions(graph)
    return [graph.nodes[place] for place in sorted(position[name] for name in stage.nodes if name in position)]


@found_once
def _positions(graph: Graph) -> dict[str, int]:
    return {node.name: position for position, node in enumerate(graph.nodes)}


def answered_values(graph: Graph, plan: Plan, index: int) -> tuple[tuple[str, Placement], ...]:
    """What a stage leaves for later ones, in the placements that it goes in, that the gradient comes back of."""
    back = gradients_back(graph, plan)
    values = [
        (name, leaving_placement(graph, plan, reader, name))
        for reader, name in _read_later(graph, plan, index)
        if name in back[reader]
    ]
    return tuple(dict.fromkeys(values))


def gradients_back(graph: Graph, plan: Plan) -> tuple[frozenset[str], ...]:
    """By stage, what it receives and sends the gradient of back: what is trained, and leads to the loss there or later.

    Kept with the plan, whose stages it follows from.
    """
    if "_gradients_back" not in plan.__dict__:
        plan.__dict__["_gradients_back"] = _find_gradients_back(graph, plan)
    found: tuple[frozenset[str], ...] = plan.__dict__["_gradients_back"]
    return found


def _find_gradients_back(graph: Graph, plan: Plan) -> tuple[frozenset[str], ...]:
    count = len(plan.stages)
    reached: list[set[str]] = [set() for _ in range(count)]
    reached[-1].update(name for name in (graph.loss,) if name is not None)
    found: list[frozenset[str]] = []
    for index in reversed(range(count)):
        stage, here = plan.stages[index], reached[index]
        for node in reversed(stage_nodes(graph, stage)):
            if not here.isdisjoint(node.results):
                here.update(name for name in node.operands if graph.tensors[name].differentiable)
        back = frozenset(name for name in stage.inputs if name in here and name not in graph.inputs)
        for name in back:
            reached[maker_of(graph, plan, index, name)].add(name)
        found.insert(0, back)
    return tuple(found)


def tied_tensors(graph: Graph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Trained tensors that several stages keep, with the stages: their gradients are summed over these."""
    kept = {
        item.tensor: tuple(index for index, stage in enumerate(plan.stages) if item.tensor in stage.storage)
        for item in graph.stored
        if item.requires_grad
    }
    return {tensor: stages for tensor, stages in kept.items() if len(stages) > 1}


def check_stages(graph: Graph, plan: Plan) -> None:
    """That the stages compute the graph, on submeshes of the mesh, and receive what they read as it was sent.

    Raises PlanError or PlacementError naming what is wrong with which stage.
    """
    _check_submeshes(plan)
    _check_together(graph, plan)
    _check_nodes(graph, plan)
    for index in range(len(plan.stages)):
        _check_reads(graph, plan, index)
        _check_received(graph, plan, index)


def _check_submeshes(plan: Plan) -> None:
    if plan.schedule not in SCHEDULES:
        raise PlanError(f"expected a schedule as one of {', '.join(SCHEDULES)}, found {plan.schedule!r}")
    submeshes = sorted({(stage.ranks.start, stage.ranks.stop) for stage in plan.stages})
    ends = [0, *(stop for _, stop in submeshes)]
    for end, (start, stop) in zip(ends, submeshes, strict=False):
        if start != end:
            raise PlanError(
                f"expected stages on equal or disjoint ranks that leave none of {plan.mesh} out, "
                f"found one on ranks {start} to {stop - 1} after rank {end - 1}"
            )
    if ends[-1] != plan.mesh.num_devices:
        raise PlanError(f"expected stages on all {plan.mesh.num_devices} devices of {plan.mesh}, found {ends[-1]}")
    if len(submeshes) < len(plan.stages) and not SCHEDULES[plan.schedule].has_chunks:
        raise PlanError(f"expected stages on submeshes of their own with schedule {plan.schedule!r}, found shared ones")
    firsts = [stage.first_rank for stage in plan.stages]
    has_branches = any(stage.forks for stage in plan.stages)
    check_schedule(plan.schedule, firsts, plan.microbatches, plan.recompute, has_branches)


def check_schedule(
    schedule: str, first_ranks: Sequence[int], microbatches: int, recompute: Sequence[str], has_branches: bool
) -> None:
    """That stages from these ranks on may run so: those that share submeshes are in turn on all of them, microbatches
    make equal rounds over these, and a backward pass in two parts recomputes nothing, which it would for each of its
    branches. Raises PlanError."""
    num_submeshes, row = len(set(first_ranks)), SCHEDULES[schedule]
    firsts = [*first_ranks]
    if len(firsts) % num_submeshes or firsts != row.in_turn(firsts[:num_submeshes], len(firsts) // num_submeshes):
        back = ", and back in every other turn," if row.turns_back else ","
        raise PlanError(
            f"expected stages in turn on each of {num_submeshes} submeshes{back} as often on all, found them from "
            f"ranks {', '.join(map(str, firsts))} on"
        )
    if num_submeshes > 1 and row.num_chunks not in (None, len(firsts) // num_submeshes):
        raise PlanError(
            f"expected {row.num_chunks} stages on each submesh with schedule {schedule!r}, found "
            f"{len(firsts) // num_submeshes}"
        )
    if len(firsts) > 1:
        check_microbatches(schedule, microbatches, num_submeshes)
    if row.splits_backward and recompute:
        raise PlanError(
            f'expected no recomputation with schedule "{schedule}", found {len(recompute)} recomputed modules, '
            "which its backward pass in two parts would run again for each group of parameters' gradients; "
            f'take schedule="{PLAIN}", or recompute="none"'
        )
    if has_branches:
        raise PlanError("expected no branches in a plan of several stages, found some; take one stage, or no branches")


def _check_together(graph: Graph, plan: Plan) -> None:
    """What stages keep of the same tensors: one that is updated by forward in one stage, others alike, none nowhere."""
    for stored in graph.stored:
        keepers = [index for index, stage in enumerate(plan.stages) if stored.tensor in stage.storage]
        if not keepers:
            raise PlanError(f"expected {stored.name} stored by a stage, found it in none: state dicts would lack it")
        _check_update(graph, plan, stored.name, keepers)
        kept: dict[int, tuple[Storage, LogicalMesh]] = {}
        for stage in (plan.stages[index] for index in keepers):
            own = stage.storage[stored.tensor], stage.axes
            if kept.setdefault(stage.first_rank, own) != own:
                raise PlanError(
                    f"expected {stored.name} to be stored alike by the stages {keepers} on the same ranks, which share "
                    "it, found it stored otherwise"
                )


def _check_update(graph: Graph, plan: Plan, name: str, keepers: list[int]) -> None:
    """That the stage which makes the new value of what is stored is the one that keeps it."""
    if name not in graph.mutations:
        return
    node = graph.producers.get(graph.mutations[name])
    makers = [index for index, stage in enumerate(plan.stages) if node is not None and node.name in stage.nodes]
    if makers != keepers or len(keepers) > 1:
        raise PlanError(
            f"expected {name}, which forward updates{update_line(graph, name)}, in the stage that makes its new value, "
            f"found it kept in stages {keepers} and the value made in {makers}: other stages would read an old one; "
            "take one stage"
        )


def _check_nodes(graph: Graph, plan: Plan) -> None:
    """Each node runs somewhere; one that changes a buffer, or that `runs_once` names, in one stage."""
    changed = set(graph.mutations.values())
    counts = Counter(name for stage in plan.stages for name in stage.nodes)
    for node in graph.nodes:
        count = counts[node.name]
        single = runs_once(node) or not changed.isdisjoint(node.results)
        if count == 0 or (single and count > 1):
            raise PlanError(f"expected node {node.name} ({node.op}) at {node.source} in one stage, found it in {count}")
        if graph.loss in node.results and [node.name in stage.nodes for stage in plan.stages].index(True) + 1 < len(
            plan.stages
        ):
            raise PlanError(
                f"expected the last of {len(plan.stages)} stages alone to make the loss, node {node.name} ({node.op}) "
                f"at {node.source}, found it in an earlier one"
            )
    unknown = {name for stage in plan.stages for name in stage.nodes} - {node.name for node in graph.nodes}
    if unknown:
        raise PlanError(f"expected nodes of the model, found {sorted(unknown)[:3]}")


def _check_reads(graph: Graph, plan: Plan, index: int) -> None:
    stage = plan.stages[index]
    known = {*stage.inputs, *stage.storage}
    missing = (set(stage.storage) - set(graph.stored_by_tensor)) | (set(stage.inputs) & set(graph.stored_by_tensor))
    if missing:
        raise PlanError(f"expected stage {index} to store what the model stores, found {sorted(missing)[:3]}")
    for node in stage_nodes(graph, stage):
        for name in node.operands:
            if name not in known:
                raise PlanError(f"{_where(node, index)}: expected {name} made or received before it, found neither")
        known.update(node.results)


def _check_received(graph: Graph, plan: Plan, index: int) -> None:
    """Each tensor of an earlier stage arrives in a placement that it has there, or that it may cross in."""
    for name, placement in plan.stages[index].inputs.items():
        if name in graph.inputs:
            continue
        if len(placement) != len(plan.stages[index].axes):
            raise PlacementError(
                f"stage {index}: expected {name} with a type for each of {len(plan.stages[index].axes)} axes, "
                f"found [{format_placement(placement)}]"
            )
        leaving_placement(graph, plan, index, name)
        if not _are_equally_long(plan.stages[maker_of(graph, plan, index, name)].axes, plan.stages[index].axes):
            _check_arrival(graph, plan, index, name, placement)


def _check_arrival(graph: Graph, plan: Plan, index: int, name: str, placement: Placement) -> None:
    axes, tensor = plan.stages[index].axes, graph.tensors[name]
    dims = [type_.dim for type_ in placement if type_.kind == "S"]
    fine = all(0 <= dim < len(tensor.shape) for dim in dims)
    if not fine or not may_cross(tensor, placement, axes):
        raise PlacementError(
            f"{_where(graph.producers[name], index)}: expected {name} to come from other axes "
            f"as {_travelling(tensor)} on each, found [{format_placement(placement)}]"
        )


# What leaves a stage ----------------------------------------


def leaving_values(graph: Graph, plan: Plan, index: int) -> list[tuple[str, Placement]]:
    """What a stage leaves for later ones, in the placements that it goes in, each once."""
    pairs = [(name, leaving_placement(graph, plan, reader, name)) for reader, name in _read_later(graph, plan, index)]
    return list(dict.fromkeys(pairs))


def maker_of(graph: Graph, plan: Plan, index: int, name: str) -> int:
    """The stage that sends a tensor to stage `index`: the first that makes it. Raises PlanError where there is none."""
    node = graph.producers.get(name)
    found = index if node is None else _wiring(plan).maker.get(node.name, index)
    if found >= index:
        raise PlanError(f"expected an input of the model or a tensor of a stage before {index}, found {name}")
    return found


class _Wiring(NamedTuple):
    """Of all stages at once: the first that runs each node, the last that has each input, the others that have it."""

    maker: dict[str, int]
    last_reader: dict[str, int]
    readers: dict[str, list[int]]


def _wiring(plan: Plan) -> _Wiring:
    """Kept with the plan: to look through all stages for each tensor takes as long as there are pairs of stages."""
    if "_wiring" not in plan.__dict__:
        maker, readers = dict[str, int](), defaultdict[str, list[int]](list)
        for index, stage in enumerate(plan.stages):
            for name in stage.nodes:
                maker.setdefault(name, index)
            for name in stage.inputs:
                readers[name].append(index)
        plan.__dict__["_wiring"] = _Wiring(maker, {name: own[-1] for name, own in readers.items()}, dict(readers))
    found: _Wiring = plan.__dict__["_wiring"]
    return found


def _read_later(graph: Graph, plan: Plan, index: int) -> list[tuple[int, str]]:
    """What stage `index` makes first and later ones receive, with these, in their order. Kept with the plan."""
    if index == len(plan.stages) - 1:
        return []
    known: dict[int, list[tuple[int, str]]] = plan.__dict__.setdefault("_read_later", {})
    if index not in known:
        known[index] = _find_read_later(graph, plan, index)
    return known[index]


def _find_read_later(graph: Graph, plan: Plan, index: int) -> list[tuple[int, str]]:
    wiring, given = _wiring(plan), {*graph.inputs}
    made = (
        name
        for node in plan.stages[index].nodes
        if wiring.maker[node] == index and node in graph.node_by_name
        for name in graph.node_by_name[node].results
    )
    pairs = {(reader, name) for name in made if name not in given for reader in wiring.readers.get(name, ())}
    order = {reader: {name: n for n, name in enumerate(plan.stages[reader].inputs)} for reader, _ in pairs}
    return sorted((pair for pair in pairs if pair[0] > index), key=lambda pair: (pair[0], order[pair[0]][pair[1]]))


def leaving_placement(graph: Graph, plan: Plan, index: int, name: str) -> Placement:
    """The placement in which a tensor leaves the stage that makes it for stage `index`.

    Between axes that are equally long, that in which it arrives. Else, of the placements that its maker has it in, the
    one that may cross and is cut by most ranks, the first of several. Raises PlacementError when there is none.
    """
    maker, stage = plan.stages[maker_of(graph, plan, index, name)], plan.stages[index]
    node, tensor, arriving = graph.producers[name], graph.tensors[name], stage.inputs[name]
    there = _placements_of(node, maker, name)
    if _are_equally_long(maker.axes, stage.axes):
        if arriving not in there:
            raise PlacementError(
                f"{_where(node, index)}: expected {name} as it is there, {_listed(there)}, "
                f"found [{format_placement(arriving)}]"
            )
        return arriving
    microbatch = _on_microbatches(arriving, stage.axes)
    able = [
        p for p in there if may_cross(tensor, p, maker.axes) and _on_microbatches(p, maker.axes) == microbatch
    ]  # fmt: skip
    if not able:
        raise PlacementError(
            f"{_where(node, index)}: expected {name} to leave for other axes as {_travelling(tensor)} on each and as "
            f"it arrives over microbatches, found {_listed(there)}; redistribute it where it is made"
        )
    return max(able, key=lambda placement: _num_cuts(placement, maker.axes))


def may_cross(tensor: Tensor, placement: Placement, axes: LogicalMesh) -> bool:
    """Whether a tensor may travel so between unequal axes: in slices and whole values, whose gradients are alike."""
    kinds = "SI" if tensor.differentiable else "SIR"
    return all(type_.kind in kinds for type_, axis in zip(placement, axes, strict=True) if axis.name != MICROBATCH)


def _travelling(tensor: Tensor) -> str:
    return "S(d) or I" if tensor.differentiable else "S(d) or R"


def _are_equally_long(axes: LogicalMesh, others: LogicalMesh) -> bool:
    return [axis.size for axis in axes] == [axis.size for axis in others]


def _on_microbatches(placement: Placement, axes: LogicalMesh) -> list[Type]:
    return [type_ for type_, axis in zip(placement, axes, strict=True) if axis.name == MICROBATCH]


def _num_cuts(placement: Placement, axes: LogicalMesh) -> int:
    cuts = (a.size for t, a in zip(placement, axes, strict=True) if t.kind == "S" and a.name != MICROBATCH)
    return math.prod(cuts)


def _listed(placements: list[Placement]) -> str:
    return " or ".join(f"[{format_placement(placement)}]" for placement in placements)


def _placements_of(node: Node, stage: Stage, name: str) -> list[Placement]:
    """The placements in which a stage has a tensor that it makes."""
    made = stage.nodes[node.name].results[node.results.index(name)]
    return [made, *(item.target for item in stage.redistributes if item.tensor == name)]


def _where(node: Node, index: int) -> str:
    return f"stage {index}, node {node.name} ({node.op})" + (f" at {node.source}" if node.source else "")
