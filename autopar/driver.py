"""The one loop over passes. It owns the clock, verifies plans, keeps the best, and refuses where nothing is left.

    pass     (front, context) → candidates: graphs that are to be planned, or plans of one
    round    each pass once, in order, on the graphs that are open; one more as long as a pass opens others
    end      no pass begins once the user has asked for an end, or the guard struck (`clock`), and there is a plan
    best     of the plans that a profile cannot tell from the fastest, the one that fits most surely, and of the fewest
             substitutions

After each pass the best plan is verified. What the verifier refuses is left out, with its reason as a row of the
report, and the next best takes its place. An interrupt, or the guard of the clock, leaves the best so far. Where
nothing is left a refusal is raised, that which names how much memory would do if there is one. `AUTOPAR_DUMP=folder`
has every plan written between passes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.clock import Clock, Interrupted, guard_struck, guarded, is_ending, is_interrupted
from autopar.cost import Profile
from autopar.errors import AutoparError, InfeasibleError, InternalError, MeshError, PlacementError, PlanError
from autopar.ir.buffers import joins_modules
from autopar.ir.graph import Graph
from autopar.ir.outline import Outline, sizes_text
from autopar.ir.plan import Plan, Rewriting, rule_counts
from autopar.ir.tried import Tried
from autopar.ir.writing import write_whole
from autopar.microbatch import check_plan
from autopar.odds import Sure, with_odds
from autopar.profiler import profile_of, profiles_of
from autopar.progress import Ended, Report, reporting, reporting_passes
from autopar.refusal import check_host
from autopar.request import Request
from autopar.show.text import rules_text
from autopar.substitute import GraphCandidate
from autopar.substitute.backtracking import RESOLUTION
from autopar.trace import Blocks, find_blocks
from autopar.tunables import GUARD, NEARBY_S

START, PLANNED, REFINED = range(3)
"""Ranks of candidates: where refinement may begin, but no answer; a plan; a plan that is refined, which goes first."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A graph that is to be planned, or a plan of one.

    outline: where a plan is looked for, None for anywhere; of a plan, its own. clock: until when planning it may begin.
    seconds: what that may take, None for what the request says. step_ns, peak_bytes: as the plan was simulated. made:
    states the plan, once it is asked for. told: says more of the answer, which no pass asks for: the bytes that it
    sends, counted operator by operator. asked: which open graph it is a plan of. is_bounded: a bound of it is known, so
    that it is taken where others are as fast.
    """

    variant: GraphCandidate
    outline: Outline | None = None
    clock: Clock | None = None
    seconds: float | None = None
    step_ns: float = math.inf
    peak_bytes: int = 0
    made: Callable[[], Plan] | None = None
    told: Callable[[Plan], Plan] | None = None
    asked: Candidate | None = None
    rank: int = PLANNED
    is_bounded: bool = False

    @property
    def graph(self) -> Graph:
        """The model's own, or an equal one."""
        return self.variant.graph

    @property
    def is_given(self) -> bool:
        """Whether it is of the model's own graph."""
        return not self.variant.steps

    @cached_property
    def plan(self) -> Plan:
        """The plan for the step. Raises AutoparError where it cannot be stated."""
        assert self.made is not None, "an open graph has no plan"
        return self.made()

    @property
    def answer(self) -> Plan:
        """The plan with all that is said of an answer."""
        return self.plan if self.told is None else self.told(self.plan)

    def planned(
        self, outline: Outline, step_ns: int, peak_bytes: int, made: Callable[[], Plan],
        told: Callable[[Plan], Plan] | None = None,
    ) -> Candidate:  # fmt: skip
        """A plan of this open graph."""
        return replace(self, outline=outline, step_ns=step_ns, peak_bytes=peak_bytes, made=made, told=told, asked=self)


def outline_of(plan: Plan) -> Outline:
    """What is decided of a plan before its placements."""
    submeshes = {stage.first_rank: stage.axes for stage in plan.stages}
    return Outline(tuple(submeshes.values()), plan.microbatches, schedule=plan.schedule)


def of_plan(
    asked: Candidate, outline: Outline, plan: Plan, made: Callable[[], Plan] | None = None,
    told: Callable[[Plan], Plan] | None = None,
) -> Candidate:  # fmt: skip
    """A plan that was simulated, as a candidate. made, told: say more of it, where it is the best, or the answer."""
    said = plan.predicted
    return asked.planned(outline, said.step_time_ns, said.peak_bytes, made or (lambda: plan), told)


@dataclass(eq=False)
class Context:
    """What was asked, and what is told of the search; passes write rows, and none reads them."""

    request: Request
    progress: Report | None = None
    ended: Ended = field(default_factory=lambda: reporting_passes(None))
    rows: list[Tried] = field(default_factory=list)
    rewriting: Callable[[], Rewriting] | None = None  # says what came of equal graphs, at the end
    struck_in: str = ""  # the pass that the guard ended, if it did

    def blocks(self, graph: Graph) -> Blocks:
        """The repeated blocks of a graph."""
        return find_blocks(graph, self.request.constraints)

    @cached_property
    def looks_for_stages(self) -> bool:
        """Whether plans of several stages are looked for: where constraints ask for them, or may be and nothing
        forbids."""
        request = self.request
        pinned = {constraint.stages for constraint in request.constraints} - {None}
        if not request.mesh.is_homogeneous or pinned:
            return request.mesh.is_homogeneous and pinned != {1}
        return request.budget.stages and request.mode == "train" and request.mesh.num_devices > 1

    def keeps_one_stage(self, graph: Graph) -> bool:
        """Whether stages could part what reads a buffer from what updates it; where they are pinned, that is tried."""
        return all(rule.stages is None for rule in self.request.constraints) and joins_modules(graph)

    @property
    def profile(self) -> Profile:
        """Of the devices, where they are of one kind."""
        return profile_of(self.request.mesh)

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """Of all kinds of devices."""
        return profiles_of(self.request.mesh)

    @cached_property
    def sure(self) -> Sure | None:
        """How surely plans fit, where the profile of the devices, which are of one kind, knows that and how far steps
        are from predictions."""
        profile = self.profile if self.request.mesh.is_homogeneous else None
        return None if profile is None or profile.steps is None or profile.memory is None else Sure(profile)

    def limit_bytes(self, ranks: range) -> int:
        """What a device of these ranks, which are of one kind, may hold."""
        group = self.request.mesh.group_of(ranks)
        own = self.profiles[group.profile].shared_by(group.devices_per_node)
        return self.request.memory_limit or own.usable_bytes

    def nearby(self, front: Front) -> Request:
        """What is asked of an equal graph in a given outline: what the best plan of the model's own computes again."""
        given, budget = front.best_of(front.given), self.request.budget
        again = () if given is None else given.plan.recompute
        return replace(self.request, recompute=again, budget=replace(budget, seconds=NEARBY_S))

    def asked_of(self, asked: Candidate) -> Request:
        """What is asked of a graph: the request, with the time that there is for it."""
        budget = self.request.budget
        return replace(self.request, budget=replace(budget, seconds=asked.seconds or budget.seconds))

    def near(self, asked: Candidate, planned: Callable[[], Iterable[Candidate]]) -> list[Candidate]:
        """What a pass finds of an equal graph in its outline, reported. Nothing where it has no plan that fits there,
        or may not be cut into so many stages, microbatches or rows."""
        found: list[Candidate] = []
        with contextlib.suppress(InfeasibleError, MeshError, PlacementError, PlanError):
            found += planned()
        least_ns = min((one.step_ns for one in found), default=None)
        step = "no plan found that fits" if least_ns is None else f"{least_ns / 1e6:.3f} ms a step"
        with reporting(self.progress, 1) as report:
            report(f"{rules_text(rule_counts(asked.variant.steps))} on {asked.outline}: {step}")
        return found

    def noting(self, asked: Candidate) -> Callable[[Tried], None]:
        """What takes a row: those of other graphs than the model's own are told in one each (`rewriting`)."""
        return self.rows.append if asked.is_given else lambda row: None


class Front:
    """Graphs that are open in this round, and plans found so far."""

    def __init__(self, graph: Graph, sure: Sure | None = None) -> None:
        """sure: how surely plans fit, where that is known."""
        self.sure = sure
        self.given = Candidate(GraphCandidate(graph, (), 0))
        self.open: list[Candidate] = []
        self.opened = [self.given]  # for the next round
        self.begun: list[Candidate] = []  # graphs that were open, and that a pass has looked at
        self.found: list[Candidate] = []
        self.refusals: list[AutoparError] = []
        self.refused: set[Candidate | None] = set()  # graphs of which a plan was left out
        self.kept: dict[tuple[str, Candidate], Any] = {}  # what a pass has built for a graph, for a later one
        self.spent_s: dict[Candidate, float] = {}  # seconds that passes took for a graph
        self.round = 0
        self._origin: dict[Candidate, str] = {}
        self._verified: set[Candidate] = set()

    @property
    def best(self) -> Candidate | None:
        """What would be the answer now."""
        rank = max((candidate.rank for candidate in self.found), default=START)
        return None if rank == START else chosen([one for one in self.found if one.rank == rank], self.sure)

    def best_of(self, asked: Candidate, *origins: str) -> Candidate | None:
        """The fastest plan of an open graph, before refinement; of some passes alone, or of any."""
        return next(iter(self.all_of(asked, *origins)), None)

    def all_of(self, asked: Candidate, *origins: str) -> list[Candidate]:
        """All such plans, the fastest first."""
        own = (one for one in self.found if one.asked is asked and one.rank == PLANNED)
        wanted = (one for one in own if not origins or self._origin[one] in origins)
        return sorted(wanted, key=lambda one: one.step_ns)

    def in_turn(self, wants: Callable[[Outline | None], bool]) -> Iterator[Candidate]:
        """The open graphs that a pass plans, by where they are to be planned, as far as there is time."""
        for asked in self.open:
            is_over = asked.clock is not None and asked.clock.is_over
            if wants(asked.outline) and not is_over and not (is_ending() and self.best is not None):
                if asked not in self.begun:
                    self.begun.append(asked)
                yield asked

    def next_round(self) -> bool:
        """Goes on to the graphs that were opened. False where there are none."""
        self.open, self.opened, self.round = self.opened, [], self.round + 1
        return bool(self.open)

    def add(self, candidate: Candidate, origin: str) -> None:
        """Takes what a pass found."""
        if candidate.made is None:
            self.opened.append(candidate)
        else:
            self.found.append(candidate)
            self._origin[candidate] = origin

    def settle(self) -> Iterator[Tried]:
        """Verifies the best, and leaves out what is refused until one is well typed. Yields rows that say why."""
        while (best := self.best) is not None and best not in self._verified:
            try:
                check_plan(best.graph, best.plan)
                check_host(best.plan)
                self._verified.add(best)
            except AutoparError as error:
                self.refusals.append(error)
                self.found.remove(best)
                self.refused.add(best.asked)
                yield refused(best, error)


def chosen(found: Sequence[Candidate], sure: Sure | None) -> Candidate:
    """The answer of some plans: the simplest; of those that the profile cannot tell from the fastest, it is one that
    fits as surely as any. Where nothing is known of that, it is the simplest of all. Plans that fill the device are
    left out where another one is faster with what refilling it may take."""
    if sure is None:
        return simplest(found)
    longest = {one: one.step_ns + sure.refilling_ns(one.peak_bytes, microbatches_of(one)) for one in found}
    least = min(longest.values())
    found = [one for one in found if longest[one] == one.step_ns or longest[one] <= least]
    most = min(one.step_ns for one in found) * (1 + sure.resolution)
    odds = {one: sure.of(one.peak_bytes) for one in found if one.step_ns <= most}
    return simplest([one for one in odds if odds[one] == max(odds.values())])


def microbatches_of(candidate: Candidate) -> int:
    """Of its outline; one where it has none."""
    return 1 if candidate.outline is None else candidate.outline.microbatches


def simplest(found: Sequence[Candidate]) -> Candidate:
    """Of the plans that a profile cannot tell from the fastest, the one of the fewest substitutions, the fastest of
    these.

    Predicted steps are sums of a profile's times, which differ by RESOLUTION when they are measured again: a
    substitution that gains less may as well lose. The model as it was written needs no reason.
    """
    most = min(one.step_ns for one in found) * (1 + RESOLUTION)
    near = (one for one in found if one.step_ns <= most)
    return min(near, key=lambda one: (len(one.variant.steps), one.step_ns, not one.is_bounded))


def refused(candidate: Candidate, error: AutoparError) -> Tried:
    """The row of a plan that is left out."""
    outline = candidate.outline
    assert outline is not None
    mesh = " + ".join(dict.fromkeys(map(sizes_text, outline.submeshes)))
    return Tried(
        mesh=mesh, stages=outline.num_submeshes, microbatches=outline.microbatches, schedule=outline.schedule,
        estimated_ns=round(candidate.step_ns), infeasible=str(error),
    )  # fmt: skip


# The loop ----------------------------------------

SearchPass = Callable[[Front, Context], Iterable[Candidate]]


def search(passes: Sequence[SearchPass], graph: Graph, context: Context) -> tuple[Graph, Plan]:
    """The best plan that passes find of a model's graph, or of a graph equal to it, with that graph.

    Raises InfeasibleError, or the first refusal, where nothing is found; Interrupted where there was nothing yet when
    the user asked for an end.
    """
    front, budget = Front(graph, context.sure), context.request.budget
    with guarded(GUARD * (budget.seconds + budget.refine_seconds)):
        _rounds(passes, front, context)
        if front.best is None:
            raise next((error for error in front.refusals if isinstance(error, InfeasibleError)), front.refusals[0])
        return front.best.graph, _told(front.best, context)


def _rounds(passes: Sequence[SearchPass], front: Front, context: Context) -> None:
    while front.next_round():
        for one in passes:
            if is_ending() and front.best is not None:
                return
            _run(one, front, context)
            if guard_struck() and not context.struck_in:
                context.struck_in = one.__name__


def _run(one: SearchPass, front: Front, context: Context) -> None:
    """One pass: what it finds is added, and the best verified."""
    name = one.__name__
    found: list[Candidate] = []
    try:
        for candidate in one(front, context):
            found.append(candidate)
            front.add(candidate, name)
    except InternalError:
        raise
    except AutoparError as error:
        front.refusals.append(error)
        context.rows += [Tried(setting=name, infeasible=str(error))] * (front.best is not None)
    except Interrupted:
        if front.best is None:
            raise
    context.rows += front.settle()
    _dump(f"{front.round}-{name}", found)
    if found and front.best is not None:
        context.ended(name, f"{front.best.step_ns / 1e6:.3f} ms a step")


def _told(best: Candidate, context: Context) -> Plan:
    """The plan, which says how it was found."""
    plan, outline, rows = best.answer, best.outline, [*context.rows]
    assert outline is not None
    if not best.is_given:
        rows.append(
            Tried(
                mesh=sizes_text(outline.axes), stages=outline.num_submeshes, microbatches=outline.microbatches,
                schedule=plan.schedule, step_time_ns=plan.predicted.step_time_ns, peak_bytes=plan.predicted.peak_bytes,
            )
        )  # fmt: skip
    said = f"interrupted, {plan.search.stop_reason}" if is_interrupted() else plan.search.stop_reason
    said = f"{said}; the clock struck in pass {context.struck_in}" if context.struck_in else said
    rewriting = None if context.rewriting is None else context.rewriting()
    report = replace(plan.search, tried=tuple(rows), rewriting=rewriting, stop_reason=said)
    return with_odds(replace(plan, substitutions=best.variant.steps, search=report), best.graph)


def _dump(name: str, found: Sequence[Candidate]) -> None:
    """Writes the plans that a pass found, where the user asks for that: for people who look for faults."""
    folder = os.environ.get("AUTOPAR_DUMP")
    plans = [candidate for candidate in found if candidate.made is not None] if folder else []
    for number, candidate in enumerate(plans):
        path = Path(str(folder), f"{name}-{number:03d}")
        try:
            text = replace(candidate.plan, substitutions=candidate.variant.steps).to_json()
            write_whole(path.with_suffix(".json"), text)
        except AutoparError as error:
            write_whole(path.with_suffix(".txt"), f"{error}\n")
