"""Wires the SOAP search to the planner: what a plan may be changed to, what the simulator says of it, and from where.

    plan  →  its placements of one microbatch on its logical mesh  →  chains by MCMC (`soap`)  →  the plan stated again

A *world* holds what the placements leave open: the number of microbatches, and of stages of equal submeshes that share
their placements, which blocks are in which. Jumps lead from one to another; branches are drawn within one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from random import Random

from autopar.branches import drawn_branches
from autopar.cost import Profile
from autopar.errors import AutoparError, PlanError
from autopar.interop import Layers, block_layers
from autopar.intraop import kept_in
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh, logical_meshes, make_axes
from autopar.ir.placement import Placement
from autopar.ir.plan import Alternative, Choice, Move, NodePlan, Plan, Storage
from autopar.ir.stages import makes_rounds
from autopar.microbatch import one_microbatch_plan
from autopar.planning import Place, Request, divided, pinned_nodes
from autopar.progress import Report, reporting
from autopar.simulate import Incremental, Timeline, prices_of, simulate
from autopar.simulate.schedule import without_collector
from autopar.soap import (
    INPUT,
    STORAGE,
    Budget,
    Jump,
    Ledger,
    Proposals,
    Score,
    Space,
    Stages,
    Start,
    Watch,
    World,
    refine,
)
from autopar.staging import cut
from autopar.trace import Blocks
from autopar.zero import recomputable

_SAID_EVERY = 500  # proposals
_RESCHEDULED = 0.2  # of proposals to a border between stages
_SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
_NEVER = 2**62
_WALKED = 200  # proposals that a random start is away


def refined(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, plan: Plan, progress: Report | None = None,
    others: Sequence[tuple[str, Plan]] = (),
) -> Plan:  # fmt: skip
    """The plan, or a faster one that MCMC finds around it, or from other plans, which have a name each; where there are
    such, from a drawn one as well.

    A plan whose stages are placed apart, or that is for devices of several kinds, is returned as it is.
    """
    budget = request.budget
    if request.mesh.num_devices == 1 or not request.mesh.is_homogeneous or not budget.proposals or not _is_alike(plan):
        return plan
    worlds = Worlds(graph, blocks, replace(request, recompute=plan.recompute), profile, plan)
    try:
        starts = [worlds.start(name, one) for name, one in [("the plan", plan), *others]]
    except PlanError:
        return plan
    if others:
        starts.append(worlds.drawn(starts[0], budget.seed))
    chances = Budget(budget.proposals, budget.refine_seconds, budget.seed)
    with without_collector(), reporting(progress, max(1, budget.proposals // _SAID_EVERY)) as say:
        found, report = refine(starts, chances, worlds.jumps(), _watch(say))
    if found.world is worlds.first and not report.moves:
        return replace(plan, search=replace(plan.search, refinement=report))
    stated = worlds.stated(found.world, found.plan, report.moves)
    is_better = _fits(stated) and stated.predicted.step_time_ns < plan.predicted.step_time_ns
    if _fits(plan) and not is_better:
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
    """What a world's placements leave open: the logical mesh (of a stage), microbatches, and where there are stages,
    that of each layer, their first ranks and the schedule."""

    axes: LogicalMesh
    microbatches: int
    stage_of: tuple[int, ...] = ()
    first_ranks: tuple[int, ...] = ()
    schedule: str = "1f1b"

    def __str__(self) -> str:
        sizes = "x".join(str(axis.size) for axis in self.axes) or "1"
        layers = "+".join(str(self.stage_of.count(stage)) for stage in sorted(set(self.stage_of)))
        stages = f"{len(self.first_ranks)} stages of {sizes}, {self.schedule}, layers {layers}"
        return f"{stages if self.stage_of else f'mesh {sizes}'}, {self.microbatches} microbatches"


class Worlds:
    """The worlds around a plan, each made when it is first asked for."""

    def __init__(self, graph: Graph, blocks: Blocks, request: Request, profile: Profile, plan: Plan) -> None:
        self.graph, self.blocks, self.request, self.profile, self.plan = graph, blocks, request, profile, plan
        self._places: dict[Outer, Place] = {}
        self._known: dict[Outer, World] = {}
        self._outer_of: dict[World, Outer] = {}

    @cached_property
    def first(self) -> World:
        """The plan's."""
        return self.at(self.outer(self.plan))

    @cached_property
    def layers(self) -> Layers:
        """The repeated blocks."""
        return block_layers(self.graph, [path for paths in self.blocks.paths for path in paths])

    def outer(self, plan: Plan) -> Outer:
        """What a plan leaves open. Raises PlanError where stages divide a layer."""
        axes = one_microbatch_plan(plan).parts[0].axes
        if not plan.stages:
            return Outer(axes, plan.microbatches)
        found: dict[int, set[int]] = {}
        for name, layer in self.layers.fixed.items():
            found.setdefault(layer, set()).update(n for n, stage in enumerate(plan.stages) if name in stage.nodes)
        if not found or any(len(stages) != 1 for stages in found.values()):
            raise PlanError("expected stages of whole repeated blocks, found others")
        stage_of = tuple(stages.pop() for _, stages in sorted(found.items()))
        return Outer(axes, plan.microbatches, stage_of, tuple(s.first_rank for s in plan.stages), plan.schedule)

    def place(self, outer: Outer) -> Place:
        """Raises PlanError where the batch has not so many microbatches."""
        if outer not in self._places:
            part = divided(self.graph, self.blocks, outer.microbatches)
            if outer.stage_of:
                whole = partial(self._cut, self.graph, outer)
                part = replace(part, cut=whole, num_submeshes=len(set(outer.first_ranks)))
            self._places[outer] = Place(part, outer.axes, self.request, self.profile)
        return self._places[outer]

    def _cut(self, graph: Graph, outer: Outer, plan: Plan) -> Plan:
        members = self.layers.members(graph, outer.stage_of)
        return cut(graph, plan, members, outer.first_ranks, outer.schedule)

    def at(self, outer: Outer) -> World:
        """Raises PlanError where there is none."""
        if outer not in self._known:
            place = self.place(outer)
            graph, profile = place.part.graph, place.shared_profile
            staged = partial(self._cut, graph, outer)
            score: Score = _Staged(graph, profile, staged) if outer.stage_of else Incremental(graph, profile)
            space = space_of(place, recomputes=not outer.stage_of or outer.schedule != "zero_bubble")
            self._known[outer] = world = World(space, score, str(outer), self._ledger(outer, place, space))
            self._outer_of[world] = outer
        return self._known[outer]

    def _ledger(self, outer: Outer, place: Place, space: Space) -> Ledger:
        graph, ranks = place.part.graph, math.prod(axis.size for axis in outer.axes)
        per_node = min(ranks, self.request.mesh.devices_per_node)
        prices = prices_of(graph, place.draft(), place.shared_profile, per_node)
        stages = None
        if outer.stage_of:
            members, firsts = self.layers.members(graph, outer.stage_of), outer.first_ranks
            is_one_by_one = len(set(firsts)) == len(firsts)
            is_row = is_one_by_one, is_one_by_one and outer.schedule != "zero_bubble"
            stages = Stages(members, is_row, firsts)
        return Ledger(space, prices, outer.microbatches, stages)

    # Plans ----------------------------------------

    def start(self, name: str, plan: Plan) -> Start:
        """Where a chain may begin. Raises PlanError where that is not in any world."""
        return Start(name, self.at(self.outer(plan)), self.unstaged(plan))

    def drawn(self, first: Start, seed: int) -> Start:
        """A random start: where a walk ends that takes every typed proposal."""
        random, space, draft = Random(seed), first.world.space, first.world.space.draft(first.plan)
        proposals = Proposals(space)
        for _ in range(0 if proposals.is_empty() else _WALKED):
            draft = space.changed(draft, proposals.draw(draft, random)) or draft
        return Start("a drawn plan", first.world, draft.plan)

    def unstaged(self, plan: Plan) -> Plan:
        """One microbatch's placements, all stages' in one. Raises PlanError where stages place alike things apart."""
        inner = one_microbatch_plan(plan)
        if not inner.stages:
            return inner
        outer = self.outer(plan)
        graph = self.place(outer).part.graph
        nodes = {name: placed for part in inner.parts for name, placed in part.nodes.items()}
        storage = {name: kept for part in inner.parts for name, kept in part.storage.items()}
        fed = {name: placed for part in inner.parts for name, placed in part.inputs.items() if name in graph.inputs}
        rest = self._unread(outer, storage, fed)
        merged = replace(
            inner, stages=(), axes=outer.axes, nodes={node.name: nodes[node.name] for node in graph.nodes},
            storage=storage | rest[0], inputs=fed | rest[1], redistributes=(),
        )  # fmt: skip
        found = self.at(outer).space.redistributed(merged)
        if found is None:
            raise PlanError("expected stages that place alike what several of them read, found others")
        return found

    def _unread(
        self, outer: Outer, storage: dict[str, Storage], fed: dict[str, Placement]
    ) -> tuple[dict[str, Storage], dict[str, Placement]]:
        """Something for what no stage reads."""
        graph, options = self.place(outer).part.graph, self.place(outer).placements.options
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
        rules, trains, found = self.request.constraints, self.plan.mode == "train", dict[str, Jump]()
        names_axes = any(rule.axis is not None for rule in rules)
        found["operator"] = self._branches
        if trains and all(rule.microbatches is None for rule in rules):
            found["microbatches"] = self._microbatches
        if not names_axes:
            found["mesh"] = self._mesh
        if trains and self.layers.count > 1 and self.request.budget.stages:
            found["border"] = self._border
            if all(rule.stages is None for rule in rules) and not names_axes:
                found["stages"] = self._stages
        return found

    def _microbatches(self, world: World, plan: Plan, random: Random) -> tuple[World, Plan] | None:
        """Half or double as many."""
        outer = self._outer_of[world]
        is_more = outer.microbatches == 1 or random.random() < 0.5
        count = outer.microbatches * 2 if is_more else outer.microbatches // 2
        return self._moved(replace(outer, microbatches=count), plan)

    def _mesh(self, world: World, plan: Plan, random: Random) -> tuple[World, Plan] | None:
        """The same devices seen along other axes."""
        outer = self._outer_of[world]
        if outer.stage_of or plan.forks:
            return None
        axes = random.choice([axes for axes in logical_meshes(self.request.mesh) if axes != outer.axes] or [outer.axes])
        return self._moved(replace(outer, axes=axes), plan)

    def _border(self, world: World, plan: Plan, random: Random) -> tuple[World, Plan] | None:
        """A layer beside a border between stages goes to the other side; or another schedule."""
        outer = self._outer_of[world]
        stage_of = list(outer.stage_of)
        borders = [n for n in range(1, len(stage_of)) if stage_of[n - 1] != stage_of[n]]
        if not borders:
            return None
        if random.random() < _RESCHEDULED:
            others = [schedule for schedule in _SCHEDULES if schedule != outer.schedule]
            return self._moved(replace(outer, schedule=random.choice(others)), plan)
        border = random.choice(borders)
        if random.random() < 0.5:
            stage_of[border] = stage_of[border - 1]
        else:
            stage_of[border - 1] = stage_of[border]
        if set(stage_of) != set(outer.stage_of):
            return None
        return self._moved(replace(outer, stage_of=tuple(stage_of)), plan)

    def _stages(self, world: World, plan: Plan, random: Random) -> tuple[World, Plan] | None:
        """Twice as many stages on half as many devices each, or the other way round; layers in equal numbers."""
        outer = self._outer_of[world]
        before = len(outer.first_ranks) or 1
        count = before * 2 if before == 1 or random.random() < 0.5 else before // 2
        axes = _resized(outer.axes, before, count)
        if (
            axes is None
            or plan.forks
            or self.layers.count < count
            or len(set(outer.first_ranks)) != len(outer.first_ranks)
        ):
            return None
        per_stage = self.request.mesh.num_devices // count
        stages = () if count == 1 else tuple(layer * count // self.layers.count for layer in range(self.layers.count))
        firsts = () if count == 1 else tuple(range(0, self.request.mesh.num_devices, per_stage))
        return self._moved(Outer(axes, outer.microbatches, stages, firsts, outer.schedule), plan)

    def _moved(self, outer: Outer, plan: Plan) -> tuple[World, Plan] | None:
        """The placements in another world, where they are possible there."""
        there = _on_axes(plan, outer.axes)
        if there is None or not _go_together(outer, plan):
            return None
        try:
            world = self.at(outer)
        except AutoparError:
            return None
        if outer.microbatches == 1:
            once = {name: replace(kept, reduce_each_microbatch=False) for name, kept in there.storage.items()}
            there = replace(there, storage=once)
        there = replace(there, microbatches=outer.microbatches)
        if not world.space.admits(there):
            return None
        found = world.space.redistributed(there)
        return None if found is None else (world, found)

    def _branches(self, world: World, plan: Plan, random: Random) -> tuple[World, Plan] | None:
        """Operators that know nothing of each other, on disjoint parts of an axis."""
        outer = self._outer_of[world]
        if outer.stage_of:
            return None
        place = self.place(outer)
        graph, pinned = place.part.graph, pinned_nodes(place.part.graph, self.request.constraints)
        found = drawn_branches(graph, plan, place.shared_profile, self.blocks.representative_node, pinned, random)
        return None if found is None else (world, found)


def _go_together(outer: Outer, plan: Plan) -> bool:
    """Whether a schedule may have so many microbatches, and what the plan computes again or has in branches."""
    if not outer.stage_of:
        return True
    in_rounds = outer.schedule in ("interleaved", "zero_bubble")
    possible = not in_rounds or makes_rounds(outer.microbatches, len(set(outer.first_ranks)))
    return possible and not plan.forks and not (outer.schedule == "zero_bubble" and plan.recompute)


# Placements on other axes ----------------------------------------


def _resized(axes: LogicalMesh, before: int, after: int) -> LogicalMesh | None:
    """The axes with the outermost as many times longer as there are fewer stages; None where it is no whole number."""
    sizes = [axis.size for axis in axes] or [1]
    sizes[0] = sizes[0] * before // after
    if not sizes[0] or sizes[0] * after != (axes[0].size if axes else 1) * before:
        return None
    names = [axis.name for axis in axes] or ["d0"]
    kept = [(name, size) for name, size in zip(names, sizes, strict=True) if size > 1]
    return make_axes(tuple(name for name, _ in kept), tuple(size for _, size in kept))


def _on_axes(plan: Plan, axes: LogicalMesh) -> Plan | None:
    """The plan's placements along other axes over as many devices, or fewer or more along the outermost; None where an
    axis would have several types."""
    if plan.axes == axes:
        return plan
    origin = _origins(plan.axes, axes)
    try:
        return replace(
            plan, axes=axes,
            inputs={name: _along(placed, origin) for name, placed in plan.inputs.items()},
            storage={n: replace(kept, placement=_along(kept.placement, origin)) for n, kept in plan.storage.items()},
            nodes={
                name: NodePlan(
                    tuple([_along(p, origin) for p in own.operands]), tuple([_along(p, origin) for p in own.results])
                )
                for name, own in plan.nodes.items()
            },
        )  # fmt: skip
    except _Mixed:
        return None


class _Mixed(Exception):
    """An axis would have several types."""


def _origins(before: LogicalMesh, after: LogicalMesh) -> list[tuple[int, ...]]:
    """For each new axis, the old ones that it lies along, by strides in the same order of ranks."""
    found = []
    for axis in after:
        ends = axis.stride, axis.stride * axis.size
        found.append(
            tuple(n for n, old in enumerate(before) if old.stride < ends[1] and ends[0] < old.stride * old.size)
        )
    return found


def _along(placement: Placement, origin: Sequence[tuple[int, ...]]) -> Placement:
    types = []
    for old in origin:
        own = {placement[n] for n in old}
        if len(own) != 1:
            raise _Mixed
        types.append(own.pop())
    return tuple(types)


@dataclass(frozen=True, eq=False)
class _Staged:
    """The simulator of plans that are cut into stages. What cannot be cut so costs more than anything."""

    graph: Graph
    profile: Profile
    cut: Callable[[Plan], Plan]

    last: list[tuple[Plan, Timeline | None]] = field(default_factory=list)

    def step_time_ns(self, plan: Plan) -> int:
        played = self._timeline(plan)
        return _NEVER if played is None else played.step_time_ns

    def peak_bytes(self, plan: Plan) -> int:
        played = self._timeline(plan)
        return 0 if played is None else played.peak_bytes

    def _timeline(self, plan: Plan) -> Timeline | None:
        if not self.last or self.last[0][0] is not plan:
            self.last[:] = [(plan, self._played(plan))]
        return self.last[0][1]

    def _played(self, plan: Plan) -> Timeline | None:
        try:
            return simulate(self.graph, self.cut(plan), self.profile)
        except PlanError:
            return None


def space_of(place: Place, recomputes: bool = True) -> Space:
    """What plans in a place may be changed to, within the request's constraints. recomputes: blocks may be, too."""
    options, request = place.placements.options, place.request
    is_open = recomputes and request.mode == "train" and all(rule.recompute is None for rule in request.constraints)
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
