"""Causal masks are recognised by their values, and only they."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.emit import emit
from autopar.errors import PlanError
from autopar.pipeline import template_of_graph
from autopar.substitute.masks import ATTENTION, under_causal_masks, without_masks
from autopar.trace import trace
from tests.equivalence import planned, zoo
from tests.equivalence.harness import differences, run_rank
from tests.substitute.rewrites import alone

LENGTH = 6


class Attention(nn.Module):
    """Self-attention of one projection under a mask that forward makes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.project = kind, nn.Linear(4, 4)

    def mask(self, x: Tensor) -> Tensor:
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        if self.kind in ("bool", "window", "upper"):
            offset = {"bool": 0, "window": 0, "upper": 1}[self.kind]
            seen = seen.tril(offset)
            return seen & seen.triu(-2) if self.kind == "window" else seen
        if self.kind == "input":
            return (x[0, :, :1] > -100).expand(LENGTH, LENGTH) & seen.tril()
        least = {"added": float("-inf"), "least": torch.finfo(torch.float32).min, "weak": -1.0}[self.kind]
        return torch.full((LENGTH, LENGTH), least).triu(1).expand(2, 1, LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=self.mask(x)).sum()


@pytest.mark.parametrize("kind", ["bool", "added", "least"])
def test_a_lower_triangle_is_causal(kind: str) -> None:
    graph = trace(Attention(kind), (torch.zeros(2, LENGTH, 4),))
    (name,) = under_causal_masks(graph)
    after = without_masks(graph, (name,))
    (node,) = (node for node in after.nodes if node.op == ATTENTION)
    assert node.args[3:] == (None, 0.0, True)
    assert len(after.nodes) < len(graph.nodes)


@pytest.mark.parametrize("kind", ["window", "upper", "weak", "input"])
def test_another_mask_stays(kind: str) -> None:
    graph = trace(Attention(kind), (torch.zeros(2, LENGTH, 4),))
    assert under_causal_masks(graph) == ()
    (node,) = (node for node in graph.nodes if node.op == ATTENTION)
    with pytest.raises(PlanError, match="causal mask"):
        without_masks(graph, (node.name,))


def test_gpt2_without_its_masks_is_the_same_model() -> None:
    graph = planned.graph("hf_gpt2")
    names = under_causal_masks(graph)
    assert len(names) == 2
    after = without_masks(graph, names)
    model, batch = zoo.build("hf_gpt2")
    plan = template_of_graph(after, autopar.Mesh("cpu", devices_per_node=1))
    found = run_rank(0, 1, emit(after, plan), dict(model.state_dict()), batch, ("sgd",))
    assert differences(alone("hf_gpt2"), found) == []


def test_a_plan_says_that_masks_are_gone() -> None:
    model, batch = zoo.build("hf_gpt2")
    budget = autopar.SearchBudget(seconds=4.0, stages=False, proposals=0)
    program = autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=1), batch, search=budget)
    plan = autopar.Plan.from_json(program.plan.to_json())
    assert "causal-mask" in {step.rule for step in plan.substitutions}
    assert autopar.parallelize(model, plan.mesh, batch, plan=plan).source == program.source
