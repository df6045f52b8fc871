"""What is found once for calls that are alike is what would be found for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.intraop import builder, costs
from autopar.intraop.builder import Built
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import make_axes
from autopar.ops import call_key
from autopar.planning import Place, divided
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks, trace
from tests.equivalence import zoo

pytestmark = pytest.mark.sweep


def _problem(graph: Graph, microbatches: int) -> Built:
    mesh = autopar.Mesh("a100", devices_per_node=4)
    request = Request(mesh, "train", "adamw", None, (), SearchBudget())
    part = divided(graph, find_blocks(graph), microbatches)
    return Place(part, make_axes(("a", "b"), (2, 2)), request, load_profile("a100")).placements.built


def _names_apart(graph: Graph, node: Node) -> Any:
    return node.name


@pytest.mark.parametrize(
    ("name", "microbatches"), [("gpt", 2), ("moe", 1), ("lstm", 1), ("wide_resnet", 1), ("dlrm", 1)]
)
def test_problems_are_the_same_when_each_call_is_asked(
    monkeypatch: pytest.MonkeyPatch, name: str, microbatches: int
) -> None:
    model, batch = zoo.build(name)
    graph = trace(model, batch)
    short = _problem(graph, microbatches)
    for module in (builder, costs):
        monkeypatch.setattr(module, "call_key", _names_apart)
    whole = _problem(replace(graph), microbatches)
    assert short.variables == whole.variables
    assert short.problem.edges == whole.problem.edges
    for one, other in (
        (short.problem.costs, whole.problem.costs),
        (short.problem.usages, whole.problem.usages),
        (short.problem.edge_costs, whole.problem.edge_costs),
    ):
        assert all(map(np.array_equal, one, other))


class _Calls(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (
            torch.addcmul(x, x, y, value=1) + torch.addcmul(x, y, x, value=1)
            + torch.addcmul(y, y, x, value=1) + torch.addcmul(x, x, y, value=2)
        ).sum()  # fmt: skip


def test_arguments_and_the_order_of_operands_tell_calls_apart() -> None:
    graph = trace(_Calls(), {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}, mode="inference")
    calls = [node for node in graph.nodes if "addcmul" in node.op]
    first, swapped, renamed, doubled = (call_key(graph, node) for node in calls)
    assert first == renamed
    assert len({first, swapped, doubled}) == 3
