"""Plans of several stages by what differs: equal to a whole simulation, and only changed stages are lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

import autopar
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.refinement import Worlds
from autopar.simulate import Incremental
from autopar.simulate.incremental import simulate_whole
from autopar.simulate.parts import Lowered, PartLowering
from autopar.simulate.segments import Segment
from autopar.soap import Proposals
from benchmarks.soap.delta import differences
from tests.soap.test_space import graph
from tests.soap.walks import worlds_of

STEPS = 12
FOUR = autopar.Mesh("h100", devices_per_node=4)


@cache
def worlds(schedule: str, zero: int = 0) -> Worlds:
    """Two stages of two layers each, or in two chunks."""
    own = graph("deep gpt")
    chunks = SCHEDULES[schedule].num_chunks or 3  # of those that have several
    count = max(2, SCHEDULES[schedule].fewest(2))
    plan = template_of_graph(own, FOUR, pp=2, dp=2, microbatches=count, schedule=schedule, chunks=chunks, zero=zero)
    return worlds_of(own, plan)


def plans(schedule: str, zero: int = 0) -> list[Plan]:
    """Those of a walk, cut into stages."""
    own, random = worlds(schedule, zero), Random(3)
    outline, space = own.outline(own.plan), own.first.space
    draft, found = space.draft(own.unstaged(own.plan)), [own.plan]
    for _ in range(STEPS):
        after = space.changed(draft, Proposals(space).draw(draft, random))
        if after is None:
            continue
        try:
            found.append(own.cut(microbatch(schedule), outline, after.plan))
        except PlanError:
            continue
        draft = after if random.random() < 0.5 else draft
    return found


def noting(lower: Callable[..., Lowered], noted: list[Segment]) -> Callable[..., Lowered]:
    """As it is, and notes what segment it lowers."""

    def noted_first(self: PartLowering, segment: Segment, *rest: Any) -> Lowered:
        noted.append(segment)
        return lower(self, segment, *rest)

    return noted_first


def microbatch(schedule: str) -> Graph:
    own = worlds(schedule)
    return own.place(own.outline(own.plan)).part.graph


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_walk_is_simulated_as_a_whole_simulation_would(schedule: str) -> None:
    own, profile = microbatch(schedule), worlds(schedule).profile
    stages, regathering = Incremental(own, profile), 0
    for plan in plans(schedule):
        assert not differences(simulate_whole(own, plan, profile), stages.timeline(plan))
        if SCHEDULES[schedule].splits_backward:  # the second part asks for all parameters when it begins
            regathering += sum(any(kept.regather for kept in stage.storage.values()) for stage in plan.stages)
    assert stages.num_whole <= regathering


@pytest.mark.parametrize("zero", [0, 3])
def test_stages_of_other_borders_share_what_is_known_of_equal_layers(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages, and six, of one model on equal submeshes: a layer is lowered once for all of them, unless it
    receives or sends other tensors."""
    own = graph("deep gpt")
    shapes = [("1f1b", 1), ("interleaved", 3), ("gpipe", 1)]
    found = [
        template_of_graph(own, FOUR, pp=2, dp=2, microbatches=2, schedule=name, chunks=chunks, zero=zero)
        for name, chunks in shapes
    ]
    part, profile = divided_graph(own, 2), worlds("1f1b").profile
    lowered: list[Segment] = []
    monkeypatch.setattr(PartLowering, "lower", noting(PartLowering.lower, lowered))
    stages = Incremental(part, profile)
    for plan in found:
        assert not differences(simulate_whole(part, plan, profile), stages.timeline(plan))
    lowered.clear()
    apart = [Incremental(part, profile).timeline(plan) for plan in found]
    alone, together = len(lowered), Incremental(part, profile)
    lowered.clear()
    assert [together.timeline(plan).step_time_ns for plan in found] == [played.step_time_ns for played in apart]
    assert len(lowered) < alone


@pytest.mark.parametrize("zero", [0, 1])
def test_stages_that_receive_and_send_alike_are_lowered_and_played_once(zero: int) -> None:
    own = graph("deep gpt")
    plan = template_of_graph(own, FOUR, pp=2, dp=2, microbatches=2, schedule="interleaved", chunks=3, zero=zero)
    part, profile = divided_graph(own, 2), worlds("1f1b").profile
    first, *inner, last = (stage.joined.players for stage in Incremental(part, profile).stages(plan))
    assert len(inner) == 4 and len(set(inner)) == 1 and not {first, last} & {*inner}
    assert not differences(simulate_whole(part, plan, profile), Incremental(part, profile).timeline(plan))


@pytest.mark.parametrize("in_parts", [True, False])
def test_what_may_come_in_two_parts_takes_as_long_in_one(in_parts: bool) -> None:
    """The second part of each backward pass was taken for all of it."""
    own, profile = microbatch("1f1b"), worlds("1f1b").profile
    stages = Incremental(own, profile, in_parts=in_parts, may_split=True)
    for plan in plans("1f1b")[:4]:
        for schedule in ("zero_bubble", "1f1b"):
            other = replace(plan, schedule=schedule)
            assert not differences(simulate_whole(own, other, profile), stages.timeline(other)), schedule


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_that_regather_their_parameters_are_simulated_in_parts(schedule: str) -> None:
    """Each pass gathers them anew, and the backward pass begins with those of no block."""
    own, profile = microbatch(schedule), worlds(schedule, 3).profile
    stages = Incremental(own, profile)
    for plan in plans(schedule, 3)[:5]:
        assert any(kept.regather for stage in plan.stages for kept in stage.storage.values())
        assert not differences(simulate_whole(own, plan, profile), stages.timeline(plan))
    assert not stages.num_whole


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_only_what_changed_is_lowered(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, (first, *_), lowered = microbatch(schedule), plans(schedule), list[object]()
    lower = PartLowering.lower
    monkeypatch.setattr(PartLowering, "lower", lambda *args: (lowered.append(args[1]), lower(*args))[1])
    stages = Incremental(own, worlds(schedule).profile)
    stages.timeline(first)
    assert lowered and not stages.num_whole
    lowered.clear()
    stages.timeline(replace(first))
    assert not lowered and not stages.num_whole


def test_a_backward_pass_in_two_parts_that_regathers_is_played_in_one_segment() -> None:
    """Its second part asks for all parameters when it begins."""
    own, (first, *_), profile = microbatch("zero_bubble"), plans("zero_bubble", 3), worlds("zero_bubble", 3).profile
    stages = Incremental(own, profile)
    assert not differences(simulate_whole(own, first, profile), stages.timeline(first))
    assert stages.num_whole == len(first.stages)
