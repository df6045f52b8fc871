"""Programs whose copies of the parameters meet by a named algorithm equal that algorithm on one device: losses of five
steps, and the weights after them, which those of synchronous training are far from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.copied import under_algorithm
from autopar.errors import PlanError
from autopar.ir.algorithm import parse_algorithm
from autopar.ir.placement import I, R, S
from autopar.ir.redistribution import Step
from autopar.microbatch import check_plan
from autopar.trace import trace
from benchmarks.accuracy.memory import measure_rank
from tests.equivalence import zoo
from tests.equivalence.algorithms import farthest, refused_on_rank, trained_alone, trained_on_ranks
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
    assert program.plan.stage.axes[0][:2] == ("copies", 2)
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
        ({"dp": 2, "offload": "optimizer"}, "on the host"),
        ({"dp": 2, "mode": "inference"}, "trains"),
    ],
)
def test_copies_that_depend_on_each_other_are_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        program_of("gpt", **asked, algorithm="local_sgd(2)")


def test_parameters_whose_gradients_are_summed_by_slices_are_used_as_they_are() -> None:
    """A path of two steps, I -> S(0) -> R, costs less where many small ranks sum a bias."""
    plan = program_of("mlp", dp=2).plan
    way = (Step(0, I, S(0)), Step(0, S(0), R))
    parameters = plan.stage.storage.keys()
    sliced = plan.placed(redistributes=tuple(
        replace(one, steps=way) if one.tensor in parameters else one for one in plan.stage.redistributes
    ))  # fmt: skip
    model, batches = case("mlp")
    graph = trace(model, batches[0])
    algorithm = parse_algorithm("local_sgd(2)", "dp")
    with pytest.raises(PlanError, match="used as it is"):
        check_plan(graph, replace(sliced, algorithm=algorithm))
    found = under_algorithm(graph, sliced, algorithm)
    steps = {one.steps for one in found.stage.redistributes if one.tensor in parameters}
    assert steps == {(Step(0, I, R),)}


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


@pytest.mark.ranks
def test_each_copy_is_clipped_by_its_own_norm() -> None:
    model, batches = case("mlp")
    program = program_of("mlp", dp=2, algorithm="local_sgd(2)")
    state = dict(model.state_dict())
    results = pool(2).run(trained_on_ranks, program.source, state, batches, "sgd", "", None, 0.2)
    _, weights = trained_alone(model, batches, 2, "local_sgd", "sgd", 2, norm=0.2)
    assert farthest(weights, results[0][1]) < LINE[0]


@pytest.mark.ranks
def test_what_would_mix_copies_or_is_not_seen_is_refused() -> None:
    _, batches = case("mlp")
    program = program_of("mlp", dp=2, algorithm="local_sgd(2)")
    for told in pool(2).run(refused_on_rank, program.source, batches[0]):
        assert [text.partition(",")[0] for text in told] == [
            "expected an optimizer that looks at elements by themselves",
            "expected an optimizer that looks at elements by themselves",
            "expected updates of parameters by an optimizer of rank.parameters()",
        ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("algorithm", "above"),
    [
        ("local_sgd(1)", 0.2),
        ("adasum", 0.2),
        ("backup(1)", 0.4),
        ("int8", 1.0),
        ("topk(0.05)", 1.0),
        ("powersgd(4)", 1.0),
    ],
)
def test_no_rank_takes_more_than_predicted(algorithm: str, above: float) -> None:
    model, batches = case("mlp")
    program = program_of("mlp", dp=2, algorithm=algorithm)
    found = pool(2).run(measure_rank, program.source, dict(model.state_dict()), batches[0])
    most = max(lifetimes.peak_bytes for lifetimes, _ in found)
    assert most <= program.plan.predicted.peak_bytes < (1 + above) * most
