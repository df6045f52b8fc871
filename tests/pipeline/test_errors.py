"""Errors say what was expected, what was found, where, and what to do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import autopar
from autopar import errors
from models import mlp


def model_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = mlp.Config()
    return mlp.build(config), mlp.example_inputs(config)


def test_no_divisible_strategy_names_tensor_and_mesh() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    rule = autopar.Constraint("0.weight", ("S(0)",), what="used")
    with pytest.raises(errors.InfeasibleError, match=r"no divisible strategy.*0\.weight"):
        autopar.parallelize(
            model, autopar.Mesh("cpu", devices_per_node=4), (torch.zeros(4, 7), torch.zeros(4, 3)),
            loss_fn=nn.functional.mse_loss, constraints=[rule],
        )  # fmt: skip


def test_memory_limit_that_cannot_be_met_names_the_smallest() -> None:
    model, batch = model_and_batch()
    with pytest.raises(errors.InfeasibleError, match=r"smallest"):
        autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=2), batch, memory_limit=10_000)


def test_plan_of_another_model_is_refused_with_the_difference() -> None:
    model, batch = model_and_batch()
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, batch, dp=2)
    other = nn.Linear(4, 4)
    with pytest.raises(errors.PlanError, match=r"found one for .*the plan has parameters the model lacks"):
        autopar.parallelize(
            other, mesh, (torch.zeros(4, 4), torch.zeros(4, 4)), loss_fn=nn.functional.mse_loss, plan=plan
        )


def test_plan_of_another_mesh_is_refused() -> None:
    model, batch = model_and_batch()
    plan = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=2), batch, dp=2)
    with pytest.raises(errors.PlanError, match=r"expected a plan for cpu:1x4, found one for cpu:1x2"):
        autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=4), batch, plan=plan)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()


def test_data_dependent_control_flow_names_the_line() -> None:
    with pytest.raises(errors.TraceError, match=r"test_errors\.py:\d+: if y\.sum\(\) > 0:"):
        autopar.parallelize(Branching(), autopar.Mesh("cpu", devices_per_node=2), (torch.zeros(4, 4),))


def test_unknown_profile_lists_the_known_ones() -> None:
    model, batch = model_and_batch()
    with pytest.raises(errors.ProfileError, match=r"expected a known cost profile .*h100.*found 'tpu'"):
        autopar.parallelize(model, autopar.Mesh("tpu", devices_per_node=2), batch)


def test_template_unlike_the_mesh() -> None:
    model, batch = model_and_batch()
    with pytest.raises(errors.MeshError, match=r"expected dp × tp × pp = 4 devices"):
        autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=4), batch, dp=2)


class Unruly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp(self.fc(x)).mean()


def test_operator_without_rule_is_reported_as_replicated() -> None:
    plan = autopar.parallelize(Unruly(), autopar.Mesh("cpu", devices_per_node=2), (torch.zeros(4, 4),)).plan
    assert plan.coverage["aten.linalg_matrix_exp.default"].startswith("replicated")
    assert "linalg_matrix_exp" in str(plan)


def test_broken_plan_text_is_refused() -> None:
    model, batch = model_and_batch()
    plan = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=2), batch, dp=2)
    text = plan.to_json()
    assert autopar.Plan.from_json(text).to_json() == text
    for broken in ("{", text.replace('"autopar_plan": 1', '"autopar_plan": 9'), text.replace("S(0)", "S(x)")):
        with pytest.raises(errors.PlanError, match="expected"):
            autopar.Plan.from_json(broken)


def test_every_dropped_or_swapped_redistribution_is_refused() -> None:
    """The verifier accepts no plan that lacks a redistribution it has, or in which one ends elsewhere."""
    model, batch = model_and_batch()
    plan = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=4), batch, dp=2, tp=2)
    assert plan.redistributes
    for position, item in enumerate(plan.redistributes):
        rest = (*plan.redistributes[:position], *plan.redistributes[position + 1 :])
        with pytest.raises(errors.PlacementError):
            autopar.verify(dataclasses.replace(plan, redistributes=rest), model, batch)
        shorter = dataclasses.replace(item, steps=item.steps[:-1])
        with pytest.raises(errors.PlacementError):
            autopar.verify(dataclasses.replace(plan, redistributes=(*rest, shorter)), model, batch)
