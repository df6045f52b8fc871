"""Every proposal leads to a plan that type-checks, with the redistributions that it needs and no others."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

import autopar
from autopar.ir import verifier
from autopar.ir.graph import Graph
from autopar.ops import admits
from autopar.pipeline import template_of_graph
from autopar.refinement import Jumps
from autopar.trace import trace
from models import gpt
from tests.equivalence import planned
from tests.soap.walks import walk, worlds_of

FOUR = autopar.Mesh("h100", devices_per_node=4)
STEPS = 60

#: model, template, share of jumps
WALKS: dict[str, tuple[str, dict[str, int], float]] = {
    "transformer": ("gpt", {"dp": 2, "tp": 2}, 0.0),
    "experts": ("moe", {"dp": 2, "tp": 2}, 0.0),
    "convolutions": ("wide_resnet", {"dp": 2, "tp": 2}, 0.0),
    "tied weights": ("hf_gpt2", {"dp": 4, "zero": 3}, 0.0),
    "microbatches": ("gpt", {"dp": 2, "tp": 2, "microbatches": 2}, 0.3),
    "meshes": ("gpt", {"dp": 4}, 0.3),
    "stages": ("deep gpt", {"pp": 2, "dp": 2, "microbatches": 2}, 0.3),
}


@cache
def graph(name: str) -> Graph:
    """A model of the zoo, and one whose stages have several layers each."""
    if name == "deep gpt":
        config = gpt.Config(num_layers=6)
        return trace(gpt.build(config), gpt.example_inputs(config))
    return planned.graph(name)


@pytest.mark.parametrize("name", WALKS)
def test_every_plan_on_a_walk_is_typed(name: str) -> None:
    model, template, jumps = WALKS[name]
    worlds = worlds_of(graph(model), template_of_graph(graph(model), FOUR, **template))  # type: ignore[arg-type]
    seen = set[object]()
    for number, (world, plan) in enumerate(walk(worlds, STEPS, 1, jumps)):
        again = world.space.redistributed(plan)
        assert again is not None
        stage = plan.stage
        assert stage.forks or set(again.stage.redistributes) == set(stage.redistributes)
        decided = tuple(stage.nodes.values()), tuple(stage.storage.values()), stage.forks
        seen.add((decided, plan.recompute, id(world)))
        if number % 10 == 9:
            verifier.verify(worlds.graph, worlds.stated(world, plan, ()), admits)
    assert len(seen) > STEPS // 10


def test_a_jump_leads_to_another_world() -> None:
    worlds = worlds_of(graph("deep gpt"), template_of_graph(graph("deep gpt"), FOUR, dp=4))
    first, random = worlds.unstaged(worlds.plan), Random(0)
    found = [Jumps(worlds).possible()["mesh"](worlds.first, first, random) for _ in range(8)]
    ends = [worlds.stated(*end, ()) for end in found if end is not None]
    assert ends
    before = worlds.plan
    for plan in ends:
        verifier.verify(worlds.graph, plan, admits)
        now = plan.microbatches, plan.stages, plan.schedule
        assert now != (before.microbatches, before.stages, before.schedule)
