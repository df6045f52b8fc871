"""async_tp: the best plan → the same, whose products compute beside what is sent around them, where that is faster.

Placements were found with rows that are gathered before products and summands that are scattered behind them, for
which ranks stand still. Here both go block by block beside the products (`autopar.async_tp`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from autopar.async_tp import RowSending, beside_products, kinds_of_sending
from autopar.clock import is_interrupted
from autopar.driver import Candidate, Context, Front, of_plan, outline_of
from autopar.errors import PlacementError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate import predict
from autopar.staged.finalists import Finalists
from autopar.step import simulated_again, simulated_step
from autopar.substitute import GraphCandidate
from autopar.tunables import NEARLY_FINALISTS, SPLIT_FINALISTS


def async_tp(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan changed, once no graph is open; and, where it gains, templates that were nearly as fast."""
    best = None if front.opened else front.best
    if best is None or not context.request.mesh.is_homogeneous:
        return
    begun = _Begun(best.graph, best.plan, best.variant)
    found = [one for sent in _ways(begun) if not is_interrupted() and (one := _changed(begun, sent, best, context))]
    if found and best.is_given:
        for plan in _nearly(front, best):
            other = replace(begun, plan=plan)
            changed = (_changed(other, sent, best, context) for sent in _ways(other) if not is_interrupted())
            found += [one for one in changed if one is not None]
    yield from sorted(found, key=lambda one: one.step_ns)[:2]


@dataclass(frozen=True)
class _Begun:
    """A plan that is to be changed, of a graph."""

    graph: Graph
    plan: Plan
    variant: GraphCandidate


def _nearly(front: Front, best: Candidate) -> Iterator[Plan]:
    """Templates whose activations are split by positions, that the search for stages left out."""
    finalists = front.kept.get(("stage", front.given))
    if isinstance(finalists, Finalists):
        yield from finalists.of_split_sequences(SPLIT_FINALISTS, NEARLY_FINALISTS * best.step_ns)


def _ways(best: _Begun) -> Iterator[list[RowSending]]:
    """What is sent beside products: all that may be, rows once for all that read them, or for each large one by
    itself."""
    known = list[list[RowSending]]()
    for apart in (True, False):
        every = [one for kind in kinds_of_sending(best.graph, best.plan, apart) for one in kind]
        if every and every not in known:
            known.append(every)
            yield every


def _changed(begun: _Begun, sent: list[RowSending], best: Candidate, context: Context) -> Candidate | None:
    """None where that is not faster than the best, or does not fit."""
    try:
        graph, plan = beside_products(begun.graph, begun.plan, sent)
    except (PlanError, PlacementError):
        return None
    played = simulated_step(graph, plan)
    if played.step_time_ns >= best.step_ns or played.peak_bytes > context.limit_bytes(range(1)):
        return None
    plan = replace(plan, predicted=predict(played))
    steps = plan.substitutions[len(begun.plan.substitutions) :]
    asked = Candidate(GraphCandidate(graph, (*begun.variant.steps, *steps), begun.variant.cost_ns))
    stated = replace(plan, substitutions=begun.plan.substitutions)
    return replace(of_plan(asked, outline_of(plan), stated, told=partial(_told, graph)), rank=best.rank)


def _told(graph: Graph, plan: Plan) -> Plan:
    """With the bytes that it sends."""
    return simulated_again(plan, graph)
