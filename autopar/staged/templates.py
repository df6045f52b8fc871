"""Templates of several stages that people run: thousands by an estimate, of which the best few are looked at.

dp × tp × pp devices, tp inside a node with sequences split between its operators, ZeRO-1 or 2, any number of chunks and
of microbatches, operators computed again by price; where tokens are routed, neighbours of dp share the experts, or the
ranks of tp do (ep). What a layer takes of a microbatch depends on tp, ep and on how many samples a rank has of it,
hardly on how many stages there are, and among how many ranks the optimizer's state is:

    (tp, ep, samples)              → placements, and what each layer costs         a problem, a layer is played
    × stages × chunks × schedules
    × recomputation × ZeRO         → step and peak by the formulas of `ways`       no problem, nothing is played

So a plan that people write by hand is among what is searched, and the rest of the search is bounded by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError
from autopar.interop import StageKind
from autopar.interop.submeshes import divisors, submesh_sizes
from autopar.ir.mesh import make_axes
from autopar.microbatch import divisible
from autopar.staged.layered import Layered
from autopar.staged.looks import NEVER, Looks
from autopar.staged.ways import Int64Array, Setting, StageStrategy
from autopar.tunables import (
    FAR_TEMPLATE,
    FEW_DEVICES,
    LESS_EACH,
    LIKELY_STAGES,
    MOST_SAMPLES,
    MOST_SAMPLES_ALONE,
    NEAR_ESTIMATE,
    SHARED_SIZES,
    TEMPLATES_LOOKED_AT,
)

_ZERO = (1, 2)
_ZERO_ALONE = (1, 2, 3)
"""Of one stage, whose parameters may be gathered again for each microbatch's backward pass."""


class Estimated(NamedTuple):
    """A template by estimate: ns a step and bytes a device, where it runs, and what is computed again (a name)."""

    step_ns: int
    peak_bytes: int
    setting: Setting
    recompute: str


class StageTemplates:
    """Of a search, the templates that its request allows."""

    def __init__(self, looks: Looks, one_stage: bool = False, near: float = NEAR_ESTIMATE) -> None:
        """one_stage: those of one stage are among them, which else are looked at by themselves (`families`). near: how
        many times the best estimate what is estimated further may take at least."""
        self.looks, self.layered, self.mesh = looks, looks.layered, looks.layered.request.mesh
        self.one_stage, self.near = one_stage, near
        self._stored = (*_ZERO, 0) if one_stage else _ZERO
        self.best_ns, self._least_of_tp = looks.bound_ns, NEVER
        self._alone_ns = looks.bound_ns  # the best of one stage
        self._is_slow = False  # whether what was estimated last is, with nothing computed again

    def look(self) -> None:
        """Looks at the best few that fit by estimate, each with what it is to compute again; notes what the best of
        each shape takes."""
        found = self.estimated()
        for one in found:
            shape = one.setting.num_devices, _tensor_parallel(one.setting)
            self.looks.of_shape.setdefault(shape, one.step_ns)
        looked = set[tuple[Setting, str]]()
        for one in found:
            if one.step_ns > NEAR_ESTIMATE * self.looks.best_ns or len(looked) == TEMPLATES_LOOKED_AT:
                break
            looked.add((one.setting, one.recompute))
            self.looks.look_at_template(one.setting, one.recompute)

    def estimated(self) -> list[Estimated]:
        """Those that fit by estimate, the fastest first."""
        return sorted(self._estimates() if self._are_open else (), key=lambda one: one[:2])

    @property
    def _are_open(self) -> bool:
        """Whether there are any: of a model of repeated blocks, on devices enough that do not share cores, where
        constraints leave them open."""
        request, layered = self.layered.request, self.layered
        is_open = request.mode == "train" and not request.constraints and len(layered.paths) > 1
        least = 2 if self.one_stage else FEW_DEVICES
        return is_open and self.mesh.num_devices >= least and not layered.shares_cores

    def _estimates(self) -> list[Estimated]:
        """Those that fit."""
        found, experts = list[Estimated](), self.layered.num_experts
        for tp in divisors(self.mesh.devices_per_node):
            self._least_of_tp = NEVER
            if tp == 1 or not found:  # a third axis would send more
                found += self._sharing_experts(tp)
            if tp > 1 or not found:  # who shares experts has room for more
                found += self._of_shape(tp, 1, ("tp",) if 1 < tp <= experts else ())
            self.looks.least_of_tp[tp] = self._least_of_tp if self._least_of_tp < NEVER else 0
            if NEVER > self._least_of_tp > self.near * self.best_ns:
                break  # more ranks send more
        return found

    def _sharing_experts(self, tp: int) -> list[Estimated]:
        """Those of a node share the experts; then those of more nodes, as long as that gains something, or makes some
        fit."""
        near, most = self.mesh.devices_per_node // tp, min(self.layered.num_experts, self.mesh.num_devices // tp)
        within = max((size for size in divisors(near) if size <= most), default=1)
        sizes = [within, *(near * nodes for nodes in divisors(self.mesh.nodes) if 1 < nodes <= most // near)]
        found, best_ns = list[Estimated](), NEVER
        for ep in [size for size in sizes if size > 1][:SHARED_SIZES]:
            here = self._of_shape(tp, ep, ("ep",))
            if best_ns < NEVER and min((one.step_ns for one in here), default=NEVER) >= best_ns:
                break
            found += here
            best_ns = min((one.step_ns for one in here), default=NEVER)
        return found

    def _of_shape(self, tp: int, ep: int, sharing: tuple[str, ...]) -> list[Estimated]:
        """More samples a microbatch are looked at as long as they gain something, or each takes less where it is too
        slow: what launches bind with one may be the best with four. Where one stage is among them, numbers of samples
        that as many stages as are the best cannot share equally say nothing of more.
        """
        found, best = list[Estimated](), None
        most = MOST_SAMPLES_ALONE if self.one_stage else MOST_SAMPLES
        for samples in (count for count in divisors(self.layered.batch) if count <= most):
            every = [replace(one, sharing=sharing) for one in self._on_stages(tp, ep, samples)]
            before, here = self._least_of_tp, [*self._of_microbatch(every)]
            found += here
            first = min(here, key=lambda one: one.step_ns, default=None)
            gains = first is not None and (best is None or first.step_ns < best.step_ns)
            may_gain = self._is_slow and self._least_of_tp <= LESS_EACH * before
            is_told = (
                not self.one_stage or best is None or any(one.num_stages == best.setting.num_stages for one in every)
            )
            if is_told and not gains and not may_gain:
                break
            best = first if gains else best
        return found

    def _of_microbatch(self, every: Sequence[Setting]) -> Iterator[Estimated]:
        """Of settings with as many samples a rank and microbatch, on any number of stages, in each way to store what
        stays.

        No less is computed with less stored, nor by one rank alone (ZeRO-0), which comes last: where what was estimated
        before is too slow with nothing computed again, so are the others.
        """
        self._is_slow, slow = False, dict[bool, bool]()
        for zero, is_one in product((*_ZERO_ALONE, 0), (False, True)):
            alike = [one for one in every if one.zero == zero and (one.num_stages == 1) == is_one]
            if alike and not slow.get(is_one):
                yield from self._of_storage(alike)
                slow[is_one] = self._is_slow
        self._is_slow = bool(slow) and all(slow.values())

    def _of_storage(self, alike: Sequence[Setting]) -> Iterator[Estimated]:
        """Of settings that differ in the number of stages alone: all by what layers cost in one of them.

        What computes more again is estimated of those alone that memory keeps from being as fast as they could be, and
        that could be near the best.
        """
        known, self._is_slow = min(alike, key=lambda one: abs(np.log2(one.num_stages / LIKELY_STAGES))), False
        open_ = [one for one in alike if self._may_be_near(one)]
        if not open_:
            return
        with suppress(InfeasibleError):
            choice = self.layered.fastest(known, *self.looks.solver)
            for recompute in self.layered.recomputations:
                kind = self.layered.kind(StageStrategy(known, choice, recompute))
                self._least_of_tp = min(self._least_of_tp, self._least_ns(kind, known))
                if self._least_ns(kind, known) > self._near_ns(known):
                    self._is_slow = recompute == next(iter(self.layered.recomputations))
                    break
                bound = list[Setting]()
                for setting in open_:
                    way = StageStrategy(setting, choice, recompute)
                    own = stored_as(kind, known, setting, copied_bytes(self.layered, setting))
                    least_ns, found = self._of_setting(way, own)
                    yield from found
                    is_bound = least_ns < min((one.step_ns for one in found), default=NEVER)
                    bound += [setting] if is_bound and least_ns <= self._told_ns(setting) else []
                open_ = [one for one in bound if self._may_be_near(one)]
                if not open_:
                    break

    def _may_be_near(self, setting: Setting) -> bool:
        """Whether a setting in which all that is computed, shared out evenly, waits as little as it may is near the
        best."""
        return self.looks.computed_ns(setting) <= self._near_ns(setting)

    def _near_ns(self, setting: Setting) -> float:
        """Up to what an estimate is near the best: of one stage, near those of one stage, as estimates of schedules
        leave out what stages wait for each other."""
        return self.near * (self._alone_ns if setting.num_stages == 1 else self.best_ns)

    def _told_ns(self, setting: Setting) -> float:
        """Up to what an estimate says something of its shape (`Looks.of_shape`)."""
        return max(1.0, FAR_TEMPLATE / self.near) * self._near_ns(setting)

    def _on_stages(self, tp: int, ep: int, samples: int) -> Iterator[Setting]:
        """The settings on all numbers of stages that devices, layers and the batch allow."""
        layers, devices, batch = self.layered.layers.count, self.mesh.num_devices, self.layered.batch
        for size in submesh_sizes(self.mesh, layers):
            dp, stages = size // tp, devices // size
            if (stages == 1 and not self.one_stage) or size % tp or dp % ep or batch % (dp * samples):
                continue
            microbatches = batch // (dp * samples)
            if divisible(self.layered.folded.graph, microbatches):
                sizes = {name: count for name, count in (("dp", dp // ep), ("ep", ep), ("tp", tp)) if count > 1}
                axes = make_axes(tuple(sizes), tuple(sizes.values()))
                for zero in (_ZERO_ALONE if stages == 1 else self._stored) if dp > 1 else (0,):
                    yield Setting(axes, size, stages, microbatches, zero, splits_sequence=tp > 1)

    def _least_ns(self, kind: StageKind, setting: Setting) -> int:
        """What a step takes at least: what is computed, on as many devices, without a bubble."""
        return int(setting.microbatches * kind.time_ns.sum()) // setting.num_stages

    def _of_setting(self, way: StageStrategy, own: StageKind) -> tuple[int, list[Estimated]]:
        """What the fastest of all numbers of chunks takes, and the fastest that fits. own: what layers cost."""
        every = [*self.looks.chunks.of(way, own), self.looks.chunks.whole(way, own)]
        least_ns = min(one.step_ns for one in every)
        fitting = [one for one in every if one.peak_bytes <= self.layered.admitted]
        if not fitting:
            return least_ns, []
        best = min(fitting, key=lambda one: one.step_ns)
        self.best_ns = min(self.best_ns, best.step_ns)
        if way.setting.num_stages == 1:
            self._alone_ns = min(self._alone_ns, best.step_ns)
        return least_ns, [Estimated(best.step_ns, best.peak_bytes, way.setting, way.recompute)]


def copied_bytes(layered: Layered, setting: Setting) -> Int64Array:
    """Of each layer, what a rank has of the parameters when they are gathered."""
    tp, ep = _tensor_parallel(setting), _size(setting, "ep")
    return layered.parameter_bytes(False) // tp + layered.parameter_bytes(True) // (tp * ep)


def stored_as(kind: StageKind, known: Setting, setting: Setting, copied_bytes: Int64Array) -> StageKind:
    """What layers cost where there are other numbers of stages, so that what is sharded is among d ranks and not k.

    Of what a rank needs of a layer's parameters, w bytes (`copied_bytes`), ZeRO-1 keeps the gathered copy and a shard,
    and one of the optimizer's state s, in all w + (w + s) / d; ZeRO-2 of gradients a shard, too, g / d, and buckets on
    their way with their sums, b · (1 + 1 / d); ZeRO-3 keeps no copy.
    """
    before, after = (one.num_devices // _tensor_parallel(one) for one in (known, setting))
    stays = kind.resident_bytes - kind.gradient_bytes
    whole = np.minimum(stays, 0 if setting.zero == _ZERO_ALONE[-1] else copied_bytes)
    is_sharded = setting.zero in _ZERO_ALONE[1:]
    gradients = kind.gradient_bytes * before // after if is_sharded else kind.gradient_bytes
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
    return _size(setting, "tp")


def _size(setting: Setting, name: str) -> int:
    """Of the axis of that name."""
    return next((axis.size for axis in setting.axes if axis.name == name), 1)
