"""Equal stages: each logical shape is looked at once, and from the best on the number of microbatches climbs.

What a setting has is found, and traded between time and memory, in `looks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest

from autopar.clock import Clock
from autopar.errors import InfeasibleError, PlanError
from autopar.interop.submeshes import logical_shapes, submesh_sizes
from autopar.ir.mesh import LogicalMesh, make_axes
from autopar.ir.outline import Outline, sizes_text
from autopar.progress import Report
from autopar.staged.counts import Counts
from autopar.staged.layered import Layered
from autopar.staged.looks import NEVER, Look, Looks
from autopar.staged.ways import EstimatedStages, Setting
from autopar.tunables import (
    BESIDE_KNOWN,
    BETWEEN,
    FAR_TEMPLATE,
    FEW_DEVICES,
    FIRST_LOOK_SHARE,
    FULL_MICROBATCHES,
    HOPELESS,
    LIKELY_STAGES,
    NEAR_TEMPLATE,
    STAGE_SHARE,
    TEMPLATE_SHAPES,
)


class StagedSearch:
    """Looks at settings, and keeps what the best estimate is and why it stopped."""

    def __init__(self, layered: Layered, than_ns: float | None = None, looks: Looks | None = None) -> None:
        """than_ns: what a plan takes that is known. looks: with what was looked at already."""
        self.layered, self.request = layered, layered.request
        self.known_ns = math.inf if than_ns is None else than_ns
        self.looks = Looks(layered, self.known_ns) if looks is None else looks.bounded(self.known_ns)
        self.counts = Counts(layered)
        self.admitted = layered.admitted
        self._likely_spread = self._spread_of_known()
        self.stop_reason = "all settings"
        self.clock = Clock.of(self.request.budget.seconds)

    def _spread_of_known(self) -> int:
        """Microbatches times devices of a submesh, of what is likely to be the best so far; none where nothing is."""
        known = [
            (look.likely_ns, setting.microbatches * setting.num_devices) for setting, look in self.looks.known.items()
        ]
        return min(known, default=(NEVER, 0))[1]

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
            if clock.is_over and (self.looks.candidates or self.known_ns < math.inf):
                self.stop_reason = clock.stop_reason
                break
            here = self._climb(size, axes)
            likely_ns = min(self.looks.known[setting].likely_ns for setting in here)
            what = f"{likely_ns / 1e6:.3f} ms" if likely_ns < NEVER else "nothing better that fits"
            count = self.request.mesh.num_devices // size
            report(f"{count} stage{'s' if count > 1 else ''} of {sizes_text(axes)}: {what}")
        self.looks.trade(self._look_at_templates(clock), clock)
        self.looks.trade(self._look_between(clock), clock)
        return sorted(self.looks.candidates, key=lambda candidate: candidate.step_ns)

    def _by_first_look(self, clock: Clock) -> Iterator[tuple[int, LogicalMesh]]:
        """Those that are likely to be the best first; then those that there was no time for. Left out are those of a
        size whose first is far from a plan that is known.
        """
        likely, far, later = list[tuple[int, int, int]](), set[int](), [*enumerate(self._near_templates)]
        shapes = dict(later)
        while later and not clock.is_over:
            number, (size, axes) = later.pop(0)
            if size not in far:
                look = self.looks.look(self._setting(size, axes, self._start(size, axes)))
                likely.append((look.likely_ns, look.floor_ns, number))
                far |= {size} if HOPELESS * BESIDE_KNOWN * self.known_ns < look.floor_ns < NEVER else set()
        yield from (shapes[number] for _, _, number in sorted(likely))
        yield from (shape for _, shape in later)

    @property
    def _near_templates(self) -> list[tuple[int, LogicalMesh]]:
        """The shapes, but for those of which the best template is far from the best of all, where that is known."""
        known = self.looks.of_shape
        if not known:
            return self.shapes
        most = FAR_TEMPLATE * min(*known.values(), self.known_ns)
        least = {self.request.mesh.num_devices: self.known_ns}
        return [(size, axes) for size, axes in self.shapes if least.get(size, self._least_of_template(axes)) <= most]

    def _least_of_template(self, axes: LogicalMesh) -> int:
        """What the best template of a logical shape takes; one axis is for data there, or for tensor parallelism."""
        known, size = self.looks.of_shape, math.prod(axis.size for axis in axes)
        if len(axes) == 2:
            return known.get((size, axes[1].size), NEVER)
        return min(known.get((size, 1), NEVER), known.get((size, size), NEVER))

    def near(self, outline: Outline) -> list[EstimatedStages]:
        """What is found in an outline of alike submeshes, freely and around templates."""
        count, sizes = outline.num_submeshes, sizes_text(outline.axes)
        size = self.request.mesh.num_devices // count
        shapes = [axes for n, axes in self.shapes if n == size and sizes_text(axes) == sizes]
        settings = [Setting(axes, size, self.request.mesh.num_devices // size, outline.microbatches) for axes in shapes]
        every = [named for setting in settings for named in (setting, *_as_templates(setting))]
        for setting in every:
            self.looks.look(setting)
        self.looks.trade(every, self.clock)
        return self.looks.candidates

    def climb_freely(self, template: Setting) -> None:
        """From a template on: looks at placements that are free of it, in as many microbatches, and in more and fewer
        as long as these are likely to get better."""
        free = replace(template, zero=None, splits_sequence=False, sharing=())
        looked = [free]
        self.looks.look(free, is_near=True)
        for step in (-1, 1):
            looked += self._on_the_way(free, self.counts.beside(free, step), self.clock)
        self.looks.trade(looked, self.clock)

    def _look_at_templates(self, clock: Clock) -> list[Setting]:
        """Templates on the best setting of each logical shape; from the best of each on, with more and fewer
        microbatches as long as it is likely to get better.

        What their placements hide, or send together, may be more than what they cost. Where templates of one stage are
        known, of stages alone.
        """
        likely = [(look.likely_ns, setting) for setting, look in self.looks.known.items()]
        shapes: dict[LogicalMesh, Setting] = {}
        for likely_ns, setting in sorted([*likely, *self.looks.floors], key=lambda pair: pair[0]):
            is_open = self.known_ns == math.inf or setting.num_stages > 1
            if is_open and (self.layered.shares_cores or self.looks.may_be_best(likely_ns)):
                shapes.setdefault(setting.axes, setting)
        looked: list[Setting] = []
        for setting in [*shapes.values()][:TEMPLATE_SHAPES]:
            templates = [named for named in _as_templates(setting) if not clock.is_over and self.looks.look(named)]
            looked += templates
            for best in self._near(templates):
                for step in (-1, 1):
                    looked += self._on_the_way(best, self.counts.beside(best, step), clock)
        return looked

    def _near(self, templates: Sequence[Setting]) -> list[Setting]:
        """Those of one shape from which to go on: the best, if that may be the best of all.

        Where ranks share cores, those that wait leave theirs to others, so that a step depends little on the number of
        microbatches: there all that are near the best of all.
        """
        if self.layered.shares_cores:
            return [setting for setting in templates if self._is_near(setting)]
        best = sorted(templates, key=lambda setting: self.looks.look(setting).likely_ns)[:1]
        return [setting for setting in best if self.looks.may_be_best(self.looks.look(setting).likely_ns)]

    def _is_near(self, setting: Setting) -> bool:
        return self.layered.shares_cores and self.looks.look(setting).floor_ns <= NEAR_TEMPLATE * self.looks.best_ns

    def _look_between(self, clock: Clock) -> list[Setting]:
        """From the best settings on, at numbers of microbatches between those that were looked at, as long as it gets
        better: in a batch that is no power of two."""
        best = list(dict.fromkeys(c.ways[0].setting for c in self.looks.fitting))[:BETWEEN]
        ways = ((setting, between) for setting in best for between in self.counts.between(setting))
        return [looked for setting, between in ways for looked in self._on_the_way(setting, between, clock)]

    def _on_the_way(self, setting: Setting, others: Iterable[Setting], clock: Clock) -> list[Setting]:
        """Looks at others as long as they are likely to be better than those before, or near the best."""
        looked, last = list[Setting](), self.looks.look(setting)
        for other in others:
            if clock.is_over:
                break
            looked.append(other)
            here = self.looks.look(other)
            if here.likely_ns >= last.likely_ns and not self._is_near(other):
                break
            last = here
        return looked

    def _setting(self, size: int, axes: LogicalMesh, number: int) -> Setting:
        """With the microbatches of that place among the counts."""
        return Setting(axes, size, self.request.mesh.num_devices // size, self.counts.ladder(axes)[number])

    def _start(self, size: int, axes: LogicalMesh) -> int:
        """The place of the fewest microbatches that make the bubble small, and of which each device has no more samples
        in flight than were likely to be best in other shapes; no more than have a sample for each rank of the outer
        axis, which mostly is for data. Where a template of the shape was looked at, as many as in the best."""
        counts, sizes = self.counts.ladder(axes), [axis.size for axis in axes]
        templates = [
            (look.likely_ns, counts.index(setting.microbatches))
            for setting, look in self.looks.known.items()
            if setting.num_devices == size and [axis.size for axis in setting.axes] == sizes
            and setting.zero is not None and setting.microbatches in counts
        ]  # fmt: skip
        if templates:
            return min(templates)[1]
        wanted = max(FULL_MICROBATCHES * (self.request.mesh.num_devices // size - 1), self._likely_spread // size)
        most = max(1, self.layered.batch // axes[0].size) if axes else counts[-1]
        enough = next((number for number, count in enumerate(counts) if count >= wanted), len(counts) - 1)
        return min(enough, max((number for number, count in enumerate(counts) if count <= most), default=0))

    def _climb(self, size: int, axes: LogicalMesh) -> list[Setting]:
        """From where it starts up, as long as it is likely to get better; else down. What is likely to be the best is
        traded against memory at once, so that other shapes are judged by it."""
        counts, start = self.counts.ladder(axes), self._best_known(size, axes)
        looked = [self._setting(size, axes, start)]
        first = last = self.looks.look(looked[0])
        if not self.looks.may_be_best(first.likely_ns):
            return looked

        def look(number: int) -> Look:
            looked.append(self._setting(size, axes, number))
            return self.looks.look(looked[-1], last.likely_ns <= self.looks.best_ns)

        def may_lead(number: int) -> bool:
            other, before = (
                self._setting(size, axes, number),
                next(one for one in looked if self.looks.look(one) is last),
            )
            return self.looks.may_gain(before, other) and self.looks.may_lead(first, looked[0], other)

        number = start + first.stride
        while number < len(counts) and may_lead(number):
            here = look(number)
            if here.likely_ns >= last.likely_ns:
                break
            number, last = number + here.stride, here
        for number in range(start - 1, -1, -1) if last is first else ():
            here = look(number) if may_lead(number) else last
            if here.likely_ns >= last.likely_ns:
                break
            last = here
        self.looks.trade(looked, self.clock)
        self._likely_spread = self._spread_of_known()
        return looked

    def _best_known(self, size: int, axes: LogicalMesh) -> int:
        """The place of the number that is likely to be the best of those that were looked at; of none, where to
        start."""
        known = self.looks.known
        every = ((number, self._setting(size, axes, number)) for number in range(len(self.counts.ladder(axes))))
        likely = [(known[setting].likely_ns, number) for number, setting in every if setting in known]
        return min(likely)[1] if likely else self._start(size, axes)

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
                curve = placements.trade_offs(min(setting.num_stages, count), *self.looks.solver)
                smallest = curve.smallest(curve.fastest())
                yield from self.looks.staged(setting, smallest, recompute)
            except InfeasibleError as error:
                self.looks.refusal = error


def _as_templates(setting: Setting) -> Iterator[Setting]:
    """The setting with its axes named as templates name them, the outer one for data: ZeRO 0 to 3 where it is. No
    template has a third axis."""
    sizes = tuple(axis.size for axis in setting.axes)
    shards = (0, 1, 2, 3) if setting.microbatches > 1 else (0, 1, 3)
    for names in {0: ((),), 1: (("dp",), ("tp",)), 2: (("dp", "tp"),)}.get(len(sizes), ()):
        for zero in shards if "dp" in names else (0,):
            yield replace(setting, axes=make_axes(names, sizes), zero=zero)
