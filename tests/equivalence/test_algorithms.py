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
LINE = 2e-3, 1e-2  # weights are as near as this to the algorithm's, and farther than that from synchronous training's


@cache
def case(model_name: str) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    model, batch = zoo.build(model_name)
    return model, [{name: x.roll(number, -1) for name, x in batch.items()} for number in range(STEPS)]


@cache
def alone(model_name: str, algorithm: str, plan: str, optimizer: str) -> Any:
    model, batches = case(model_name)
    name, period, after = ALGORITHMS.get(algorithm, ("sum", 1, 0))
    ignored = -100 if model_name.startswith("hf_") else None
    copies, parts = COPIES.get(plan, 2), PLANS[plan].get("microbatches", 1)
    return trained_alone(model, batches, copies, name, optimizer, period, after, ignored, microbatches=parts)


def program_of(model_name: str, **asked: Any) -> Any:
    model, batches = case(model_name)
    devices = asked.get("dp", 1) * asked.get("tp", 1) * asked.get("pp", 1)
    mesh = autopar.Mesh("cpu", devices_per_node=devices)
    plan = autopar.template_plan(model, mesh, batches[0], **asked)
    return autopar.parallelize(model, mesh, batches[0], plan=autopar.Plan.from_json(plan.to_json()))


@pytest.mark.sampled(always=("gpt-adasum-tp-sgd", "hf_llama-local_sgd(2)-hsdp_zero3-adamw"))
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
    losses, weights = alone(model_name, algorithm, plan, optimizer)
    for own, _ in results:
        assert own == pytest.approx(losses, rel=2e-4)
    _, summed = alone(model_name, "sum", plan, optimizer)
    assert farthest(weights, results[0][1]) < LINE[0] < LINE[1] < farthest(weights, summed)


def test_a_search_plans_one_copy_and_runs_several() -> None:
    model, batches = case("gpt")
    mesh = autopar.Mesh("cpu", devices_per_node=4)
    program = autopar.parallelize(model, mesh, batches[0], algorithm="local_sgd(2, copies=2)", search="fast")
    assert [axis.size for axis in program.plan.stage.axes][0] == 2
    assert autopar.Plan.from_json(program.plan.to_json()) == program.plan


@pytest.mark.ranks
def test_a_searched_plan_trains_as_the_algorithm_says() -> None:
    model, batches = case("hf_llama")
    mesh = autopar.Mesh("cpu", devices_per_node=4)
    program = autopar.parallelize(model, mesh, batches[0], algorithm="local_sgd(2, copies=2)", search="fast")
    results = pool(4).run(trained_on_ranks, program.source, dict(model.state_dict()), batches, "sgd")
    losses, weights = alone("hf_llama", "local_sgd(2)", "dp", "sgd")
    assert results[0][0] == pytest.approx(losses, rel=2e-4)
    assert farthest(weights, results[0][1]) < LINE[0]


@pytest.mark.ranks
def test_a_checkpoint_takes_the_mean_of_copies_and_of_what_their_optimizers_keep(tmp_path: Path) -> None:
    model, batches = case("gpt")
    program = program_of("gpt", dp=2, algorithm="local_sgd(3)")
    results = pool(2).run(
        trained_on_ranks, program.source, dict(model.state_dict()), batches, "adamw", str(tmp_path), 1
    )
    losses, weights = trained_alone(model, batches, 2, "local_sgd", "adamw", 3, saved_after=1)
    assert results[0][0] == pytest.approx(losses, rel=2e-4)
    assert farthest(weights, results[0][1]) < LINE[0]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"dp": 2, "zero": 1}, "stored whole"),
        ({"tp": 2}, "at least 2 copies"),
        ({"dp": 2, "mode": "inference"}, "trains"),
    ],
)
def test_copies_that_depend_on_each_other_are_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        program_of("gpt", **asked, algorithm="local_sgd(2)")


def test_batch_statistics_over_copies_are_refused() -> None:
    with pytest.raises(PlanError, match="samples"):
        program_of("wide_resnet", dp=2, algorithm="adasum")


@pytest.mark.parametrize("text", ["local_sgd", "local_sgd(0)", "local_sgd(-1)", "adasum(2)", "sum", 8])
def test_other_algorithms_are_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="local_sgd"):
        program_of("mlp", dp=2, algorithm=text)


@pytest.mark.parametrize("search", ["fast", "default"])
def test_no_search_chooses_an_algorithm(search: str) -> None:
    model, batches = case("mlp")
    found = autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=4), batches[0], search=search).plan
    assert found.algorithm is None


def test_meeting_is_priced_and_its_bytes_are_counted() -> None:
    often, seldom = (program_of("gpt", dp=2, algorithm=f"local_sgd({period})").plan for period in (1, 64))
    summed = program_of("gpt", dp=2).plan
    sent = summed.predicted.comm_bytes["all_reduce"]
    assert often.predicted.comm_bytes["all_reduce"] == sent
    assert seldom.predicted.comm_bytes["all_reduce"] < sent / 32
    assert seldom.predicted.step_time_ns < often.predicted.step_time_ns
    assert "local_sgd(64)" in str(seldom) and "not what one device computes" in str(seldom)
