"""place: an open graph → plans of one stage, over all logical meshes and numbers of microbatches (Alpa §4).

Which places there are, and when blocks are computed again, is decided in `autopar.places`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autopar.branches import most_spared_ns
from autopar.clock import Clock, ends
from autopar.driver import Candidate, Context, Front, of_plan
from autopar.interop.submeshes import logical_shapes
from autopar.ir.mesh import logical_meshes
from autopar.ir.outline import Outline, sizes_text
from autopar.ir.plan import Plan
from autopar.places import PlaceSearch
from autopar.planning import Place, divided, pinned_nodes
from autopar.tunables import FEW_DEVICES, LEAST_PLACE_SHARE


def place(front: Front, context: Context) -> Iterator[Candidate]:
    """Plans of one stage, where devices are alike; for a graph whose outline is given, in that one."""
    if not context.request.mesh.is_homogeneous:
        return
    for asked in front.in_turn(lambda outline: outline is None or outline.num_submeshes == 1):
        if asked.outline is not None:
            yield from context.near(asked, partial(_near, asked, asked.outline, front, context))
        elif _is_wanted(asked, front, context):
            search = front.kept["place", asked] = _search(asked, front, context)
            for there, plan in search.run():
                found = of_plan(asked, there.outline, plan, told=there.part.with_traffic)
                yield replace(found, is_bounded=True)


def _is_wanted(asked: Candidate, front: Front, context: Context) -> bool:
    """Whether one stage is looked at on all logical meshes: after stages, on few devices alone."""
    if not context.looks_for_stages or context.keeps_one_stage(asked.graph):
        return True
    stages = {rule.stages for rule in context.request.constraints} - {None, 1}
    is_small = context.request.mesh.num_devices <= FEW_DEVICES
    return is_small and not stages and not ends(front.best_of(asked) is not None)


def _search(asked: Candidate, front: Front, context: Context) -> PlaceSearch:
    """In the time that stages have left, a part of all at least."""
    request, known = context.asked_of(asked), front.best_of(asked)
    seconds = request.budget.seconds
    clock = Clock.of(max(seconds - front.spent_s.get(asked, 0.0), LEAST_PLACE_SHARE * seconds))
    return PlaceSearch(
        asked.graph, context.blocks(asked.graph), request, context.profile, clock, context.noting(asked),
        context.progress, None if known is None else known.step_ns, front.best is not None, _branches_spare_ns,
    )  # fmt: skip


def _branches_spare_ns(there: Place, plan: Plan) -> int:
    """What operators beside each other may spare of a plan in a place (`passes.branch`)."""
    graph, pinned = there.part.graph, pinned_nodes(there.part.graph, there.request.constraints)
    return most_spared_ns(graph, plan, there.shared_profile, there.part.blocks.representative_node, pinned)


def _near(asked: Candidate, outline: Outline, front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan in an outline. Raises InfeasibleError where none fits."""
    mesh, request = context.request.mesh, context.nearby(front)
    every = [*logical_meshes(mesh), *logical_shapes(mesh.num_devices, mesh.devices_per_node)]
    axes = next((axes for axes in every if sizes_text(axes) == sizes_text(outline.axes)), None)
    if axes is not None:
        part = divided(asked.graph, context.blocks(asked.graph), outline.microbatches)
        there = Place(part, axes, request, context.profile, by_factors=True)
        plan = there.fit(request.budget.seconds)
        yield of_plan(asked, there.outline, plan, told=part.with_traffic)
