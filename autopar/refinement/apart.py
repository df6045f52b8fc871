"""Refines stages on devices of several kinds: what one kind's stages do after another's, all others as they are.

    kind        its stages' placements, completed to a plan of the whole model on their axes  →  chains by MCMC (`soap`)
    proposal    cut into the plan of all stages, and simulated there with all profiles

What a proposal changes outside of the kind's own stages is cut away; so strategies of operators that they do not run
are no proposals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.cost import Profile
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Refinement, Stage
from autopar.planning import Place, divided
from autopar.refinement.worlds import CutScore, space_of
from autopar.request import Request
from autopar.simulate import predict, simulate
from autopar.soap import Budget, Start, World, refine
from autopar.staging import cut
from autopar.trace import Blocks
from autopar.tunables import LEAST_SOLVE_S

_ANY = 1 << 62  # bytes


def refined_apart(
    graph: Graph, blocks: Blocks, request: Request, profiles: Mapping[str, Profile], plan: Plan
) -> Plan:  # fmt: skip
    """The plan, or a faster one that chains find around it, kind by kind."""
    try:
        stages = _StagesApart(graph, blocks, request, profiles, plan)
    except (InfeasibleError, PlanError) as error:
        step_ns, why = plan.predicted.step_time_ns, f"it is in no space of the search ({error})"
        report = Refinement("the plan", step_ns, step_ns, 0, 0, 0.0, request.budget.seed, why)
        return replace(plan, search=replace(plan.search, refinement=report))
    kinds = list(dict.fromkeys(stages.kinds))
    budget, reports = request.budget, list[Refinement]()
    chances = Budget(max(1, budget.proposals // len(kinds)), budget.refine_seconds / len(kinds), budget.seed)
    for kind in kinds:
        start = Start(f"the plan, stages on {kind}", stages.world(kind), stages.wholes[kind])
        found, report = refine([start], chances)
        stages.wholes[kind] = found.plan
        reports.append(report)
    better, report = stages.stated(), _joined(reports)
    is_better = stages.fits(better) and better.predicted.step_time_ns < plan.predicted.step_time_ns
    taken = better if is_better and report.moves else plan
    return replace(taken, search=replace(plan.search, refinement=report))


class _StagesApart:
    """A plan's stages by the kind of their devices, and for each kind a plan of the whole model on its stages' axes."""

    def __init__(
        self, graph: Graph, blocks: Blocks, request: Request, profiles: Mapping[str, Profile], plan: Plan
    ) -> None:
        self.part, self.request, self.profiles, self.plan = (
            divided(graph, blocks, plan.microbatches), request, profiles, plan,
        )  # fmt: skip
        self.kinds = [plan.mesh.group_of(stage.ranks).profile for stage in plan.stages]
        self.places = {kind: self._place(stage) for kind, stage in zip(self.kinds, plan.stages, strict=True)}
        self.wholes = {kind: self._whole(kind) for kind in self.places}

    def _place(self, stage: Stage) -> Place:
        mesh = self.plan.mesh.part(stage.ranks)
        request = replace(
            self.request, mesh=mesh, memory_limit=self.limit_of(stage.ranks), recompute=self.plan.recompute
        )
        return Place(self.part, stage.axes, request, self.profiles[mesh.profile])

    def limit_of(self, ranks: range) -> int:
        """Bytes that a device of these ranks may hold."""
        group = self.plan.mesh.group_of(ranks)
        own = self.profiles[group.profile].shared_by(group.devices_per_node)
        return self.request.memory_limit or own.usable_bytes

    def _whole(self, kind: str) -> Plan:
        """What the kind's stages do; what they do not run as is fastest on their axes. Raises PlanError where that is
        no plan."""
        place, budget, graph = self.places[kind], self.request.budget, self.part.graph
        found = place.placements.plan(_ANY, LEAST_SOLVE_S, budget.seed, budget.gap).stage
        inputs, storage, nodes = dict(found.inputs), dict(found.storage), dict(found.nodes)
        for own in self._own(kind):
            inputs |= {name: placed for name, placed in own.inputs.items() if name in graph.inputs}
            storage |= own.storage
            nodes |= own.nodes
        whole = replace(self.plan, stages=(Stage(0, place.axes, inputs, storage, nodes),))
        redistributed = space_of(place, recomputes=False).redistributed(whole)
        if redistributed is None:
            raise PlanError(f"expected stages on {kind} that are a part of a plan of the whole model, found others")
        return redistributed

    def _own(self, kind: str) -> list[Stage]:
        return [stage for own, stage in zip(self.kinds, self.plan.stages, strict=True) if own == kind]

    def world(self, kind: str) -> World:
        """What the kind's stages may be changed to."""
        space = space_of(self.places[kind], recomputes=False)
        run = {space.representative(name) for own in self._own(kind) for name in (*own.nodes, *own.storage)}
        strategies = {name: options for name, options in space.strategies.items() if name in run}
        storages = {name: options for name, options in space.storages.items() if name in run}
        own = replace(space, strategies=strategies, storages=storages)
        score = CutScore(self.part.graph, self.profiles, partial(self.cut, kind), self.limit_of)
        return World(own, score, f"stages on {kind}")

    def cut(self, kind: str, whole: Plan) -> Plan:
        """All stages, of which the kind's are as a plan of the whole model says. Raises PlanError."""
        members: dict[str, tuple[int, ...]] = {}
        for number, stage in enumerate(self.plan.stages):
            for name in stage.nodes:
                members[name] = (*members.get(name, ()), number)
        wholes = self.wholes | {kind: whole}
        firsts = [stage.first_rank for stage in self.plan.stages]
        plans = [wholes[own] for own in self.kinds]
        return cut(self.part.graph, plans, members, firsts, self.plan.schedule, self.plan.mesh, self.profiles)

    def stated(self) -> Plan:
        """The plan of all stages as they are now, with the simulator's prediction."""
        try:
            plan = self.cut(self.kinds[0], self.wholes[self.kinds[0]])
            return replace(plan, predicted=predict(simulate(self.part.graph, plan, self.profiles)))
        except PlanError:
            return self.plan

    def fits(self, plan: Plan) -> bool:
        """Whether each device can hold what the plan has it hold."""
        lanes = simulate(self.part.graph, plan, self.profiles).lanes
        return all(lane.peak_bytes <= self.limit_of(lane.ranks) for lane in lanes)


def _joined(reports: Sequence[Refinement]) -> Refinement:
    """One after another, as one search."""
    made, accepted = Counter[str](), Counter[str]()
    for report in reports:
        made.update({kind: count for kind, (count, _) in report.rates.items()})
        accepted.update({kind: count for kind, (_, count) in report.rates.items()})
    return replace(
        reports[0], after_ns=reports[-1].after_ns, seconds=round(sum(report.seconds for report in reports), 3),
        proposals=made.total(), simulated=sum(report.simulated for report in reports),
        rates={kind: (count, accepted[kind]) for kind, count in sorted(made.items())},
        starts={name: steps for report in reports for name, steps in report.starts.items()},
        moves=tuple(move for report in reports for move in report.moves),
        stop_reason="; ".join(dict.fromkeys(report.stop_reason for report in reports)),
    )  # fmt: skip
