"""The bound of a change: never above the step, the same as that of the plan with it, and near the step."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

import autopar
from autopar.pipeline import template_of_graph
from autopar.refinement import Worlds
from autopar.soap import NEVER, Ledger, Proposals
from autopar.soap.space import Change
from tests.soap.test_space import graph
from tests.soap.walks import worlds_of

FOUR = autopar.Mesh("h100", devices_per_node=4)
STEPS = 30
STARTS = {
    "gpt": {"dp": 2, "tp": 2, "microbatches": 2},
    "moe": {"dp": 2, "tp": 2},
    "wide_resnet": {"dp": 4},
    "deep gpt": {"pp": 2, "dp": 2, "microbatches": 2},
}


@cache
def worlds(name: str) -> Worlds:
    return worlds_of(graph(name), template_of_graph(graph(name), FOUR, **STARTS[name]))  # type: ignore[arg-type]


def anew(name: str) -> Ledger:
    """A ledger that has seen nothing."""
    known = worlds(name).first.ledger
    assert known is not None
    return Ledger(known.space, known.prices, known.microbatches, known.stages)


@pytest.mark.parametrize("name", STARTS)
def test_a_change_is_bounded_as_the_plan_with_it_and_below_its_step(name: str) -> None:
    world, random = worlds(name).first, Random(7)
    draft, proposals = world.space.draft(worlds(name).unstaged(worlds(name).plan)), Proposals(world.space)
    for number in range(STEPS):
        change = proposals.draw(draft, random)
        least, after = world.least_ns(draft.plan, change), world.space.changed(draft, change)
        if after is None:
            continue
        assert least <= world.score.step_time_ns(after.plan), change
        if number % 5 == 0:
            assert least == anew(name).least_ns(after.plan), change
        draft = after if random.random() < 0.3 else draft


def test_the_bound_is_near_the_step_where_layers_wait_for_what_they_read() -> None:
    world, plan = worlds("gpt").first, worlds("gpt").unstaged(worlds("gpt").plan)
    assert world.least_ns(plan) >= 0.85 * world.score.step_time_ns(plan)


def test_a_change_of_one_layer_is_priced_beside_equal_ones_that_stay() -> None:
    """Of equal layers that are placed otherwise, each is priced by itself."""
    world, plan = worlds("deep gpt").first, worlds("deep gpt").unstaged(worlds("deep gpt").plan)
    name = next(name for name in world.space.operators if len(world.space.equals[name]) > 2)
    now, single = plan.stage.nodes[name], world.space.equals[name][1]
    for option in world.space.strategies[name]:
        change = Change("operator", single, {single: option})
        after = world.space.changed(world.space.draft(plan), change)
        expected = NEVER if after is None else anew("deep gpt").least_ns(after.plan)
        assert option == now or world.least_ns(plan, change) == expected


def test_what_is_computed_again_is_counted_once_more() -> None:
    world, plan = worlds("gpt").first, worlds("gpt").unstaged(worlds("gpt").plan)
    whole = tuple(module for group in world.space.recomputable[0] for module in group)
    before = world.least_ns(plan)
    for modules in (world.space.recomputable[0][0], whole):
        change = Change("recompute", modules[0], recompute=modules)
        after = world.space.changed(world.space.draft(plan), change)
        assert after is not None
        assert before < world.least_ns(plan, change) == anew("gpt").least_ns(after.plan)
        assert world.least_ns(plan, change) <= world.score.step_time_ns(after.plan)
        before = world.least_ns(plan, change)


def test_equal_decisions_have_one_key() -> None:
    world, plan = worlds("gpt").first, worlds("gpt").unstaged(worlds("gpt").plan)
    ledger, name = anew("gpt"), world.space.operators[0]
    now = plan.stage.nodes[name]
    other = next(one for one in world.space.strategies[name] if one != now)
    same, changed = (Change("operator", name, {name: option}, together=True) for option in (now, other))
    assert ledger.key(plan, same) == ledger.key(plan, Change("recompute", "")) != ledger.key(plan, changed)
