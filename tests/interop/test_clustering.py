"""Layers of a model without repeated blocks: neighbouring nodes, about equal times, fewest bytes across the borders."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.interop import balanced_layers
from autopar.interop.clustering import portable_nodes
from autopar.ir import verifier
from autopar.ir.graph import Graph
from autopar.ops import admits
from autopar.pipeline import planned
from autopar.request import Request, SearchBudget
from autopar.trace import trace


class Hourglass(nn.Module):
    """Narrow in the middle, where it is cheap to cut, with a skip connection; no numbered modules."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow, self.grow = nn.Linear(32, 64), nn.Linear(64, 8), nn.Linear(8, 64)
        self.shrink, self.head = nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        small = self.narrow(self.widen(x).relu())
        again = self.shrink(self.grow(small).relu()) + small
        return nn.functional.cross_entropy(self.head(again), y)


def hourglass() -> Graph:
    return trace(Hourglass(), (torch.zeros(16, 32), torch.zeros(16, dtype=torch.int64)))


def crossing_bytes(graph: Graph, layer: dict[str, int], count: int) -> int:
    """What is made up to each border and read behind it, counted tensor by tensor."""
    total = 0
    for border in range(1, count):
        for node in graph.nodes:
            for name in node.results:
                readers = [layer[user.name] for user, _ in graph.consumers[name] if user.name in layer]
                if node.name in layer and layer[node.name] < border <= max(readers, default=0):
                    total += math.prod(graph.tensors[name].shape) * graph.tensors[name].itemsize
    return total


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_cut_within_the_imbalance_has_fewer_bytes(count: int, seed: int) -> None:
    graph, draw = hourglass(), random.Random(seed)
    names = [node.name for node in graph.nodes if node.name not in portable_nodes(graph)]
    times = {node.name: draw.randint(1, 9) for node in graph.nodes}
    found = balanced_layers(graph, times, count)
    order = [found.fixed[name] for name in names]
    assert order == sorted(order) and set(order) == set(range(found.count))
    total = sum(times[name] for name in names)
    most = max(int(total / found.count * 1.25), max(times[name] for name in names))
    best = math.inf
    for cuts in itertools.combinations(range(1, len(names)), found.count - 1):
        layer = {name: sum(position >= cut for cut in cuts) for position, name in enumerate(names)}
        slowest = max(sum(times[n] for n in names if layer[n] == number) for number in range(found.count))
        if slowest <= most:
            best = min(best, crossing_bytes(graph, layer, found.count))
    assert crossing_bytes(graph, dict(found.fixed), found.count) == best


def test_a_model_without_repeated_blocks_is_cut_into_stages() -> None:
    pins = (autopar.Constraint(stages=2, microbatches=4),)
    mesh = autopar.Mesh("h100", devices_per_node=4)
    graph = hourglass()
    plan = planned(graph, Request(mesh, "train", "adamw", None, pins, SearchBudget()))
    assert len({stage.first_rank for stage in plan.stages}) == 2
    verifier.verify(graph, plan, admits)
