"""A whole step of a plan, simulated: what `plan.timeline()` calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import one_microbatch, one_microbatch_plan, types_of
from autopar.profiler import profiles_of
from autopar.simulate import Timeline, simulate


def with_simulator(plan: Plan, graph: Graph) -> Plan:
    """The plan with what `plan.timeline()` calls."""
    return replace(plan, simulator=partial(simulated_step, graph))


@faults_told()
def simulated_step(graph: Graph, plan: Plan) -> Timeline:
    """The timeline of a whole step; the simulator plays one microbatch's graph as often as there are microbatches."""
    part = graph if plan.microbatches == 1 else one_microbatch(graph, types_of(plan), plan.microbatches)
    return simulate(part, one_microbatch_plan(plan), profiles_of(plan.mesh))
