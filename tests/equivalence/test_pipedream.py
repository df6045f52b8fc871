"""PipeDream's programs equal that algorithm on one device: losses of three steps, and the weights after them, from
which those of one version of the weights are far."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.emit import StepFigures
from autopar.emit.training import script
from autopar.errors import PlanError
from autopar.ir.algorithm import parse_algorithm
from autopar.microbatch import check_plan
from autopar.trace import trace
from tests.equivalence import zoo
from tests.equivalence.algorithms import farthest
from tests.equivalence.pipedream import peak_on_rank, refused_on_rank, trained_alone, trained_on_ranks, trained_together
from tests.rank_pool import pool

STEPS = 3


@cache
def case(name: str) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    model, batch = zoo.build(name)
    return model, [{name: x.roll(number, -1) for name, x in batch.items()} for number in range(STEPS)]


def planned(name: str, pp: int, microbatches: int, **asked: Any) -> autopar.Plan:
    model, batches = case(name)
    mesh = autopar.Mesh("cpu", devices_per_node=pp)
    asked = {"algorithm": "pipedream", "check": False, **asked}
    return autopar.template_plan(model, mesh, batches[0], pp=pp, microbatches=microbatches, **asked)


def program_of(name: str, plan: autopar.Plan) -> Any:
    model, batches = case(name)
    plan = autopar.Plan.from_json(plan.to_json())
    return autopar.parallelize(model, plan.mesh, batches[0], plan=plan, check=False)


def stage_of(plan: autopar.Plan) -> dict[str, int]:
    return {
        plan.parameters[name]: number
        for number, stage in enumerate(plan.stages) for name in stage.storage if name in plan.parameters
    }  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "asked"),
    [("gpt", 2, 4, {}), ("llama", 2, 2, {"recompute": "full"}), ("mlp", 3, 8, {})],
)
def test_stages_train_as_pipedream_says(
    name: str, pp: int, microbatches: int, asked: dict[str, Any], optimizer: str
) -> None:
    model, batches = case(name)
    plan = planned(name, pp, microbatches, **asked)
    results = pool(pp).run(
        trained_on_ranks, program_of(name, plan).source, dict(model.state_dict()), batches, optimizer
    )
    losses, weights = trained_alone(model, batches, stage_of(plan), microbatches, optimizer)
    for own, _ in results:
        assert own == pytest.approx(losses, rel=1e-5)
    _, other = trained_together(model, batches, microbatches, optimizer)
    assert farthest(weights, results[0][1]) < 1e-4 < 1e-3 < farthest(weights, other)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"pp": 1}, "several stages in the order of 1f1b"),
        ({"schedule": "gpipe"}, "several stages in the order of 1f1b"),
        ({"dp": 2}, "a device for each stage"),
        ({"precision": "bf16"}, "weights that operators read as they are stored"),
        ({"mode": "inference", "microbatches": 1}, "a plan that trains"),
    ],
)
def test_other_plans_are_refused(asked: dict[str, Any], told: str) -> None:
    model, batches = case("gpt")
    asked = {"pp": 2, "microbatches": 4, **asked}
    mesh = autopar.Mesh("cpu", devices_per_node=asked["pp"] * asked.get("dp", 1))
    with pytest.raises(PlanError, match=told):
        autopar.template_plan(model, mesh, batches[0], algorithm="pipedream", check=False, **asked)


def test_a_search_does_not_make_one() -> None:
    model, batches = case("gpt")
    with pytest.raises(PlanError, match="a plan by hand for pipedream"):
        autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=2), batches[0], algorithm="pipedream")


def test_updates_and_versions_are_priced_and_told() -> None:
    plan, plain = planned("gpt", 2, 4), planned("gpt", 2, 4, algorithm=None)
    model, batches = case("gpt")
    check_plan(trace(model, batches[0]), replace(plain, algorithm=parse_algorithm("pipedream", "dp")))
    assert plan.predicted.step_time_ns > plain.predicted.step_time_ns
    assert plan.predicted.breakdown.optimizer_ns > 2 * plain.predicted.breakdown.optimizer_ns
    assert plan.predicted.peak_bytes > plain.predicted.peak_bytes
    assert plan.predicted.comm_bytes == plain.predicted.comm_bytes
    assert "pipedream: each stage updates its weights after every microbatch" in str(plan)
    text = script(plan, StepFigures())
    assert "rank.update_with(optimizer)" in text and "clip_grad_norm_" not in text
    compile(text, "train.py", "exec")


@pytest.mark.ranks
def test_what_a_step_cannot_do_is_refused() -> None:
    _, batches = case("gpt")
    for told in pool(2).run(refused_on_rank, program_of("gpt", planned("gpt", 2, 4)).source, batches[0]):
        assert [text.partition(",")[0] for text in told] == [
            "expected the optimizer before the first step",
            "expected an optimizer of all of rank.parameters()",
            "expected an optimizer that looks at elements by themselves",
            "expected parameters without hooks under pipedream",
            "expected to compile a program that reads one version of its weights",
        ]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "pp"), [("mlp", 3), ("gpt", 2)])
def test_no_rank_takes_more_than_predicted(name: str, pp: int) -> None:
    model, batches = case(name)
    plan = planned(name, pp, 4)
    found = pool(pp).run(peak_on_rank, program_of(name, plan).source, dict(model.state_dict()), batches[0])
    assert max(found) <= plan.predicted.peak_bytes < 2 * max(found)
