"""Wires the SOAP search to the planner: what a plan may be changed to, what the simulator says of it, and from where.

plan  →  its graph of one microbatch on its logical mesh  →  chains by MCMC (`soap`)  →  the plan stated again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.cost import Profile
from autopar.intraop import kept_in
from autopar.ir.graph import Graph
from autopar.ir.plan import Alternative, Choice, Move, Plan
from autopar.microbatch import one_microbatch_plan
from autopar.planning import Place, Request, divided
from autopar.progress import Report
from autopar.simulate import Incremental
from autopar.soap import INPUT, STORAGE, Budget, Space, Start, World, refine
from autopar.trace import Blocks
from autopar.zero import recomputable

_SAID_EVERY = 500  # proposals


def refined(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, plan: Plan, progress: Report | None,
    others: Sequence[Plan] = (),
) -> Plan:  # fmt: skip
    """The plan, or a faster one that MCMC finds around it; the plan itself where it has stages.

    others: plans of the same microbatches and logical mesh from which chains begin, too. Never slower than the plan.
    """
    count = request.budget.proposals
    if plan.stages or request.mesh.num_devices == 1 or not request.mesh.is_homogeneous or not count:
        return plan
    part, inner = divided(graph, blocks, plan.microbatches), one_microbatch_plan(plan)
    place = Place(part, inner.axes, replace(request, recompute=plan.recompute), profile)
    space = space_of(place)
    shared = profile.shared_by(request.mesh.devices_per_node)
    starts = [*_starts(inner, [one_microbatch_plan(other) for other in others])]
    budget = Budget(count, request.budget.refine_seconds, request.budget.seed)
    world = World(space, Incremental(part.graph, shared))
    found, report = refine(world, starts, budget, watch=_watch(progress))
    if not report.moves:
        return replace(plan, search=replace(plan.search, refinement=report))
    scored = place.scored(replace(found, choices=_explained(place, found, report.moves)))
    return part.on_all_axes(replace(scored, search=replace(plan.search, refinement=report)))


def space_of(place: Place) -> Space:
    """What plans in a place may be changed to, within the request's constraints."""
    options, request = place.placements.options, place.request
    is_open = request.mode == "train" and all(rule.recompute is None for rule in request.constraints)
    again = recomputable(place.part.whole, [path for paths in place.part.blocks.paths for path in paths])
    return Space(
        graph=place.part.graph,
        twins=place.part.blocks,
        strategies=options.strategies,
        storages=options.storages,
        inputs=options.inputs,
        path=place.placements.costs.steps,
        recomputable=tuple(groups for groups in (again.full, again.attention) if groups) if is_open else (),
    )


def _starts(plan: Plan, others: Sequence[Plan]) -> Iterator[Start]:
    share = 1.0 / (1 + len(others))
    yield Start("the plan", plan, share)
    for other in others:
        yield Start(other.search.method, other, share)


def _watch(progress: Report | None) -> Callable[[int, int], None]:
    def watch(count: int, best_ns: int) -> None:
        if progress is not None and count and count % _SAID_EVERY == 0:
            progress(f"soap: {best_ns / 1e6:.3f} ms after {count:,} proposals")

    return watch


# Explanations ----------------------------------------


def _explained(place: Place, plan: Plan, moves: Sequence[Move]) -> tuple[Choice, ...]:
    """Each decision against its alternatives with everything else as it is now; what refinement chose against what was
    there before, with the difference that the simulator finds. Of decisions that are none of the intra-op problem's,
    what the plan had."""
    graph = place.part.graph
    placements = place.placements_with({item.tensor: kept_in(graph, plan, item.tensor) for item in graph.stored})
    choice = placements.choice_of(plan)
    told = plan.choices if choice is None else placements.explained(choice)
    by_name = {(item.name, item.kind): item for item in told}
    for move in moves:
        kind = {STORAGE: "stored", INPUT: "input"}.get(move.kind, "node")
        known = by_name.get((move.name, kind))
        rest = [item for item in known.alternatives if item.option != move.before] if known else []
        cost_ns, num_options = (known.cost_ns, known.num_options) if known else (0, 2)
        simulated = Alternative(f"{move.before} (simulated)", move.gain_ns, 0)
        by_name[move.name, kind] = Choice(
            move.name, kind, move.count, move.after, cost_ns, num_options, (simulated, *rest)
        )
    return tuple(by_name.values())


__all__ = ["refined", "space_of"]
