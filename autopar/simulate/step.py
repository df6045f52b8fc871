"""One step of a plan, simulated: its stages one beside the other, or its one stage on ranks that are unlike."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from autopar.collector import without_collector
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate.part_player import Unsupported
from autopar.simulate.parted import PartedStage
from autopar.simulate.player import Player
from autopar.simulate.program import lower_stages
from autopar.simulate.schedule import PlayedStep, play_stages, profiles_of_stages
from autopar.simulate.timeline import Timeline
from autopar.simulate.unlike import play_unlike
from autopar.simulate.variants import Variants


def simulate(graph: Graph, plan: Plan, profile: Profile | Mapping[str, Profile], sums_early: bool = True) -> Timeline:
    """One step of the plan: what runs when, what it sends, what memory it takes. Deterministic.

    graph, plan: of one microbatch; played are `plan.microbatches`. Every rank of a submesh does the same; simulated is
    its first, which has the longest slices; where ranks are unlike, one of each kind (`unlike`).
    profile: of the devices; by the name that the mesh has for them where they are of several kinds
    (`profiler.profiles_of`). sums_early: gradients are summed over ranks while the backward pass goes on, as emitted
    programs do; False: after it, as DeepSpeed's pipeline engine does. Raises PlanError for a plan that lacks a
    redistribution.
    """
    if sums_early and has_parts(plan):
        with without_collector(), suppress(Unsupported):
            return simulate_in_parts(graph, plan, profile).timeline()
    return simulate_whole(graph, plan, profile, sums_early)


def simulate_in_parts(graph: Graph, plan: Plan, profile: Profile | Mapping[str, Profile]) -> PlayedStep:
    """The step of a plan that has parts (`has_parts`), of which equal ones are lowered once, and played once where they
    begin alike. Raises Unsupported where they depend on each other in ways that are not followed."""
    (own,) = profiles_of_stages(plan, profile)
    return play_stages(graph, plan, [PartedStage(Variants(graph, plan, own), plan)], [own])


def simulate_whole(
    graph: Graph, plan: Plan, profile: Profile | Mapping[str, Profile], sums_early: bool = True
) -> Timeline:
    """As `simulate`, of whole programs: what the parts must agree with."""
    with without_collector():
        if not plan.stages and (plan.forks or ranks_differ(plan)):
            known = profile if isinstance(profile, Mapping) else {group.profile: profile for group in plan.mesh.groups}
            return play_unlike(graph, plan, known, sums_early)
        profiles = profiles_of_stages(plan, profile)
        trains, programs = plan.mode == "train" and graph.loss is not None, lower_stages(graph, plan, profiles)
        pairs = zip(programs, profiles, strict=True)
        players = [Player(program, own, trains, sums_early) for program, own in pairs]
        return play_stages(graph, plan, players, profiles).timeline()


def has_parts(plan: Plan) -> bool:
    """Whether its equal parts may be told apart: it is of one stage, and its ranks do the same."""
    return not (plan.stages or plan.forks or ranks_differ(plan))


def ranks_differ(plan: Plan) -> bool:
    """Whether ranks of one stage differ, in their devices or in their shares."""
    return not plan.mesh.is_homogeneous or any(axis.shares for axis in plan.axes)
