"""A whole step of a plan, simulated: what `plan.timeline()` calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
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
    return replace(plan, predicted=replace(predict(timeline), comm_bytes=most))


@faults_told()
def simulated_step(graph: Graph, plan: Plan) -> Timeline:
    """The timeline of a whole step; the simulator plays one microbatch's graph as often as there are microbatches."""
    return simulate(divided_graph(graph, plan.microbatches), plan, profiles_of(plan.mesh))
