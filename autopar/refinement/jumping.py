"""Proposals that lead from one world to another: the same devices along other axes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from autopar.errors import AutoparError
from autopar.ir.mesh import logical_meshes
from autopar.ir.outline import Outline
from autopar.ir.plan import Plan
from autopar.refinement.axes import on_axes
from autopar.refinement.worlds import Worlds
from autopar.soap import Jump, World

Landing = tuple[World, Plan]


class Jumps:
    """Those around one plan."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds, self.request = worlds, worlds.request

    def possible(self) -> dict[str, Jump]:
        """Those that the request leaves open, by kind of proposal."""
        names_axes = any(rule.axis is not None for rule in self.request.constraints)
        return {"mesh": self._mesh} if self.request.mesh.is_homogeneous and not names_axes else {}

    def _mesh(self, world: World, plan: Plan, random: Random) -> Landing | None:
        """The same devices seen along other axes."""
        outline = self.worlds.outline_of(world)
        if outline.stage_of or plan.stage.forks:
            return None
        others = [axes for axes in logical_meshes(self.request.mesh) if axes != outline.axes]
        return self._moved(replace(outline, submeshes=(random.choice(others or [outline.axes]),)), plan)

    def _moved(self, outline: Outline, plan: Plan) -> Landing | None:
        """The placements in another world, where they are possible there."""
        there = on_axes(plan, outline.axes)
        if there is None:
            return None
        try:
            world = self.worlds.at(outline)
        except AutoparError:
            return None
        if not world.space.admits(there):
            return None
        found = world.space.redistributed(there)
        return None if found is None else (world, found)
