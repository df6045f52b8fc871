"""The chain finds the best of all plans of small graphs, and the same one for the same seed."""

from __future__ import annotations

import pytest

import autopar
from autopar.ir.mesh import logical_meshes
from autopar.refinement import space_of
from autopar.request import SearchBudget
from autopar.simulate import Incremental, prices_of
from autopar.soap import Budget, Ledger, Start, World, refine
from benchmarks.soap.exhaustive import least_step
from tests.soap.drawn import drawn_graph, drawn_place, first_plan, least_step_ns, num_plans

MESH = autopar.Mesh("h100", devices_per_node=4)
MOST = 8_000  # plans that are all looked at


NOTHING_KNOWN = 1 << 60
CASES = [*((seed, count) for count in (2, 3, 4) for seed in range(3)), (0, 5), (2, 5), (3, 5)]


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "count"), CASES)
def test_the_best_of_all_plans_is_found(seed: int, count: int) -> None:
    graph = drawn_graph(seed, count)
    looked_at = 0
    for axes in logical_meshes(MESH):
        place = drawn_place(graph, axes, MESH, is_whole=count > 2)
        space, plan = space_of(place), first_plan(place)
        if num_plans(space) > MOST:
            continue
        looked_at += 1
        score = Incremental(graph, place.shared_profile)
        budget = Budget(SearchBudget().proposals, 60)
        (_, found), report = refine([Start("the plan", World(space, score), plan)], budget)
        assert score.step_time_ns(found) == least_step_ns(space, plan, score, score.step_time_ns(found) + 1)
        assert report.after_ns == score.step_time_ns(found) <= report.before_ns == score.step_time_ns(plan)
    assert looked_at


def test_what_takes_all_operators_at_once_is_found() -> None:
    """Every change by itself loses: the operators have to be cut along a second axis together."""
    graph = drawn_graph(35, 5)
    place = drawn_place(graph, logical_meshes(MESH)[1], MESH, is_whole=True)
    space, plan, score = space_of(place), first_plan(place), Incremental(graph, place.shared_profile)
    ledger = Ledger(space, prices_of(graph, place.draft(), place.shared_profile, MESH.devices_per_node), 1)
    budget = Budget(SearchBudget().proposals, 60)
    (_, found), _ = refine([Start("the plan", World(space, score, ledger=ledger), plan)], budget)
    proof = least_step(space, plan, score, ledger, score.step_time_ns(found) + 1)
    assert proof.is_proved and score.step_time_ns(found) == proof.step_ns


@pytest.mark.sampled(only=("0-2", "2-4", "7-5"))
@pytest.mark.parametrize(("seed", "count"), [(0, 2), (1, 3), (2, 4), (7, 5), (5, 4)])
def test_branch_and_bound_finds_the_best_of_all_plans_with_nothing_known(seed: int, count: int) -> None:
    """And looks at fewer than half of them, with parameters stored whole and not."""
    graph = drawn_graph(seed, count)
    for axes, is_whole in ((logical_meshes(MESH)[0], True), (logical_meshes(MESH)[0], False)):
        place = drawn_place(graph, axes, MESH, is_whole=is_whole)
        space, plan = space_of(place), first_plan(place)
        if num_plans(space) > MOST:
            continue
        score = Incremental(graph, place.shared_profile)
        prices = prices_of(graph, place.draft(), place.shared_profile, MESH.devices_per_node)
        proof = least_step(space, plan, score, Ledger(space, prices, 1), NOTHING_KNOWN)
        assert proof.is_proved
        assert proof.step_ns == least_step_ns(space, plan, score, NOTHING_KNOWN)
        assert proof.simulated < 0.5 * num_plans(space)


def test_branch_and_bound_on_two_axes_agrees_and_says_what_it_did_not_prove() -> None:
    graph = drawn_graph(0, 2)
    place = drawn_place(graph, logical_meshes(MESH)[1], MESH, is_whole=True)
    space, plan, score = space_of(place), first_plan(place), Incremental(graph, place.shared_profile)
    prices = prices_of(graph, place.draft(), place.shared_profile, MESH.devices_per_node)
    ledger = Ledger(space, prices, 1)
    least = least_step(space, plan, score, ledger, NOTHING_KNOWN).step_ns
    assert least == least_step_ns(space, plan, score, least + 1)
    assert least_step(space, plan, score, ledger, least).step_ns == least
    assert not least_step(space, plan, score, ledger, NOTHING_KNOWN, limit=0).is_proved
