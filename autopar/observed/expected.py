"""What the planner writes beside a traced program, and each rank into its trace: what was simulated, and of each
operator the call that was priced, so that a trace alone says what a profile may learn from it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from autopar.cost.compute import node_call
from autopar.cost.seen import call_to_json
from autopar.ir.graph import IDENTITY, Graph
from autopar.ir.mesh import ranks_within_node
from autopar.ir.placement import local_shape
from autopar.ir.plan import Plan, StagePlan
from autopar.ir.stages import stage_graph
from autopar.microbatch import divided_graph
from autopar.observed.form import FORMAT
from autopar.observed.simulated import Simulated, simulated
from autopar.ops.communication import inner_communication, worked_shapes
from autopar.ops.work import WorkKey
from autopar.simulate import Timeline


def expected(graph: Graph, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """As JSON data. graph: of the whole batch."""
    part = divided_graph(graph, plan.microbatches)
    return {
        "format": FORMAT,
        "plan": digest(plan),
        "model": plan.model,
        "mesh": str(plan.mesh),
        "profiles": [group.profile for group in plan.mesh.groups],
        "devices_per_node": plan.mesh.devices_per_node,
        "microbatches": plan.microbatches,
        "simulated": [to_json(lane) for lane in simulated(timeline)],
        "stages": [_stage(stage_graph(part, plan, index), stage) for index, stage in enumerate(plan.parts)],
    }


def digest(plan: Plan) -> str:
    """What tells plans apart: their stages and placements, without what is predicted of them, and by which profile."""
    shape = [(group.nodes, group.devices_per_node) for group in plan.mesh.groups]
    told = [plan.fingerprint, shape, plan.stages, plan.microbatches, plan.schedule, plan.recompute, plan.mode]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _stage(graph: Graph, stage: StagePlan) -> dict[str, Any]:
    per_node = stage.mesh.devices_per_node
    return {
        "ranks": [stage.ranks.start, len(stage.ranks)],
        "axes": {axis.name: [axis.size, ranks_within_node(axis, per_node)] for axis in stage.axes},
        "calls": {name: call_to_json(call) for name, call in _calls(graph, stage).items()},
    }


def _calls(graph: Graph, stage: StagePlan) -> dict[str, WorkKey]:
    """What each operator computes on the first rank; without those that communicate inside, whose time is not that of
    one call."""
    found = {}
    for node in graph.nodes:
        plan = stage.nodes[node.name]
        if node.op == IDENTITY or any(inner_communication(graph, node, plan.operands, stage.axes)):
            continue
        operands = tuple(
            local_shape(graph.tensors[name].shape, placement, stage.axes)
            for name, placement in zip(node.operands, plan.operands, strict=True)
        )
        results = tuple(
            local_shape(graph.tensors[name].shape, placement, stage.axes)
            for name, placement in zip(node.results, plan.results, strict=True)
        )
        operands = worked_shapes(node, operands, plan.operands, stage.axes)
        found[node.name] = node_call(node, operands, results, graph.tensors)
    return found


def to_json(lane: Simulated) -> dict[str, Any]:
    """What was simulated of a lane."""
    return {
        "ranks": [lane.first_rank, lane.num_ranks],
        "step_time_ns": lane.step_time_ns,
        "work": [[*key, spent] for key, spent in lane.work.items()],
        "sent": [[name, spent] for name, spent in lane.sent.items()],
        "exposed": dict(lane.exposed),
        "bubble_ns": lane.bubble_ns,
        "optimizer_ns": lane.optimizer_ns,
        "is_last": lane.is_last,
        "num_calls": lane.num_calls,
    }


def from_json(data: Mapping[str, Any]) -> Simulated:
    """The inverse of `to_json`."""
    work: Counter[tuple[str, str]] = Counter()
    for name, direction, spent in data["work"]:
        work[name, direction] = spent
    sent: dict[str, int] = defaultdict(int, dict(data["sent"]))
    return Simulated(
        data["ranks"][0], data["ranks"][1], data["step_time_ns"], work, sent, data["exposed"], data["bubble_ns"],
        data["optimizer_ns"], data["is_last"], data["num_calls"],
    )  # fmt: skip
