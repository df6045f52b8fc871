"""The chain finds the best of all plans of small graphs, and the same one for the same seed."""

from __future__ import annotations

import pytest

import autopar
from autopar.ir.mesh import logical_meshes
from autopar.planning import SearchBudget
from autopar.refinement import space_of
from autopar.simulate import Incremental
from autopar.soap import Budget, Start, World, refine
from tests.soap.drawn import drawn_graph, drawn_place, first_plan, least_step_ns, num_plans

MESH = autopar.Mesh("h100", devices_per_node=4)
MOST = 8_000  # plans that are all looked at


CASES = [*((seed, count) for count in (2, 3, 4) for seed in range(3)), (0, 5), (2, 5), (3, 5)]


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
