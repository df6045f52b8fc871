"""Models with branches, and plans that put every region of theirs at coordinates of an axis, faster or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

import autopar
from autopar.branches import ForkRegion, Times, find_regions, put_in_branches
from autopar.ir.branches import refusal
from autopar.ir.graph import Graph
from autopar.ir.plan import Branch, Fork, Plan
from autopar.ir.structure import constant_tensors
from autopar.profiler import load_profile
from autopar.trace import trace
from models import inception, two_towers


class _Scaling(nn.Linear):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x)) * scale


class Scaled(nn.Module):
    """Layers that are given a row of an input each: branches that begin with an operator without gradient."""

    def __init__(self, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Scaling(width, width) for _ in range(depth))

    def forward(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        x = rows
        for number, layer in enumerate(self.layers):
            x = layer(x, scales[number])
        return x.square().mean()

    @staticmethod
    def build(config: None) -> nn.Module:
        return Scaled()

    @staticmethod
    def example_inputs(config: None) -> dict[str, torch.Tensor]:
        return {"rows": torch.randn(4, 8), "scales": torch.randn(2, 8)}


CONFIGS: dict[str, tuple[Any, Any]] = {
    "inception": (inception, inception.Config(modules="AE", image_size=16)),
    "two_towers": (two_towers, two_towers.Config()),
    "scaled": (Scaled, None),
}


@cache
def case(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], Graph]:
    """The model, a batch and its graph."""
    module, config = CONFIGS[name]
    torch.manual_seed(0)
    model, batch = module.build(config), module.example_inputs(config)
    return model, batch, trace(model, batch)


def regions(graph: Graph) -> list[ForkRegion]:
    """Those that do not overlap, the largest first."""
    constant, taken = constant_tensors(graph), set[str]()
    found = []
    for region in find_regions(graph, lambda node: refusal(graph, node, constant, ()) is not None):
        names = {name for branch in region.branches for name in branch}
        if taken.isdisjoint(names):
            taken |= names
            found.append(region)
    return found


def forks(graph: Graph, axis: str, coordinates: Sequence[int]) -> list[Fork]:
    """Every region on the axis, its branches at the coordinates in turn."""
    found = []
    for region in regions(graph):
        members: dict[int, tuple[str, ...]] = {}
        for number, branch in enumerate(region.branches):
            coordinate = coordinates[number % len(coordinates)]
            members[coordinate] = (*members.get(coordinate, ()), *branch)
        found.append(Fork(axis, tuple(Branch(c, names) for c, names in members.items())))
    return found


@cache
def plan(name: str, dp: int, tp: int, coordinates: tuple[int, ...], zero: int = 0, mode: str = "train") -> Plan:
    """A template's plan on dp × tp CPU ranks with all regions in branches at coordinates of tp."""
    model, batch, graph = case(name)
    mesh = autopar.Mesh("cpu", devices_per_node=dp * tp)
    base = autopar.template_plan(model, mesh, batch, dp=dp, tp=tp, zero=zero, mode=mode)
    return in_branches(graph, base, forks(graph, "tp", coordinates))


def in_branches(graph: Graph, base: Plan, wanted: Sequence[Fork]) -> Plan:
    """The plan with these forks, and no steps but the cheapest."""
    times = Times(graph, base, load_profile("cpu"))
    return replace(put_in_branches(graph, base, wanted, times.steps), simulator=None)
