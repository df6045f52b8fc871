"""Stages that differ: submeshes of several sizes, and what each stage computes again, by how much it has in flight.

For the numbers of microbatches of the best candidates of equal stages, the ways that were found for submeshes of about
their size are kinds of one dynamic programme (`interop.best_stages`), each with every recomputation. Where stages
compute layers again, as many layers of each as memory allows compute less again after that, or nothing, the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autopar.clock import Clock
from autopar.errors import InfeasibleError
from autopar.interop import ChosenStage, StageKind, best_stages
from autopar.interop.submeshes import logical_shapes, submesh_sizes
from autopar.ir.schedule import PLAIN, SCHEDULES, in_flight
from autopar.staged.chunked import chunks_keeping_more
from autopar.staged.layered import Layered
from autopar.staged.ways import EstimatedStages, Setting, StageStrategy, hidden_bubble, in_two_parts, largest_peak
from autopar.tunables import (
    EVEN,
    KEPT_MORE,
    MIXED_COUNTS,
    MIXED_ROUNDS,
    MIXED_SHARE,
    MIXED_SIZES,
    MOST_STAGES,
    SOLVE_SHARE,
)


def mixed(layered: Layered, found: Sequence[EstimatedStages], clock: Clock) -> list[EstimatedStages]:
    """Candidates whose stages are not all alike, out of the ways of those that were found."""
    if (
        layered.request.mode != "train"
        or layered.layers.count < 2
        or any(rule.stages for rule in layered.request.constraints)
    ):
        return []
    until = clock.part(MIXED_SHARE)
    more = kept_more(layered, found, layered.admitted)
    for count in _best_counts(layered, found):
        if not until.is_over:
            more += _of_count(layered, [c for c in found if c.microbatches == count])
    return [candidate for candidate in more if layered.allows(candidate)]


def kept_more(layered: Layered, found: Sequence[EstimatedStages], admitted: int) -> list[EstimatedStages]:
    """The best of those that fit, with fewer layers computed again: as few as so many bytes allow."""
    best = sorted((c for c in found if c.peak_bytes <= layered.admitted), key=lambda c: c.step_ns)[:KEPT_MORE]
    return [fewer for candidate in best if (fewer := keeping_more(layered, candidate, admitted))]


def _best_counts(layered: Layered, found: Sequence[EstimatedStages]) -> list[int]:
    fitting = sorted((c for c in found if c.peak_bytes <= layered.admitted), key=lambda c: c.step_ns)
    return list(dict.fromkeys(c.microbatches for c in fitting))[:MIXED_COUNTS]


def _of_count(layered: Layered, found: Sequence[EstimatedStages]) -> Iterator[EstimatedStages]:
    ways = _ways(layered, found)
    kinds = [layered.kind(way) for way in ways]
    mesh, count = layered.request.mesh, found[0].microbatches
    for own in (kinds, [kind for kind in kinds if kind.key.setting == ways[0].setting]) if ways else ():
        try:
            best = best_stages(own, mesh.num_devices, count, PLAIN, MOST_STAGES, MIXED_ROUNDS)
        except InfeasibleError:
            continue
        for choice in (best.best, *best.runners_up[-1:]):
            yield from _candidates(layered, own, choice.stages, choice.step_ns, best.lower_bound_ns)


def _ways(layered: Layered, found: Sequence[EstimatedStages]) -> list[StageStrategy]:
    """Of each submesh the placements of its best candidate that fits, with every recomputation; the best of all first.

    One choice of placements for each logical shape.
    """
    fitting = sorted((c for c in found if c.peak_bytes <= layered.admitted), key=lambda c: c.step_ns)
    best: dict[int, StageStrategy] = {}
    for candidate in fitting:
        best.setdefault(candidate.ways[0].setting.num_devices, candidate.ways[0])
    size = next(iter(best), 1)
    near = [way for devices, way in best.items() if size <= devices * MIXED_SIZES and devices <= size * MIXED_SIZES]
    if len(near) == 1 and _is_uneven(layered, fitting[0]):
        near += _of_other_sizes(layered, near[0].setting)
    return [replace(way, recompute=name) for way in near for name in layered.recomputations]


def _is_uneven(layered: Layered, candidate: EstimatedStages) -> bool:
    """Whether stages wait for the slowest so long that others of another size may gain something."""
    of_layer, (_, kind) = np.array(candidate.stage_of_layer), layered.layers_of(candidate)
    times = [int(kind(way).time_ns[of_layer == number].sum()) for number, way in enumerate(candidate.ways)]
    return sum(times) < EVEN * len(times) * max(times)


def _of_other_sizes(layered: Layered, setting: Setting) -> Iterator[StageStrategy]:
    """The fastest placements on submeshes of half and twice the size, which may be too slow for all stages alike, so
    that bounds of these left them out, and right for one."""
    mesh, least, budget = layered.request.mesh, next(iter(layered.recomputations)), layered.request.budget
    sizes = {setting.num_devices // 2, 2 * setting.num_devices} & {*submesh_sizes(mesh, layered.layers.count)}
    for size in sorted(sizes - {mesh.num_devices}):
        axes = logical_shapes(size, mesh.devices_per_node)[-1]
        other = Setting(axes, size, mesh.num_devices // size, setting.microbatches)
        with suppress(InfeasibleError):
            curve = layered.place_of(other).placements.trade_offs(1, SOLVE_SHARE * budget.seconds, budget.seed)
            yield StageStrategy(other, curve.fastest(), least)


def _candidates(
    layered: Layered, kinds: Sequence[StageKind], stages: Sequence[ChosenStage], step_ns: int, bound_ns: int
) -> Iterator[EstimatedStages]:
    """The choice, and the same with fewer layers computed again; where all is alike, the latter alone."""
    of_stage = [kinds[kind] for _, _, kind in stages]
    ways = tuple(kind.key for kind in of_stage)
    of_layer = tuple(number for number, (begin, end, _) in enumerate(stages) for _ in range(begin, end))
    count = ways[0].setting.microbatches
    again = tuple(ways[stage].recompute for stage in of_layer)
    peak = largest_peak(of_stage, of_layer, count, PLAIN)
    last_ns = sum(int(kind.last_ns[begin:end].sum()) for kind, (begin, end, _) in zip(of_stage, stages, strict=True))
    step_ns += last_ns
    found = layered.in_time(EstimatedStages(ways, PLAIN, of_layer, again, step_ns, peak, bound_ns))
    if len(set(ways)) > 1:
        yield found
        may_wait = all(layered.may_wait(len(ways), way.recompute) for way in ways)
        for schedule in in_two_parts(count, len(ways)) if may_wait else ():
            peak = largest_peak(of_stage, of_layer, count, schedule)
            less = step_ns - hidden_bubble(of_stage, of_layer, count, schedule)
            waiting = EstimatedStages(ways, schedule, of_layer, again, less, peak, min(less, bound_ns))
            yield layered.in_time(waiting)
    fewer = keeping_more(layered, found, layered.admitted)
    if fewer is not None:
        yield fewer


# As few layers as must be ----------------------------------------


@dataclass(frozen=True)
class _MixedStage:
    """A stage of layers [begin, end), of which the last compute less again (`name`): what it costs when they do, and
    when none does."""

    name: str
    again: StageKind
    less: StageKind
    begin: int
    end: int
    in_flight: int

    def time_ns(self, kept: int) -> int:
        border = self.end - kept
        return int(self.again.time_ns[self.begin : border].sum() + self.less.time_ns[border : self.end].sum())

    def peak_bytes(self, kept: int) -> int:
        border = self.end - kept
        parts = [(self.again, self.begin, border), (self.less, border, self.end)]
        parts = [part for part in parts if part[1] < part[2]]
        held = sum(
            int(kind.resident_bytes[first:last].sum() + self.in_flight * kind.activation_bytes[first:last].sum())
            for kind, first, last in parts
        )
        travelling = sum(int(kind.travelling_bytes[first:last].sum()) for kind, first, last in parts)
        most = max(kind.most_travelling for kind, _, _ in parts)
        workspace = max(int(kind.workspace_bytes[first:last].max()) for kind, first, last in parts)
        return held + min(travelling, most) + workspace

    def most_kept(self, admitted: int) -> int:
        """Of how many layers less need be computed again, by estimates of up to so many bytes."""
        if self.again is self.less:
            return self.end - self.begin
        sizes = range(self.end - self.begin, 0, -1)
        return next((kept for kept in sizes if self.peak_bytes(kept) <= admitted), 0)

    def recompute(self, kept: int) -> list[str]:
        """Of each layer."""
        return [self.again.key.recompute] * (self.end - self.begin - kept) + [self.name] * kept


def keeping_more(layered: Layered, candidate: EstimatedStages, admitted: int) -> EstimatedStages | None:
    """The candidate with as few layers computed again, or as little of them, as estimates of so many bytes allow; None
    where that is no faster.

    The sum of all stages' times gets less, and the slowest's, which every other microbatch waits for.
    """
    row = SCHEDULES[candidate.schedule]
    if next(iter(layered.recomputations)) != "none" or row.splits_backward:
        return None
    if row.has_chunks:
        return chunks_keeping_more(layered, candidate, admitted)
    before, after = [], []
    for number in range(len(candidate.ways)):
        options = _options(layered, candidate, number)
        now = _as_it_is(options, candidate)
        most = [(option, option.most_kept(admitted)) for option in options]
        before.append(now)
        after.append(min(now, *most, key=lambda pair: pair[0].time_ns(pair[1])))
    if before == after:
        return None
    times = [[stage.time_ns(kept) for stage, kept in pairs] for pairs in (before, after)]
    faster = sum(times[0]) - sum(times[1]) + (candidate.microbatches - 1) * (max(times[0]) - max(times[1]))
    again = tuple(name for stage, kept in after for name in stage.recompute(kept))
    step = candidate.step_ns - round(layered.part_of_candidate(candidate) * faster)
    return replace(
        candidate, recompute=again, step_ns=step, lower_bound_ns=min(step, candidate.lower_bound_ns),
        peak_bytes=max(stage.peak_bytes(kept) for stage, kept in after),
    )  # fmt: skip


def _options(layered: Layered, candidate: EstimatedStages, number: int) -> list[_MixedStage]:
    """A stage of which some layers may compute less again, in each way that there is."""
    way, of_layer, count = candidate.ways[number], candidate.stage_of_layer, len(candidate.ways)
    names = [*layered.recomputations]
    begin, flying = of_layer.index(number), in_flight(candidate.schedule, count - number, candidate.microbatches)
    return [
        _MixedStage(
            name, layered.kind(way), layered.kind(replace(way, recompute=name)), begin, begin + of_layer.count(number),
            flying,
        )
        for name in names[: max(1, names.index(way.recompute))]
    ]  # fmt: skip


def _as_it_is(options: Sequence[_MixedStage], candidate: EstimatedStages) -> tuple[_MixedStage, int]:
    first = options[0]
    names = candidate.recompute[first.begin : first.end]
    stage = next((option for option in options if option.name == names[-1]), first)
    return stage, names.count(stage.name)
