"""What precision="bf16" takes, records and costs; what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.trace import trace
from models import gpt, mlp

ONE = autopar.Mesh("cpu", devices_per_node=1)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = mlp.Config(widths=(8, 16, 4), batch_size=8)
    return mlp.build(config), mlp.example_inputs(config)


def test_the_model_and_its_inputs_are_left_as_they_were() -> None:
    model, batch = small()
    before, given = copy.deepcopy(model.state_dict()), {name: tensor.clone() for name, tensor in batch.items()}
    program = autopar.parallelize(model, ONE, batch, precision="bf16")
    program.build().train_step(**batch)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(batch, given, rtol=0, atol=0)


def test_the_plan_records_it_and_is_used_again() -> None:
    model, batch = small()
    program = autopar.parallelize(model, ONE, batch, precision="bf16")
    plan = autopar.Plan.from_json(program.plan.to_json())
    assert (plan.precision, plan.types["layers.0.weight"]) == ("bf16", "float32[16, 8]")
    assert autopar.parallelize(model, ONE, batch, plan=plan).source == program.source
    autopar.verify(plan, model, batch)
    assert "rt.Parameter((16, 8), torch.float32, stored='', uses=('',), compute=torch.bfloat16)" in program.source
    assert "rt.Input('features', (8, 8), torch.float32, '', compute=torch.bfloat16)" in program.source
    assert "rt.Input('labels', (8,), torch.int64, '')" in program.source
    full = autopar.parallelize(model, ONE, batch)
    with pytest.raises(PlanError, match="expected precision=None, which the plan is for, found 'bf16'"):
        autopar.parallelize(model, ONE, batch, plan=full.plan, precision="bf16")


def test_another_precision_is_refused() -> None:
    model, batch = small()
    for refused in ("fp8", "bfloat16"):
        with pytest.raises(PlanError, match=rf'expected precision=None .* or "bf16", found \'{refused}\''):
            autopar.parallelize(model, ONE, batch, precision=refused)
    with pytest.raises(PlanError, match="found 'fp16'"):
        autopar.template_plan(model, ONE, batch, precision="fp16")


def test_traffic_and_memory_follow() -> None:
    """Gathers move half the bytes; gradients, masters and optimizer state stay float32; activations halve."""
    config = gpt.Config(num_layers=2, hidden_size=64)
    model, batch = gpt.build(config), gpt.example_inputs(config)
    mesh = autopar.Mesh("h100", devices_per_node=2)
    full = autopar.template_plan(model, mesh, batch, dp=2, zero=3).predicted
    half = autopar.template_plan(model, mesh, batch, dp=2, zero=3, precision="bf16").predicted
    assert half.comm_bytes["all_gather"] * 2 == full.comm_bytes["all_gather"]
    assert half.comm_bytes["reduce_scatter"] == full.comm_bytes["reduce_scatter"]
    assert half.memory["parameters"] == full.memory["parameters"]
    assert half.memory["optimizer"] == full.memory["optimizer"]
    assert half.memory["activations"] < 0.6 * full.memory["activations"]
    assert half.peak_bytes < full.peak_bytes
    kept = autopar.template_plan(model, mesh, batch, dp=2, precision="bf16").predicted
    copies = sum(parameter.numel() for parameter in model.parameters()) * 2
    assert kept.memory["gathered"] == copies, "the bf16 copy of what is stored whole"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.line = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 1 / 3]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.line(self.norm(x)) * self.scale).square().mean()


def test_buffers_are_kept_in_float32_with_the_cast_models_values() -> None:
    torch.manual_seed(0)
    model, batch = Normed(), {"x": torch.randn(16, 4)}
    reference = copy.deepcopy(model).bfloat16()
    rank = autopar.parallelize(model, ONE, batch, precision="bf16").build()
    for _ in range(2):
        loss = rank.train_step(**batch)
        torch.testing.assert_close(loss, reference(batch["x"].bfloat16()).detach(), rtol=2e-2, atol=0)
    state = rank.full_state_dict()
    assert {state[name].dtype for name in ("norm.running_mean", "scale")} == {torch.float32}
    assert state["norm.num_batches_tracked"] == 2
    torch.testing.assert_close(state["norm.running_mean"], reference.norm.running_mean.float(), rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(state["scale"], model.scale, rtol=0, atol=0)
    rank.state_dict()["scale"].mul_(2)  # as a checkpoint would be read
    assert rank.train_step(**batch) > 3 * loss


def test_what_only_the_loss_function_takes_is_not_cast() -> None:

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    torch.manual_seed(0)
    model, batch = nn.Linear(4, 2), {"input": torch.randn(8, 4), "target": torch.randn(8, 2)}
    program = autopar.parallelize(
        model, ONE, batch, loss_fn=lambda out, target: F.mse_loss(out, target), precision="bf16"
    )
    assert "rt.Input('target', (8, 2), torch.float32, '')" in program.source
    expected = F.mse_loss(copy.deepcopy(model).bfloat16()(batch["input"].bfloat16()), batch["target"])
    torch.testing.assert_close(program.build().train_step(**batch), expected.detach(), rtol=1e-6, atol=0)


def test_a_model_in_bf16_gets_masters_too() -> None:
    model, batch = small()
    program = autopar.parallelize(model.bfloat16(), ONE, batch, precision="bf16")
    rank = program.build()
    assert {p.dtype for p in rank.parameters()} == {torch.float32}
    torch.testing.assert_close(
        rank.full_state_dict(), {n: t.float() for n, t in model.state_dict().items()}, rtol=0, atol=0
    )


def test_nothing_is_kept_beside_a_graph_of_the_model_as_it_is() -> None:
    model, batch = small()
    assert not trace(model, batch).kept_dtypes
    cast = trace(model, batch, compute_dtype=torch.bfloat16)
    assert set(cast.kept_dtypes) == {"features", *dict(model.named_parameters())}
    assert cast.fingerprint != trace(model.bfloat16(), {**batch, "features": batch["features"].bfloat16()}).fingerprint


def test_inference_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(8, 8)
    program = autopar.parallelize(model, ONE, (x,), mode="inference", precision="bf16")
    expected = copy.deepcopy(model).bfloat16()(x.bfloat16())
    torch.testing.assert_close(program.build()(x), expected.detach(), rtol=0, atol=0)
    frozen, batch = small()
    frozen.layers[0].requires_grad_(False)
    rank = autopar.parallelize(frozen, ONE, batch, precision="bf16").build()
    rank.train_step(**batch)
    assert set(rank.full_gradients()) == {"layers.1.weight", "layers.1.bias"}
