"""The search over stages: submesh size, logical shape, microbatches, schedule, recomputation; the best are simulated.

    setting = (submesh size, logical shape, B)    → placements along time against memory      `intraop.trade_offs`
    variant = (placements, recomputation)         → what each layer costs, played alone       `simulate.layer_costs`
    stages of a variant by schedule               → estimated step time                       `interop.best_stages`
    the best few                                  → plans of the whole model, simulated       `Planner.built`

All but the last happens on a short graph (`interop.fold`), so the number of solves does not grow with depth. For each
logical shape the number of microbatches climbs from where the bubble is small, for as long as the estimate gets better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from autopar.cost import Profile
from autopar.errors import InfeasibleError, PlanError
from autopar.interop import ChosenStage, Folded, StageKind, best_stages, block_layers, fold, in_flight
from autopar.interop.submeshes import logical_shapes, submesh_sizes
from autopar.intraop import Sends, TradeOff, TradeOffs
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh, make_axes
from autopar.ir.placement import Axis
from autopar.ir.plan import Choice, Plan, SearchReport
from autopar.microbatch import batch_types, one_microbatch_plan
from autopar.planning import Part, Place, Request, best_plan, divided, microbatch_counts
from autopar.progress import Report, reporting
from autopar.refusal import most_of
from autopar.simulate import Timeline, predict, simulate, traffic, traffic_by_submesh
from autopar.simulate.layers import LayerCost, layer_costs
from autopar.simulate.schedule import without_collector
from autopar.staging import cut
from autopar.template import template_constraints, template_recompute
from autopar.trace import Blocks
from autopar.zero import pinned_modules, recomputable

_FEW_DEVICES = 8
FINALISTS = 3
"""Plans that are built for the whole model and simulated; more where these do not fit, or simulating is quick."""
_MOST_FINALISTS, _QUICK_S = 16, 1.5
_HALVINGS = 3
"""Of the hull of time against memory, towards the fastest placements that fit."""
_HOPELESS = 1.03
"""A setting whose fastest placements would take so many times the best estimate is not looked at further."""
_NEVER = 2**62
_TEMPLATE_SHAPES = 8
"""Logical shapes, the best first, for which placements are also found around templates."""
_LIKELY_STAGES = 8
"""The number of stages that is looked at first: what comes later is judged by what was found."""
_SHARE = 0.6
"""Of the budget for the search; the rest is for simulating the best."""
_FULL = 4
"""With so many microbatches for each other stage, the bubble is a fifth: where the search for their number begins."""
_SLACK = 1.03
"""Estimated peaks are mostly too high, by up to a tenth: what is estimated so little above the limit is tried."""
_CHUNKS = (2, 4)
RECOMPUTE = ("none", "block", "full")


@dataclass(frozen=True)
class Setting:
    """Equal submeshes of one logical shape, and the number of microbatches.

    zero: placements are found around a template's constraints with this ZeRO stage; None leaves them free.
    """

    axes: LogicalMesh
    num_devices: int
    num_stages: int
    microbatches: int
    zero: int | None = None


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run the model, with its estimates: ns a step and the largest peak in bytes a device."""

    setting: Setting
    choice: TradeOff
    recompute: str
    schedule: str
    stage_of_layer: tuple[int, ...]
    step_ns: int
    peak_bytes: int
    lower_bound_ns: int

    @property
    def row(self) -> dict[str, Any]:
        """For `SearchReport.tried`."""
        sizes = "x".join(str(axis.size) for axis in self.setting.axes) or "1"
        return {
            "mesh": sizes, "stages": self.setting.num_stages, "microbatches": self.setting.microbatches,
            "schedule": self.schedule, "recompute": self.recompute, "estimated_ns": self.step_ns,
            "estimated_bytes": self.peak_bytes,
        }  # fmt: skip


class _Look(NamedTuple):
    """What a setting has: the time that its fastest placements would take, the least of what fits, all candidates.

    stride: how many counts, each double the last, until what does not fit may, as if all of it were activations.
    """

    floor_ns: int
    least_ns: int
    found: list[Candidate]
    stride: int = 1


def best_staged_plan(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None
) -> Plan:  # fmt: skip
    """The fastest plan that fits, of one stage or several on equal submeshes.

    Raises InfeasibleError naming the smallest memory limit that can be met.
    """
    with without_collector():
        planner = Planner(graph, blocks, request, profile)
        with reporting(progress, len(planner.shapes)) as report:
            found = planner.search(report)
        return planner.best(found, *_of_one_stage(graph, blocks, request, profile, progress))


def _of_one_stage(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None
) -> tuple[Plan | None, InfeasibleError | None]:  # fmt: skip
    """On few devices, what the search of one stage finds on all logical meshes, also of three axes; or why not."""
    stages = {c.stages for c in request.constraints if c.stages is not None}
    if request.mesh.num_devices > _FEW_DEVICES or stages - {1}:
        return None, None
    try:
        return best_plan(graph, blocks, request, profile, progress), None
    except InfeasibleError as error:
        return None, error


class Planner:
    def __init__(self, graph: Graph, blocks: Blocks, request: Request, profile: Profile) -> None:
        self.graph, self.blocks, self.request, self.profile = graph, blocks, request, profile
        self.paths = [path for group in blocks.paths for path in group]
        self.layers = block_layers(graph, self.paths)
        self.folded: Folded = fold(graph, blocks, self.layers)
        self.shared = profile.shared_by(request.mesh.devices_per_node)
        self.limit = request.memory_limit or self.shared.usable_bytes
        self.admitted = int(self.limit * _SLACK)
        self.stop_reason = "all settings"
        self.started = time.monotonic()
        self.refusal = InfeasibleError("expected a strategy for every operator, found none")
        self._solver = request.budget.seconds, request.budget.seed
        self.best_ns = _NEVER
        self.floors: list[tuple[int, Setting]] = []  # of what was looked at, by time
        self.hidden = 1.0  # the least share of all costs in a row that an estimate was
        self.short_part, self.part, self.short_place = (
            cache(self._short_part),
            cache(self._part),
            cache(self._short_place),
        )

    def _short_part(self, microbatches: int) -> Part:
        return replace(divided(self.folded.graph, self.blocks, microbatches), copies=self.folded.copies)

    def _part(self, microbatches: int) -> Part:
        return divided(self.graph, self.blocks, microbatches)

    def _short_place(self, axes: LogicalMesh, microbatches: int, zero: int | None) -> Place:
        part, request = self.short_part(microbatches), self.request
        if zero is not None:
            made = batch_types(part.graph).items()
            batch = {name: type_ for name, type_ in made if self.blocks.representative_tensor(name) == name}
            rules = template_constraints(axes, zero, False, tuple(self.paths), batch)
            request = replace(request, constraints=(*request.constraints, *rules))
        return Place(part, axes, request, self.profile, self._sends(axes))

    def _place_of(self, setting: Setting) -> Place:
        return self.short_place(setting.axes, setting.microbatches, setting.zero)

    def _sends(self, axes: LogicalMesh) -> Sends | None:
        """Every border of layers is one of stages, as often as there are fewer of these."""
        size, mesh = math.prod(axis.size for axis in axes), self.request.mesh
        stages = mesh.num_devices // size
        if stages == 1:
            return None
        times = (stages - 1) / (self.layers.count - 1)
        distance = 1 if stages * size <= mesh.devices_per_node else mesh.devices_per_node
        return Sends(Axis("stages", 2, distance), dict.fromkeys(self._crossing, times))

    @cached_property
    def _crossing(self) -> list[str]:
        """Tensors that a layer makes and a later one reads."""
        graph, members = self.folded.graph, self._short_members
        return [
            name
            for node in graph.nodes
            for name in node.results
            if any(members[user.name][-1] > members[node.name][-1] for user, _ in graph.consumers[name])
        ]

    @cached_property
    def counts(self) -> list[int]:
        """Numbers of microbatches that are possible, ascending."""
        return microbatch_counts(self.folded.graph, self.request)

    @cached_property
    def shapes(self) -> list[tuple[int, LogicalMesh]]:
        """Submesh sizes with logical shapes; where stages are pinned, those of so many."""
        mesh = self.request.mesh
        pinned = {c.stages for c in self.request.constraints if c.stages is not None}
        most = max(1, self.layers.count) if self.request.mode == "train" else 1
        sizes = [n for n in submesh_sizes(mesh, most) if not pinned or {mesh.num_devices // n} == pinned]
        if not sizes:
            raise PlanError(
                f"expected a number of stages that {mesh} and {self.layers.count} layers allow, found "
                f"{' and '.join(map(str, sorted(pinned)))}; relax the constraint"
            )
        sizes.sort(key=lambda size: abs(math.log2(mesh.num_devices / size / _LIKELY_STAGES)))
        return [(size, axes) for size in sizes for axes in logical_shapes(size, mesh.devices_per_node)]

    @cached_property
    def recomputations(self) -> Mapping[str, tuple[str, ...]]:
        """Module paths by name, the fewest first; those that the model has nothing for are left out.

        Where constraints say what is computed again, that alone.
        """
        if self.request.mode != "train":
            return {"none": ()}
        pinned = pinned_modules(recomputable(self.graph, self.paths), self.request.constraints)
        if pinned is not None:
            return {"pinned": pinned}
        found = {}
        for name in RECOMPUTE:
            try:
                found[name] = template_recompute(self.graph, self.paths, name)
            except PlanError:
                continue
        return found

    # Search ----------------------------------------

    def search(self, report: Report) -> list[Candidate]:
        """Everything that was looked at in time, the fastest by estimate first."""
        found: list[Candidate] = []
        deadline = self.started + _SHARE * self.request.budget.seconds
        for size, axes in self.shapes:
            if found and time.monotonic() > deadline:
                self.stop_reason = "time limit"
                break
            here = self._climb(size, axes)
            found += here
            best = min((c for c in here if c.peak_bytes <= self.admitted), key=lambda c: c.step_ns, default=None)
            what = f"{best.step_ns / 1e6:.3f} ms" if best else "nothing better that fits"
            report(f"{self.request.mesh.num_devices // size} stages of {[a.size for a in axes]}: {what}")
        found += self._templates(found, deadline)
        found.sort(key=lambda candidate: candidate.step_ns)
        return found

    def _templates(self, found: Sequence[Candidate], deadline: float) -> list[Candidate]:
        """Templates on the best setting of each logical shape, and on those of half and twice as many microbatches.

        What their placements hide, or send together, may be more than what they cost.
        """
        fitting = [(c.step_ns, c.setting) for c in found if c.peak_bytes <= self.admitted]
        shapes: dict[LogicalMesh, Setting] = {}
        for _, setting in sorted([*fitting, *self.floors], key=lambda pair: pair[0]):
            shapes.setdefault(setting.axes, setting)
        settings = list(shapes.values())[:_TEMPLATE_SHAPES]
        more: list[Candidate] = []
        for factor in (1.0, 0.5, 2.0):
            for setting in settings:
                count = int(setting.microbatches * factor)
                for named in _as_templates(replace(setting, microbatches=count)):
                    if count in self.counts and time.monotonic() < deadline:
                        more += self._look(named).found
        return more

    def _climb(self, size: int, axes: LogicalMesh) -> list[Candidate]:
        """From a count whose bubble is small up, as long as it gets better or nothing fits; else down."""
        stages = self.request.mesh.num_devices // size
        counts = self.counts
        start = next((n for n, count in enumerate(counts) if count >= _FULL * (stages - 1)), len(counts) - 1)

        def look(number: int) -> _Look:
            return self._look(Setting(axes, size, stages, counts[number]))

        first = last = look(start)
        found, number, is_better_above = list(first.found), start + first.stride, False
        while number < len(counts):
            here = look(number)
            found += here.found
            worse = here.floor_ns > last.floor_ns and here.floor_ns >= self.best_ns
            if worse or (last.least_ns < _NEVER and here.least_ns >= last.least_ns):
                break
            is_better_above |= here.floor_ns < first.floor_ns or here.least_ns < first.least_ns
            number, last = number + here.stride, here
        last = first
        for number in () if is_better_above else range(start - 1, -1, -1):
            here = look(number)
            found += here.found
            if here.least_ns >= last.least_ns and here.floor_ns >= last.floor_ns:
                break
            last = here
        return found

    def _least(self, found: Sequence[Candidate]) -> int:
        return min((c.step_ns for c in found if c.peak_bytes <= self.admitted), default=_NEVER)

    def _look(self, setting: Setting) -> _Look:
        """The variants and schedules of a setting that may be the best.

        Its floor is what the fastest placements would take if they fitted. Where that is no better than the best so
        far, nothing else is looked at; where even all costs in a row are far from it, not even that.
        """
        place = self._place_of(setting)
        stages, count = setting.num_stages, setting.microbatches
        try:
            curve = place.placements.trade_offs(min(stages, count), *self._solver)
            fastest = curve.fastest()
            in_a_row = int(fastest.cost_ns / stages * (count + stages - 1) / count)
            if setting.zero is None and in_a_row * self.hidden > _HOPELESS * self.best_ns:
                self.floors.append((in_a_row, setting))
                return _Look(in_a_row, _NEVER, [])
            found = self._staged(setting, place, fastest, next(iter(self.recomputations)))
            floor = min(candidate.step_ns for candidate in found)
            self.hidden = min(self.hidden, floor / in_a_row)
            if floor < _HOPELESS * self.best_ns and self._least(found) == _NEVER:
                found += self._variants(setting, place, curve, fastest)
        except InfeasibleError:
            return _Look(_NEVER, _NEVER, [])
        least = self._least(found)
        self.best_ns = min(self.best_ns, least)
        peak = min(candidate.peak_bytes for candidate in found)
        stride = max(1, int(math.log2(peak / self.admitted))) if least == _NEVER else 1
        return _Look(floor, least, found, stride)

    def _variants(self, setting: Setting, place: Place, curve: TradeOffs, fastest: TradeOff) -> list[Candidate]:
        """For each recomputation the fastest placements that fit, nothing where others are faster anyway.

        What is computed again makes nothing faster: it is looked at where without it too little fits.
        """
        smallest = curve.smallest(fastest)
        found = self._staged(setting, place, smallest, [*self.recomputations][-1])
        if self._least(found) == _NEVER:
            return found
        for recompute in self.recomputations:
            limits = curve if recompute != "full" else replace(curve, in_flight=0)
            found += self._fitted(setting, place, limits, (fastest, smallest), recompute, self._least(found))
        return found

    def _fitted(
        self, setting: Setting, place: Place, curve: TradeOffs, ends: tuple[TradeOff, TradeOff], recompute: str,
        best: int,
    ) -> list[Candidate]:  # fmt: skip
        """Halves the hull between the fastest placements and the smallest, for the fastest that fit."""
        fast, small = ends
        found = self._staged(setting, place, fast, recompute) if recompute != next(iter(self.recomputations)) else []
        if found and (self._least(found) < _NEVER or min(c.step_ns for c in found) >= best):
            return found
        found += (here := self._staged(setting, place, small, recompute))
        if self._least(here) == _NEVER:
            return found
        for _ in range(_HALVINGS):
            between = curve.between(fast, small)
            if between is None:
                break
            found += (here := self._staged(setting, place, between, recompute))
            fast, small = (fast, between) if self._least(here) < _NEVER else (between, small)
        return found

    def _staged(self, setting: Setting, place: Place, choice: TradeOff, recompute: str) -> list[Candidate]:
        """The variant's best stages under each schedule."""
        return list(self._of_schedules(setting, place, choice, recompute))

    def _of_schedules(
        self, setting: Setting, place: Place, choice: TradeOff, recompute: str
    ) -> Iterator[Candidate]:  # fmt: skip
        kind = self._kind(setting, place, choice, recompute)
        stages, count = setting.num_stages, setting.microbatches
        for schedule in ("1f1b", "gpipe") if stages > 1 else ("1f1b",):
            try:
                found = best_stages([kind], self.request.mesh.num_devices, count, schedule)
            except InfeasibleError as error:
                if error.smallest_bytes is None:
                    continue
                free = replace(kind, memory_limit=error.smallest_bytes)
                found = best_stages([free], self.request.mesh.num_devices, count, schedule)
            chosen = found.best.stages
            of_layer = tuple(n for n, stage in enumerate(chosen) for _ in range(stage.begin, stage.end))
            peak = _peak(kind, chosen, count, schedule)
            step, bound = found.best.step_ns, found.lower_bound_ns
            yield Candidate(setting, choice, recompute, schedule, of_layer, step, peak, bound)
            if schedule == "1f1b" and stages > 1 and not self.recomputations[recompute]:
                step -= _hidden_bubble(kind, chosen)
                peak = _peak(kind, chosen, count, "zero_bubble")
                yield Candidate(setting, choice, recompute, "zero_bubble", of_layer, step, peak, min(step, bound))
        yield from self._interleaved(setting, kind, choice, recompute)

    def _interleaved(
        self, setting: Setting, kind: StageKind, choice: TradeOff, recompute: str
    ) -> Iterator[Candidate]:  # fmt: skip
        """Equal chunks, each submesh with several in turn."""
        stages, count, layers = setting.num_stages, setting.microbatches, self.layers.count
        for chunks in _CHUNKS:
            if stages < 2 or layers % (stages * chunks) or count % stages:
                continue
            of_layer = tuple(layer * stages * chunks // layers for layer in range(layers))
            step, peak = _interleaved_estimate(kind, of_layer, stages, chunks, count)
            yield Candidate(setting, choice, recompute, "interleaved", of_layer, step, peak, step)

    def _kind(self, setting: Setting, place: Place, choice: TradeOff, recompute: str) -> StageKind:
        """What each layer of the whole model costs with these placements."""
        short, part = self.folded, place.part
        again = self.recomputations[recompute]
        draft = replace(place.placements.draft, recompute=again)
        plan = place.placements.placed(draft, part.graph, choice.choice)
        count = max(1, short.layers.count)
        members = self._short_members
        firsts = [layer * setting.num_devices % self.request.mesh.num_devices for layer in range(count)]
        costs = layer_costs(part.graph, cut(part.graph, plan, members, firsts, "1f1b"), self.shared)
        return _stage_kind([costs[layer] for layer in short.layer_of or (0,)], setting.num_devices, self.admitted)

    @cached_property
    def _short_members(self) -> Mapping[str, tuple[int, ...]]:
        layers = self.folded.layers
        if not layers.count:
            return {node.name: (0,) for node in self.graph.nodes}
        return layers.members(self.folded.graph, range(layers.count))

    # The best few, simulated ----------------------------------------

    def best(self, found: Sequence[Candidate], other: Plan | None, refusal: InfeasibleError | None) -> Plan:
        """The fastest by simulation of the best that fit, and of another plan. Raises InfeasibleError.

        refusal: of the search for that other plan.
        """
        tried: list[dict[str, Any]] = []
        plans: list[tuple[Candidate, Timeline]] = []
        begun, deadline = time.monotonic(), self.started + self.request.budget.seconds
        for candidate in _distinct(found, self.admitted):
            tried.append(candidate.row)
            played = self._simulated(candidate, tried[-1])
            if played.peak_bytes <= self.limit:
                plans.append((candidate, played))
            now = time.monotonic()
            is_enough = len(plans) >= FINALISTS and now > begun + _QUICK_S
            if is_enough or len(plans) == _MOST_FINALISTS or (plans and now > deadline):
                break
        if other is not None:
            tried += [dict(row) for row in other.search.tried]
            if all(other.predicted.step_time_ns <= played.step_time_ns for _, played in plans):
                return replace(other, search=replace(other.search, tried=tuple(tried)))
        plans = plans or [self._smallest(tried, refusal)]
        return self.stated(*min(plans, key=lambda pair: pair[1].step_time_ns), tried)

    def _simulated(self, candidate: Candidate, row: dict[str, Any]) -> Timeline:
        """What the simulator says of a candidate, noted in its row."""
        played = simulate(self.part(candidate.setting.microbatches).graph, self.built(candidate), self.shared)
        row |= {"step_time_ns": played.step_time_ns, "peak_bytes": played.peak_bytes}
        return played

    def built(self, candidate: Candidate) -> Plan:
        """One microbatch's plan of the whole model."""
        plan = self._placed(candidate)
        if candidate.setting.num_stages == 1:
            return plan
        return self._cut(plan, candidate, self.part(candidate.setting.microbatches).graph)

    def _placed(self, candidate: Candidate) -> Plan:
        """The placements of one microbatch as of one stage."""
        setting = candidate.setting
        place = Place(self.part(setting.microbatches), setting.axes, self.request, self.profile)
        short = self._place_of(setting)
        draft = replace(place.draft(), recompute=self.recomputations[candidate.recompute])
        return short.placements.placed(draft, place.part.graph, candidate.choice.choice)

    def _cut(self, plan: Plan, candidate: Candidate, graph: Graph) -> Plan:
        members = self.layers.members(graph, candidate.stage_of_layer)
        size = candidate.setting.num_devices
        firsts = [n * size % self.request.mesh.num_devices for n in range(max(candidate.stage_of_layer) + 1)]
        return cut(graph, plan, members, firsts, candidate.schedule)

    def stated(self, candidate: Candidate, played: Timeline, tried: Sequence[Mapping[str, Any]]) -> Plan:
        """The candidate as a plan for the step, on all axes, with its prediction."""
        part = self.part(candidate.setting.microbatches)
        plan = replace(self._placed(candidate), predicted=predict(played), search=self._report(candidate, tried))
        plan = replace(plan, choices=self._explained(candidate))
        if candidate.setting.num_stages == 1:
            sent = traffic(part.graph, plan)
            return part.on_all_axes(replace(plan, predicted=replace(plan.predicted, comm_bytes=sent)))
        whole = replace(part, cut=lambda whole: self._cut(whole, candidate, self.graph)).in_stages(plan)
        by_submesh = traffic_by_submesh(self.graph, whole, part.graph, one_microbatch_plan(whole), played)
        most = max(by_submesh, key=lambda counts: sum(counts.values()))
        return replace(whole, predicted=replace(whole.predicted, comm_bytes=most))

    def _explained(self, candidate: Candidate) -> tuple[Choice, ...]:
        """Each decision against all others that the user allows, also where a template's were searched alone."""
        setting, own = candidate.setting, self._place_of(candidate.setting).placements
        if setting.zero is None:
            return own.explained(candidate.choice.choice)
        chosen = own.chosen(candidate.choice.choice)
        free = self.short_place(setting.axes, setting.microbatches, None)
        every = free.placements_with({name: option for (kind, name), option in chosen.items() if kind == "stored"})
        return every.explained(every.choosing(chosen))

    def _report(self, candidate: Candidate, tried: Sequence[Mapping[str, Any]]) -> SearchReport:
        return SearchReport(
            method="stages by dynamic programming over intra-op ILP",
            cost_ns=candidate.step_ns,
            lower_bound_ns=candidate.lower_bound_ns,
            stop_reason=self.stop_reason,
            seconds=round(time.monotonic() - self.started, 3),
            seed=self.request.budget.seed,
            tried=tuple(tried),
        )

    # Where nothing fits ----------------------------------------

    def _smallest(
        self, tried: list[dict[str, Any]], refusal: InfeasibleError | None
    ) -> tuple[Candidate, Timeline]:  # fmt: skip
        """The candidate with the least simulated peak, if that fits. Which are simulated does not depend on the limit.

        refusal: of plans of one stage. Raises InfeasibleError naming the least peak, or what plans of one stage can do
        with, whichever is less.
        """
        small = sorted(self._frugal(), key=lambda candidate: (candidate.peak_bytes, candidate.step_ns))[:FINALISTS]
        simulated = []
        for candidate in small:
            tried.append(candidate.row)
            simulated.append((candidate, self._simulated(candidate, tried[-1])))
        if not simulated:
            raise refusal or self.refusal
        chosen, played = min(simulated, key=lambda pair: pair[1].peak_bytes)
        needed = played.peak_bytes
        if needed <= self.limit:
            return chosen, played
        if refusal is not None and (refusal.smallest_bytes or needed) <= needed:
            raise refusal
        row = chosen.row
        raise InfeasibleError(
            f"expected a plan within memory_limit = {self.limit:,} bytes a device of {self.request.mesh}, found none: "
            f"the smallest limit that can be met is {needed:,} bytes (in {row['stages']} stages of logical mesh "
            f"{row['mesh']}, {row['microbatches']} microbatches, schedule {chosen.schedule}, "
            f"recompute={chosen.recompute!r}), most of it {most_of(predict(played).memory)}. Raise memory_limit to "
            "that, use more devices, or a smaller batch.",
            needed,
        )

    def _frugal(self) -> Iterator[Candidate]:
        """For each logical shape what takes least memory: most microbatches, all computed again."""
        recompute = list(self.recomputations)[-1]
        mesh, count = self.request.mesh, self.counts[-1]
        for size, axes in self.shapes:
            setting = Setting(axes, size, mesh.num_devices // size, count)
            place = self._place_of(setting)
            try:
                curve = place.placements.trade_offs(min(setting.num_stages, count), *self._solver)
                smallest = curve.smallest(curve.fastest())
            except InfeasibleError as error:
                self.refusal = error
                continue
            yield from self._staged(setting, place, smallest, recompute)


def _as_templates(setting: Setting) -> Iterator[Setting]:
    """The setting with its axes named as templates name them, the outer one for data: ZeRO 0, 1 and 3 where it is."""
    sizes = tuple(axis.size for axis in setting.axes)
    for names in {0: ((),), 1: (("dp",), ("tp",)), 2: (("dp", "tp"),)}[len(sizes)]:
        for zero in (0, 1, 3) if "dp" in names else (0,):
            yield replace(setting, axes=make_axes(names, sizes), zero=zero)


def _stage_kind(costs: Sequence[LayerCost], num_devices: int, limit: int) -> StageKind:
    columns = {name: np.array([getattr(cost, name) for cost in costs]) for name in LayerCost._fields}
    return StageKind(
        key=None,
        num_devices=num_devices,
        time_ns=columns["forward_ns"] + columns["backward_ns"],
        receive_ns=columns["receive_ns"],
        once_ns=columns["optimizer_ns"],
        reduce_ns=columns["reduce_ns"],
        hide_ns=columns["hide_ns"],
        resident_bytes=columns["resident_bytes"],
        activation_bytes=columns["activation_bytes"],
        workspace_bytes=columns["workspace_bytes"],
        memory_limit=limit,
    )


def _peak(kind: StageKind, stages: Sequence[ChosenStage], microbatches: int, schedule: str) -> int:
    """The largest of the stages' peaks in bytes a device."""
    peaks = []
    for number, (begin, end, _) in enumerate(stages):
        flying = in_flight(schedule, len(stages) - number, microbatches, num_submeshes=len(stages))
        stays = kind.resident_bytes[begin:end].sum() + kind.workspace_bytes[begin:end].max()
        peaks.append(int(stays + flying * kind.activation_bytes[begin:end].sum()))
    return max(peaks)


def _hidden_bubble(kind: StageKind, stages: Sequence[ChosenStage]) -> int:
    """What gradients of stored tensors fill of the bubble of 1f1b when they wait: a third of a pass both ways, as with
    matrices, on all stages but one (ZB-H1 of Zero Bubble, ICLR'24, table 1)."""
    slowest = max(int(kind.time_ns[begin:end].sum()) for begin, end, _ in stages)
    return (len(stages) - 1) * slowest // 3


def _interleaved_estimate(
    kind: StageKind, chunk_of_layer: Sequence[int], stages: int, chunks: int, microbatches: int
) -> tuple[int, int]:
    """Step time and peak of equal chunks in turn: the bubble is that of 1f1b over the number of chunks.

    T = B · t + (P − 1) · t / chunks + e   with t, e of the slowest submesh (Megatron-LM, SC'21, section 2.2.2).
    """
    of_layer = np.array(chunk_of_layer)
    steps, peaks = [], []
    for submesh in range(stages):
        own = of_layer % stages == submesh
        first = own & (np.diff(of_layer, prepend=-1) > 0)
        one = int(kind.time_ns[own].sum() + kind.receive_ns[first].sum())
        once = int(kind.once_ns[own].sum() + max(0, kind.reduce_ns[own].sum() - kind.hide_ns[own].sum()))
        steps.append(microbatches * one + (stages - 1) * one // chunks + once)
        flying = in_flight("interleaved", stages - submesh, microbatches, chunks, stages)
        stays = int(kind.resident_bytes[own].sum() + kind.workspace_bytes[own].max())
        peaks.append(stays + flying * int(kind.activation_bytes[own].sum()) // chunks)
    return max(steps), max(peaks)


def _distinct(found: Sequence[Candidate], limit: int) -> list[Candidate]:
    """Those that fit by estimate, the fastest first, of each setting the best of each schedule."""
    kept: dict[Any, Candidate] = {}
    for candidate in found:
        if candidate.peak_bytes <= limit:
            kept.setdefault((candidate.setting, candidate.schedule), candidate)
    return list(kept.values())
