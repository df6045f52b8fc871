"""Settings that the chain may land in: a logical mesh of so many stages and microbatches, placements solved for it.

    setting  →  the fastest placements that fit, by ILP on a short graph (`staged.search`)  →  stages of balanced time
             →  the outline of a world, and its plan

Settings are drawn without replacement: what one comes to does not depend on where the chain is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from random import Random

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.refinement.outline import Outline
from autopar.refinement.worlds import Worlds
from autopar.staged.search import Search
from autopar.staged.ways import Candidate, Setting


class Settings:
    """Those of a plan's mesh, each solved when it is drawn."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds

    @cached_property
    def _search(self) -> Search:
        return Search(self.worlds.layered)

    @cached_property
    def _left(self) -> list[Setting]:
        """Those that have not been drawn. Stages have at most twice as many microbatches as there are, times four."""
        search, devices = self._search, self.worlds.request.mesh.num_devices
        return [
            Setting(axes, size, devices // size, count)
            for size, axes in search.shapes
            for count in search.layered.counts
            if count <= _MOST_EACH * (devices // size)
        ]

    def drawn(self, random: Random) -> tuple[Outline, Plan] | None:
        """One that has not been drawn, with the best that is found there; None where nothing fits, or is near the best
        of those before, or none is left."""
        if not self._left:
            return None
        setting = self._left.pop(random.randrange(len(self._left)))
        try:
            found = self._search.look(setting)
        except AutoparError:
            return None
        fitting = [candidate for candidate in found if candidate.peak_bytes <= self.worlds.layered.admitted]
        best = min(fitting, key=lambda candidate: candidate.step_ns, default=None)
        return None if best is None else (self._outline(best), self._placed(best))

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


_MOST_EACH = 8
"""Microbatches for each stage: with so many, the bubble is an eighth at most."""
