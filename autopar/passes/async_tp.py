"""async_tp: the best plan → the same, whose products compute beside what is sent around them, where that is faster.

Placements were found with rows that are gathered before products and summands that are scattered behind them, for
which ranks stand still. Here both go block by block beside the products (`autopar.async_tp`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autopar.async_tp import RowSending, beside_products, kinds_of_sending
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
    found = [one for sent in _ways(best) if not is_interrupted() and (one := _changed(best, sent, context)) is not None]
    yield from sorted(found, key=lambda one: one.step_ns)[:1]


def _ways(best: Candidate) -> Iterator[list[RowSending]]:
    """What is sent beside products: all that may be, rows once for all that read them, or for each large one by
    itself."""
    known = list[list[RowSending]]()
    for apart in (True, False):
        every = [one for kind in kinds_of_sending(best.graph, best.plan, apart) for one in kind]
        if every and every not in known:
            known.append(every)
            yield every


def _changed(best: Candidate, sent: list[RowSending], context: Context) -> Candidate | None:
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
