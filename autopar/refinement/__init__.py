"""Wires the SOAP search to the planner: what a plan may be changed to, what the simulator says of it, and from where.

    plan  →  its placements of one microbatch on its logical mesh  →  chains by MCMC (`soap`)  →  the plan stated again

A *world* holds what the placements leave open (`outline`): the number of microbatches, and of stages of equal submeshes
that share their placements, which blocks are in which. Jumps lead from one to another (`jumping`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.collector import without_collector
from autopar.cost import Profile
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Refinement
from autopar.progress import Report, reporting
from autopar.refinement.apart import refined_apart
from autopar.refinement.jumping import Jumps
from autopar.refinement.shortened import shortened
from autopar.refinement.worlds import Worlds, space_of
from autopar.request import Request, SearchBudget
from autopar.soap import Budget, RefinedPlan, Start, Watch, refine, refined_elsewhere
from autopar.trace import Blocks
from autopar.tunables import SHORT_SHARE

_SAID_EVERY = 500  # proposals


def refined(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile | Mapping[str, Profile], plan: Plan,
    progress: Report | None = None, others: Sequence[tuple[str, Plan]] = (),
) -> Plan:  # fmt: skip
    """The plan, or a faster one that MCMC finds around it, or from other plans, which have a name each; where there are
    such, from a drawn one as well.

    profile: by the mesh's names for its devices, where these are of several kinds. A plan whose stages are placed apart
    stays as it is, and says so; on devices of several kinds it is refined kind by kind (`apart`).
    """
    budget = request.budget
    if request.mesh.num_devices == 1 or not budget.proposals:
        return plan
    if len(plan.stages) > 1 and isinstance(profile, Mapping):
        return refined_apart(graph, blocks, request, profile, plan)
    if not _is_alike(plan):
        return _as_it_is(plan, "its stages are on unlike submeshes, or on parts of them", budget.seed)
    worlds = Worlds(graph, blocks, replace(request, recompute=plan.recompute), profile, plan)
    try:
        starts = [worlds.start(name, one) for name, one in [("the plan", plan), *others]]
    except PlanError as error:
        return _as_it_is(plan, f"it is in no space of the search ({error})", budget.seed)
    if others:
        starts.append(worlds.drawn(starts[0], budget.seed))
    with without_collector(), reporting(progress, max(1, budget.proposals // _SAID_EVERY)) as say:
        found, report = _found(worlds, starts, budget, _watch(say))
    if found.world is worlds.first and not report.moves:
        return replace(plan, search=replace(plan.search, refinement=report))
    stated = worlds.stated(found.world, found.plan, report.moves)
    is_better = worlds.fits(stated) and stated.predicted.step_time_ns < plan.predicted.step_time_ns
    if worlds.fits(plan) and not is_better:
        return replace(plan, search=replace(plan.search, refinement=report))
    return replace(stated, search=replace(plan.search, refinement=report))


def _found(
    worlds: Worlds, starts: Sequence[Start], budget: SearchBudget, watch: Watch
) -> tuple[RefinedPlan, Refinement]:
    """What chains find; where one begins at the plan alone, and its model is deep, on few blocks (`shortened`)."""
    chances = Budget(budget.proposals, budget.refine_seconds, budget.seed)
    is_alone = len(starts) == 1 and worlds.request.mesh.is_homogeneous
    short = shortened(worlds, starts[0]) if is_alone else None
    if short is None:
        return refine(starts, chances, Jumps(worlds).possible(), watch)
    chances = replace(chances, seconds=SHORT_SHARE * budget.refine_seconds)
    found, report = refine([short.start], chances, short.jumps, watch)
    report = replace(report, stop_reason=f"{report.stop_reason}, {short.extent}")
    world = worlds.at(short.worlds.outline_of(found.world))
    plan = world.space.redistributed(short.lifted(worlds.graph, found.plan))
    other = starts[0] if plan is None else replace(starts[0], world=world, plan=plan)
    return refined_elsewhere(starts[0], other, report)


def _as_it_is(plan: Plan, reason: str, seed: int) -> Plan:
    """The plan, which says why it was not refined."""
    step_ns = plan.predicted.step_time_ns
    report = Refinement("the plan", step_ns, step_ns, 0, 0, 0.0, seed, reason)
    return replace(plan, search=replace(plan.search, refinement=report))


def _is_alike(plan: Plan) -> bool:
    """Whether its stages, if it has any, are on equal axes and place alike what several of them have."""
    stages = plan.stages
    return len(stages) == 1 or (len({s.axes for s in stages}) == 1 and not any(s.forks for s in stages))


def _watch(say: Report) -> Watch:
    def watch(count: int, best_ns: int) -> None:
        if count and count % _SAID_EVERY == 0:
            say(f"soap: {best_ns / 1e6:.3f} ms after {count:,} proposals")

    return watch


__all__ = ["Jumps", "Worlds", "refined", "space_of"]
