"""Errors say what was expected, what was found, where, and what to do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import errors
from autopar.microbatch import check_plan
from autopar.pipeline import template_of_graph
from autopar.trace import trace
from models import gpt, mlp


def model_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = mlp.Config()
    return mlp.build(config), mlp.example_inputs(config)


def test_no_strategy_names_tensor_and_mesh() -> None:
    model = nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 3))
    rule = autopar.Constraint("0.weight", ("S(0)",), what="used")
    with pytest.raises(errors.InfeasibleError, match=r"no strategy.*0\.weight"):
        autopar.parallelize(
            model, autopar.Mesh("h100", devices_per_node=4), (torch.zeros(4, 7), torch.zeros(4, 3)),
            loss_fn=nn.functional.mse_loss, constraints=[rule],
        )  # fmt: skip


@pytest.mark.sampled(only=("1", "2"))
@pytest.mark.parametrize("world", [1, 2, 4])
def test_memory_limit_that_cannot_be_met_names_the_smallest_that_can(world: int) -> None:
    model, batch = model_and_batch()
    mesh = autopar.Mesh("h100", devices_per_node=world)
    with pytest.raises(errors.InfeasibleError) as caught:
        autopar.parallelize(model, mesh, batch, memory_limit=10_000)
    text, smallest = str(caught.value), caught.value.smallest_bytes
    assert smallest is not None
    assert f"expected a plan within memory_limit = 10,000 bytes a device of h100:1x{world}, found none" in text
    assert f"the smallest limit that can be met is {smallest:,} bytes (on logical mesh" in text
    assert "most of it optimizer (" in text
    assert "the largest tensors are layers.1.weight (" in text
    assert text.endswith("Raise memory_limit to that, use more devices, or a smaller batch.")
    met = autopar.parallelize(model, mesh, batch, memory_limit=smallest).plan
    assert met.predicted.peak_bytes <= smallest
    assert met.memory_limit == smallest
    with pytest.raises(errors.InfeasibleError) as again:
        autopar.parallelize(model, mesh, batch, memory_limit=smallest * 95 // 100)
    assert again.value.smallest_bytes is not None
    assert again.value.smallest_bytes > smallest * 95 // 100


@pytest.mark.parametrize(
    ("choices", "where"),
    [({"dp": 2}, "on logical mesh 2"), ({"pp": 2, "dp": 2, "microbatches": 2}, "in 2 stages on 2, in 2 microbatches")],
)
def test_template_that_does_not_fit_names_the_smallest_limit(choices: dict[str, Any], where: str) -> None:
    config = gpt.Config(num_layers=2)
    model, batch = gpt.build(config), gpt.example_inputs(config)
    mesh = autopar.Mesh("h100", devices_per_node=2 * choices.get("pp", 1))
    found = rf"the smallest limit that can be met is [\d,]+ bytes \({where}"
    with pytest.raises(errors.InfeasibleError, match=found) as caught:
        autopar.template_plan(model, mesh, batch, **choices, memory_limit=10_000)
    plan = autopar.template_plan(model, mesh, batch, **choices, memory_limit=caught.value.smallest_bytes)
    assert plan.predicted.peak_bytes <= plan.memory_limit == caught.value.smallest_bytes


def test_plan_of_another_model_is_refused_with_the_difference() -> None:
    model, batch = model_and_batch()
    mesh = autopar.Mesh("h100", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, batch, dp=2)
    other = nn.Linear(4, 4)
    with pytest.raises(errors.PlanError, match=r"found one for .*the plan has parameters the model lacks"):
        autopar.parallelize(
            other, mesh, (torch.zeros(4, 4), torch.zeros(4, 4)), loss_fn=nn.functional.mse_loss, plan=plan
        )


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (mlp.Config(widths=(64, 128, 16)), "the plan has parameters the model lacks: layers.2.bias, layers.2.weight"),
        (
            mlp.Config(widths=(64, 256, 256, 128, 16)),
            "the model has parameters the plan lacks: layers.3.bias, layers.3.weight",
        ),
        (
            mlp.Config(widths=(64, 256, 128, 16)),
            "layers.1.weight is float32[128, 256] here and float32[256, 256] in the plan",
        ),
        (mlp.Config(batch_size=64), "features is float32[64, 64] here and float32[32, 64] in the plan"),
    ],
)
def test_plan_of_another_configuration_is_refused_with_the_difference(config: mlp.Config, difference: str) -> None:
    model, batch = model_and_batch()
    mesh = autopar.Mesh("h100", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, batch, dp=2)
    with pytest.raises(errors.PlanError, match=r"^expected a plan for this model \(MLP, .*Plan again") as caught:
        autopar.parallelize(mlp.build(config), mesh, mlp.example_inputs(config), plan=plan)
    assert difference in str(caught.value)


class Activated(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.fc(x)).mean()


def test_plan_of_a_model_with_another_operator_names_it() -> None:
    mesh, batch = autopar.Mesh("h100", devices_per_node=2), (torch.zeros(4, 4),)
    plan = autopar.template_plan(Activated(torch.tanh), mesh, batch, dp=2)
    with pytest.raises(errors.PlanError, match=r"plan has operators the model lacks: aten\.tanh\.default; the model"):
        autopar.verify(plan, Activated(torch.relu), batch)
    plan = autopar.template_plan(Activated(lambda x: x.softmax(0)), mesh, batch, dp=2)
    with pytest.raises(errors.PlanError, match="arguments of operators differ"):
        autopar.verify(plan, Activated(lambda x: x.softmax(1)), batch)


def test_plan_of_another_mesh_is_refused() -> None:
    model, batch = model_and_batch()
    plan = autopar.template_plan(model, autopar.Mesh("h100", devices_per_node=2), batch, dp=2)
    with pytest.raises(errors.PlanError, match=r"expected a plan for h100:1x4, found one for h100:1x2"):
        autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=4), batch, plan=plan)


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
        autopar.parallelize(Branching(), autopar.Mesh("h100", devices_per_node=2), (torch.zeros(4, 4),))


class Masked(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return y[y > 0].std()


def test_data_dependent_shape_names_the_line_and_the_remedy() -> None:
    with pytest.raises(errors.TraceError, match=r"test_errors\.py:\d+: return y\[y > 0\]\.std\(\)") as caught:
        autopar.parallelize(Masked(), autopar.Mesh("h100", devices_per_node=2), (torch.zeros(4, 4),))
    assert "expected shapes and control flow that do not depend on tensor values" in str(caught.value)
    assert "a boolean index y[mask] by a product with the mask or torch.where" in str(caught.value)


def test_unknown_profile_lists_the_known_ones() -> None:
    model, batch = model_and_batch()
    with pytest.raises(errors.ProfileError, match=r"expected a known cost profile .*h100.*found 'tpu'; .*autopar prof"):
        autopar.parallelize(model, autopar.Mesh("tpu", devices_per_node=2), batch)


def test_template_unlike_the_mesh() -> None:
    model, batch = model_and_batch()
    with pytest.raises(errors.MeshError, match=r"expected dp × tp × pp = 4 devices"):
        autopar.template_plan(model, autopar.Mesh("h100", devices_per_node=4), batch, dp=2)


@torch.library.custom_op("autopar_test::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0) * 2


@unknown.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


unknown.register_autograd(lambda context, gradient: gradient.flip(0) * 2)


@pytest.mark.parametrize(
    ("function", "op"),
    [(torch.linalg.matrix_exp, "aten.linalg_matrix_exp.default"), (unknown, "autopar_test.unknown.default")],
)
def test_operator_without_rule_is_reported_as_replicated(function: Callable[..., torch.Tensor], op: str) -> None:
    mesh, batch = autopar.Mesh("h100", devices_per_node=2), (torch.zeros(4, 4),)
    plan = autopar.parallelize(Activated(function), mesh, batch).plan
    assert plan.coverage[op].startswith("replicated: ")
    assert f"replicated: {op}" in str(plan)
    name = next(name for name, scope in plan.scopes.items() if op in scope)
    assert autopar.Plan.from_json(plan.to_json()).coverage == plan.coverage
    assert all(type_.kind in "RI" for placement in plan.stage.nodes[name].results for type_ in placement)


def test_every_dropped_or_swapped_redistribution_is_refused() -> None:
    """The verifier accepts no plan that lacks a redistribution it has, or in which one ends elsewhere."""
    graph = trace(*model_and_batch())
    plan = template_of_graph(graph, autopar.Mesh("h100", devices_per_node=4), dp=2, tp=2)
    assert plan.stage.redistributes
    for position, item in enumerate(plan.stage.redistributes):
        rest = (*plan.stage.redistributes[:position], *plan.stage.redistributes[position + 1 :])
        with pytest.raises(errors.PlacementError):
            check_plan(graph, plan.placed(redistributes=rest))
        shorter = dataclasses.replace(item, steps=item.steps[:-1])
        with pytest.raises(errors.PlacementError):
            check_plan(graph, plan.placed(redistributes=(*rest, shorter)))


MESH = autopar.Mesh("h100", devices_per_node=2)


@pytest.mark.parametrize(
    "argument",
    [
        {"model": 3}, {"model": nn.Linear}, {"model": lambda x: x}, {"loss_fn": 3}, {"mesh": 3}, {"mesh": None},
        {"optimizer": 3}, {"optimizer": []}, {"precision": []}, {"precision": torch.bfloat16}, {"constraints": 3},
        {"constraints": [3]}, {"constraints": autopar.Constraint(stages=1)}, {"plan": "plan.json"}, {"search": []},
        {"plan": 3}, {"progress": 3}, {"mode": 3}, {"memory_limit": []}, {"memory_limit": "16GB"},
        {"example_inputs": 3}, {"example_inputs": (torch.ones(1),) * 9},
        {"example_inputs": ()}, {"example_inputs": None}, {"search": 3},
    ],
    ids=lambda argument: re.sub(r" at 0x\w+", "", str(argument)),
)  # fmt: skip
def test_arguments_of_another_kind_are_refused_by_name(argument: dict[str, object]) -> None:
    model, batch = model_and_batch()
    given = {"model": model, "mesh": MESH, "example_inputs": batch, "search": "fast", **argument}
    with pytest.raises(errors.AutoparError, match=r"expected|captured") as caught:
        autopar.parallelize(**given)  # type: ignore[arg-type]
    assert not isinstance(caught.value, errors.InternalError)


@pytest.mark.parametrize(
    "argument",
    [
        {"dp": 0}, {"dp": 2.0}, {"dp": "2"}, {"tp": -1}, {"pp": 0}, {"dp": 2, "microbatches": 0},
        {"dp": 2, "microbatches": "2"}, {"dp": 2, "microbatches": 1.5}, {"dp": 2, "schedule": 3}, {"dp": 2, "zero": 5},
        {"dp": 2, "chunks": 0}, {"dp": 2, "zero": "3"}, {"dp": 2, "recompute": True}, {"dp": 2, "split": 3},
        {"dp": True},
    ],
    ids=str,
)  # fmt: skip
def test_templates_of_no_such_numbers_are_refused(argument: dict[str, object]) -> None:
    model, batch = model_and_batch()
    with pytest.raises(errors.AutoparError, match="expected") as caught:
        autopar.template_plan(model, MESH, batch, **argument)  # type: ignore[arg-type]
    assert not isinstance(caught.value, errors.InternalError)


@pytest.mark.parametrize(
    "make",
    [
        lambda: autopar.SearchBudget("x"), lambda: autopar.SearchBudget(-1), lambda: autopar.SearchBudget(float("nan")),
        lambda: autopar.Mesh(3), lambda: autopar.Mesh([3]), lambda: autopar.Mesh("h100", 1, "2"),
        lambda: autopar.Constraint(3), lambda: autopar.Constraint("x", "S(0)"), lambda: autopar.register_rule(3, 3),
        lambda: autopar.Plan.from_json(3), lambda: autopar.Plan.load(None),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_refused_where_they_are_made(make: Callable[[], object]) -> None:
    with pytest.raises(errors.AutoparError, match="expected"):
        make()


def test_plans_are_compared_and_explained_by_plans_and_text_alone() -> None:
    model, batch = model_and_batch()
    plan = autopar.template_plan(model, MESH, batch, dp=2)
    for call in (lambda: plan.diff("plan.json"), lambda: plan.explain(3), lambda: plan.report("x.html", 3)):  # type: ignore[arg-type]
        with pytest.raises(errors.PlanError, match="expected"):
            call()
