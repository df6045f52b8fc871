"""Unequal devices that share each batch: rows by speed, within each device's memory, and steps in lockstep."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost import Profile
from autopar.errors import InfeasibleError, MeshError, PlacementError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import make_axes
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.pipeline import placed, planned, template_of_graph
from autopar.planning import divided
from autopar.profiler import profiles_of
from autopar.request import Request, SearchBudget
from autopar.shares import SharedBatch, best_rows, near_rows
from autopar.simulate import Timeline, simulate
from autopar.trace import find_blocks, trace
from models import gpt
from tests.oracles.frozen.cases import PROFILES

MESH = autopar.Mesh([(PROFILES["a100"], 1, 2), (PROFILES["v100"], 1, 2)])
REQUEST = Request(MESH, "train", "adamw", None, (), SearchBudget(2.0))


@cache
def graph(batch_size: int = 32) -> Graph:
    config = gpt.Config(
        num_layers=2, hidden_size=1024, num_heads=8, seq_len=512, vocab_size=1024, batch_size=batch_size
    )
    with torch.device("meta"):
        model = gpt.build(config).to(torch.float16)
    return trace(model, gpt.example_inputs(config))


@cache
def template(split: str = "speed", mesh: autopar.Mesh = MESH, **asked: Any) -> Plan:
    return template_of_graph(graph(), mesh, split=split, **({"dp": 4} | asked))


def shares_of(plan: Plan) -> tuple[int, ...]:
    return next((axis.shares for axis in plan.stage.axes if axis.shares), ())


# Rows ----------------------------------------


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_near_rows_add_up_and_are_as_near_as_any(data: st.DataObject) -> None:
    kinds = data.draw(st.integers(1, 3))
    ranks = [data.draw(st.integers(1, 4)) for _ in range(kinds)]
    weights = [data.draw(st.integers(1, 9)) for _ in range(kinds)]
    total = data.draw(st.integers(1, 40))
    unit = total / sum(count * weight for count, weight in zip(ranks, weights, strict=True))

    def distance(rows: tuple[int, ...]) -> float:
        return max(abs(row / (weight * unit) - 1) for row, weight in zip(rows, weights, strict=True))

    every = [
        rows for rows in itertools.product(range(1, total + 1), repeat=kinds)
        if sum(count * row for count, row in zip(ranks, rows, strict=True)) == total
    ]  # fmt: skip
    found = near_rows(total, ranks, weights)
    if found is not None:
        assert found in every
        assert kinds > 2 or distance(found) <= min(map(distance, every)) + 1e-9
    assert found is not None or kinds > 2 or not every


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_best_rows_of_two_kinds_are_those_of_exhaustive_search(data: st.DataObject) -> None:
    ranks = [data.draw(st.integers(1, 4)) for _ in range(2)]
    speeds = [data.draw(st.integers(1, 9)) for _ in range(2)]
    fixed = [data.draw(st.integers(0, 30)) for _ in range(2)]
    total = sum(ranks) * data.draw(st.integers(1, 12))

    def cost(rows: tuple[int, ...]) -> tuple[int, int]:
        return 0, max(f + 840 * row // speed for row, speed, f in zip(rows, speeds, fixed, strict=True))

    every = [
        rows for rows in itertools.product(range(1, total + 1), repeat=2)
        if sum(count * row for count, row in zip(ranks, rows, strict=True)) == total
    ]  # fmt: skip
    start = near_rows(total, ranks, [1, 1])
    assert start is not None
    assert cost(best_rows(start, ranks, cost)) == min(map(cost, every))


# Plans ----------------------------------------


def test_faster_devices_get_more_rows_and_the_step_is_shorter() -> None:
    equal, fast = template("equal"), template()
    assert shares_of(equal) == ()
    shares = shares_of(fast)
    assert shares[0] == shares[1] > shares[2] == shares[3]
    assert fast.predicted.step_time_ns < 0.85 * equal.predicted.step_time_ns
    for plan in (equal, fast):
        check_plan(graph(), plan)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.timeline().step_time_ns == plan.predicted.step_time_ns
    assert {source.split()[0] for source in fast.sources} == {PROFILES["a100"], PROFILES["v100"]}


def work_ns(timeline: Timeline) -> list[int]:
    return [lane.breakdown.compute_ns for lane in timeline.lanes]


def test_each_lane_is_as_fast_and_as_full_as_its_own_devices() -> None:
    """Beside meshes of one kind with as many rows: an equal split of 16 rows over 4 is the half of one of 32."""
    plan = template("equal")
    alone = [
        simulate(graph(), replace(plan, mesh=autopar.Mesh(kind, 2, 2)), profiles_of(MESH)[kind])
        for kind in (PROFILES["a100"], PROFILES["v100"])
    ]
    together = simulate(graph(), plan, profiles_of(MESH))
    assert work_ns(together) == [work_ns(own)[0] for own in alone]
    assert [lane.peak_bytes for lane in together.lanes] == [own.peak_bytes for own in alone]
    assert together.step_time_ns >= max(own.step_time_ns for own in alone)
    assert together.lanes[0].breakdown.exposed_communication_ns > alone[0].breakdown.exposed_communication_ns


@pytest.mark.parametrize("mesh", [MESH, autopar.Mesh([("a100", 1, 2), ("v100", 1, 2)])], ids=["frozen", "shipped"])
def test_collectives_start_when_the_last_rank_is_there(mesh: autopar.Mesh) -> None:
    """And end together, whatever computation costs them on either kind."""
    for asked in ({}, {"dp": 2, "tp": 2}, {"zero": 3, "microbatches": 2}):
        timeline = template(mesh=mesh, **asked).timeline()
        sums: dict[int, list[tuple[str, int]]] = {}
        for event in timeline.events:  # type: ignore[attr-defined]
            if event.stream[1] != "compute" and "gradient" in event.kind:
                sums.setdefault(event.stream[0], []).append((event.name, event.end_ns))
        first, second = sums.values()
        joined = dict(first).keys() & dict(second).keys()
        assert joined and {name: end for name, end in first if name in joined} == {
            name: end for name, end in second if name in joined
        }


def test_shares_on_equal_devices_make_the_larger_share_slower() -> None:
    plan = template_of_graph(graph(), autopar.Mesh("a100", 1, 2), dp=2)
    unequal = plan.placed(axes=(plan.stage.axes[0]._replace(shares=(5, 3)),))
    first, second = simulate(graph(), unequal, profiles_of(plan.mesh)["a100"]).lanes
    assert first.breakdown.compute_ns > plan.predicted.breakdown.compute_ns > second.breakdown.compute_ns
    assert first.peak_bytes > second.peak_bytes


def test_each_microbatch_is_shared_out_in_whole_rows() -> None:
    plan = template(microbatches=4)
    check_plan(graph(), plan)
    assert 8 % sum(shares_of(plan)) == 0 and shares_of(plan)[0] > shares_of(plan)[2]


def with_memory(kind: str, capacity: int) -> dict[str, Profile]:
    profiles = profiles_of(MESH)
    facts = replace(profiles[kind].facts, capacity_bytes=capacity, reserve_bytes=0)
    return profiles | {kind: replace(profiles[kind], facts=facts, memory=None, _shared={})}


def test_a_rank_gets_no_more_rows_than_its_memory_holds() -> None:
    def shared(profiles: dict[str, Profile]) -> Plan:
        part = divided(graph(), find_blocks(graph()), 1)
        return SharedBatch(part, make_axes(("x",), (4,)), REQUEST, profiles).plan("speed")

    free = shared(profiles_of(MESH))
    peak = simulate(graph(), free, profiles_of(MESH)).lanes[0].peak_bytes
    limit = peak * 3 // 4
    profiles = with_memory(PROFILES["a100"], limit)
    tight = simulate(graph(), shared(profiles), profiles)
    assert tight.lanes[0].peak_bytes <= limit < peak
    with pytest.raises(InfeasibleError):
        shared(with_memory(PROFILES["a100"], limit // 50))


def test_rows_that_other_axes_cut_in_unequal_parts_are_passed_over() -> None:
    """25 of 32 rows over two ranks: no reshape keeps such parts whole, so that the verifier refused what was best."""
    part = divided(graph(), find_blocks(graph()), 1)
    batch = SharedBatch(part, make_axes(("x", "y"), (2, 2)), REQUEST, profiles_of(MESH))
    draft = next(draft for draft in batch.drafts() if all(len({*types}) == 1 for types in draft.stage.inputs.values()))
    odd, even = batch.shared(draft, (25, 7)), batch.shared(draft, (26, 6))
    assert not batch.are_even(odd) and batch.are_even(even)
    with pytest.raises(PlacementError, match="in 64 slices does not reshape"):
        check_plan(graph(), odd)
    check_plan(graph(), batch.plan("speed"))


def test_the_better_of_shares_and_stages_is_found() -> None:
    best = placed(graph(), REQUEST)
    check_plan(graph(), best)
    rows = [row for row in best.search.tried if row.step_time_ns]
    assert {str(row.setting).split()[0] for row in rows} == {"shares", "stages"}
    assert best.predicted.step_time_ns == min(row.step_time_ns or 0 for row in rows)
    assert 0 < best.search.lower_bound_ns <= best.predicted.step_time_ns


@pytest.mark.sampled(only=("2",))
@pytest.mark.parametrize("stages", [1, 2])
def test_pinned_stages_say_which_is_looked_for(stages: int) -> None:
    request = replace(REQUEST, constraints=(autopar.Constraint(stages=stages),))
    assert len(planned(graph(), request).stages) == stages


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(MeshError, match="all but the first join devices of one kind, found 2 × 2"):
        template_of_graph(graph(), autopar.Mesh([("a100", 1, 1), ("v100", 1, 3)]), dp=2, tp=2)
    uneven = autopar.Mesh([("a100", 1, 2), ("v100", 1, 2)])
    with pytest.raises(
        PlanError, match=r"rows can be shared out over a100:1x2\+v100:1x2, .* found 11 for 2 \+ 2 parts"
    ):
        template_of_graph(graph(11), uneven, dp=4, split="speed")
    with pytest.raises(PlanError, match='expected split as "equal" or "speed", found \'slow\''):
        template("slow")
