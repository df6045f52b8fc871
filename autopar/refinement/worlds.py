"""The worlds around a plan: each holds what placements leave open, with its space, its simulator and its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from random import Random

from autopar.clock import worked
from autopar.cost import Profile
from autopar.errors import PlanError
from autopar.interop import Layers
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.outline import Outline
from autopar.ir.placement import Placement
from autopar.ir.plan import Move, Plan, Stage, Storage
from autopar.ir.schedule import SCHEDULES
from autopar.planning import DividedGraph, Place, divided
from autopar.refinement.explaining import explained
from autopar.request import Request
from autopar.shares import SharedBatch
from autopar.simulate import Incremental, predict, prices_of
from autopar.soap import NEVER, Ledger, Proposals, Score, Space, Stages, Start, World
from autopar.staged.layered import Layered
from autopar.staging import cut
from autopar.trace import Blocks
from autopar.tunables import CUT_NODE_S, WALKED
from autopar.zero import recomputable


class Worlds:
    """The worlds around a plan, each made when it is first asked for."""

    def __init__(
        self, graph: Graph, blocks: Blocks, request: Request, profile: Profile | Mapping[str, Profile], plan: Plan
    ) -> None:
        """profile: by the mesh's names for its devices, where these are of several kinds that share a batch."""
        self.graph, self.blocks, self.request, self.profile, self.plan = graph, blocks, request, profile, plan
        self._places: dict[Outline, Place] = {}
        self._known: dict[Outline, World] = {}
        self._spaces: dict[tuple[LogicalMesh, int, bool, bool], Space] = {}
        self._outline_of: dict[World, Outline] = {}

    def outline_of(self, world: World) -> Outline:
        """What it leaves open."""
        return self._outline_of[world]

    @cached_property
    def layered(self) -> Layered:
        """The model as layers, and what each costs."""
        assert not isinstance(self.profile, Mapping)
        return Layered(self.graph, self.blocks, self.request, self.profile)

    @cached_property
    def first(self) -> World:
        """The plan's."""
        return self.at(self.outline(self.plan))

    @cached_property
    def layers(self) -> Layers:
        """What stages are made of: the repeated blocks, where there are such."""
        return self.layered.layers

    def outline(self, plan: Plan) -> Outline:
        """What a plan leaves open. Raises PlanError where stages divide a layer."""
        axes = plan.stages[0].axes
        if len(plan.stages) == 1:
            return Outline((axes,), plan.microbatches)
        found: dict[int, set[int]] = {}
        for name, layer in self.layers.fixed.items():
            found.setdefault(layer, set()).update(n for n, stage in enumerate(plan.stages) if name in stage.nodes)
        if not found or any(len(stages) != 1 for stages in found.values()):
            raise PlanError("expected stages of whole repeated blocks, found others")
        stage_of = tuple(stages.pop() for _, stages in sorted(found.items()))
        firsts = tuple(stage.first_rank for stage in plan.stages)
        return Outline((axes,) * len(set(firsts)), plan.microbatches, stage_of, firsts, plan.schedule)

    def place(self, outline: Outline) -> Place:
        """Raises PlanError where the batch has not so many microbatches."""
        if outline not in self._places:
            part = divided(self.graph, self.blocks, outline.microbatches)
            if outline.stage_of:
                whole = partial(self.cut, part.graph, outline)
                part = replace(part, cut=whole, num_submeshes=outline.num_submeshes)
            self._places[outline] = self._place(part, outline.axes)
        return self._places[outline]

    def _place(self, part: DividedGraph, axes: LogicalMesh) -> Place:
        """Where placements are open: of devices of several kinds, as many of the one with the least memory."""
        if not isinstance(self.profile, Mapping):
            return Place(part, axes, self.request, self.profile)
        batch = self._batch(part, axes)
        return batch.place(self.request.mesh.group_of(batch.kinds[batch.tightest]), part)

    def _batch(self, part: DividedGraph, axes: LogicalMesh) -> SharedBatch:
        """Shares are the plan's, and stay."""
        assert isinstance(self.profile, Mapping)
        whole = tuple(axis._replace(shares=()) for axis in axes)
        return SharedBatch(part, whole, self.request, self.profile)

    def cut(self, graph: Graph, outline: Outline, plan: Plan) -> Plan:
        """A plan of one stage in the outline's. Raises PlanError where a tensor cannot leave its stage."""
        members = self.layers.members(graph, outline.stage_of)
        return cut(graph, plan, members, outline.first_ranks, outline.schedule)

    def at(self, outline: Outline) -> World:
        """Raises PlanError where there is none."""
        if outline not in self._known:
            place = self.place(Outline((outline.axes,), outline.microbatches))
            if not (outline.stage_of or isinstance(self.profile, Mapping)):
                place = replace(place, by_factors=True)
            graph, profile = place.part.graph, place.shared_profile
            staged = partial(self.cut, graph, outline)
            score: Score = CutScore(graph, profile, staged) if outline.stage_of else Incremental(graph, profile)
            if isinstance(self.profile, Mapping):
                score = self._batch(place.part, outline.axes)
            in_two_parts = bool(outline.stage_of) and SCHEDULES[outline.schedule].splits_backward
            space = self._space(place, recomputes=not in_two_parts)
            ledger = None if isinstance(self.profile, Mapping) else self._ledger(outline, place, space)
            self._known[outline] = world = World(space, score, str(outline), ledger)
            self._outline_of[world] = outline
        return self._known[outline]

    def _space(self, place: Place, recomputes: bool) -> Space:
        """One for all outlines of equal axes and microbatches."""
        key = place.axes, place.part.microbatches, recomputes, place.by_factors
        if key not in self._spaces:
            self._spaces[key] = space_of(place, recomputes)
        return self._spaces[key]

    def _ledger(self, outline: Outline, place: Place, space: Space) -> Ledger:
        graph, ranks = place.part.graph, math.prod(axis.size for axis in outline.axes)
        per_node = min(ranks, self.request.mesh.devices_per_node)
        profile = place.profile if outline.stage_of else place.shared_profile  # stages may have others' cores
        prices = prices_of(graph, place.draft(), profile, per_node, bool(outline.stage_of))
        stages = None
        if outline.stage_of:
            members, firsts = self.layers.members(graph, outline.stage_of), outline.first_ranks
            is_one_by_one = len(set(firsts)) == len(firsts)
            is_row = is_one_by_one, is_one_by_one and not SCHEDULES[outline.schedule].splits_backward
            stages = Stages(members, is_row, firsts)
        return Ledger(space, prices, outline.microbatches, stages)

    # Plans ----------------------------------------

    def start(self, name: str, plan: Plan) -> Start:
        """Where a chain may begin. Raises PlanError where that is not in any world."""
        return Start(name, self.at(self.outline(plan)), self.unstaged(plan))

    def drawn(self, first: Start, seed: int) -> Start:
        """A random start: where a walk ends that takes every typed proposal."""
        random, space, draft = Random(seed), first.world.space, first.world.space.draft(first.plan)
        proposals = Proposals(space)
        for _ in range(0 if proposals.is_empty() else WALKED):
            draft = space.changed(draft, proposals.draw(draft, random)) or draft
        return Start("a drawn plan", first.world, draft.plan)

    def fits(self, plan: Plan) -> bool:
        """Whether each device can hold what the plan, which was simulated, has it hold."""
        score = self.first.score
        if isinstance(score, SharedBatch):
            return not score.excess_bytes(plan, 0)
        return plan.predicted.peak_bytes <= plan.memory_limit

    def unstaged(self, plan: Plan) -> Plan:
        """The placements of all stages in one. Raises PlanError where stages place alike things apart."""
        if len(plan.stages) == 1:
            return plan
        outline = self.outline(plan)
        graph = self.place(outline).part.graph
        nodes = {name: placed for stage in plan.stages for name, placed in stage.nodes.items()}
        storage = {name: kept for stage in plan.stages for name, kept in stage.storage.items()}
        fed = {name: placed for stage in plan.stages for name, placed in stage.inputs.items() if name in graph.inputs}
        rest = self._unread(outline, storage, fed)
        nodes = {node.name: nodes[node.name] for node in graph.nodes}
        merged = replace(plan, stages=(Stage(0, outline.axes, fed | rest[1], storage | rest[0], nodes),))
        found = self.at(outline).space.redistributed(merged)
        if found is None:
            raise PlanError("expected stages that place alike what several of them read, found others")
        return found

    def _unread(
        self, outline: Outline, storage: dict[str, Storage], fed: dict[str, Placement]
    ) -> tuple[dict[str, Storage], dict[str, Placement]]:
        """Something for what no stage reads."""
        graph, options = self.place(outline).part.graph, self.place(outline).options
        kept = {item.tensor for item in graph.stored} - storage.keys()
        return (
            {name: options.storages[self.blocks.representative_tensor(name)][0] for name in kept},
            {name: options.inputs[name][0] for name in graph.inputs if name not in fed},
        )

    def stated(self, world: World, plan: Plan, moves: Sequence[Move]) -> Plan:
        """The plan with its stages and the simulator's prediction."""
        outline = self._outline_of[world]
        if outline.stage_of:
            place = self.place(outline)
            return place.staged(place.part.in_stages(replace(plan, choices=explained(place, plan, moves))))
        if isinstance(world.score, SharedBatch):
            told = replace(plan, choices=explained(self.place(outline), plan, moves))
            return world.score.part.with_traffic(replace(told, predicted=predict(world.score.timeline(plan))))
        assert isinstance(world.score, Incremental)
        short = self.layered.short_place(
            outline.axes, outline.microbatches, None, False
        )  # as for a plan that was not refined
        told = replace(plan, choices=explained(short, plan, moves), predicted=predict(world.score.timeline(plan)))
        return self.place(outline).part.with_traffic(told)


class CutScore:
    """The simulator of plans that are cut into stages. What cannot be cut so costs more than anything."""

    def __init__(
        self, graph: Graph, profile: Profile | Mapping[str, Profile], cut: Callable[[Plan], Plan],
        limit_of: Callable[[range], int] | None = None,
    ) -> None:  # fmt: skip
        """limit_of: bytes that the devices of neighbouring ranks may hold, where that is not the same for all."""
        self._stages, self._cut, self._limit_of = Incremental(graph, profile), cut, limit_of
        self._last: tuple[Plan, Plan | None] | None = None

    def step_time_ns(self, plan: Plan, until_ns: float = math.inf) -> int:
        try:
            return NEVER if (staged := self._staged(plan)) is None else self._stages.step_time_ns(staged, until_ns)
        except PlanError:
            return NEVER

    def excess_bytes(self, plan: Plan, limit_bytes: int) -> int:
        try:
            staged = self._staged(plan)
            if staged is not None and self._limit_of is not None:
                lanes = self._stages.timeline(staged).lanes
                return sum(max(0, lane.peak_bytes - self._limit_of(lane.ranks)) for lane in lanes)
            return 0 if staged is None else self._stages.excess_bytes(staged, limit_bytes)
        except PlanError:
            return 0

    def _staged(self, plan: Plan) -> Plan | None:
        if self._last is None or self._last[0] is not plan:
            worked(CUT_NODE_S * len(self._stages.graph.nodes))
            try:
                self._last = plan, self._cut(plan)
            except PlanError:
                self._last = plan, None
        return self._last[1]


def space_of(place: Place, recomputes: bool = True) -> Space:
    """What plans in a place may be changed to, within the request's constraints. recomputes: blocks may be, too."""
    options, request = place.options, place.request
    is_open = recomputes and request.mode == "train" and all(rule.recompute is None for rule in request.constraints)
    again = recomputable(place.part.whole, [path for paths in place.part.blocks.paths for path in paths])
    return Space(
        graph=place.part.graph,
        twins=place.part.blocks,
        strategies=options.strategies,
        storages=options.storages,
        inputs=options.inputs,
        path=place.costs.steps,
        recomputable=tuple(groups for groups in (again.full, again.attention) if groups) if is_open else (),
    )
