"""The chain: Metropolis acceptance, memory, stop reasons, and that a lower bound changes nothing but the time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from random import Random

import pytest

import autopar
from autopar.clock import Clock
from autopar.ir.mesh import logical_meshes
from autopar.ir.plan import Plan, Refinement
from autopar.refinement import space_of
from autopar.simulate import Incremental, prices_of
from autopar.soap import Budget, Ledger, Proposals, Start, World, refine
from autopar.soap.annealing import anneal, threshold_ns
from tests.soap.drawn import drawn_graph, drawn_place, drawn_plan, first_plan

MESH = autopar.Mesh("h100", devices_per_node=4)


@cache
def world() -> tuple[World, Plan]:
    """A small world, and a drawn plan of it that is far from the best."""
    graph = drawn_graph(5, 5)
    place = drawn_place(graph, logical_meshes(MESH)[0], MESH)
    space, profile = space_of(place), place.shared_profile
    ledger = Ledger(space, prices_of(graph, place.draft(), profile, MESH.devices_per_node), 1)
    return World(space, Incremental(graph, profile), ledger=ledger), drawn_plan(space, first_plan(place), 3)


def run(plan: Plan, bounded: bool = True, proposals: int = 200, seconds: float = 60.0) -> tuple[Plan, Refinement]:
    own = world()[0] if bounded else world()[0]._replace(ledger=None)
    (_, found), report = refine([Start("drawn", own, plan)], Budget(proposals, seconds, seed=1))
    return found, replace(report, seconds=0.0)


def test_the_same_seed_gives_the_same_plan_and_report() -> None:
    assert run(world()[1]) == run(world()[1])


def test_a_lower_bound_changes_nothing_but_what_is_simulated() -> None:
    bounded, unbounded = run(world()[1]), run(world()[1], bounded=False)
    assert bounded[0] == unbounded[0]
    assert bounded[1].simulated < 0.7 * unbounded[1].simulated
    assert replace(bounded[1], simulated=0) == replace(unbounded[1], simulated=0)


def test_at_the_end_of_the_way_down_no_change_of_one_decision_gains() -> None:
    own, plan = world()
    for seed in range(4):
        chain = anneal(own, plan, 1000, Clock.of(math.inf), Random(seed))
        if chain.stop_reason.startswith(("no change", "half")) and chain.tally.proposals < 1000:
            break
    assert chain.tally.proposals < 1000
    for change in Proposals(own.space).all_changes(chain.best.draft):
        real = Proposals(own.space).exchanged(chain.best.draft.plan, change)
        after = None if real is None else own.space.changed(chain.best.draft, real)
        assert after is None or own.score.step_time_ns(after.plan) >= chain.best.cost_ns


def test_equal_axes_change_places_in_all_decisions_and_back() -> None:
    graph = drawn_graph(1, 4)
    place = drawn_place(graph, logical_meshes(MESH)[1], MESH)
    space, plan = space_of(place), first_plan(place)
    proposals, draft = Proposals(space), space.draft(plan)
    (change,) = [one for one in proposals.all_changes(draft) if one.kind == "axes"]
    real = proposals.exchanged(plan, change)
    assert real is not None
    other = space.changed(draft, real)
    assert other is not None
    now = other.plan.stage.nodes
    assert all(placed.results[0] == plan.stage.nodes[name].results[0][::-1] for name, placed in now.items())
    back = proposals.exchanged(other.plan, change)
    assert back is not None
    assert back.options == {**plan.stage.nodes, **plan.stage.storage, **plan.stage.inputs}


def test_the_plan_is_never_slower_than_the_first() -> None:
    for proposals in (1, 2, 5):
        found, report = run(world()[1], proposals=proposals)
        assert report.after_ns <= report.before_ns
        assert world()[0].score.step_time_ns(found) == report.after_ns


def test_memory_is_found_for_a_start_that_does_not_fit() -> None:
    space, score = world()[0].space, world()[0].score
    drawn = [drawn_plan(space, world()[1], seed) for seed in range(30)]
    peaks = sorted((score.peak_bytes(plan), seed) for seed, plan in enumerate(drawn))
    limit, largest = (peaks[0][0] + peaks[-1][0]) // 2, drawn[peaks[-1][1]]
    found, _ = run(replace(largest, memory_limit=limit))
    assert score.peak_bytes(largest) > limit >= score.peak_bytes(found)


@pytest.mark.parametrize(
    ("proposals", "seconds", "reason"),
    [(1, 60.0, "all 1 proposals made"), (100, -1.0, "work limit after"), (600, 60.0, "half of 600 proposals without")],
)
def test_it_says_why_it_stopped(proposals: int, seconds: float, reason: str) -> None:
    assert run(world()[1], proposals=proposals, seconds=seconds)[1].stop_reason.startswith(reason)


@pytest.mark.parametrize("over", [-1.0, 0.0, 0.5, 1.0, 3.0])
def test_worse_plans_are_accepted_as_often_as_metropolis_says(over: float) -> None:
    """A plan that costs `over` temperatures more is accepted with probability min(1, exp(−over))."""
    uniforms = [(number + 0.5) / 10_000 for number in range(10_000)]
    accepted = sum(1000.0 + over * 50.0 <= threshold_ns(1000, 50.0, uniform) for uniform in uniforms)
    assert accepted / len(uniforms) == pytest.approx(min(1.0, math.exp(-over)), abs=0.001)


def test_a_plan_that_fits_is_not_left_for_a_faster_one_that_does_not() -> None:
    score, plan = world()[0].score, world()[1]
    tight = replace(plan, memory_limit=score.peak_bytes(plan))
    for seed in range(3):
        (_, found), _ = refine([Start("drawn", world()[0], tight)], Budget(100, 60.0, seed))
        assert score.peak_bytes(found) <= tight.memory_limit
