"""One step of a plan, simulated: its stages one beside the other, or its one stage on ranks that are unlike."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.collector import without_collector
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate.player import Player
from autopar.simulate.program import lower_stages
from autopar.simulate.schedule import play_stages, profiles_of_stages
from autopar.simulate.timeline import Timeline
from autopar.simulate.unlike import play_unlike


def simulate(graph: Graph, plan: Plan, profile: Profile | Mapping[str, Profile], sums_early: bool = True) -> Timeline:
    """One step of the plan: what runs when, what it sends, what memory it takes. Deterministic.

    graph, plan: of one microbatch; played are `plan.microbatches`. Every rank of a submesh does the same; simulated is
    its first, which has the longest slices; where ranks are unlike, one of each kind (`unlike`).
    profile: of the devices; by the name that the mesh has for them where they are of several kinds
    (`profiler.profiles_of`). sums_early: gradients are summed over ranks while the backward pass goes on, as emitted
    programs do; False: after it, as DeepSpeed's pipeline engine does. Raises PlanError for a plan that lacks a
    redistribution.
    """
    with without_collector():
        if len(plan.stages) == 1 and (plan.stage.forks or ranks_differ(plan)):
            known = profile if isinstance(profile, Mapping) else {group.profile: profile for group in plan.mesh.groups}
            return play_unlike(graph, plan, known, sums_early)
        profiles = profiles_of_stages(plan, profile)
        trains, programs = plan.mode == "train" and graph.loss is not None, lower_stages(graph, plan, profiles)
        pairs = zip(programs, profiles, strict=True)
        players = [Player(program, own, trains, sums_early) for program, own in pairs]
        return play_stages(graph, plan, players, profiles)


def ranks_differ(plan: Plan) -> bool:
    """Whether ranks of one stage differ, in their devices or in their shares."""
    return not plan.mesh.is_homogeneous or any(axis.shares for axis in plan.stage.axes)
