"""Gradient accumulation: what cannot be divided is refused with the reason; what does not fit at once is divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, PlacementError, PlanError
from autopar.ir.placement import R
from models import gpt, mlp

MESH = autopar.Mesh("cpu", devices_per_node=2)
BUDGET = autopar.SearchBudget(substitutions=False, proposals=0)


def small_gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    config = gpt.Config(num_layers=2, hidden_size=32, num_heads=2, seq_len=64, batch_size=8, vocab_size=64)
    return gpt.build(config), gpt.example_inputs(config)


def test_the_plan_says_what_each_microbatch_is() -> None:
    model, batch = small_gpt()
    plan = autopar.template_plan(model, MESH, batch, dp=2, microbatches=4)
    assert (plan.microbatches, plan.stage.axes[0].name, plan.stage.axes[0].size) == (4, "microbatch", 4)
    assert autopar.Plan.from_json(plan.to_json()) == plan
    assert plan.timeline().step_time_ns == plan.predicted.step_time_ns
    source = autopar.parallelize(model, MESH, batch, plan=plan).source
    assert "MICROBATCHES = 4" in source and "def prepare(self, microbatches):" in source


def test_a_number_that_does_not_divide_the_batch_is_refused() -> None:
    model, batch = small_gpt()
    with pytest.raises(PlanError, match=r"expected a number of microbatches that divides the batch of 8, found 3"):
        autopar.template_plan(model, MESH, batch, dp=2, microbatches=3)


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).square().mean()


class AcrossSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(0)[:, 0].mean()  # samples compete


class Peak(nn.Module):
    """A buffer that keeps what the batch makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.last.copy_(h.detach()[:2].tanh())
        return h.square().mean()


@pytest.mark.parametrize("model", [WithBuffer, Peak])
def test_forward_that_changes_a_buffer_by_the_batch_is_refused(model: type[nn.Module]) -> None:
    with pytest.raises(PlanError, match=r"test_microbatches.py:\d+.*microbatches=1"):
        autopar.template_plan(model(), MESH, (torch.randn(4, 4),), dp=2, microbatches=2)


def test_an_operator_across_samples_is_refused_with_its_line() -> None:
    with pytest.raises(PlanError, match=r"softmax.*test_microbatches.py:\d+.*mixes samples.*microbatches=1"):
        autopar.template_plan(AcrossSamples(), MESH, (torch.randn(4, 4),), dp=2, microbatches=2)


class OwnStatistics(WithBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)


def test_batch_statistics_mix_samples_and_running_ones_do_not() -> None:
    batch = (torch.randn(4, 4),)
    with pytest.raises(PlanError, match=r"batch_norm.*mixes samples"):
        autopar.template_plan(OwnStatistics(), MESH, batch, dp=2, microbatches=2)
    model = WithBuffer()
    model.norm.eval()
    assert autopar.template_plan(model, MESH, batch, dp=2, microbatches=2).microbatches == 2


def test_what_does_not_fit_at_once_is_planned_in_microbatches() -> None:
    model, batch = small_gpt()
    alone = [autopar.Constraint(stages=1)]
    whole = autopar.parallelize(model, MESH, batch, constraints=alone, search=BUDGET).plan
    assert whole.microbatches == 1
    divided = autopar.template_plan(model, MESH, batch, dp=2, microbatches=4)
    limit = (whole.predicted.peak_bytes + divided.predicted.peak_bytes) // 2
    with pytest.raises(InfeasibleError):
        autopar.parallelize(
            model, MESH, batch, memory_limit=divided.predicted.peak_bytes // 3,
            constraints=[autopar.Constraint(microbatches=1)], search=BUDGET,
        )  # fmt: skip
    plan = autopar.parallelize(model, MESH, batch, memory_limit=limit, constraints=alone, search=BUDGET).plan
    assert plan.predicted.peak_bytes <= limit


def test_constraints_pin_the_number() -> None:
    config = mlp.Config()
    model, batch = mlp.build(config), mlp.example_inputs(config)
    pinned = [autopar.Constraint(microbatches=2)]
    plan = autopar.parallelize(model, MESH, batch, constraints=pinned, search=BUDGET).plan
    assert plan.microbatches == 2


def test_microbatches_are_never_joined_again() -> None:
    """A plan that gathers over microbatches, which run one after another, is refused."""
    model, batch = small_gpt()
    plan = autopar.template_plan(model, MESH, batch, dp=2, microbatches=4)
    nodes = plan.stage.nodes
    node = next(name for name, node in nodes.items() if node.operands and str(node.operands[0][0]) == "S(0)")
    first, *others = nodes[node].operands
    changed = replace(nodes[node], operands=((R, *first[1:]), *others))
    with pytest.raises(PlacementError, match=r"nothing redistributes it|follow a rule"):
        autopar.verify(plan.placed(nodes={**nodes, node: changed}), model, batch)
