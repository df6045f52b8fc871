"""Models whose layers are all inside of one module, which a head is put on: stages are cut inside of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.recompute import operator_call
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import profile_of
from autopar.simulate import Incremental
from autopar.simulate.incremental import simulate_whole
from autopar.trace import trace
from benchmarks.soap.delta import differences

FOUR = Mesh("h100", devices_per_node=4)
SIZE = 64


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(SIZE, 128), nn.Linear(SIZE, 128), nn.Linear(128, SIZE)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(SIZE), Gated()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x)) * scale


class Trunk(nn.Module):
    """All but the head. gives: "last", "first" (what the first layer makes, too) or "view" (that in another shape)."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives, self.embed, self.norm = gives, nn.Embedding(512, SIZE), nn.LayerNorm(SIZE)
        self.layers = nn.ModuleList([GatedLayer() for _ in range(4)])

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(tokens)
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        made = []
        for layer in self.layers:
            made.append(x := layer(x, scale) + 1.0)  # what the layer has made is held, and not saved
        first = made[0].reshape(-1, SIZE) if self.gives == "view" else made[0]
        return self.norm(x), first


class Headed(nn.Module):
    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives, self.trunk, self.head = gives, Trunk(gives), nn.Linear(SIZE, 512)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, first = self.trunk(tokens)
        if self.gives != "last":
            x = x + first.reshape(x.shape)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def headed(gives: str) -> Graph:
    with torch.device("meta"):
        model = Headed(gives)
    tokens = torch.empty((16, 32), dtype=torch.long, device="meta")
    return trace(model, (tokens, tokens))


def num_parts(gives: str, asked: dict[str, Any], again: tuple[str, ...] = ()) -> list[int]:
    """Of each stage, once it is seen to be simulated as in one part. again: operators that are computed again."""
    graph, count = headed(gives), asked.get("microbatches", 1)
    plan: Plan = template_of_graph(graph, FOUR, **asked)
    plan = replace(plan, recompute=again or plan.recompute)
    part, profile = divided_graph(graph, count), profile_of(FOUR)
    incremental = Incremental(part, profile)
    assert not differences(simulate_whole(part, plan, profile), incremental.timeline(plan))
    return [len(stage.parts) for stage in incremental.stages(plan)]


SHAPES = [
    {"dp": 4}, {"dp": 2, "tp": 2, "zero": 1}, {"tp": 4, "microbatches": 2}, {"dp": 4, "zero": 2, "microbatches": 2},
    {"dp": 2, "tp": 2, "sequence_parallel": True}, {"dp": 2, "pp": 2, "microbatches": 2},
    {"dp": 2, "pp": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2, "zero": 1},
]  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("gives", ["last", "first"])
def test_a_stage_is_cut_inside_of_the_module_around_its_layers(gives: str, recompute: str) -> None:
    """What the module holds until it returns is given back there, but for what is read behind it."""
    for asked in SHAPES:
        assert max(num_parts(gives, asked | {"recompute": recompute})) > 1, asked


@pytest.mark.parametrize("schedule", ["zero_bubble", "zero_bubble_v", "gpipe"])
def test_it_is_in_each_schedule(schedule: str) -> None:
    asked = {"tp": 2, "pp": 2, "microbatches": 4, "schedule": schedule}
    assert max(num_parts("last", asked)) > 1


def test_it_is_not_cut_where_its_own_operators_are_computed_again_for_others() -> None:
    """What one segment computes again for the backward pass of the next was not known there."""
    graph, asked = headed("last"), {"dp": 2, "tp": 2, "zero": 1}
    own, inner = (
        tuple(operator_call(node) for node in graph.nodes if node.op.startswith(op) and where in node.scope.module)
        for op, where in (("aten.add", "trunk"), ("aten.layer_norm", "layers"))
    )
    assert num_parts("last", asked, own)[0] <= 2 < num_parts("last", asked, inner)[0]


def test_what_it_gathers_again_is_for_all_of_it() -> None:
    assert num_parts("last", {"dp": 4, "zero": 3, "microbatches": 2})[0] <= 2


def test_memory_that_is_held_behind_it_under_another_name_is_not_followed() -> None:
    assert num_parts("view", {"dp": 4})[0] <= 2
