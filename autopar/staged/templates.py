"""Templates of several stages that people run: thousands by an estimate, of which the best few are looked at.

dp × tp × pp devices, tp inside a node with sequences split between its operators, ZeRO-1 or 2, any number of chunks and
of microbatches, operators computed again by price. What a layer takes of a microbatch depends on tp and on how many
samples a rank has of it, hardly on how many stages there are, and among how many ranks the optimizer's state is:

    (tp, samples)                  → placements, and what each layer costs         a problem, a layer is played
    × stages × chunks × schedules
    × recomputation × ZeRO         → step and peak by the formulas of `ways`       no problem, nothing is played

So a plan that people write by hand is among what is searched, and the rest of the search is bounded by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError
from autopar.interop import StageKind
from autopar.interop.submeshes import divisors, submesh_sizes
from autopar.intraop import TradeOff
from autopar.ir.mesh import make_axes
from autopar.microbatch import divisible
from autopar.staged.looks import NEVER, Looks
from autopar.staged.ways import Setting, StageStrategy
from autopar.tunables import (
    FEW_DEVICES,
    LIKELY_STAGES,
    MOST_SAMPLES,
    NEAR_ESTIMATE,
    TEMPLATES_LOOKED_AT,
)

_ZERO = (1, 2)


class Estimated(NamedTuple):
    """A template by estimate: ns a step and bytes a device, where it runs, and what is computed again (a name)."""

    step_ns: int
    peak_bytes: int
    setting: Setting
    recompute: str


class StageTemplates:
    """Of a search, the templates that its request allows."""

    def __init__(self, looks: Looks) -> None:
        self.looks, self.layered, self.mesh = looks, looks.layered, looks.layered.request.mesh
        self.best_ns, self._least_of_tp = looks.bound_ns, NEVER

    def look(self) -> None:
        """Looks at the best few that fit by estimate, each with what it is to compute again; notes what the best of
        each shape takes."""
        found = sorted(self._estimates() if self._are_open else (), key=lambda one: one[:2])
        for one in found:
            tp = next((axis.size for axis in one.setting.axes if axis.name == "tp"), 1)
            self.looks.of_shape.setdefault((one.setting.num_devices, tp), one.step_ns)
        looked = set[Setting]()
        for one in found:
            if one.step_ns > NEAR_ESTIMATE * self.looks.best_ns or len(looked) == TEMPLATES_LOOKED_AT:
                break
            if one.setting not in looked:
                looked.add(one.setting)
                self.looks.look_at_template(one.setting, one.recompute)

    @property
    def _are_open(self) -> bool:
        """Whether there are any: of a model of repeated blocks, on devices enough that do not share cores, where
        constraints leave them open."""
        request, layered = self.layered.request, self.layered
        is_open = request.mode == "train" and not request.constraints and len(layered.paths) > 1
        return is_open and self.mesh.num_devices >= FEW_DEVICES and not layered.shares_cores

    def _estimates(self) -> list[Estimated]:
        """Those that fit. More samples a microbatch are looked at as long as they gain something."""
        found = list[Estimated]()
        for tp in divisors(self.mesh.devices_per_node):
            best_ns, self._least_of_tp = self.best_ns, NEVER
            for samples in (count for count in divisors(self.layered.batch) if count <= MOST_SAMPLES):
                here = [*self._of_microbatch(tp, samples)]
                found += here
                if min((one.step_ns for one in here), default=best_ns) >= best_ns:
                    break
                best_ns = min(one.step_ns for one in here)
            if NEVER > self._least_of_tp > NEAR_ESTIMATE * self.best_ns:
                break  # more ranks send more
        return found

    def _of_microbatch(self, tp: int, samples: int) -> Iterator[Estimated]:
        """With so many samples a rank and microbatch, on any number of stages."""
        every = [*self._on_stages(tp, samples)]
        if not every:
            return
        known = min(every, key=lambda one: abs(np.log2(one.num_stages / LIKELY_STAGES)))
        with suppress(InfeasibleError):
            choice = self.layered.place_of(known).placements.trade_offs(1, *self.looks.solver).fastest()
            for recompute in self.layered.recomputations:
                kind = self.layered.kind(StageStrategy(known, choice, recompute))
                self._least_of_tp = min(self._least_of_tp, self._least_ns(kind, known))
                if self._least_ns(kind, known) > NEAR_ESTIMATE * self.best_ns:
                    break
                for setting in every:
                    yield from self._of_setting(kind, choice, known, setting, recompute)

    def _on_stages(self, tp: int, samples: int) -> Iterator[Setting]:
        """The settings on all numbers of stages that devices, layers and the batch allow."""
        layers, devices, batch = self.layered.layers.count, self.mesh.num_devices, self.layered.batch
        for size in submesh_sizes(self.mesh, layers):
            dp, stages = size // tp, devices // size
            if stages == 1 or size % tp or batch % (dp * samples):
                continue
            microbatches = batch // (dp * samples)
            if divisible(self.layered.folded.graph, microbatches):
                names = {name: count for name, count in (("dp", dp), ("tp", tp)) if count > 1}
                axes = make_axes(tuple(names), tuple(names.values()))
                yield Setting(axes, size, stages, microbatches, 1 if dp > 1 else 0, splits_sequence=tp > 1)

    def _least_ns(self, kind: StageKind, setting: Setting) -> int:
        """What a step takes at least: what is computed, on as many devices, without a bubble."""
        return int(setting.microbatches * kind.time_ns.sum()) // setting.num_stages

    def _of_setting(
        self, kind: StageKind, choice: TradeOff, known: Setting, setting: Setting, recompute: str
    ) -> Iterator[Estimated]:
        """With each number of chunks, by what layers cost in a setting of another number of stages."""
        for zero in _ZERO if setting.zero else (0,):
            own = self._stored_as(kind, known, setting, zero)
            way = StageStrategy(setting, choice, recompute)
            every = [*self.looks.chunks.of(way, own), self.looks.chunks.whole(way, own)]
            fitting = [one for one in every if one.peak_bytes <= self.layered.admitted]
            if fitting:
                best = min(fitting, key=lambda one: one.step_ns)
                self.best_ns = min(self.best_ns, best.step_ns)
                yield Estimated(best.step_ns, best.peak_bytes, replace(setting, zero=zero), recompute)
            if len(fitting) == len(every):
                break  # what is sharded more would not be faster

    def _stored_as(self, kind: StageKind, known: Setting, setting: Setting, zero: int) -> StageKind:
        """What layers cost where the optimizer's state, and gradients with ZeRO-2, are among other ranks."""
        dp, tp = (next((axis.size for axis in setting.axes if axis.name == name), 1) for name in ("dp", "tp"))
        before = known.num_devices // tp
        stays = kind.resident_bytes - kind.gradient_bytes
        weights = np.minimum(stays, self.layered.parameter_bytes // tp)
        gradients = kind.gradient_bytes // (dp if zero == 2 else 1)
        resident = weights + (stays - weights) * before // dp + gradients
        return replace(
            kind, num_devices=setting.num_devices, resident_bytes=resident, gradient_bytes=gradients,
            once_ns=kind.once_ns * before // dp,
        )  # fmt: skip
