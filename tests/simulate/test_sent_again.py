"""What the backward pass sends once more: where operators keep copies, nothing needs to be made again; and weights stay
of which a block hands out a view. Held against what ranks send."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.recompute import is_operator_call
from autopar.ir.statements import flatten
from autopar.microbatch import on_microbatch_axis
from autopar.pipeline import template_of_graph
from autopar.simulate.facts import Recomputation
from autopar.simulate.traffic import reached_tensors
from autopar.trace import trace
from tests.constructs import practice
from tests.constructs.check import EQUAL, judged


class Attention(nn.Module):
    """Queries that are scaled before: attention's kernel keeps them, or copies, by how it runs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.q, self.kv, self.way = nn.Linear(8, 8), nn.Linear(8, 8), way
        self.bias = nn.Parameter(torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).view(-1, 6, 2, 4).transpose(1, 2) for layer in (self.q, self.kv))
        q = q * 0.5
        if self.way == "by hand":
            return torch.matmul((q @ k.transpose(-1, -2)).softmax(-1), k).square().mean()
        bias = self.bias if self.way == "learned bias" else self.bias.detach()
        return F.scaled_dot_product_attention(q, k, k, bias).square().mean()


@pytest.mark.parametrize(
    ("way", "device", "again"),
    [("plain", "cpu", True), ("learned bias", "cpu", False), ("learned bias", "h100", True), ("by hand", "cpu", False)],
)
def test_what_is_kept_as_a_copy_is_not_made_again(way: str, device: str, again: bool) -> None:
    graph = trace(Attention(way), {"x": torch.randn(4, 6, 8)})
    plan = template_of_graph(graph, autopar.Mesh(device, devices_per_node=2), dp=2)
    plan = replace(plan, recompute=("mul()",))
    assert is_operator_call(plan.recompute[0])
    part = on_microbatch_axis(graph, plan).parts[0]
    found = Recomputation(graph, part, partial(flatten, graph, part), reached_tensors(graph))
    assert found.computes_again("mul") is again


def test_a_weight_of_which_its_block_hands_out_a_view_is_gathered_once() -> None:
    (model,) = (one for one in practice.CASES if "by power iterations" in one.what)
    verdict = judged(model, "zero3")
    assert verdict.kind == EQUAL, verdict.text
