"""precision="bf16": the gradients of the model cast to bf16, masters in float32, sums over ranks in float32.

Against the like on one device, each gradient within 3e-2 (of the larger of its norm and 1e-2 of the global one: where
a gradient is zero in exact arithmetic, bf16 leaves noise). Against the float32 model, no worse than twice one device's
own bf16 error.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.plan import Plan
from tests.equivalence import zoo
from tests.equivalence.precision import Tensors, gradients_of, run_rank, train
from tests.rank_pool import pool

STEPS = 3
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "dp_tp_microbatches": {"dp": 2, "tp": 2, "microbatches": 2},
    "zero2_microbatches": {"dp": 2, "zero": 2, "microbatches": 2},
}


def planned(model: nn.Module, batch: Tensors, choices: dict[str, Any], precision: str | None = "bf16") -> Plan:
    mesh = autopar.Mesh("cpu", devices_per_node=math.prod(choices.get(n, 1) for n in ("dp", "cp", "tp")))
    return autopar.template_plan(model, mesh, batch, precision=precision, **choices)


def run(model: nn.Module, batch: Tensors, plan: Plan, steps: int = 0) -> list[Any]:
    program = autopar.parallelize(model, plan.mesh, batch, plan=plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    return pool(plan.mesh.num_devices).run(run_rank, program.source, state, batch, steps)


@cache
def single(name: str) -> Any:
    model, batch = zoo.build(name)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    exact = gradients_of(model, state, batch, torch.float32)
    return exact, gradients_of(model, state, batch, torch.bfloat16), train(model, batch, STEPS)


def largest_difference(found: Tensors, expected: Tensors, floor: float) -> dict[str, float]:
    total = torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    return {
        name: ((found[name] - tensor).norm() / max(tensor.norm(), floor * total)).item()
        for name, tensor in expected.items()
    }


@pytest.mark.sampled(only=("gpt-dp_tp_microbatches", "hf_llama-cp", "hf_llama-zero2_microbatches", "hf_gpt2-zero3"))
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model_name", "plan_name"),
    [
        *((name, plan) for name in ("gpt", "hf_llama") for plan in PLANS if (name, plan) != ("gpt", "cp")),
        ("hf_gpt2", "zero3"),
    ],  # the last has tied weights
)
def test_plan_equals_the_model_in_bf16(model_name: str, plan_name: str) -> None:
    model, batch = zoo.build(model_name)
    (exact_loss, exact), (low_loss, low), (losses, weights) = single(model_name)
    plan = planned(model, batch, PLANS[plan_name])
    results = run(model, batch, plan, STEPS)
    loss, gradients, sent, found_losses, state = results[0]
    assert abs(loss - low_loss) <= 2**-7 * abs(exact_loss)
    assert {item[0].item() for item in results} == {loss.item()}
    assert {tensor.dtype for tensor in gradients.values()} == {torch.float32}
    own_error = largest_difference(low, exact, 1e-2)
    assert max(own_error.values()) > 1e-3, "the model was not computed in bf16"
    error = largest_difference({name: gradients[name] for name in exact}, exact, 1e-2)
    apart = largest_difference({name: gradients[name] for name in low}, low, 1e-2)
    assert not {name: value for name, value in apart.items() if value > 3e-2}
    assert not {name: value for name, value in error.items() if value > 2 * own_error[name] + 2e-3}
    assert sent == {kind: size for kind, size in plan.predicted.comm_bytes.items() if size}
    torch.testing.assert_close(torch.stack(found_losses), torch.stack(losses), rtol=2e-2, atol=0)
    assert {state[name].dtype for name in weights} == {torch.float32}
    start = dict(model.named_parameters())
    moved = {name: weight - start[name].detach() for name, weight in weights.items()}
    drift = largest_difference({name: state[name] - start[name].detach() for name in weights}, moved, 1e-2)
    assert not {name: value for name, value in drift.items() if value > 5e-2}


class Total(nn.Module):
    """Sums what a column of weights makes of the features: its gradient is the sum of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 4, bias=False)
        with torch.no_grad():
            self.line.weight.zero_()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.line(features).sum()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "choices",
    [{"dp": 4}, {"dp": 4, "zero": 1}, {"dp": 4, "zero": 3}, {"dp": 2, "microbatches": 2},
     {"dp": 2, "zero": 2, "microbatches": 2}],
    ids=str,
)  # fmt: skip
def test_gradients_are_summed_in_float32(choices: dict[str, Any]) -> None:
    """256 + 1 + 1 + 1 is 256 in bf16, one after the other; each sample's part is exact there."""
    model, batch = Total(), {"features": torch.tensor([[256.0, 1.0], [1.0, 256.0], [1.0, 1.0], [1.0, 1.0]])}
    for _, gradients, *_ in run(model, batch, planned(model, batch, choices)):
        torch.testing.assert_close(gradients["line.weight"], torch.full((4, 2), 259.0), rtol=0, atol=0)


def test_microbatches_on_one_device_are_summed_in_float32() -> None:
    model, batch = Total(), {"features": torch.tensor([[256.0, 1.0], [1.0, 256.0], [1.0, 1.0], [1.0, 1.0]])}
    plan = planned(model, batch, {"microbatches": 4})
    rank = autopar.parallelize(model, plan.mesh, batch, plan=plan).build()
    for times in (1, 2):
        rank.train_step(**batch)
        gradient = rank.full_gradients()["line.weight"]
        torch.testing.assert_close(gradient, torch.full((4, 2), 259.0 * times), rtol=0, atol=0)


@pytest.mark.ranks
@pytest.mark.parametrize("choices", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "zero": 3, "microbatches": 2}], ids=str)
def test_small_integers_are_exact(choices: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4))
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape).float()
    batch = {"input": torch.randint(-1, 2, (4, 8)).float()}

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.layers(input).sum()

    summed = Summed()
    loss = summed(**batch)
    loss.backward()
    assert abs(loss) <= 256, "an integer that bf16 holds"
    expected = {name: parameter.grad for name, parameter in summed.named_parameters()}
    for found_loss, gradients, *_ in run(summed, batch, planned(summed, batch, choices)):
        assert found_loss == loss
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


@pytest.mark.ranks
@pytest.mark.parametrize("plan_name", ["zero3", "tp"])
def test_a_model_in_bf16_stays_as_it_is(plan_name: str) -> None:
    """precision=None: parameters, gradients and optimizer state in the model's own dtype."""
    model, batch = zoo.build("gpt")
    exact, _, _ = single("gpt")
    model.bfloat16()
    expected_loss = model(**batch)
    expected_loss.backward()
    expected = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    loss, gradients, sent, _, state = run(model, batch, plan := planned(model, batch, PLANS[plan_name], None))[0]
    assert {tensor.dtype for tensor in (*gradients.values(), *state.values())} == {torch.bfloat16}
    assert abs(loss - expected_loss) <= 2**-7 * abs(expected_loss)
    found = {name: gradient.float() for name, gradient in gradients.items()}
    own_error = largest_difference(expected, exact[1], 1e-2)
    error = largest_difference(found, exact[1], 1e-2)
    assert not {name: value for name, value in error.items() if value > 2 * own_error[name] + 2e-3}
    assert sent == {kind: size for kind, size in plan.predicted.comm_bytes.items() if size}
