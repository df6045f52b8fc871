"""branch: the best plans of one stage → the same with operators beside each other on parts of an axis, where faster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.branches import with_branches
from autopar.clock import Clock
from autopar.driver import START, Candidate, Context, Front, of_plan, outline_of
from autopar.ir.plan import Plan
from autopar.planning import Place, divided, pinned_nodes
from autopar.tunables import BESIDE_FASTEST, BRANCH_SHARE, MOST_BRANCHED


def branch(front: Front, context: Context) -> Iterator[Candidate]:
    """The model's own graph in branches, once no other is open: they leave less to substitute, so that plans without
    may gain more by that. It is refined beside the best.

    Other plans that are nearly as fast are tried, too: they may gain more.
    """
    clock, gained = Clock.of(BRANCH_SHARE * context.request.budget.seconds), list[Candidate]()
    for start in _starts(front, context):
        if len(gained) == MOST_BRANCHED or (gained and clock.is_over):
            break
        part = divided(start.graph, context.blocks(start.graph), start.plan.microbatches)
        request = context.request.recomputing(start.plan.recompute)
        place = Place(part, outline_of(start.plan).axes, request, context.profile)
        plan = _in_branches(place, start.plan, clock, min((one.step_ns for one in gained), default=math.inf))
        if plan is not start.plan:
            gained.append(of_plan(front.given, place.outline, plan, told=part.with_traffic))
    if gained:
        yield replace(min(gained, key=lambda one: one.step_ns), rank=START)


def _starts(front: Front, context: Context) -> list[Candidate]:
    """Plans of one stage on devices that are alike, where the best is one: the fastest first."""
    origins = ("stage", "place", "fit")
    searched = None if front.opened else front.best_of(front.given, *origins)
    mesh = context.request.mesh
    if searched is None or not mesh.is_homogeneous or mesh.num_devices == 1 or len(searched.plan.stages) > 1:
        return []
    near = (one for one in front.all_of(front.given, *origins) if one.step_ns <= BESIDE_FASTEST * searched.step_ns)
    every = (one for one in near if one.outline is not None and one.outline.num_submeshes == 1)
    distinct = {(str(one.outline), one.step_ns, one.peak_bytes): one for one in every}
    return [*distinct.values()]


def _in_branches(place: Place, plan: Plan, clock: Clock, than_ns: float) -> Plan:
    own = place.profile.shared_by(place.request.mesh.devices_per_node)
    representative = place.part.blocks.representative_node
    graph, pinned = place.part.graph, pinned_nodes(place.part.graph, place.request.constraints)
    return with_branches(graph, plan, own, place.scored, representative, clock.left_s, pinned, than_ns)
