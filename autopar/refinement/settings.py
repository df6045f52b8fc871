"""Settings that the chain may land in: a logical mesh of so many stages and microbatches, placements solved for it.

    setting  →  the fastest placements that fit, by ILP on a short graph (`staged.search`)  →  stages of balanced time
             →  the outline of a world, and its plan

Settings are drawn without replacement, most of them beside the best so far, at first beside the plan's: half or twice
the stages or microbatches, or another logical mesh.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from random import Random

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.refinement.outline import Outline
from autopar.refinement.worlds import Worlds
from autopar.soap import NEVER
from autopar.staged.search import Search
from autopar.staged.ways import Candidate, Setting

_MOST_EACH = 8
"""Microbatches for each stage: with so many, the bubble is an eighth at most."""
_NEAR = 1.05
"""What is estimated to be so many times the best estimate is not looked at further: what it hides may be more."""
_ANYWHERE = 0.15  # of draws


class Settings:
    """Those of a plan's mesh, each solved when it is drawn."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        own, devices = worlds.outline(worlds.plan), worlds.request.mesh.num_devices
        stages = len(set(own.first_ranks)) or 1
        self._best = NEVER, Setting(own.axes, devices // stages, stages, own.microbatches)  # estimated, ns

    @cached_property
    def _search(self) -> Search:
        return Search(self.worlds.layered)

    @cached_property
    def _left(self) -> list[Setting]:
        """Those that have not been drawn."""
        search, devices = self._search, self.worlds.request.mesh.num_devices
        return [
            Setting(axes, size, devices // size, count)
            for size, axes in search.shapes
            for count in search.layered.counts
            if count <= _MOST_EACH * (devices // size)
        ]

    def drawn(self, random: Random) -> tuple[Outline, Plan] | None:
        """The best that is found in a setting; None where nothing fits, or is near the best of others before, or none
        is left."""
        setting = self._next(random)
        if setting is None:
            return None
        try:
            found = self._search.look(setting)
        except AutoparError:
            return None
        fitting = [candidate for candidate in found if candidate.peak_bytes <= self.worlds.layered.admitted]
        best = min(fitting, key=lambda candidate: candidate.step_ns, default=None)
        if best is None or best.step_ns > _NEAR * self._best[0]:
            return None
        if best.step_ns < self._best[0]:
            self._best = best.step_ns, setting
        return self._outline(best), self._placed(best)

    def _next(self, random: Random) -> Setting | None:
        """One of those left."""
        left = self._left
        beside = [one for one in left if _is_beside(one, self._best[1])]
        chosen = random.choice(beside) if beside and random.random() >= _ANYWHERE else None
        if chosen is None and left:
            chosen = random.choice(left)
        if chosen is not None:
            left.remove(chosen)
        return chosen

    def _outline(self, candidate: Candidate) -> Outline:
        setting = candidate.ways[0].setting
        if setting.num_stages == 1:
            return Outline(setting.axes, setting.microbatches)
        devices = self.worlds.request.mesh.num_devices
        firsts = tuple(number * setting.num_devices % devices for number in range(len(candidate.ways)))
        return Outline(setting.axes, setting.microbatches, candidate.stage_of_layer, firsts, candidate.schedule)

    def _placed(self, candidate: Candidate) -> Plan:
        """One microbatch's placements of the whole model."""
        (way,) = set(candidate.ways)
        layered, place = self.worlds.layered, self.worlds.place(Outline(way.setting.axes, candidate.microbatches))
        draft = replace(place.draft(), recompute=layered.modules_again(candidate.recompute))
        return layered.place_of(way.setting).placements.placed(draft, place.part.graph, way.choice.choice)


def _is_beside(one: Setting, other: Setting) -> bool:
    """Whether they are a step apart: in what there is most to win by."""
    stages, counts = {one.num_stages, other.num_stages}, {one.microbatches, other.microbatches}
    if len(stages) == 1:
        return len(counts) == 1 or (one.axes == other.axes and max(counts) == 2 * min(counts))
    return max(stages) <= 4 * min(stages) and max(counts) <= 2 * min(counts)
