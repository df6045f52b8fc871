"""Wires the SOAP search to the planner: what a plan may be changed to, what the simulator says of it, and from where.

    plan  →  its placements of one microbatch on its logical mesh  →  chains by MCMC (`soap`)  →  the plan stated again

A *world* holds what the placements leave open: the number of microbatches, and of stages of equal submeshes that share
their placements, which blocks are in which. Jumps lead from one to another; branches are drawn within one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random

from autopar.branches import drawn_branches
from autopar.cost import Profile
from autopar.errors import AutoparError, PlanError
from autopar.interop import Layers, block_layers
from autopar.intraop import kept_in
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement
from autopar.ir.plan import Alternative, Choice, Move, Plan, Storage
from autopar.microbatch import one_microbatch_plan
from autopar.planning import Place, Request, divided, pinned_nodes
from autopar.progress import Report, reporting
from autopar.simulate import Incremental, Timeline, simulate
from autopar.soap import INPUT, STORAGE, Budget, Jump, Score, Space, Start, Watch, World, refine
from autopar.staging import cut
from autopar.trace import Blocks
from autopar.zero import recomputable

_SAID_EVERY = 500  # proposals


def refined(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, plan: Plan, progress: Report | None = None,
    others: Sequence[Plan] = (),
) -> Plan:  # fmt: skip
    """The plan, or a faster one that MCMC finds around it, or from others of its graph, microbatches and logical mesh.

    A plan whose stages are placed apart, or that is for devices of several kinds, is returned as it is.
    """
    budget = request.budget
    if request.mesh.num_devices == 1 or not request.mesh.is_homogeneous or not budget.proposals or not _is_alike(plan):
        return plan
    worlds = _Worlds(graph, blocks, replace(request, recompute=plan.recompute), profile, plan)
    starts = [Start("the plan", worlds.unstaged(plan), 1.0 / (1 + len(others)))]
    starts += [Start(other.search.method, worlds.unstaged(other), starts[0].share) for other in others]
    chances = Budget(budget.proposals, budget.refine_seconds, budget.seed)
    with reporting(progress, max(1, budget.proposals // _SAID_EVERY)) as say:
        found, report = refine(worlds.first, starts, chances, worlds.jumps(), _watch(say))
    if found.world is worlds.first and not report.moves:
        return replace(plan, search=replace(plan.search, refinement=report))
    stated = worlds.stated(found.world, found.plan, report.moves)
    if stated.predicted.step_time_ns >= plan.predicted.step_time_ns and _fits(plan):
        return replace(plan, search=replace(plan.search, refinement=report))
    return replace(stated, search=replace(plan.search, refinement=report))


def _fits(plan: Plan) -> bool:
    return plan.predicted.peak_bytes <= plan.memory_limit


def _is_alike(plan: Plan) -> bool:
    """Whether its stages, if it has any, are on equal axes and place alike what several of them have."""
    return len({stage.axes for stage in plan.stages}) <= 1 and not any(stage.forks for stage in plan.stages)


def _watch(say: Report) -> Watch:
    def watch(count: int, best_ns: int) -> None:
        if count and count % _SAID_EVERY == 0:
            say(f"soap: {best_ns / 1e6:.3f} ms after {count:,} proposals")

    return watch


# Worlds ----------------------------------------


@dataclass(frozen=True)
class Outer:
    """What a world's placements leave open: microbatches, and the stage of each layer, where there are stages."""

    microbatches: int
    stage_of: tuple[int, ...] = ()


class _Worlds:
    """The worlds around a plan, each made when it is first asked for."""

    def __init__(self, graph: Graph, blocks: Blocks, request: Request, profile: Profile, plan: Plan) -> None:
        self.graph, self.blocks, self.request, self.profile, self.plan = graph, blocks, request, profile, plan
        self.axes = one_microbatch_plan(plan).parts[0].axes
        self.first_ranks = [stage.first_rank for stage in plan.stages]
        self.first_outer = Outer(plan.microbatches, self._stage_of())
        self._places: dict[Outer, Place] = {}
        self._known: dict[Outer, World] = {}
        self._outer_of: dict[World, Outer] = {}

    @cached_property
    def first(self) -> World:
        """The plan's."""
        return self.at(self.first_outer)

    @cached_property
    def layers(self) -> Layers:
        """The repeated blocks."""
        return block_layers(self.graph, [path for paths in self.blocks.paths for path in paths])

    def _stage_of(self) -> tuple[int, ...]:
        """The stage of each layer in the plan; nothing where it has none, or layers that stages divide."""
        found: dict[int, set[int]] = {}
        for name, layer in self.layers.fixed.items() if self.plan.stages else ():
            found.setdefault(layer, set()).update(n for n, stage in enumerate(self.plan.stages) if name in stage.nodes)
        if any(len(stages) != 1 for stages in found.values()):
            return ()
        return tuple(stages.pop() for _, stages in sorted(found.items()))

    def place(self, outer: Outer) -> Place:
        """Raises PlanError where the batch has not so many microbatches."""
        if outer not in self._places:
            part = divided(self.graph, self.blocks, outer.microbatches)
            if outer.stage_of:
                part = replace(
                    part, cut=lambda plan: self._cut(self.graph, plan, outer), num_submeshes=max(outer.stage_of) + 1
                )
            self._places[outer] = Place(part, self.axes, self.request, self.profile)
        return self._places[outer]

    def _cut(self, graph: Graph, plan: Plan, outer: Outer) -> Plan:
        members = self.layers.members(graph, outer.stage_of)
        return cut(graph, plan, members, self.first_ranks, self.plan.schedule)

    def at(self, outer: Outer) -> World:
        """Raises PlanError where there is none."""
        if outer not in self._known:
            place = self.place(outer)
            score: Score = (
                _Staged(place.part.graph, place.shared_profile, lambda plan: self._cut(place.part.graph, plan, outer))
                if outer.stage_of
                else Incremental(place.part.graph, place.shared_profile)
            )
            self._known[outer] = world = World(space_of(place), score)
            self._outer_of[world] = outer
        return self._known[outer]

    # Plans ----------------------------------------

    def unstaged(self, plan: Plan) -> Plan:
        """One microbatch's placements, all stages' in one."""
        inner = one_microbatch_plan(plan)
        if not inner.stages:
            return inner
        graph = self.place(self.first_outer).part.graph
        nodes = {name: placed for part in inner.parts for name, placed in part.nodes.items()}
        storage = {name: kept for part in inner.parts for name, kept in part.storage.items()}
        fed = {name: placed for part in inner.parts for name, placed in part.inputs.items() if name in graph.inputs}
        rest = self._unread(graph, storage, fed)
        merged = replace(
            inner, stages=(), axes=self.axes, nodes={node.name: nodes[node.name] for node in graph.nodes},
            storage=storage | rest[0], inputs=fed | rest[1], redistributes=(),
        )  # fmt: skip
        found = self.first.space.redistributed(merged)
        if found is None:
            raise PlanError("expected stages that place alike what several of them read, found others")
        return found

    def _unread(
        self, graph: Graph, storage: dict[str, Storage], fed: dict[str, Placement]
    ) -> tuple[dict[str, Storage], dict[str, Placement]]:
        """Something for what no stage reads."""
        options = self.place(self.first_outer).placements.options
        kept = {item.tensor for item in graph.stored} - storage.keys()
        return (
            {name: options.storages[self.blocks.representative_tensor(name)][0] for name in kept},
            {name: options.inputs[name][0] for name in graph.inputs if name not in fed},
        )

    def stated(self, world: World, plan: Plan, moves: Sequence[Move]) -> Plan:
        """The plan on all axes, with its stages and the simulator's prediction."""
        place = self.place(self._outer_of[world])
        plan = replace(plan, choices=_explained(place, plan, moves))
        if place.part.cut is not None:
            return place.staged(place.part.in_stages(plan))
        return place.part.on_all_axes(place.scored(plan))

    # Jumps ----------------------------------------

    def jumps(self) -> dict[str, Jump]:
        """Those that the request leaves open, by kind of proposal."""
        rules, found = self.request.constraints, dict[str, Jump]()
        if self.plan.mode == "train" and all(rule.microbatches is None for rule in rules):
            found["microbatches"] = self._microbatches
        if len(set(self.first_outer.stage_of)) > 1:
            found["stage"] = self._stage
        if not self.plan.stages:
            found["operator"] = self._branches
        return found

    def _microbatches(self, world: World, plan: Plan, random: Random) -> tuple[World, Plan] | None:
        """Half or double as many."""
        outer = self._outer_of[world]
        count = outer.microbatches * 2 if outer.microbatches == 1 or random.random() < 0.5 else outer.microbatches // 2
        return self._moved(replace(outer, microbatches=count), replace(plan, microbatches=count))

    def _stage(self, world: World, plan: Plan, random: Random) -> tuple[World, Plan] | None:
        """A layer beside a boundary goes to the other side."""
        outer = self._outer_of[world]
        borders = [n for n in range(1, len(outer.stage_of)) if outer.stage_of[n - 1] != outer.stage_of[n]]
        border = random.choice(borders)
        stage_of = list(outer.stage_of)
        if random.random() < 0.5:
            stage_of[border] = stage_of[border - 1]
        else:
            stage_of[border - 1] = stage_of[border]
        if set(stage_of) != set(outer.stage_of):
            return None
        return self._moved(replace(outer, stage_of=tuple(stage_of)), plan)

    def _moved(self, outer: Outer, plan: Plan) -> tuple[World, Plan] | None:
        """The placements in another world, where they are possible there."""
        try:
            world = self.at(outer)
        except AutoparError:
            return None
        if not world.space.admits(plan):
            return None
        found = world.space.redistributed(plan)
        return None if found is None else (world, found)

    def _branches(self, world: World, plan: Plan, random: Random) -> tuple[World, Plan] | None:
        """Operators that know nothing of each other, on disjoint parts of an axis."""
        place = self.place(self._outer_of[world])
        graph, pinned = place.part.graph, pinned_nodes(place.part.graph, self.request.constraints)
        found = drawn_branches(graph, plan, place.shared_profile, self.blocks.representative_node, pinned, random)
        return None if found is None else (world, found)


@dataclass(frozen=True, eq=False)
class _Staged:
    """The simulator of plans that are cut into stages."""

    graph: Graph
    profile: Profile
    cut: Callable[[Plan], Plan]

    last: list[tuple[Plan, Timeline]] = field(default_factory=list)

    def step_time_ns(self, plan: Plan) -> int:
        return self._timeline(plan).step_time_ns

    def peak_bytes(self, plan: Plan) -> int:
        return self._timeline(plan).peak_bytes

    def _timeline(self, plan: Plan) -> Timeline:
        if not self.last or self.last[0][0] is not plan:
            self.last[:] = [(plan, simulate(self.graph, self.cut(plan), self.profile))]
        return self.last[0][1]

    def least_time_ns(self, plan: Plan) -> int:
        return 0


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
