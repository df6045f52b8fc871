"""Drawn models of a few operators, and the best of all their plans by looking at each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan
from autopar.planning import Place, divided
from autopar.profiler import load_profile
from autopar.refinement import space_of
from autopar.request import Request, SearchBudget
from autopar.soap import Score, Space
from autopar.soap.space import Change
from autopar.trace import find_blocks, trace

SIZE = 512


class Drawn(nn.Module):
    """So many operators on what was made before, the last of them a sum."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        kinds = ("linear", "linear", "relu", "add", "mul", "turned")
        later = [
            (draw.choice(kinds), draw.randint(max(1, n - 1), n), draw.randrange(1 + n)) for n in range(1, count - 1)
        ]
        self.steps = [("linear", 0, 0), *later]
        linear = [kind == "linear" for kind, _, _ in self.steps]
        self.weights = nn.ParameterList(torch.empty(SIZE, SIZE, device="meta") for _ in range(sum(linear)))

    def forward(self, x: Tensor) -> Tensor:
        made, weights = [x], iter(self.weights)
        for kind, first, second in self.steps:
            one, other = made[first], made[second]
            if kind == "linear":
                made.append(nn.functional.linear(one, next(weights)))
            elif kind == "relu":
                made.append(torch.relu(one))
            elif kind == "turned":
                made.append(one.transpose(0, 1))
            else:
                made.append(one + other if kind == "add" else one * other)
        return made[-1].sum()


def drawn_graph(seed: int, count: int) -> Graph:
    """A graph of at most so many operators that are there for something."""
    return trace(Drawn(seed, count), (torch.empty(SIZE, SIZE, device="meta"),))


def drawn_place(graph: Graph, axes: LogicalMesh, mesh: autopar.Mesh, is_whole: bool = False) -> Place:
    """is_whole: parameters are stored whole."""
    rules = (autopar.Constraint(allow=("I",), what="stored"),) if is_whole else ()
    request = Request(mesh, "train", "adamw", None, rules, SearchBudget())
    return Place(divided(graph, find_blocks(graph), 1), axes, request, load_profile(mesh.profile))


def first_plan(place: Place) -> Plan:
    """The intra-op search's plan."""
    return place.fit(5.0)


def drawn_plan(space: Space, plan: Plan, seed: int) -> Plan:
    """A plan whose every decision is drawn."""
    draw = random.Random(seed)
    while True:
        choices = {**space.strategies, **space.storages, **space.inputs}
        change = Change("all", "", {name: draw.choice(options) for name, options in choices.items()})
        found = space.changed(space.draft(plan), change)
        if found is not None:
            return found.plan


def every_plan(space: Space, plan: Plan) -> Iterator[Plan]:
    """All typed plans of a space."""
    choices = {**space.strategies, **space.storages, **space.inputs}
    draft = space.draft(plan)
    for chosen in itertools.product(*choices.values()):
        found = space.changed(draft, Change("all", "", dict(zip(choices, chosen, strict=True))))
        if found is not None:
            yield found.plan


def num_plans(space: Space) -> int:
    """How many there are to look at, typed or not."""
    product = 1
    for options in (*space.strategies.values(), *space.storages.values(), *space.inputs.values()):
        product *= len(options)
    return product


def least_step_ns(space: Space, plan: Plan, score: Score, below_ns: int) -> int:
    """The shortest step of all plans that fit, if it is shorter than `below_ns`; else that."""
    best = below_ns
    for other in every_plan(space, plan):
        step_ns = score.step_time_ns(other, best)
        if step_ns < best and score.peak_bytes(other) <= plan.memory_limit:
            best = step_ns
    return best


__all__ = [
    "drawn_graph",
    "drawn_place",
    "every_plan",
    "first_plan",
    "least_step_ns",
    "num_plans",
    "replace",
    "space_of",
]
