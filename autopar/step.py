"""A whole step of a plan, simulated: what `plan.timeline()` calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost.meetings import meeting, stashing
from autopar.ir.algorithm import BACKUP, PIPEDREAM
from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.ops.pipedream import versions
from autopar.profiler import profiles_of
from autopar.quantiles import with_p99
from autopar.simulate import Timeline, predict, simulate, traffic, traffic_by_submesh


@dataclass(frozen=True, eq=False)
class StepSimulator:
    """Plays plans of a graph, of a whole batch."""

    graph: Graph

    def __call__(self, plan: Plan) -> Timeline:
        return simulated_step(self.graph, plan)


def with_simulator(plan: Plan, graph: Graph) -> Plan:
    """The plan with what `plan.timeline()` calls."""
    return replace(plan, simulator=StepSimulator(graph))


def predicted_again(plan: Plan) -> Plan:
    """A plan that has its simulator, predicted as it runs now: its step, in the mean and at the 99th percentile of
    routings, and its memory. What it sends stays. Raises PlanError as `plan.timeline()`."""
    told = replace(predict(plan.timeline()), comm_bytes=plan.predicted.comm_bytes)  # type: ignore[arg-type] # its own
    plan = replace(plan, predicted=told)
    return with_p99(plan, plan.simulator.graph) if isinstance(plan.simulator, StepSimulator) else plan


def simulated_again(plan: Plan, graph: Graph) -> Plan:
    """A plan of the graph, of a whole batch, predicted as it runs, with the exact bytes that it sends; of several
    stages, those of the submesh that sends most."""
    timeline = simulated_step(graph, plan)
    sent = [traffic(graph, plan)] if len(plan.stages) == 1 else traffic_by_submesh(graph, plan, timeline)
    most = max(sent, key=lambda counts: sum(counts.values()))
    return met(graph, replace(plan, predicted=replace(predict(timeline), comm_bytes=most)))


@faults_told()
def simulated_step(graph: Graph, plan: Plan) -> Timeline:
    """The timeline of a whole step; the simulator plays one microbatch's graph as often as there are microbatches.

    Where copies of the parameters meet by an algorithm, of a step in which they do not."""
    return simulate(divided_graph(graph, plan.microbatches), plan, profiles_of(plan.mesh))


def met(graph: Graph, plan: Plan) -> Plan:
    """A plan predicted without what it takes its copies of the parameters to meet, and with it: time and bytes in the
    mean over steps, and the memory that it takes beside what is kept between steps."""
    algorithm = plan.algorithm
    if algorithm is None:
        return plan
    profiles, found = profiles_of(plan.mesh), []
    for first in dict.fromkeys(stage.first_rank for stage in plan.stages):
        own = [stage for stage in plan.stages if stage.first_rank == first]
        group = plan.mesh.group_of(own[0].ranks)
        profile = profiles[group.profile].shared_by(group.devices_per_node)
        if algorithm.name == PIPEDREAM:
            count = versions(plan, plan.stages.index(own[0]))
            found.append(stashing(graph, own[0], count, plan.microbatches, plan.optimizer, profile))
            continue
        found.append(meeting(graph, own, algorithm, group.devices_per_node, profile))
    slowest, told = max(one.duration_ns for one in found), plan.predicted
    sent = max((one.sent for one in found), key=lambda counts: sum(counts.values()))
    counts = {
        kind: told.comm_bytes.get(kind, 0) + -(-sent.get(kind, 0) // algorithm.period)
        for kind in sorted({*told.comm_bytes, *sent})
    }
    if algorithm.name == BACKUP:  # the loss and its count go with the gradients
        counts = dict(sent)
    held = max(one.kept_bytes for one in found)
    kept = sum(told.memory.get(kind, 0) for kind in ("parameters", "optimizer", "constants", "inputs", "buffers"))
    meeting_bytes = kept + max(one.gradient_bytes + one.buffer_bytes + one.kept_bytes for one in found)
    each_ns = -(-slowest // algorithm.period)
    parts = replace(told.breakdown, exposed_communication_ns=told.breakdown.exposed_communication_ns + each_ns)
    if algorithm.name == PIPEDREAM:
        parts = replace(told.breakdown, optimizer_ns=told.breakdown.optimizer_ns + each_ns)
    return replace(plan, predicted=replace(
        told, step_time_ns=told.step_time_ns + each_ns, comm_bytes=counts, breakdown=parts,
        peak_bytes=max(told.peak_bytes + held, meeting_bytes),
    ))  # fmt: skip
