"""Proposals that lead from one world to another: other microbatches, meshes, stages and schedules; or to branches."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from autopar.branches import drawn_branches
from autopar.errors import AutoparError, PlanError
from autopar.ir.mesh import logical_meshes
from autopar.ir.plan import Plan
from autopar.ir.stages import check_schedule
from autopar.planning import pinned_nodes
from autopar.refinement.outline import Outline, on_axes, resized
from autopar.refinement.settings import Settings
from autopar.refinement.worlds import Worlds
from autopar.soap import Jump, World

_RESCHEDULED = 0.2  # of proposals to a border between stages
_SCHEDULES = ("gpipe", "1f1b", "zero_bubble")

Landing = tuple[World, Plan]


class Jumps:
    """Those around one plan."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds, self.request, self.layers = worlds, worlds.request, worlds.layers
        self.settings = Settings(worlds)

    def possible(self) -> dict[str, Jump]:
        """Those that the request leaves open, by kind of proposal. What the search for the plan has tried is not
        solved again."""
        rules, trains, found = self.request.constraints, self.worlds.plan.mode == "train", dict[str, Jump]()
        names_axes = any(rule.axis is not None for rule in rules)
        is_free = not names_axes and all(rule.stages is None and rule.microbatches is None for rule in rules)
        if trains and is_free and self.request.budget.stages and not self.worlds.plan.search.tried:
            found["setting"] = self._setting
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

    def _setting(self, world: World, plan: Plan, random: Random) -> Landing | None:
        """Another logical mesh, number of stages and of microbatches at once, with placements that are solved there."""
        solved = self.settings.drawn(random)
        return None if solved is None else self._landed(*solved)

    def _landed(self, outline: Outline, plan: Plan) -> Landing | None:
        try:
            world = self.worlds.at(outline)
        except AutoparError:
            return None
        found = world.space.redistributed(plan)
        return None if found is None else (world, found)

    def _microbatches(self, world: World, plan: Plan, random: Random) -> Landing | None:
        """Half or double as many."""
        outline = self.worlds.outline_of(world)
        is_more = outline.microbatches == 1 or random.random() < 0.5
        count = outline.microbatches * 2 if is_more else outline.microbatches // 2
        return self._moved(replace(outline, microbatches=count), plan)

    def _mesh(self, world: World, plan: Plan, random: Random) -> Landing | None:
        """The same devices seen along other axes."""
        outline = self.worlds.outline_of(world)
        if outline.stage_of or plan.forks:
            return None
        others = [axes for axes in logical_meshes(self.request.mesh) if axes != outline.axes]
        return self._moved(replace(outline, axes=random.choice(others or [outline.axes])), plan)

    def _border(self, world: World, plan: Plan, random: Random) -> Landing | None:
        """A layer beside a border between stages goes to the other side; or another schedule."""
        outline = self.worlds.outline_of(world)
        stage_of = list(outline.stage_of)
        borders = [n for n in range(1, len(stage_of)) if stage_of[n - 1] != stage_of[n]]
        if not borders:
            return None
        if random.random() < _RESCHEDULED:
            others = [schedule for schedule in _SCHEDULES if schedule != outline.schedule]
            return self._moved(replace(outline, schedule=random.choice(others)), plan)
        border = random.choice(borders)
        if random.random() < 0.5:
            stage_of[border] = stage_of[border - 1]
        else:
            stage_of[border - 1] = stage_of[border]
        if set(stage_of) != set(outline.stage_of):
            return None
        return self._moved(replace(outline, stage_of=tuple(stage_of)), plan)

    def _stages(self, world: World, plan: Plan, random: Random) -> Landing | None:
        """Twice as many stages on half as many devices each, or the other way round; layers in equal numbers."""
        outline, layers, devices = self.worlds.outline_of(world), self.layers.count, self.request.mesh.num_devices
        before = len(outline.first_ranks) or 1
        count = before * 2 if before == 1 or random.random() < 0.5 else before // 2
        axes = resized(outline.axes, before, count)
        is_shared = len(set(outline.first_ranks)) != len(outline.first_ranks)
        if axes is None or plan.forks or layers < count or is_shared:
            return None
        stages = () if count == 1 else tuple(layer * count // layers for layer in range(layers))
        firsts = () if count == 1 else tuple(range(0, devices, devices // count))
        return self._moved(Outline(axes, outline.microbatches, stages, firsts, outline.schedule), plan)

    def _moved(self, outline: Outline, plan: Plan) -> Landing | None:
        """The placements in another world, where they are possible there."""
        there = on_axes(plan, outline.axes)
        if there is None or not _go_together(outline, plan):
            return None
        try:
            world = self.worlds.at(outline)
        except AutoparError:
            return None
        if outline.microbatches == 1:
            once = {name: replace(kept, reduce_each_microbatch=False) for name, kept in there.storage.items()}
            there = replace(there, storage=once)
        there = replace(there, microbatches=outline.microbatches)
        if not world.space.admits(there):
            return None
        found = world.space.redistributed(there)
        return None if found is None else (world, found)

    def _branches(self, world: World, plan: Plan, random: Random) -> Landing | None:
        """Operators that know nothing of each other, on disjoint parts of an axis."""
        outline = self.worlds.outline_of(world)
        if outline.stage_of:
            return None
        place = self.worlds.place(outline)
        graph, pinned = place.part.graph, pinned_nodes(place.part.graph, self.request.constraints)
        blocks, profile = self.worlds.blocks, place.shared_profile
        found = drawn_branches(graph, plan, profile, blocks.representative_node, pinned, random)
        return None if found is None else (world, found)


def _go_together(outline: Outline, plan: Plan) -> bool:
    """Whether a schedule may have so many microbatches, and what the plan computes again or has in branches."""
    if not outline.stage_of:
        return True
    try:
        check_schedule(outline.schedule, outline.first_ranks, outline.microbatches, plan.recompute, bool(plan.forks))
    except PlanError:
        return False
    return True
