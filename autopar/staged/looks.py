"""What settings have: a first look at each says how fast its placements could be and what memory they would take.

Where that is too much, the setting is traded against memory, if it may be the best for all that: placements on the hull
of time against memory (`intraop.trade_offs`), each with every recomputation. Those that are likely to be the best come
first, so that most of the others need not be traded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.clock import Clock
from autopar.errors import InfeasibleError
from autopar.interop import StageChoice, StageKind, best_stages, equally_cut
from autopar.intraop import TradeOff, TradeOffs
from autopar.ir.schedule import PLAIN, SCHEDULES
from autopar.staged import relief
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
    HOPED,
    HOPELESS,
    HULL_HALVINGS,
    LIKE_SHAPES,
    MEMORY_BOUND,
    RUNNERS_UP,
    SOLVE_SHARE,
)

NEVER = 2**62
_WHOLE = sorted((s.name for s in SCHEDULES.values() if not s.has_chunks and not s.splits_backward), key=PLAIN.__ne__)
"""Schedules of whole stages and whole backward passes, the plain one first."""


@dataclass(frozen=True)
class Look:
    """What is known of a setting: the time that its fastest placements would take, the least of what fits, what it is
    likely to take once it is traded against memory, and all candidates.

    stride: how many counts, each double the last, until what does not fit may, as if all of it were activations.
    curve: of its placements, and the fastest, where trading them against memory may gain something.
    """

    floor_ns: int
    least_ns: int = NEVER
    likely_ns: int = NEVER
    found: tuple[EstimatedStages, ...] = ()
    stride: int = 1
    curve: tuple[TradeOffs, TradeOff] | None = None

    @property
    def is_passed_over(self) -> bool:
        """Whether nothing but its floor is known, or that it has no placements."""
        return not self.found


class Looks:
    """What settings have, each found once, and the best so far."""

    def __init__(self, layered: Layered, known_ns: float) -> None:
        """known_ns: what a plan takes that is known."""
        self.layered, self.request, self.admitted = layered, layered.request, layered.admitted
        self.chunks, self.known_ns = Chunks(layered), known_ns
        self.best_ns = int(min(NEVER, BESIDE_KNOWN * known_ns))
        self.known: dict[Setting, Look] = {}
        self.floors: list[tuple[int, Setting]] = []  # of what was passed over, by time
        self.refusal = InfeasibleError("expected a strategy for every operator, found none")
        self.solver = SOLVE_SHARE * self.request.budget.seconds, self.request.budget.seed
        self.of_shape: dict[tuple[int, int], int] = {}  # what a template takes at least, by devices and those of its tp
        self.least_of_tp: dict[int, int] = {}  # what layers of one take at least on so many ranks, without a bubble
        self._computed: dict[Setting, int] = {}
        self._outlook: dict[Setting, int] = {}  # what was likely at a first look
        self._hidden = 1.0  # the least share of all costs in a row that an estimate was

    def bounded(self, known_ns: float) -> Looks:
        """The same, where a plan is known that takes so long."""
        self.known_ns = known_ns
        self.best_ns = int(min(self.best_ns, NEVER, BESIDE_KNOWN * known_ns))
        return self

    @property
    def candidates(self) -> list[EstimatedStages]:
        """Of all that was looked at."""
        return [candidate for look in self.known.values() for candidate in look.found]

    @property
    def fitting(self) -> list[EstimatedStages]:
        """Those that fit by estimate, the fastest first."""
        return sorted((c for c in self.candidates if c.peak_bytes <= self.admitted), key=lambda c: c.step_ns)

    @property
    def bound_ns(self) -> int:
        """What is estimated to take longer is not looked at further."""
        return int(min(NEVER, BESIDE_KNOWN * self.known_ns, HOPELESS * self.best_ns))

    def look(self, setting: Setting, is_near: bool = False) -> Look:
        """A first look at a setting; where it was passed over and is near the best now, once more."""
        known = self.known.get(setting)
        if known is None or (is_near and known.is_passed_over):
            known = self.known[setting] = self._first(setting, is_near)
            self.best_ns = min(self.best_ns, known.least_ns)
            self._outlook[setting] = known.likely_ns
        return known

    def may_gain(self, setting: Setting, other: Setting) -> bool:
        """Whether a setting in another number of microbatches may be better, by how other shapes of the same devices
        compare in both."""
        counts = setting.microbatches, other.microbatches
        ratios = [
            self._outlook[then] / outlook
            for one, outlook in self._outlook.items()
            if (one.num_devices, one.microbatches, one.zero) == (setting.num_devices, counts[0], setting.zero)
            and self._outlook.get(then := replace(one, microbatches=counts[1]), NEVER) < NEVER
        ]
        return not ratios or LIKE_SHAPES * min(ratios) < 1

    def look_at_template(self, setting: Setting, recompute: str) -> None:
        """The fastest placements of a setting around a template, which computes this again."""
        try:
            fastest = self.layered.fastest(setting, *self.solver)
            found = self.staged(setting, fastest, recompute)
            way = StageStrategy(setting, fastest, recompute)
            found += self.chunks.equal(way, self.layered.kind(way))
        except InfeasibleError:
            return
        found += self.known[setting].found if setting in self.known else ()  # with something else computed again
        floor, least = _floor(found), self.least(found)
        self.known[setting] = Look(floor, least, least, tuple(found))
        self.best_ns = min(self.best_ns, least)

    def may_be_best(self, likely_ns: int) -> bool:
        """Whether what is likely to take so long is near enough the best to be it."""
        return likely_ns * HOPED < self.best_ns

    def trade(self, settings: Iterable[Setting], clock: Clock) -> None:
        """Trades settings against memory, those that are likely to be the best first, as long as any is; the first of
        all where it may be."""
        likely = sorted((self.known[setting].likely_ns, n, setting) for n, setting in enumerate(settings))
        for number, (likely_ns, _, setting) in enumerate(likely):
            may_be = likely_ns < self.best_ns or (number == 0 and self.may_be_best(likely_ns))
            if clock.is_over or not may_be:
                break
            look = self.known[setting]
            if look.curve is not None:
                self.known[setting] = self._traded(setting, look)
                self.best_ns = min(self.best_ns, self.known[setting].least_ns)

    def least(self, found: Sequence[EstimatedStages]) -> int:
        """Of what fits, ns a step."""
        return min((c.step_ns for c in found if c.peak_bytes <= self.admitted), default=NEVER)

    def _first(self, setting: Setting, is_near: bool) -> Look:
        """The fastest placements of a setting, in each schedule.

        Its floor is what they would take if they fitted. Where all that is computed, shared out evenly, takes longer
        than the best so far, no placements are looked for. Where even all costs in a row are far from the best, they
        are looked at no further, unless the setting is next to the best.
        """
        stages, count = setting.num_stages, setting.microbatches
        computed = self.computed_ns(setting)
        if computed >= self.bound_ns:
            return Look(computed)
        try:
            curve = self.layered.place_of(setting).placements.trade_offs(min(stages, count), *self.solver)
            fastest = curve.fastest()
            part = self.layered.part_of_step(PLAIN, stages, count, (1,) * stages)
            in_a_row = int(part * fastest.cost_ns / stages * self._fewest_passes(stages, count) / count)
            if setting.zero is None and not is_near and in_a_row * self._hidden > self.bound_ns:
                self.floors.append((int(in_a_row * self._hidden), setting))
                return Look(in_a_row)
            found = self.staged(setting, fastest, self._least_again)
        except InfeasibleError:
            return Look(NEVER)
        floor, least = _floor(found), self.least(found)
        self._hidden = min(self._hidden, floor / in_a_row)
        peak = min(candidate.peak_bytes for candidate in found)
        stride = max(1, int(math.log2(peak / self.admitted))) if least == NEVER else 1
        if least <= MEMORY_BOUND * floor:
            return Look(floor, least, least, tuple(found), stride)
        way = StageStrategy(setting, fastest, self._least_again)
        likely = relief.likely_ns(self.layered, self.layered.kind(way), found)
        return Look(floor, least, min(least, likely), tuple(found), stride, (curve, fastest))

    def _traded(self, setting: Setting, look: Look) -> Look:
        """What a setting has with less memory."""
        found = [*look.found]
        if look.curve is not None and look.floor_ns < self.bound_ns:
            with suppress(InfeasibleError):
                found += self._variants(setting, look, *look.curve)
        least = self.least(found)
        return Look(look.floor_ns, least, least, tuple(found), look.stride)

    def _fewest_passes(self, stages: int, count: int) -> float:
        """Of a stage in a step of so many microbatches, what it waits included: in the schedule with least to wait."""
        ways = [(schedule, 1) for schedule in _WHOLE]
        may_wait = self.layered.may_wait(stages, self._least_again)
        ways += [(schedule, 1) for schedule in in_two_parts(count, stages)] if may_wait else []
        ways += self.chunks.possible(stages, count, may_wait)
        return float(count + min(SCHEDULES[schedule].bubble(stages, count, chunks) for schedule, chunks in ways))

    def may_lead(self, look: Look, setting: Setting, other: Setting) -> bool:
        """Whether another number of microbatches may be the best where this is what one has.

        What placements add to all that is computed and waited for is about as much in both.
        """
        own, least = self.computed_ns(setting), self.computed_ns(other)
        return look.floor_ns >= NEVER or least * look.floor_ns <= own * HOPELESS * self.best_ns

    def computed_ns(self, setting: Setting) -> int:
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

    def _is_bound(self, found: Sequence[EstimatedStages]) -> bool:
        """Whether memory keeps what fits, if anything does, from being about as fast as what was found."""
        return self.least(found) > MEMORY_BOUND * min(candidate.step_ns for candidate in found)

    def _variants(self, setting: Setting, look: Look, curve: TradeOffs, fastest: TradeOff) -> list[EstimatedStages]:
        """For each recomputation the fastest placements that fit, where memory binds those that compute least again.

        What is computed again makes nothing faster: more of it is looked at where with less too little fits, as long as
        the fastest placements are not slower than the best, what less of it has found among that.
        """
        found, here, smallest = list[EstimatedStages](), [*look.found], curve.smallest(fastest)
        for recompute in self.layered.recomputations:
            if recompute != self._least_again:
                found += (here := self.staged(setting, fastest, recompute))
            if _floor(here) >= self._bound_beside(found) or not self._is_bound(here):
                break
            limits = replace(curve, in_flight=0) if recompute in ("extensive", "full") else curve
            found += self._fitted(setting, limits, (fastest, smallest), recompute, found)
        return found

    def _bound_beside(self, found: Sequence[EstimatedStages]) -> float:
        """What takes longer is no better than what is known, or was found meanwhile."""
        return min(self.bound_ns, HOPELESS * self.least(found))

    def _fitted(
        self, setting: Setting, curve: TradeOffs, ends: tuple[TradeOff, TradeOff], recompute: str,
        beside: Sequence[EstimatedStages],
    ) -> list[EstimatedStages]:  # fmt: skip
        """Halves the hull between the fastest placements and the smallest, for the fastest that are not bound; as long
        as what does not fit is not slower than the best, what is found already (`beside`) among that."""
        fast, small = ends
        found = self.staged(setting, small, recompute)
        if self.least(found) == NEVER:
            return found
        for _ in range(HULL_HALVINGS):
            between = curve.between(fast, small)
            if between is None:
                break
            found += (here := self.staged(setting, between, recompute))
            if self._is_bound(here) and _floor(here) >= self._bound_beside([*beside, *found]):
                break
            fast, small = (between, small) if self._is_bound(here) else (fast, between)
        return found

    def staged(self, setting: Setting, choice: TradeOff, recompute: str) -> list[EstimatedStages]:
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
                last_ns = int(kind.last_ns.sum())  # one stage waits for the other, wherever they begin
                step, bound = choice.step_ns + last_ns, found.lower_bound_ns + last_ns
                yield EstimatedStages(ways, schedule, of_layer, again, step, peak, bound, last_ns)
                for later in in_two_parts(count, stages) if may_wait else ():
                    less = step - hidden_bubble(kinds, of_layer, count, later)
                    peak = largest_peak(kinds, of_layer, count, later)
                    yield EstimatedStages(ways, later, of_layer, again, less, peak, min(less, bound), last_ns)

    def _equally_cut(self, kind: StageKind, best: StageChoice, microbatches: int) -> list[StageChoice]:
        """Stages of as many layers each, where these are not the best by estimate but ranks share cores.

        Ranks that wait leave their cores to others there, so that it matters less which stage is the slowest.
        """
        equal = equally_cut(kind, len(best.stages), microbatches) if self.layered.shares_cores else None
        return [] if equal is None or equal.stages == best.stages else [equal]


def _floor(found: Sequence[EstimatedStages]) -> int:
    """What the fastest would take that waits for no gradients on their way: others may send these as they come."""
    return min(candidate.step_ns - candidate.last_ns for candidate in found)
