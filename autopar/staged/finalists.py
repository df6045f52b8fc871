"""The best candidates as plans of the whole model, simulated; the fastest that fits is stated, or none is and why."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from autopar.clock import Clock
from autopar.collector import cached_method
from autopar.errors import InfeasibleError
from autopar.ir.plan import Choice, Plan, SearchReport
from autopar.ir.schedule import SCHEDULES
from autopar.ir.tried import Tried
from autopar.planning import DividedGraph, Place
from autopar.refusal import does_not_fit
from autopar.simulate import Incremental, Timeline, predict, traffic_by_submesh
from autopar.staged.mixing import keeping_more
from autopar.staged.search import StagedSearch
from autopar.staged.ways import EstimatedStages, StageStrategy
from autopar.staging import cut
from autopar.tunables import BESIDE_KNOWN, CORRECTIONS, FAR_FINALISTS, FINALISTS, LIKE_BORDERS, MOST_FINALISTS, QUICK_S


class Finalists:
    """What a search found, the fastest by estimate first."""

    def __init__(
        self, search: StagedSearch, found: Sequence[EstimatedStages], note: Callable[[Tried], None]
    ) -> None:  # fmt: skip
        self.search, self.layered, self.request = search, search.layered, search.request
        near = (candidate for candidate in found if candidate.step_ns <= BESIDE_KNOWN * search.known_ns)
        self.found = sorted(near, key=lambda candidate: candidate.step_ns)
        self._note = note

    @cached_method
    def _simulator(self, microbatches: int) -> Incremental:
        """Of plans in which equal layers, of whichever stage, are lowered and played once."""
        return Incremental(self.layered.part(microbatches).graph, self.layered.shared)

    @cached_property
    def plans(self) -> list[tuple[EstimatedStages, Timeline]]:
        """Those that fit, simulated."""
        return self._kept_more(self._with_other_borders(self._fitting()))

    def _fitting(self) -> list[tuple[EstimatedStages, Timeline]]:
        """The first candidates that fit when they are simulated, as many as there is time for.

        Estimated peaks are mostly too high: after those that fit by estimate come faster ones that would, were theirs
        as much too high as is usual here.
        """
        first = _distinct(self.found, 0, self.layered.admitted)
        plans = self._simulated_of(first, MOST_FINALISTS)
        if not plans:
            return plans
        usual = statistics.median(candidate.peak_bytes / played.peak_bytes for candidate, played in plans)
        fastest = min(played.step_time_ns for _, played in plans)
        more = _distinct(self.found, self.layered.admitted, int(self.layered.limit * usual))
        return plans + self._simulated_of([c for c in more if c.step_ns < fastest], FINALISTS)

    def _simulated_of(
        self, candidates: Sequence[EstimatedStages], most: int, than_ns: float = math.inf
    ) -> list[tuple[EstimatedStages, Timeline]]:
        """Those that fit of the first candidates, as far as there is time.

        First are those of the least estimate, corrected by how far off the last one was on as many stages of as many
        ranks: what estimates leave out (waiting for each other, cores that ranks share) is much alike there. Where it
        is far above what was found, so are all after it. than_ns: what is to be undercut.
        """
        plans: list[tuple[EstimatedStages, Timeline]] = []
        quick = Clock.of(QUICK_S)
        left, off = list(candidates), dict[Any, float]()
        while left:
            likely_ns, number = min((one.step_ns * off.get(_submeshes(one), 1.0), n) for n, one in enumerate(left))
            fastest_ns = min((found.step_time_ns for _, found in plans), default=math.inf)
            far_ns = min(than_ns, FAR_FINALISTS * min(fastest_ns, self.search.known_ns))
            if likely_ns > far_ns and not self.layered.shares_cores:
                break
            candidate = left.pop(number)
            played = self._simulated(candidate)
            off[_submeshes(candidate)] = played.step_time_ns / candidate.step_ns
            if played.peak_bytes <= self.layered.limit:
                plans.append((candidate, played))
            is_enough = len(plans) >= FINALISTS and quick.is_over
            if is_enough or len(plans) == most or (plans and self.search.clock.is_over):
                break
        return plans

    def _with_other_borders(
        self, plans: list[tuple[EstimatedStages, Timeline]]
    ) -> list[tuple[EstimatedStages, Timeline]]:
        """With the runners-up of the fastest plans, whose stages begin at other layers, and the fastest in other
        numbers of chunks, as far as there is time.

        Of all that are within `LIKE_BORDERS` of the fastest: where ranks share cores, those that wait leave theirs to
        others, so that borders change the step by little, and the estimate may not tell which are best.
        """
        if not plans:
            return plans
        fastest, fastest_ns = min(((c, played.step_time_ns) for c, played in plans), key=lambda pair: pair[1])
        near = {_but_borders(c) for c, played in plans if played.step_time_ns <= fastest_ns * (1 + LIKE_BORDERS)}
        near.add(_but_chunks(fastest))
        known = {(candidate.ways, candidate.schedule, candidate.stage_of_layer) for candidate, _ in plans}
        others: dict[Any, EstimatedStages] = {}
        for candidate in self.found:
            key = candidate.ways, candidate.schedule, candidate.stage_of_layer
            is_like = not near.isdisjoint((_but_borders(candidate), _but_chunks(candidate)))
            if is_like and key not in known and candidate.peak_bytes <= self.layered.admitted:
                others.setdefault(key, candidate)
        return plans + self._simulated_of(list(others.values()), MOST_FINALISTS, fastest_ns)

    def _kept_more(self, plans: list[tuple[EstimatedStages, Timeline]]) -> list[tuple[EstimatedStages, Timeline]]:
        """With the fastest plan again, of which fewer layers are computed again, if any are and that fits.

        Estimates of its peak are corrected by what was simulated.
        """
        if not plans:
            return plans
        best, played = min(plans, key=lambda pair: pair[1].step_time_ns)
        for _ in range(CORRECTIONS):
            admitted = int(self.layered.limit * best.peak_bytes / played.peak_bytes)
            fewer = keeping_more(self.layered, best, admitted)
            if fewer is None:
                break
            again = self._simulated(fewer)
            if again.peak_bytes > self.layered.limit or again.step_time_ns >= played.step_time_ns:
                break
            best, played = fewer, again
            plans = [*plans, (best, played)]
        return plans

    def _simulated(self, candidate: EstimatedStages) -> Timeline:
        """What the simulator says of a candidate, noted in a row."""
        played = self._simulator(candidate.microbatches).timeline(self._built(candidate))
        self._note(replace(candidate.row, step_time_ns=played.step_time_ns, peak_bytes=played.peak_bytes))
        return played

    def of_split_sequences(self, most: int, than_ns: float) -> list[Plan]:
        """The first candidates that fit by estimate, around templates whose activations between blocks are split by
        positions: plans that are not simulated. than_ns: what their estimates are at most."""
        near = (one for one in self.found if one.step_ns <= than_ns and one.ways[0].setting.splits_sequence)
        first = _distinct([*near], 0, self.layered.admitted)[:most]
        return [
            replace(self._built(one), search=self._report(one), choices=self._explained(one.ways[0])) for one in first
        ]

    # Plans ----------------------------------------

    def _part(self, candidate: EstimatedStages) -> DividedGraph:
        return self.layered.part(candidate.microbatches)

    def _built(self, candidate: EstimatedStages) -> Plan:
        """One microbatch's plan of the whole model."""
        plans = self._placed(candidate)
        if len(plans) == 1:
            return plans[0]
        return self._cut(plans, candidate)

    def _placed(self, candidate: EstimatedStages) -> list[Plan]:
        """For each stage the placements of one microbatch of the whole model; equal ones are one plan."""
        again = self.layered.modules_again(candidate.recompute)
        made: dict[Any, Plan] = {}
        for way in candidate.ways:
            if (way.setting, way.choice) not in made:
                made[way.setting, way.choice] = self._placed_as(way, again)
        return [made[way.setting, way.choice] for way in candidate.ways]

    def _placed_as(self, way: StageStrategy, again: tuple[str, ...]) -> Plan:
        place = Place(
            self.layered.part(way.setting.microbatches), way.setting.axes, self.request, self.layered.profile
        )  # fmt: skip
        draft = replace(place.draft(), recompute=again)
        return self.layered.place_of(way.setting).placements.placed(draft, place.part.graph, way.choice.choice)

    def _cut(self, plans: Sequence[Plan], candidate: EstimatedStages) -> Plan:
        graph = self._part(candidate).graph
        layers, _ = self.layered.layers_of(candidate)
        members = layers.members(graph, candidate.stage_of_layer)
        own = plans if candidate.is_mixed else plans[0]
        profiles = {self.request.mesh.profile: self.layered.profile}
        submeshes = candidate.num_submeshes
        sizes = [way.setting.num_devices for way in candidate.ways[:submeshes]]
        firsts = SCHEDULES[candidate.schedule].in_turn(first_ranks(sizes), len(candidate.ways) // submeshes)
        return cut(graph, own, members, firsts, candidate.schedule, self.request.mesh, profiles)

    def stated(self, candidate: EstimatedStages, played: Timeline) -> Plan:
        """The candidate as a plan for the step, with its prediction and what it sends."""
        return self.told(played, self.placed(candidate, played))

    def placed(self, candidate: EstimatedStages, played: Timeline) -> Plan:
        """The same, but for what it sends."""
        told: dict[str, Any] = {
            "predicted": predict(played),
            "search": self._report(candidate),
            "choices": self._explained(candidate.ways[0]),
        }
        return replace(self._built(candidate), **told)

    def told(self, played: Timeline, plan: Plan) -> Plan:
        """Such a plan with the bytes that it sends in a step."""
        part = self.layered.part(plan.microbatches)
        if len(plan.stages) == 1:
            return part.with_traffic(plan)
        by_submesh = traffic_by_submesh(part.whole, plan, played)
        most = max(by_submesh, key=lambda counts: sum(counts.values()))
        return replace(plan, predicted=replace(plan.predicted, comm_bytes=most))

    def _explained(self, way: StageStrategy) -> tuple[Choice, ...]:
        """Each decision against all others that the user allows, also where a template's were searched alone."""
        setting, own = way.setting, self.layered.place_of(way.setting).placements
        if setting.zero is None:
            return own.explained(way.choice.choice)
        chosen = own.chosen(way.choice.choice)
        free = self.layered.short_place(setting.axes, setting.microbatches, None, False)
        every = free.placements_with({name: option for (kind, name), option in chosen.items() if kind == "stored"})
        return every.explained(every.choosing(chosen))

    def _report(self, candidate: EstimatedStages) -> SearchReport:
        template, method = candidate.row.template, "stages by dynamic programming over intra-op ILP"
        return SearchReport(
            method=method if template is None else f"template {template}: {method}",
            cost_ns=candidate.step_ns,
            lower_bound_ns=candidate.lower_bound_ns,
            stop_reason=self.search.stop_reason,
            seconds=round(self.search.clock.passed_s, 3),
            seed=self.request.budget.seed,
        )

    # Where nothing fits ----------------------------------------

    def smallest(self, refusal: InfeasibleError | None) -> tuple[EstimatedStages, Timeline]:
        """The fastest that fits of those that take least memory. Which are simulated does not depend on the limit.

        refusal: of plans of one stage. Raises InfeasibleError naming the least peak, or what plans of one stage can do
        with, whichever is less.
        """
        frugal = sorted(self.search.frugal(), key=lambda candidate: (candidate.peak_bytes, candidate.step_ns))
        simulated = [(candidate, self._simulated(candidate)) for candidate in frugal[:FINALISTS]]
        if not simulated:
            raise refusal or self.search.looks.refusal
        fitting = [pair for pair in simulated if pair[1].peak_bytes <= self.layered.limit]
        if fitting:
            return min(fitting, key=lambda pair: pair[1].step_time_ns)
        chosen, played = min(simulated, key=lambda pair: pair[1].peak_bytes)
        if refusal is not None and (refusal.smallest_bytes or played.peak_bytes) <= played.peak_bytes:
            raise refusal
        row = chosen.row
        where = (
            f"in {row.stages} stages of logical mesh {row.mesh}, {row.microbatches} microbatches, schedule "
            f"{row.schedule}, recompute={row.recompute!r}"
        )
        raise does_not_fit(self.request.mesh, self.layered.limit, predict(played), where)


def first_ranks(sizes: Sequence[int]) -> list[int]:
    """Where each submesh begins: neighbouring ranks, larger submeshes first so that none crosses a node."""
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    begins = dict(zip(order, accumulate((sizes[number] for number in order), initial=0), strict=False))
    return [begins[number] for number in range(len(sizes))]


def _but_borders(candidate: EstimatedStages) -> tuple[Any, ...]:
    """All that says how a candidate runs, but for where its stages begin."""
    return candidate.ways, candidate.schedule, candidate.recompute


def _but_chunks(candidate: EstimatedStages) -> tuple[Any, ...]:
    """The same, but for how many chunks there are, where there are any."""
    has_chunks = SCHEDULES[candidate.schedule].has_chunks
    return tuple(dict.fromkeys(candidate.ways)), has_chunks, candidate.schedule, candidate.recompute


def _submeshes(candidate: EstimatedStages) -> tuple[int, ...]:
    """How many ranks each stage has."""
    return tuple(way.setting.num_devices for way in candidate.ways)


def _distinct(found: Sequence[EstimatedStages], least: int, most: int) -> list[EstimatedStages]:
    """Those of estimated peaks above `least` up to `most`, the fastest first; of each setting the best by schedule."""
    kept: dict[Any, EstimatedStages] = {}
    for candidate in found:
        if least < candidate.peak_bytes <= most:
            settings = tuple(dict.fromkeys(way.setting for way in candidate.ways))
            kept.setdefault((settings, candidate.schedule, len(set(candidate.recompute)) > 1), candidate)
    return list(kept.values())
