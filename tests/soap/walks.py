"""Long walks over the plans of a model, every typed proposal accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.refinement import Jumps, Worlds
from autopar.request import Request, SearchBudget
from autopar.soap import World
from autopar.soap.proposals import Proposals
from autopar.trace import find_blocks


def request_for(mesh: autopar.Mesh) -> Request:
    return Request(mesh, "train", "adamw", None, (), SearchBudget())


def worlds_of(graph: Graph, plan: Plan) -> Worlds:
    """What a plan may become."""
    profile = load_profile(plan.mesh.profile)
    request = replace(request_for(plan.mesh), recompute=plan.recompute)
    return Worlds(graph, find_blocks(graph), request, profile, plan)


def walk(worlds: Worlds, steps: int, seed: int, jumps: float) -> Iterator[tuple[World, Plan]]:
    """The worlds and plans on a walk from the first. jumps: the share of proposals that are jumps."""
    random, world, plan = Random(seed), worlds.first, worlds.unstaged(worlds.plan)
    possible = Jumps(worlds).possible()
    for _ in range(steps):
        if possible and random.random() < jumps:
            found = possible[random.choice([*possible])](world, plan, random)
            if found is not None:
                world, plan = found
        elif not (proposals := Proposals(world.space)).is_empty():
            draft = world.space.draft(plan)
            after = world.space.changed(draft, proposals.draw(draft, random))
            plan = plan if after is None else after.plan
        yield world, plan


def walked(graph: Graph, mesh: autopar.Mesh, steps: int, seed: int, jumps: float = 0.0, **template: int) -> Plan:
    """The plan at the end of a walk from a template's, as one for the step."""
    worlds = worlds_of(graph, template_of_graph(graph, mesh, **template))  # type: ignore[arg-type]
    *_, (world, plan) = walk(worlds, steps, seed, jumps)
    return worlds.stated(world, plan, ())
