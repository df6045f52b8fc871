"""Models whose tokens are exchanged for experts equal the models, whatever the routing; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.by_hand import template_of_graph
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.rewrites import graph_of
from models import gpt
from tests.equivalence import experts
from tests.equivalence.experts import ONE, Case

CASES = [
    Case("mixtral", "ep_x4", "power law", 1),  # 2, 2, 2 and 1 experts
    Case("mixtral", "ep_two_levels", "none to a rank", 4),
    Case("qwen3_moe", "ep_over_tp", "balanced", 1),
    Case("qwen3_moe", "ep_pp", ONE, 4),
    Case("deepseek", "ep", "none to a rank", 1),
    Case("deepseek", "ep_zero3", "power law", 4),
    Case("gpt_oss", "ep_tp", ONE, 1),
    Case("gpt_oss_told", "ep_tp", "power law", 4),
    Case("qwen3_moe", "ep_over_cp", "balanced", 4),
]


@pytest.mark.sampled(
    only=(
        "mixtral, ep_x4, power law, 1 chunk",
        "mixtral, ep_two_levels, none to a rank, 4 chunks",
        "qwen3_moe, ep_over_tp, balanced, 1 chunk",
        "qwen3_moe, ep_pp, one expert, 4 chunks",
        "deepseek, ep_zero3, power law, 4 chunks",
        "gpt_oss, ep_tp, one expert, 1 chunk",
        "gpt_oss_told, ep_tp, power law, 4 chunks",
        "qwen3_moe, ep_over_cp, balanced, 4 chunks",
    )
)
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_that_are_exchanged_compute_the_same(case: Case) -> None:
    found = experts.faults(case)
    assert not found, "\n".join(found)


def graph(name: str = "qwen3_moe") -> Any:
    return experts._graph(name, 3)


def test_chunks_and_levels_are_in_the_plan() -> None:
    """They are read back, and replayed."""
    plan = template_of_graph(graph(), autopar.Mesh("cpu", 2, 2), dp=4, ep=4, exchange="two-level", exchange_chunks=4)
    again = autopar.Plan.from_json(plan.to_json())
    node = next(node for node in graph_of(again, graph()).nodes if node.op == ROUTED_EXPERTS)
    assert dict(node.kwargs)["chunks"] == 4
    assert [(axis.name, axis.size) for axis in plan.stage.axes] == [("ep_nodes", 2), ("ep", 2)]
    up, x = (plan.stage.nodes[node.name].operands[position] for position in (3, 0))
    assert list(map(str, up)) == ["S(0)", "S(0)"] == list(map(str, x))


@pytest.mark.parametrize(
    ("choices", "error", "said"),
    [
        ({"dp": 4, "ep": 3}, MeshError, "expected ep as a divisor of dp=4"),
        ({"dp": 4, "ep": 4, "exchange": "sideways"}, PlanError, "expected exchange as one of flat, two-level"),
        ({"dp": 4, "ep": 4, "exchange": "two-level"}, PlanError, "ranks of several nodes"),
        ({"dp": 4, "ep": 2, "hsdp": 2, "zero": 1}, PlanError, "both of which divide dp"),
        ({"dp": 4, "ep": 2, "exchange_chunks": 9}, PlanError, "expected 1 to 8 chunks"),
        ({"dp": 4, "ep": 2, "exchange_chunks": 0}, PlanError, "expected 1 to 8 chunks"),
    ],
)
def test_what_cannot_be_is_refused(choices: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        template_of_graph(graph(), autopar.Mesh("cpu", 1, 4), **choices)


def test_experts_are_fewer_than_ranks_or_none() -> None:
    mesh = autopar.Mesh("cpu", 1, 16)
    with pytest.raises(PlanError, match="expected at least ep=16 experts, found 8"):
        template_of_graph(graph(), mesh, dp=16, ep=16)
    config = gpt.Config(num_layers=1)
    with pytest.raises(PlanError, match="expected routed experts with ep=2, found none"):
        autopar.template_plan(gpt.build(config), autopar.Mesh("cpu", 1, 2), gpt.example_inputs(config), dp=2, ep=2)


class Frozen(nn.Module):
    """Experts alone, of tokens that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape)) for shape in ((6, 8), (8, 6)))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.ops.autopar.routed_experts(x, ids, weights, self.up, self.down, "relu", False, 4)
        return made.square().mean()


def test_tokens_without_a_gradient_stay() -> None:
    """No gradient would come back of them, so that ranks would not all wait for the exchange."""
    batch = {"x": torch.randn(8, 6), "ids": torch.randint(4, (8, 2)), "weights": torch.rand(8, 2)}
    with pytest.raises(InfeasibleError, match="no strategy that the constraints allow"):
        autopar.template_plan(Frozen(), autopar.Mesh("cpu", 1, 2), batch, dp=2, ep=2)
