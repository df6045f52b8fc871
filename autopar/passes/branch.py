"""branch: the best plan of one stage → the same with operators beside each other on parts of an axis, where faster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autopar.branches import with_branches
from autopar.clock import Clock
from autopar.driver import START, Candidate, Context, Front, of_plan, outline_of
from autopar.errors import InfeasibleError
from autopar.ir.mesh import logical_meshes
from autopar.ir.plan import Plan
from autopar.planning import Place, divided, pinned_nodes
from autopar.tunables import BRANCH_SHARE, LEAST_SOLVE_S


def branch(front: Front, context: Context) -> Iterator[Candidate]:
    """The model's own graph in branches, once no other is open: they leave less to substitute, so that plans without
    may gain more by that. It is refined beside the best.

    Where branches are worth while, the other logical meshes are looked at once more: theirs may be worth more.
    """
    searched = None if front.opened else front.best_of(front.given, "stage", "place", "fit")
    if searched is None or not context.request.mesh.is_homogeneous:
        return
    plan, axes_before = searched.plan, outline_of(searched.plan).axes
    if len(plan.stages) > 1 or context.request.mesh.num_devices == 1:
        return
    clock = Clock.of(BRANCH_SHARE * context.request.budget.seconds)
    part = divided(front.given.graph, context.blocks(front.given.graph), plan.microbatches)
    request = context.request.recomputing(plan.recompute)
    here = Place(part, axes_before, request, context.profile)
    best = here, _in_branches(here, plan, clock)
    if best[1] is plan:
        return
    for axes in logical_meshes(request.mesh):
        if axes != axes_before and not clock.is_over:
            there = Place(part, axes, request, context.profile)
            with contextlib.suppress(InfeasibleError):
                other = _in_branches(there, there.fit(max(LEAST_SOLVE_S, clock.left_s / 2)), clock)
                best = min(best, (there, other), key=lambda one: one[1].predicted.step_time_ns)
    there, plan = best
    yield replace(of_plan(front.given, there.outline, plan, partial(part.with_traffic, plan)), rank=START)


def _in_branches(place: Place, plan: Plan, clock: Clock) -> Plan:
    own = place.profile.shared_by(place.request.mesh.devices_per_node)
    representative = place.part.blocks.representative_node
    graph, rules = place.part.graph, place.request.constraints
    return with_branches(graph, plan, own, place.scored, representative, clock.left_s, pinned_nodes(graph, rules))
