"""Programs that go on without their last ranks equal one device on the samples of those that took part: losses of five
steps and the weights after them, which all ranks have bit for bit. A late rank waits until another has ended the step:
were one to wait for it, none would."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.emit import StepFigures
from autopar.emit.training import script
from autopar.errors import PlanError
from tests.equivalence import zoo
from tests.equivalence.algorithms import farthest
from tests.equivalence.backup import (
    MeanOfSquares,
    MeanOfWeighted,
    lost_on_rank,
    trained_alone,
    trained_on_ranks,
    watched_on_rank,
)
from tests.rank_pool import pool

LATE = {
    1: [[3], [0], [1], [1], [2]],  # the first two within a step, the others before it; one twice in a row
    2: [[0, 3], [1, 2], [0, 1], [2, 3], [0, 3]],
}
OWN = {"squares": MeanOfSquares, "weighted": MeanOfWeighted}


@cache
def case(name: str) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    if name not in OWN:
        model, batch = zoo.build(name)
    else:
        torch.manual_seed(0)
        model, batch = OWN[name](), {"x": torch.randn(8, 8), "y": torch.randn(8, 4)}
    if "labels" in batch and batch["labels"].dim() > 1:  # copies count unlike
        batch["labels"][:2, 3:] = -100
    return model, [{name: x.roll(number, 0) for name, x in batch.items()} for number in range(5)]


def program_of(name: str, algorithm: str = "backup(1)", **asked: Any) -> Any:
    model, batches = case(name)
    asked = {"dp": 4, **asked}
    mesh = autopar.Mesh("cpu", devices_per_node=asked["dp"] * asked.get("tp", 1) * asked.get("pp", 1))
    plan = autopar.template_plan(model, mesh, batches[0], algorithm=algorithm, **asked)
    return autopar.parallelize(model, mesh, batches[0], plan=autopar.Plan.from_json(plan.to_json()))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "num_late", "optimizer"),
    [("squares", 1, "adamw"), ("mlp", 2, "sgd"), ("gpt", 1, "sgd"), ("hf_llama", 2, "sgd")],
)
def test_late_ranks_are_left_out(name: str, num_late: int, optimizer: str, tmp_path: Path) -> None:
    model, batches = case(name)
    program, late = program_of(name, f"backup({num_late})"), LATE[num_late]
    state = {key: x.clone() for key, x in model.state_dict().items()}
    results = pool(4).run(trained_on_ranks, program.source, state, batches, optimizer, late, str(tmp_path))
    losses, weights = trained_alone(model, batches, 4, late, optimizer)
    model.load_state_dict(weights, strict=False)
    output = model(**batches[0])
    after = (output if isinstance(output, torch.Tensor) else output["loss"]).item()
    model.load_state_dict(state)
    _, summed = trained_alone(model, batches, 4, [[]] * 5, optimizer)
    model.load_state_dict(state)
    for own, held, called in results:
        assert own == pytest.approx(losses, rel=1e-5) and own == results[0][0]
        assert called == pytest.approx(after, rel=1e-5)
        assert all(torch.equal(x, held[key]) for key, x in results[0][1].items())
    assert farthest(weights, results[0][1]) < 1e-5 < 1e-3 < farthest(weights, summed)


@pytest.mark.ranks
def test_a_lost_rank_is_told_of(tmp_path: Path) -> None:
    model, batches = case("squares")
    source = program_of("squares").source
    *others, last = pool(4).run(lost_on_rank, source, dict(model.state_dict()), batches * 2, str(tmp_path))
    assert last == (2, "")
    for made, told in others:
        assert made == 4, "two steps more than the one that is lost, and no more"
        assert "did not come to its end" in told


@pytest.mark.ranks
def test_signals_reach_all_ranks_without_waiting_for_one(tmp_path: Path) -> None:
    model, batches = case("squares")
    due = pool(4).run(watched_on_rank, program_of("squares").source, dict(model.state_dict()), batches, str(tmp_path))
    assert due[0] == due[-1] == due[1] == due[2]
    assert due[0][-1] == (True, True) and len(due[0]) in (3, 4)


@pytest.mark.parametrize(
    ("name", "algorithm", "asked", "told"),
    [
        ("mlp", "backup(4)", {}, "fewer late copies than the 4"),
        ("mlp", "backup(0)", {}, "expected algorithm as"),
        ("mlp", "backup(1)", {"microbatches": 2}, "one stage and one microbatch"),
        ("mlp", "backup(1)", {"dp": 2, "pp": 2, "microbatches": 2}, "one stage and one microbatch"),
        ("mlp", "backup(1)", {"dp": 2, "tp": 2}, "a device each"),
        ("mlp", "backup(1)", {"zero": 1}, "stored whole"),
        ("mlp", "backup(1)", {"precision": "bf16"}, "other precision"),
        ("mlp", "backup(1)", {"mode": "inference"}, "trains"),
        ("mlp", "backup(1)", {"dp": 3}, "equal parts"),
        ("wide_resnet", "backup(1)", {"dp": 2}, "samples"),
        ("weighted", "backup(1)", {}, "crosses ranks"),
    ],
)
def test_what_is_not_whole_is_refused_by_name(name: str, algorithm: str, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        program_of(name, algorithm, **asked)


def test_plans_and_scripts_say_so() -> None:
    plan = program_of("mlp", "backup(2)").plan
    assert "backup(2): 4 copies (dp); updates take the first 2 gradients" in str(plan)
    assert "saves nothing" in str(plan) and "not what one device computes" in str(plan)
    text = script(plan, StepFigures())
    assert "own_time = None" in text and "rank.unite_copies()" in text


@pytest.mark.parametrize("search", ["fast"])
def test_a_search_is_told_and_chooses_none(search: str) -> None:
    model, batches = case("mlp")
    mesh = autopar.Mesh("cpu", devices_per_node=4)
    told = autopar.parallelize(model, mesh, batches[0], search=search, algorithm="backup(1, copies=4)").plan
    assert str(told.algorithm) == "backup(1)"
    assert autopar.parallelize(model, mesh, batches[0], search=search).plan.algorithm is None
