"""Programs whose copies of the parameters meet by a named algorithm equal that algorithm on one device: losses of five
steps, and the weights after them, which those of synchronous training are far from."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import PlanError
from tests.equivalence import zoo
from tests.equivalence.algorithms import farthest, trained_alone, trained_on_ranks
from tests.rank_pool import pool

STEPS = 5
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "dp4": {"dp": 4},
    "microbatches": {"dp": 2, "microbatches": 2},
    "tp": {"dp": 2, "tp": 2},
    "hsdp": {"dp": 4, "hsdp": 2, "zero": 1},
    "hsdp_zero3": {"dp": 4, "hsdp": 2, "zero": 3, "microbatches": 1},
    "stages": {"dp": 2, "pp": 2, "microbatches": 2},
}
ALGORITHMS = {
    "local_sgd(2)": ("local_sgd", 2, 0), "local_sgd(2, after=2)": ("local_sgd", 2, 2), "adasum": ("adasum", 1, 0),
}  # fmt: skip
COPIES = {"dp4": 4}


@cache
def case(model_name: str) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    model, batch = zoo.build(model_name)
    return model, [{name: x.roll(number, -1) for name, x in batch.items()} for number in range(STEPS)]


@cache
def alone(model_name: str, algorithm: str, copies: int, optimizer: str) -> Any:
    model, batches = case(model_name)
    name, period, after = ALGORITHMS.get(algorithm, ("sum", 1, 0))
    ignored = -100 if model_name.startswith("hf_") else None
    return trained_alone(model, batches, copies, name, optimizer, period, after, ignored)


def program_of(model_name: str, **asked: Any) -> Any:
    model, batches = case(model_name)
    devices = asked.get("dp", 1) * asked.get("tp", 1) * asked.get("pp", 1)
    mesh = autopar.Mesh("cpu", devices_per_node=devices)
    plan = autopar.template_plan(model, mesh, batches[0], **asked)
    return autopar.parallelize(model, mesh, batches[0], plan=autopar.Plan.from_json(plan.to_json()))


@pytest.mark.sampled(always=("gpt-adasum-tp-sgd", "hf_llama-local_sgd(2)-hsdp_zero3-adamw", "mlp-local_sgd(2, after=2)-stages-sgd"))
@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model_name", ["gpt", "hf_llama", "mlp"])
def test_copies_train_as_the_algorithm_says(model_name: str, algorithm: str, plan: str, optimizer: str) -> None:
    model, batches = case(model_name)
    program = program_of(model_name, **PLANS[plan], algorithm=algorithm)
    results = pool(program.plan.mesh.num_devices).run(
        trained_on_ranks, program.source, dict(model.state_dict()), batches, optimizer
    )
    losses, weights = alone(model_name, algorithm, COPIES.get(plan, 2), optimizer)
    for own, _ in results:
        assert own == pytest.approx(losses, rel=2e-4)
    _, summed = alone(model_name, "sum", COPIES.get(plan, 2), optimizer)
    assert farthest(weights, results[0][1]) < 2e-3 < 2e-2 < farthest(weights, summed)
