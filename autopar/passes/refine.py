"""refine: the best plan → a faster one that MCMC finds around it, by SOAP dims (FlexFlow)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.by_hand import expert_plans
from autopar.clock import is_interrupted
from autopar.driver import REFINED, START, Candidate, Context, Front, of_plan, outline_of
from autopar.ir.plan import Plan
from autopar.refinement import refined
from autopar.tunables import SEVERAL_STARTS


def refine(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan refined, once no graph is open; and what else may lead further: what a faster template has beaten,
    which leaves less to be changed, and the plan in branches."""
    best = None if front.opened else front.best
    if best is None:
        return
    for start in [best, *_others(front, context)]:
        if start is best or not is_interrupted():
            plan = _refined(start, context)
            told = start.told if plan.predicted == start.plan.predicted else None  # as it was: what it sends is counted
            yield replace(of_plan(start, outline_of(plan), plan, told=told), rank=REFINED)


def _others(front: Front, context: Context) -> list[Candidate]:
    """Of the model's own graph."""
    searched, few = front.best_of(front.given, "stage", "place", "fit"), context.request.budget.proposals
    fastest = front.best_of(front.given)
    is_beaten = searched is not None and searched is not fastest and few < SEVERAL_STARTS
    beside = [one for one in front.found if one.rank == START]
    return [*([searched] if is_beaten and searched is not None else []), *beside]


def _refined(start: Candidate, context: Context) -> Plan:
    request = context.request
    is_alike, blocks = request.mesh.is_homogeneous, context.blocks(start.graph)
    are_several = is_alike and request.budget.proposals >= SEVERAL_STARTS
    others = expert_plans(start.graph, request) if are_several else []
    profile = context.profile if is_alike else context.profiles
    return refined(start.graph, blocks, request, profile, start.plan, context.progress, others)
