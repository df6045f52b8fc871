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

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError
from autopar.interop import StageKind
from autopar.interop.submeshes import divisors, submesh_sizes
from autopar.ir.mesh import make_axes
from autopar.microbatch import divisible
from autopar.staged.looks import NEVER, Looks
from autopar.staged.ways import Int64Array, Setting, StageStrategy
from autopar.tunables import (
    FEW_DEVICES,
    LESS_EACH,
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
            shape = one.setting.num_devices, _tensor_parallel(one.setting)
            self.looks.of_shape.setdefault(shape, one.step_ns)
        looked = set[tuple[Setting, str]]()
        for one in found:
            if one.step_ns > NEAR_ESTIMATE * self.looks.best_ns or len(looked) == TEMPLATES_LOOKED_AT:
                break
            looked.add((one.setting, one.recompute))
            self.looks.look_at_template(one.setting, one.recompute)

    @property
    def _are_open(self) -> bool:
        """Whether there are any: of a model of repeated blocks, on devices enough that do not share cores, where
        constraints leave them open."""
        request, layered = self.layered.request, self.layered
        is_open = request.mode == "train" and not request.constraints and len(layered.paths) > 1
        return is_open and self.mesh.num_devices >= FEW_DEVICES and not layered.shares_cores

    def _estimates(self) -> list[Estimated]:
        """Those that fit. More samples a microbatch are looked at as long as they gain something, or each takes less
        where it is too slow: what launches bind with one may be the best with four."""
        found = list[Estimated]()
        for tp in divisors(self.mesh.devices_per_node):
            best_ns, self._least_of_tp = self.best_ns, NEVER
            for samples in (count for count in divisors(self.layered.batch) if count <= MOST_SAMPLES):
                before, here = self._least_of_tp, [*self._of_microbatch(tp, samples)]
                found += here
                here_ns = min((one.step_ns for one in here), default=NEVER)
                is_slow = self._least_of_tp > NEAR_ESTIMATE * self.best_ns
                if here_ns >= best_ns and not (is_slow and self._least_of_tp <= LESS_EACH * before):
                    break
                best_ns = min(best_ns, here_ns)
            if NEVER > self._least_of_tp > NEAR_ESTIMATE * self.best_ns:
                break  # more ranks send more
        return found

    def _of_microbatch(self, tp: int, samples: int) -> Iterator[Estimated]:
        """With so many samples a rank and microbatch, on any number of stages, in each way to store what stays."""
        every = [*self._on_stages(tp, samples)]
        for alike in ([one for one in every if one.zero == zero] for zero in (0, *_ZERO)):
            if alike:
                yield from self._of_storage(alike)

    def _of_storage(self, alike: Sequence[Setting]) -> Iterator[Estimated]:
        """Of settings that differ in the number of stages alone: all by what layers cost in one of them."""
        known = min(alike, key=lambda one: abs(np.log2(one.num_stages / LIKELY_STAGES)))
        with suppress(InfeasibleError):
            choice = self.layered.place_of(known).placements.trade_offs(1, *self.looks.solver).fastest()
            for recompute in self.layered.recomputations:
                kind = self.layered.kind(StageStrategy(known, choice, recompute))
                self._least_of_tp = min(self._least_of_tp, self._least_ns(kind, known))
                if self._least_ns(kind, known) > NEAR_ESTIMATE * self.best_ns:
                    break
                for setting in alike:
                    way = StageStrategy(setting, choice, recompute)
                    yield from self._of_setting(way, stored_as(kind, known, setting, self.layered.parameter_bytes))

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
                for zero in _ZERO if dp > 1 else (0,):
                    yield Setting(axes, size, stages, microbatches, zero, splits_sequence=tp > 1)

    def _least_ns(self, kind: StageKind, setting: Setting) -> int:
        """What a step takes at least: what is computed, on as many devices, without a bubble."""
        return int(setting.microbatches * kind.time_ns.sum()) // setting.num_stages

    def _of_setting(self, way: StageStrategy, own: StageKind) -> Iterator[Estimated]:
        """The fastest that fits of all numbers of chunks. own: what layers cost."""
        every = [*self.looks.chunks.of(way, own), self.looks.chunks.whole(way, own)]
        fitting = [one for one in every if one.peak_bytes <= self.layered.admitted]
        if fitting:
            best = min(fitting, key=lambda one: one.step_ns)
            self.best_ns = min(self.best_ns, best.step_ns)
            yield Estimated(best.step_ns, best.peak_bytes, way.setting, way.recompute)


def stored_as(kind: StageKind, known: Setting, setting: Setting, parameter_bytes: Int64Array) -> StageKind:
    """What layers cost where there are other numbers of stages, so that what is sharded is among d ranks and not k.

    Of a layer's w bytes ZeRO-1 keeps the gathered copy and a shard, and one of the optimizer's state s, in all
    w + (w + s) / d; ZeRO-2 of gradients a shard, too, g / d, and buckets on their way with their sums, b · (1 + 1 / d).
    """
    before, after = (one.num_devices // _tensor_parallel(one) for one in (known, setting))
    stays = kind.resident_bytes - kind.gradient_bytes
    whole = np.minimum(stays, parameter_bytes // _tensor_parallel(setting))
    gradients = kind.gradient_bytes * before // after if setting.zero == 2 else kind.gradient_bytes
    on_their_way = (1 + 1 / after) / (1 + 1 / before)
    return replace(
        kind,
        num_devices=setting.num_devices,
        resident_bytes=whole + (stays - whole) * before // after + gradients,
        gradient_bytes=gradients,
        once_ns=kind.once_ns * before // after,
        travelling_bytes=(kind.travelling_bytes * on_their_way).astype(np.int64),
        most_travelling_bytes=(kind.most_travelling_bytes * on_their_way).astype(np.int64),
    )


def _tensor_parallel(setting: Setting) -> int:
    return next((axis.size for axis in setting.axes if axis.name == "tp"), 1)
