"""One rung: templates of any number of stages by what layers cost on all rungs, the best few placed and simulated.

    settings of the rung        → estimates                 `staged.StageTemplates`, no problem solved, nothing played
    the best few                → candidates                their stages by dynamic programming
    the first few of these      → plans of the whole model, simulated                      `staged.finalists`
    the best of other forms     → the same: estimates say little of which form is the best
    the best of each form       → placed anew on the rung's own mesh, simulated
    the best                    → verified, with its odds, as a search of its own would return it

What an estimate leaves out is much alike where as many stages hold as many samples: by how much it was off on one rung
corrects it on the next, so that few candidates have to be simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, product
from typing import Any

from autopar.clock import guarded
from autopar.driver import Candidate, chosen
from autopar.errors import AutoparError, InfeasibleError
from autopar.intraop import costs_of
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Choice, Plan
from autopar.ir.schedule import PLAIN
from autopar.ir.tried import Tried
from autopar.ladders.shared import RungLayers, SharedLayers
from autopar.microbatch import check_plan
from autopar.odds import Sure, with_odds
from autopar.planning import Place
from autopar.request import Request
from autopar.simulate import Incremental, Timeline
from autopar.staged.finalists import Finalists
from autopar.staged.looks import Looks
from autopar.staged.mixing import kept_more
from autopar.staged.search import StagedSearch
from autopar.staged.templates import Estimated, StageTemplates
from autopar.staged.ways import EstimatedStages, Setting, StageStrategy
from autopar.substitute import GraphCandidate
from autopar.tunables import GUARD

NEAR = 1.08
"""Of the best estimate, up to which templates are looked at. At 1.04, what estimates of some number of stages leave out
keeps others from being seen; at 1.15, most of what is looked at is far from the best."""
LOOKED_AT = 8
"""Of these, how many: the fastest, those that fit surely, and the fastest of each number of stages."""
NEAR_ANEW = 1.04
"""Of the best plan's step, up to which the best of other forms are placed anew on a rung's own mesh, too. With none
placed anew, some rungs are up to 3% slower than a search of their own finds; nearer to 2, each form is solved again."""
LOOKED_AT_FREELY = 0, 3
"""Shapes at which placements that no template has are looked at, the best first: where templates are about as good as
on the best rung so far, and where none is, as where the batch leaves each device less than a sample. With none there,
too, such rungs are up to 22% slower; with one everywhere, a ladder of devices that are short of memory takes a third
longer, and no rung gains as much as a percent."""
SIMULATED = ((2, 1.005), (5, 1.02))
"""Plans of one stage and of several that are simulated and fit; a further one only where it is likely to take no more
than so many times the best, or where it is likely to undercut it by as much: estimates of one stage are within a
percent, those of schedules are not. With all as of one stage, rungs with stages are up to 4% slower than a search of
their own finds; with all as of several, a ladder takes twice as long."""


@dataclass(eq=False)
class Climb:
    """What was learned on the rungs so far, of one kind of device. off: of stages that are alike, by how many times a
    step was longer than its estimate. least_ns: of a sample on one device, on the rung where that was least."""

    sure: Sure | None
    off: dict[Any, float] = field(default_factory=dict)
    least_ns: float = math.inf

    def plan(self, shared: SharedLayers, request: Request) -> Plan:
        """The best plan of a rung. Raises InfeasibleError where none of these fits."""
        layers, rows = RungLayers(shared, request), list[Tried]()
        with guarded(GUARD * request.budget.seconds):
            looks = self._looks(layers)
            search = StagedSearch(layers, None, looks)
            finalists = RungFinalists(search, self._with_more_kept(looks), rows.append, shared, self)
            every = [self._candidate(finalists, *found) for found in finalists.plans]
            every += self._placed_anew(finalists, rows.append)
            for best in self._best_first(every):
                try:
                    plan = best.plan
                    check_plan(layers.graph, plan)
                except AutoparError as error:
                    rows.append(Tried(infeasible=str(error)))
                    continue
                report = replace(plan.search, tried=tuple(rows))
                work = layers.batch / request.mesh.num_devices
                self.least_ns = min(self.least_ns, plan.predicted.step_time_ns / work)
                return with_odds(replace(plan, search=report), layers.graph)
        least = min((c.peak_bytes for c in looks.candidates), default=None)
        raise InfeasibleError(f"found no template within {layers.limit:,} bytes a device", least)

    def _looks(self, layers: RungLayers) -> Looks:
        """What is looked at: what is far slower than on the best rung so far is not, where anything is near that."""
        likely_ns = self.least_ns * layers.batch / layers.request.mesh.num_devices
        for known_ns in dict.fromkeys((likely_ns, math.inf)):
            looks = Looks(layers, known_ns)
            estimated = StageTemplates(looks, one_stage=True, near=NEAR).estimated()
            for one in self._in_turn(estimated):
                looks.look_at_template(one.setting, one.recompute)
            _look_freely(looks, [one.setting for one in estimated], LOOKED_AT_FREELY[known_ns == math.inf])
            if min((one.step_ns for one in looks.fitting), default=math.inf) <= NEAR * known_ns:
                break
        return looks

    def _with_more_kept(self, looks: Looks) -> list[EstimatedStages]:
        """The best again, with as few layers computed again as fit, and as few as fit surely; and the best of whole
        stages, of which the last hold so few microbatches that they may keep all."""
        most = looks.layered.admitted
        surely = most if self.sure is None else self.sure.most_bytes(most)
        whole = [one for one in looks.candidates if one.schedule == PLAIN and len(one.ways) > 1]
        more = (
            kept_more(looks.layered, some, size)
            for some, size in product((looks.candidates, whole), sorted({most, surely}))
        )
        different = {_how_it_runs(one): one for one in chain.from_iterable(more)}
        return [*looks.candidates, *different.values()]

    def _in_turn(self, found: Sequence[Estimated]) -> list[Estimated]:
        """The fastest, that of one stage, those that fit surely, and the fastest of each number of stages and each
        tensor parallelism."""
        alone = [one for one in found if one.setting.num_stages == 1][:1]
        near = [one for one in found if one.step_ns <= NEAR * min(one.step_ns for one in found[:1])]
        most = max((self.odds(one.peak_bytes) for one in near), default=0.0)
        surely = [one for one in near if self.odds(one.peak_bytes) == most]
        shapes = {_shape(one.setting): one for one in reversed(near)}
        of_shapes = sorted(shapes.values(), key=lambda one: one.step_ns)
        ordered = {
            (one.setting, one.recompute): one for one in (*near[:1], *alone, *surely[:2], *of_shapes, *surely, *near)
        }
        return [*ordered.values()][:LOOKED_AT]

    def _placed_anew(self, finalists: RungFinalists, note: Callable[[Tried], None]) -> list[Candidate]:
        """The best templates again, with placements that are found on the rung's own mesh: what is stored once on so
        many ranks may be stored in shards on others."""
        layers = RungLayers(finalists.shared, finalists.request, at_home=True)
        looks, wanted = Looks(layers, math.inf), set[Any]()
        for one in finalists.away_from_home:
            way = one.ways[0]
            looks.look_at_template(way.setting, way.recompute)
            wanted.add(_ways_to_run(one))
        found: dict[Any, EstimatedStages] = {}
        for one in looks.fitting:
            if _ways_to_run(one) in wanted:
                found.setdefault(_ways_to_run(one), one)
        search = StagedSearch(layers, None, looks)
        again = RungFinalists(search, [*found.values()], note, finalists.shared, self)
        return [self._candidate(again, *played) for played in again.every]

    def odds(self, peak_bytes: int) -> float:
        """How surely that fits, where it is known; all that fits is alike where it is not."""
        return 1.0 if self.sure is None else self.sure.of(peak_bytes)

    def _candidate(self, finalists: Finalists, found: EstimatedStages, played: Timeline) -> Candidate:
        asked = Candidate(GraphCandidate(finalists.layered.graph, (), 0))
        made = partial(finalists.stated, found, played)
        return asked.planned(found.outline, played.step_time_ns, played.peak_bytes, made)

    def _best_first(self, every: list[Candidate]) -> Iterator[Candidate]:
        left = list(every)
        while left:
            best = chosen(left, self.sure)
            left.remove(best)
            yield best


class RungFinalists(Finalists):
    """The best candidates of a rung, played by what all rungs of a batch share."""

    layered: RungLayers

    def __init__(
        self, search: StagedSearch, found: list[EstimatedStages], note: Callable[[Tried], None],
        shared: SharedLayers, climb: Climb,
    ) -> None:  # fmt: skip
        super().__init__(search, found, note)
        self.shared, self._climb = shared, climb
        self._known: dict[EstimatedStages, Plan] = {}

    @cached_property
    def plans(self) -> list[tuple[EstimatedStages, Timeline]]:
        """Those that fit: of what is near the fastest by corrected estimates, those first that fit most surely, as of
        plans that a profile cannot tell apart one of these is taken (`driver.chosen`)."""
        sure = self._climb.sure
        left = sorted((c for c in self.found if c.peak_bytes <= self.layered.admitted), key=self._likely_ns)
        most_ns = self._likely_ns(left[0]) * (1 + (sure.resolution if sure is not None else 0.0)) if left else 0.0
        plans = list[tuple[EstimatedStages, Timeline]]()
        while left:
            near = [c for c in left if self._likely_ns(c) <= most_ns] or left
            most = max(self._climb.odds(c.peak_bytes) for c in near)
            one = min((c for c in near if self._climb.odds(c.peak_bytes) == most), key=self._likely_ns)
            best_ns = min((played.step_time_ns for _, played in plans), default=math.inf)
            enough, like = SIMULATED[one.num_submeshes > 1]
            is_enough = len(plans) >= (enough if self._likely_ns(one) > best_ns / like else LOOKED_AT)
            if is_enough or self._likely_ns(one) > like * best_ns:
                break
            left.remove(one)
            self._tried(one, plans)
        for one in self._of_other_forms(plans):
            self._tried(one, plans)
        return plans if sure is not None else self._kept_more(plans)

    @property
    def every(self) -> list[tuple[EstimatedStages, Timeline]]:
        """All that fit."""
        plans = list[tuple[EstimatedStages, Timeline]]()
        for one in self.found:
            self._tried(one, plans)
        return plans

    @property
    def away_from_home(self) -> list[EstimatedStages]:
        """The best plan of each form that is near the best, where its placements were found on another mesh."""
        plans = sorted(self.plans, key=lambda pair: pair[1].step_time_ns)
        best: dict[Any, EstimatedStages] = {}
        for one, played in plans:
            setting = one.ways[0].setting
            is_away = setting.zero is not None and not self.layered.is_home(setting)
            if is_away and played.step_time_ns <= NEAR_ANEW * plans[0][1].step_time_ns:
                best.setdefault(_form(one), one)
        return [*best.values()]

    def _of_other_forms(self, plans: Sequence[tuple[EstimatedStages, Timeline]]) -> list[EstimatedStages]:
        """Of each form of which none was simulated, the best that fits surely: estimates of one form are off alike, and
        say less of which form is the best."""
        best_ns = min((played.step_time_ns for _, played in plans), default=math.inf)
        surest, known = (
            max((self._climb.odds(p.peak_bytes) for _, p in plans), default=0.0),
            {_form(c) for c, _ in plans},
        )
        found: dict[Any, EstimatedStages] = {}
        for one in self.found:  # the fastest by estimate first
            is_open = one.peak_bytes <= self.layered.admitted and self._climb.odds(one.peak_bytes) >= surest
            if is_open and one.step_ns <= NEAR * best_ns and _form(one) not in known:
                found.setdefault(_form(one), one)
        return [*found.values()]

    def _tried(self, one: EstimatedStages, plans: list[tuple[EstimatedStages, Timeline]]) -> None:
        """Simulated, and a plan where it fits."""
        played = self._simulated(one)
        if played.peak_bytes <= self.layered.limit:
            plans.append((one, played))

    def _simulator(self, microbatches: int) -> Incremental:
        return self.shared.simulator(microbatches)

    def _built(self, candidate: EstimatedStages) -> Plan:
        """Once, for simulating and for stating it."""
        if candidate not in self._known:
            self._known[candidate] = super()._built(candidate)
        return self._known[candidate]

    def _placed_as(self, way: StageStrategy, again: tuple[str, ...]) -> Plan:
        """Placements of its home on the rung's own mesh: what converts one into another there may be another way."""
        part, request = self.layered.part(way.setting.microbatches), self.request
        draft = Place(part, way.setting.axes, request, self.layered.profile).draft()
        home = self.layered.place_of(way.setting).placements
        own = replace(home, draft=draft, costs=costs_of(part.graph, draft, self.layered.shared))
        return own.placed(replace(draft, recompute=again), part.graph, way.choice.choice)

    def _likely_ns(self, candidate: EstimatedStages) -> float:
        """By how far off candidates that are alike were, on this rung or one before."""
        alike = (self._climb.off.get(key) for key in _likeness(candidate, self.layered.batch))
        return candidate.step_ns * next((off for off in alike if off is not None), 1.0)

    def _simulated(self, candidate: EstimatedStages) -> Timeline:
        played = super()._simulated(candidate)
        off = played.step_time_ns / candidate.step_ns
        self._climb.off.update(dict.fromkeys(_likeness(candidate, self.layered.batch), off))
        return played

    def _explained(self, way: StageStrategy) -> tuple[Choice, ...]:
        """Each decision against the others of its template."""
        return self.layered.place_of(way.setting).placements.explained(way.choice.choice)


def _look_freely(looks: Looks, settings: Iterable[Setting], most: int) -> None:
    """At placements that no template has, in so many of the best shapes: with as many microbatches, and with more and
    fewer as long as that is likely to gain something. settings: of templates, the best first. One axis alone counts
    where it does not divide the batch, so that its templates are of tensor parallelism at most."""
    search = StagedSearch(looks.layered, None, looks)
    settings = [*settings]
    splits_samples = any(_splits_samples_alone(setting) for setting in settings)
    shapes: dict[LogicalMesh, Setting] = {}
    for setting in settings:
        is_open = len(setting.axes) > 1 or setting.num_stages > 1 or not splits_samples
        if is_open and not setting.sharing:
            shapes.setdefault(setting.axes, setting)
    for setting in sorted([*shapes.values()][:most], key=_num_axes, reverse=True):
        search.climb_freely(setting)


def _splits_samples_alone(setting: Setting) -> bool:
    """Whether it has one stage on one axis, over which samples are split."""
    return setting.num_stages == 1 and [axis.name for axis in setting.axes] == ["dp"]


def _num_axes(setting: Setting) -> int:
    return len(setting.axes)


def _how_it_runs(candidate: EstimatedStages) -> tuple[Any, ...]:
    """All of it but what it is estimated to take."""
    return candidate.ways, candidate.schedule, candidate.stage_of_layer, candidate.recompute


def _ways_to_run(candidate: EstimatedStages) -> tuple[Any, ...]:
    """All but its placements and where its stages begin."""
    way = candidate.ways[0]
    return way.setting, way.recompute, candidate.schedule, len(candidate.ways)


def _form(candidate: EstimatedStages) -> tuple[Any, ...]:
    """Stages, ranks of tensor parallelism, and whether its placements are a template's."""
    setting = candidate.ways[0].setting
    return _shape(setting), setting.zero is None


def _likeness(candidate: EstimatedStages, batch: int) -> tuple[Any, ...]:
    """What candidates have whose estimates are off alike: all that says how their stages run; and their schedule, on as
    many stages in as many chunks, which leave as much of a bubble that estimates do not see."""
    way = candidate.ways[0]
    sizes = {axis.name: axis.size for axis in way.setting.axes}
    ranks = way.setting.num_devices // sizes.get("tp", 1)
    samples = batch / candidate.microbatches / ranks
    near = _shape(way.setting), candidate.schedule, len(candidate.ways)
    return (*near, samples, way.setting.zero, way.recompute, way.setting.sharing), near


def _shape(setting: Setting) -> tuple[int, int]:
    """Stages, and ranks of tensor parallelism."""
    return setting.num_stages, next((axis.size for axis in setting.axes if axis.name == "tp"), 1)
