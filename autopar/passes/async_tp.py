"""async_tp: the best plan → the same, whose products compute beside what is sent around them, where that is faster.

Placements were found with rows that are gathered before products and summands that are scattered behind them, for
which ranks stand still. Here both go block by block beside the products (`autopar.async_tp`): all that may at once;
where that loses, since what comes with it falls to other places (gradients of several weights are there together, and
go home later), gathers or scatters alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autopar.async_tp import Sending, beside_products, kinds_of_sending
from autopar.clock import is_interrupted
from autopar.driver import Candidate, Context, Front, of_plan, outline_of
from autopar.errors import PlacementError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate import predict
from autopar.step import simulated_again, simulated_step
from autopar.substitute import GraphCandidate


def async_tp(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan changed, once no graph is open."""
    best = None if front.opened else front.best
    if best is None or not context.request.mesh.is_homogeneous:
        return
    kinds = kinds_of_sending(best.graph, best.plan)
    every = [one for kind in kinds for one in kind]
    ways = [every, [one for one in every if not one.gathers], [one for one in every if one.gathers]]
    for sent in ways if len(kinds) > 1 else ways[:1]:
        found = None if is_interrupted() or not sent else _changed(best, sent, context)
        if found is not None:
            yield found
            return


def _changed(best: Candidate, sent: list[Sending], context: Context) -> Candidate | None:
    """None where that is not faster, or does not fit."""
    try:
        graph, plan = beside_products(best.graph, best.plan, sent)
    except (PlanError, PlacementError):
        return None
    plan = replace(plan, predicted=predict(simulated_step(graph, plan)))
    is_faster = plan.predicted.step_time_ns < best.plan.predicted.step_time_ns
    if not is_faster or plan.predicted.peak_bytes > context.limit_bytes(range(1)):
        return None
    steps = plan.substitutions[len(best.plan.substitutions) :]
    asked = Candidate(GraphCandidate(graph, (*best.variant.steps, *steps), best.variant.cost_ns))
    stated = replace(plan, substitutions=best.plan.substitutions)
    return replace(of_plan(asked, outline_of(plan), stated, told=partial(_told, graph)), rank=best.rank)


def _told(graph: Graph, plan: Plan) -> Plan:
    """With the bytes that it sends."""
    return simulated_again(plan, graph)
