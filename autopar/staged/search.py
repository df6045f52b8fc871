"""Equal stages: each logical shape is looked at once, and from the best on the number of microbatches climbs.

What a setting has is traded between time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from autopar.clock import Clock
from autopar.errors import InfeasibleError, PlanError
from autopar.interop import StageChoice, StageKind, best_stages, equally_cut
from autopar.interop.submeshes import logical_shapes, submesh_sizes
from autopar.intraop import TradeOff, TradeOffs
from autopar.ir.mesh import LogicalMesh, make_axes
from autopar.ir.outline import Outline, sizes_text
from autopar.ir.schedule import PLAIN, SCHEDULES
from autopar.microbatch import divisible
from autopar.progress import Report
from autopar.staged.chunked import Chunks
from autopar.staged.layered import Layered
from autopar.staged.ways import (
    EstimatedStages,
    Setting,
    StageStrategy,
    hidden_bubble,
    in_two_parts,
    largest_peak,
)
from autopar.tunables import (
    BESIDE_KNOWN,
    BETWEEN,
    FEW_DEVICES,
    FIRST_LOOK_SHARE,
    FULL_MICROBATCHES,
    HOPELESS,
    HULL_HALVINGS,
    LIKELY_STAGES,
    NEAR_TEMPLATE,
    RUNNERS_UP,
    SOLVE_SHARE,
    STAGE_SHARE,
    TEMPLATE_SHAPES,
)

_NEVER = 2**62
_WHOLE = sorted((s.name for s in SCHEDULES.values() if not s.has_chunks and not s.splits_backward), key=PLAIN.__ne__)
"""Schedules of whole stages and whole backward passes, the plain one first."""


class _Look(NamedTuple):
    """What a setting has: the time that its fastest placements would take, the least of what fits, all candidates.

    stride: how many counts, each double the last, until what does not fit may, as if all of it were activations.
    """

    floor_ns: int
    least_ns: int
    found: list[EstimatedStages]
    stride: int = 1

    @property
    def is_passed_over(self) -> bool:
        """Whether nothing but its floor is known, or that it has no placements."""
        return not self.found


class StagedSearch:
    """Looks at settings, and keeps what the best estimate is and why it stopped."""

    def __init__(self, layered: Layered, than_ns: float | None = None) -> None:
        """than_ns: what a plan takes that is known."""
        self.layered, self.request = layered, layered.request
        self.chunks = Chunks(layered)
        self.admitted = layered.admitted
        self.stop_reason = "all settings"
        self.clock = Clock.of(self.request.budget.seconds)
        self.refusal = InfeasibleError("expected a strategy for every operator, found none")
        self._solver = SOLVE_SHARE * self.request.budget.seconds, self.request.budget.seed
        self.known_ns = math.inf if than_ns is None else than_ns
        self._best_ns = int(min(_NEVER, BESIDE_KNOWN * self.known_ns))
        self._known: dict[Setting, _Look] = {}
        self._computed: dict[Setting, int] = {}
        self._floors: list[tuple[int, Setting]] = []  # of what was looked at, by time
        self._hidden = 1.0  # the least share of all costs in a row that an estimate was

    @cached_property
    def shapes(self) -> list[tuple[int, LogicalMesh]]:
        """Submesh sizes with logical shapes, first of each size the one whose inner axis fills a node, which mostly is
        the best, then each size's next.

        Where stages are pinned, those of so many. On few devices one stage is looked at in `places`.
        """
        mesh, layers = self.request.mesh, self.layered.layers.count
        pinned = {c.stages for c in self.request.constraints if c.stages is not None}
        most = max(1, layers) if self.request.mode == "train" else 1
        sizes = [n for n in submesh_sizes(mesh, most) if not pinned or {mesh.num_devices // n} == pinned]
        if not sizes:
            raise PlanError(
                f"expected a number of stages that {mesh} and {layers} layers allow, found "
                f"{' and '.join(map(str, sorted(pinned)))}; relax the constraint"
            )
        if mesh.num_devices <= FEW_DEVICES and not pinned:
            sizes.remove(mesh.num_devices)
        sizes.sort(key=lambda size: abs(math.log2(mesh.num_devices / size / LIKELY_STAGES)))
        of_size = [[(size, axes) for axes in reversed(self._shapes_of(size))] for size in sizes]
        return [shape for rank in zip_longest(*of_size) for shape in rank if shape is not None]

    def _shapes_of(self, size: int) -> list[LogicalMesh]:
        """A third axis is looked at where all is: of few devices, as for one stage."""
        with_third = self.request.budget.everywhere and size <= FEW_DEVICES
        return logical_shapes(size, self.request.mesh.devices_per_node, with_third)

    def run(self, report: Report) -> list[EstimatedStages]:
        """Everything that was looked at in time, the fastest by estimate first."""
        clock = self.clock.part(STAGE_SHARE)
        for size, axes in self._by_first_look(clock.part(FIRST_LOOK_SHARE)):
            if clock.is_over and (self._candidates or self.known_ns < math.inf):
                self.stop_reason = clock.stop_reason
                break
            here = self._climb(size, axes)
            best = min((c for c in here if c.peak_bytes <= self.admitted), key=lambda c: c.step_ns, default=None)
            what = f"{best.step_ns / 1e6:.3f} ms" if best else "nothing better that fits"
            count = self.request.mesh.num_devices // size
            report(f"{count} stage{'s' if count > 1 else ''} of {sizes_text(axes)}: {what}")
        self._look_at_templates(clock)
        self._look_between(clock)
        return sorted(self._candidates, key=lambda candidate: candidate.step_ns)

    @property
    def _bound_ns(self) -> int:
        """What is estimated to take longer is not looked at further."""
        return int(min(_NEVER, BESIDE_KNOWN * self.known_ns, HOPELESS * self._best_ns))

    @property
    def _candidates(self) -> list[EstimatedStages]:
        """Of all that was looked at."""
        return [candidate for look in self._known.values() for candidate in look.found]

    def _by_first_look(self, clock: Clock) -> list[tuple[int, LogicalMesh]]:
        """The shapes in which something fits, the best first; then others by what would be if it did; then those that
        there was no time for. Left out are those of a size whose first is far from a plan that is known.
        """
        looks, far, later = list[tuple[int, int, int]](), set[int](), [*enumerate(self.shapes)]
        while later and not (looks and clock.is_over):
            number, (size, axes) = later.pop(0)
            if size not in far:
                look = self._look(self._setting(size, axes, self._start(size, axes)))
                looks.append((look.least_ns, look.floor_ns, number))
                far |= {size} if HOPELESS * BESIDE_KNOWN * self.known_ns < look.floor_ns < _NEVER else set()
        return [*(self.shapes[number] for _, _, number in sorted(looks)), *(shape for _, shape in later)]

    def near(self, outline: Outline) -> list[EstimatedStages]:
        """What is found in an outline of alike submeshes, freely and around templates."""
        count, sizes = outline.num_submeshes, sizes_text(outline.axes)
        size = self.request.mesh.num_devices // count
        shapes = [axes for n, axes in self.shapes if n == size and sizes_text(axes) == sizes]
        settings = [Setting(axes, size, self.request.mesh.num_devices // size, outline.microbatches) for axes in shapes]
        every = [named for setting in settings for named in (setting, *_as_templates(setting))]
        return [candidate for setting in every for candidate in self._look(setting).found]

    def _look_at_templates(self, clock: Clock) -> None:
        """Templates on the best setting of each logical shape; where they are near the best, with half and twice as
        many microbatches, too. Where templates of one stage are known, of stages that are near these alone.

        What their placements hide, or send together, may be more than what they cost. Where ranks share cores, those
        that wait leave theirs to others, so that a step depends little on the number of microbatches: there it is
        halved and doubled again, as long as what it gives is near the best.
        """
        fitting = [(c.step_ns, c.ways[0].setting) for c in self._candidates if c.peak_bytes <= self.admitted]
        shapes: dict[LogicalMesh, Setting] = {}
        for step_ns, setting in sorted([*fitting, *self._floors], key=lambda pair: pair[0]):
            if self.known_ns == math.inf or (setting.num_stages > 1 and step_ns < self._bound_ns):
                shapes.setdefault(setting.axes, setting)
        settings = [named for setting in [*shapes.values()][:TEMPLATE_SHAPES] for named in _as_templates(setting)]
        self._look_until(settings, clock)
        near = [setting for setting in settings if self._is_near(setting)]
        for factor in (0.5, 2.0):
            reached = near
            while reached:
                reached = [replace(s, microbatches=int(s.microbatches * factor)) for s in reached]
                self._look_until(reached, clock)
                reached = [s for s in reached if self.layered.shares_cores and self._is_near(s)]

    def _look_between(self, clock: Clock) -> None:
        """At numbers of microbatches between, beside the best settings: in a batch that is no power of two."""
        fitting = sorted((c for c in self._candidates if c.peak_bytes <= self.admitted), key=lambda c: c.step_ns)
        for setting in list(dict.fromkeys(c.ways[0].setting for c in fitting))[:BETWEEN]:
            for count in self._counts_beside(setting):
                if not clock.is_over and divisible(self.layered.graph, count):
                    self._look(replace(setting, microbatches=count))

    def _counts_beside(self, setting: Setting) -> list[int]:
        """The next number of microbatches below and above, of those that are not looked at anyway and leave each rank
        of the outer axis as many samples."""
        known, own = self.layered.counts, setting.microbatches
        each = self.layered.batch // math.gcd(self.layered.batch, setting.axes[0].size if setting.axes else 1)
        if len(known) == 1:
            return []
        near = [n for n in range(own // 2 + 1, 2 * own) if n not in known and each % n == 0]
        below, above = [n for n in near if n < own], [n for n in near if n > own]
        return [*below[-1:], *above[:1]]

    def _look_until(self, settings: Sequence[Setting], clock: Clock) -> None:
        """At those with a number of microbatches that is possible."""
        for setting in settings:
            is_possible = setting.microbatches in self.layered.counts
            if is_possible and not clock.is_over:
                self._look(setting)

    def _is_near(self, setting: Setting) -> bool:
        """Whether a setting was looked at, and is so near the best that another number of microbatches may be it."""
        known = self._known.get(setting)
        return known is not None and min(known.floor_ns, known.least_ns) <= NEAR_TEMPLATE * self._best_ns

    def _setting(self, size: int, axes: LogicalMesh, number: int) -> Setting:
        """With the microbatches of that place among the counts."""
        return Setting(axes, size, self.request.mesh.num_devices // size, self.layered.counts[number])

    def _start(self, size: int, axes: LogicalMesh) -> int:
        """The place of the fewest microbatches that make the bubble small; no more than have a sample for each rank of
        the outer axis, which mostly is for data."""
        wanted, counts = FULL_MICROBATCHES * (self.request.mesh.num_devices // size - 1), self.layered.counts
        most = max(1, self.layered.batch // axes[0].size) if axes else counts[-1]
        enough = next((number for number, count in enumerate(counts) if count >= wanted), len(counts) - 1)
        return min(enough, max((number for number, count in enumerate(counts) if count <= most), default=0))

    def _climb(self, size: int, axes: LogicalMesh) -> list[EstimatedStages]:
        """From a count whose bubble is small up, as long as it gets better or nothing fits; else down."""
        start, counts = self._start(size, axes), self.layered.counts
        settings = [self._setting(size, axes, number) for number in range(len(counts))]

        def look(number: int, beside: _Look) -> _Look:
            return self._look(settings[number], beside.least_ns <= self._best_ns)

        def may_lead(number: int) -> bool:
            return self._may_lead(first, settings[start], settings[number])

        first = last = self._look(settings[start])
        found, number, is_better_above = list(first.found), start + first.stride, False
        while number < len(counts) and may_lead(number):
            here = look(number, last)
            found += here.found
            worse = here.floor_ns > last.floor_ns and here.floor_ns >= self._best_ns
            if worse or (last.least_ns < _NEVER and here.least_ns >= last.least_ns):
                break
            is_better_above |= here.floor_ns < first.floor_ns or here.least_ns < first.least_ns
            number, last = number + here.stride, here
        last = first
        for number in () if is_better_above else range(start - 1, -1, -1):
            if not may_lead(number):
                break
            here = look(number, last)
            found += here.found
            if here.least_ns >= last.least_ns and here.floor_ns >= last.floor_ns:
                break
            last = here
        return found

    def _may_lead(self, look: _Look, setting: Setting, other: Setting) -> bool:
        """Whether another number of microbatches may be the best where this is what one has.

        What placements add to all that is computed and waited for is about as much in both.
        """
        own, least = self._computed_ns(setting), self._computed_ns(other)
        return look.floor_ns >= _NEVER or least * look.floor_ns <= own * HOPELESS * self._best_ns

    def _least(self, found: Sequence[EstimatedStages]) -> int:
        return min((c.step_ns for c in found if c.peak_bytes <= self.admitted), default=_NEVER)

    def _look(self, setting: Setting, is_near: bool = False) -> _Look:
        """What a setting has, found once; where it was passed over and is near the best now, once more."""
        known = self._known.get(setting)
        if known is None or (is_near and known.is_passed_over):
            known = self._known[setting] = self._found_in(setting, is_near)
        return known

    def _found_in(self, setting: Setting, is_near: bool) -> _Look:
        """The variants and schedules of a setting that may be the best.

        Its floor is what the fastest placements would take if they fitted. Where all that is computed, shared out
        evenly, takes longer than the best so far, no placements are looked for. Where the floor is no better than the
        best, nothing else is looked at; where even all costs in a row are far from it, not even that, unless the
        setting is next to the best.
        """
        stages, count = setting.num_stages, setting.microbatches
        computed = self._computed_ns(setting)
        if computed >= self._bound_ns:
            return _Look(computed, _NEVER, [])
        place = self.layered.place_of(setting)
        try:
            curve = place.placements.trade_offs(min(stages, count), *self._solver)
            fastest = curve.fastest()
            part = self.layered.part_of_step(PLAIN, stages, count, (1,) * stages)
            in_a_row = int(part * fastest.cost_ns / stages * self._fewest_passes(stages, count) / count)
            if setting.zero is None and not is_near and in_a_row * self._hidden > self._bound_ns:
                self._floors.append((in_a_row, setting))
                return _Look(in_a_row, _NEVER, [])
            found = self._staged(setting, fastest, self._least_again)
            floor = min(candidate.step_ns for candidate in found)
            self._hidden = min(self._hidden, floor / in_a_row)
            if floor < self._bound_ns and self._least(found) == _NEVER:
                found += self._variants(setting, curve, fastest)
        except InfeasibleError:
            return _Look(_NEVER, _NEVER, [])
        least = self._least(found)
        self._best_ns = min(self._best_ns, least)
        peak = min(candidate.peak_bytes for candidate in found)
        stride = max(1, int(math.log2(peak / self.admitted))) if least == _NEVER else 1
        return _Look(floor, least, found, stride)

    def _fewest_passes(self, stages: int, count: int) -> float:
        """Of a stage in a step of so many microbatches, what it waits included: in the schedule with least to wait."""
        ways = [(schedule, 1) for schedule in _WHOLE]
        may_wait = self.layered.may_wait(stages, self._least_again)
        ways += [(schedule, 1) for schedule in in_two_parts(count, stages)] if may_wait else []
        ways += self.chunks.possible(stages, count, may_wait)
        return float(count + min(SCHEDULES[schedule].bubble(stages, count, chunks) for schedule, chunks in ways))

    def _computed_ns(self, setting: Setting) -> int:
        """What a step takes by estimate if nothing is sent, and all fits: at least, where ranks leave each other no
        cores."""
        if self.layered.shares_cores or self.request.mode != "train":
            return 0
        own = replace(setting, axes=(), zero=None, splits_sequence=False)
        if own not in self._computed:
            way = StageStrategy(own, TradeOff((), 0, 0, 0), self._least_again)
            kind = self.layered.computed(own.num_devices, own.microbatches)
            every = [*self._of_schedules(way, kind), *self.chunks.of(way, kind)]
            self._computed[own] = min(candidate.step_ns for candidate in every)
        return self._computed[own]

    @property
    def _least_again(self) -> str:
        """The recomputation that computes least again."""
        return next(iter(self.layered.recomputations))

    def _variants(self, setting: Setting, curve: TradeOffs, fastest: TradeOff) -> list[EstimatedStages]:
        """For each recomputation the fastest placements that fit, where those that compute least again do not.

        What is computed again makes nothing faster: more of it is looked at where with less too little fits, as long as
        the fastest placements are not slower than the best. Of these the most first: where none fit with that, none do
        with less.
        """
        found, likely = list[EstimatedStages](), [self._least_again]
        for recompute in [*self.layered.recomputations][1:]:
            found += (here := self._staged(setting, fastest, recompute))
            is_slow = min(c.step_ns for c in here) >= HOPELESS * self._bound_ns
            if is_slow or self._least(here) < _NEVER:
                break
            likely.append(recompute)
        smallest = curve.smallest(fastest)
        for recompute in reversed(likely):
            limits = replace(curve, in_flight=0) if recompute in ("extensive", "full") else curve
            found += (here := self._fitted(setting, limits, (fastest, smallest), recompute))
            if self._least(here) == _NEVER:
                break
        return found

    def _fitted(
        self, setting: Setting, curve: TradeOffs, ends: tuple[TradeOff, TradeOff], recompute: str
    ) -> list[EstimatedStages]:
        """Halves the hull between the fastest placements, which do not fit, and the smallest, for the fastest that
        fit."""
        fast, small = ends
        found = self._staged(setting, small, recompute)
        if self._least(found) == _NEVER:
            return found
        for _ in range(HULL_HALVINGS):
            between = curve.between(fast, small)
            if between is None:
                break
            found += (here := self._staged(setting, between, recompute))
            fast, small = (fast, between) if self._least(here) < _NEVER else (between, small)
        return found

    def _staged(self, setting: Setting, choice: TradeOff, recompute: str) -> list[EstimatedStages]:
        """The best stages of one way under each schedule. Raises InfeasibleError where constraints allow none."""
        way = StageStrategy(setting, choice, recompute)
        kind = self.layered.kind(way)
        every = [*self._of_schedules(way, kind), *self.chunks.of(way, kind)]
        allowed = [self.layered.in_time(candidate) for candidate in every if self.layered.allows(candidate)]
        if not allowed:
            self.refusal = InfeasibleError(
                f"expected a schedule and chunks as constraints pin them, found none for {setting.microbatches} "
                f"microbatches of {self.layered.layers.count} layers on {setting.num_stages} submeshes; pin a number "
                "of chunks above 1 with schedules that have such, and microbatches that make equal rounds"
            )
            raise self.refusal
        return allowed

    def _of_schedules(self, way: StageStrategy, kind: StageKind) -> Iterator[EstimatedStages]:
        """Of stages that are submeshes, whose layers cost what the kind says; where none fit, those of the smallest
        limit that would do.

        With borders that are estimated to be little worse: messages that wait are estimated to hide nothing.
        """
        setting = way.setting
        stages, count = setting.num_stages, setting.microbatches
        again = (way.recompute,) * kind.num_layers
        for schedule in _WHOLE if stages > 1 else (PLAIN,):
            try:
                found = best_stages([kind], self.request.mesh.num_devices, count, schedule)
            except InfeasibleError as error:
                if error.smallest_bytes is None:
                    continue
                free = replace(kind, memory_limit=error.smallest_bytes)
                found = best_stages([free], self.request.mesh.num_devices, count, schedule)
            kinds, ways = [kind] * stages, (way,) * stages
            may_wait = schedule == PLAIN and self.layered.may_wait(stages, way.recompute)
            for choice in (found.best, *found.runners_up[:RUNNERS_UP], *self._equally_cut(kind, found.best, count)):
                of_layer = tuple(n for n, (begin, end, _) in enumerate(choice.stages) for _ in range(begin, end))
                peak = largest_peak(kinds, of_layer, count, schedule)
                step, bound = choice.step_ns, found.lower_bound_ns
                yield EstimatedStages(ways, schedule, of_layer, again, step, peak, bound)
                for later in in_two_parts(count, stages) if may_wait else ():
                    less = step - hidden_bubble(kinds, of_layer, count, later)
                    peak = largest_peak(kinds, of_layer, count, later)
                    yield EstimatedStages(ways, later, of_layer, again, less, peak, min(less, bound))

    def _equally_cut(self, kind: StageKind, best: StageChoice, microbatches: int) -> list[StageChoice]:
        """Stages of as many layers each, where these are not the best by estimate but ranks share cores.

        Ranks that wait leave their cores to others there, so that it matters less which stage is the slowest.
        """
        equal = equally_cut(kind, len(best.stages), microbatches) if self.layered.shares_cores else None
        return [] if equal is None or equal.stages == best.stages else [equal]

    def frugal(self) -> Iterator[EstimatedStages]:
        """For each logical shape what takes least memory: most microbatches, all computed again.

        Keeps the refusal where a shape has no strategies at all.
        """
        recompute = list(self.layered.recomputations)[-1]
        mesh, count = self.request.mesh, self.layered.counts[-1]
        for size, axes in self.shapes:
            setting = Setting(axes, size, mesh.num_devices // size, count)
            try:
                placements = self.layered.place_of(setting).placements
                curve = placements.trade_offs(min(setting.num_stages, count), *self._solver)
                smallest = curve.smallest(curve.fastest())
                yield from self._staged(setting, smallest, recompute)
            except InfeasibleError as error:
                self.refusal = error


def _as_templates(setting: Setting) -> Iterator[Setting]:
    """The setting with its axes named as templates name them, the outer one for data: ZeRO 0, 1 and 3 where it is. No
    template has a third axis."""
    sizes = tuple(axis.size for axis in setting.axes)
    for names in {0: ((),), 1: (("dp",), ("tp",)), 2: (("dp", "tp"),)}.get(len(sizes), ()):
        for zero in (0, 1, 3) if "dp" in names else (0,):
            yield replace(setting, axes=make_axes(names, sizes), zero=zero)
