"""The comparison of tests/equivalence finds what is wrong, and the table of results in the repository is whole."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.equivalence import planned, zoo
from tests.equivalence.step import Step, Tensors, compare

RESULTS = Path(__file__).parents[2] / "benchmarks" / "equivalence" / "results.json"
EXACT = Step(
    loss=torch.tensor(2.0),
    gradients={"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([0.0])},
    buffers={"mean": torch.tensor([1.0, -1.0]), "count": torch.tensor(7)},
    sent={"all_reduce": 8},
)


def gradients(**changed: torch.Tensor) -> Tensors:
    return {**EXACT.gradients, **changed}


def faults(found: Step, other_loss: float = 2.0) -> list[str]:
    second = replace(found, loss=torch.tensor(other_loss), gradients={}, buffers={})
    return compare(EXACT, [found, second], {"all_reduce": 8, "all_gather": 0}).faults()


def test_equal_steps_have_no_faults() -> None:
    assert faults(EXACT) == []
    assert faults(replace(EXACT, gradients=gradients(weight=torch.tensor([3.0, 4.0 + 4e-4])))) == []


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (replace(EXACT, gradients=gradients(weight=torch.tensor([3.0, 4.001]))), "gradient of weight"),
        (replace(EXACT, gradients=gradients(weight=torch.tensor([3.0, float("nan")]))), "gradient of weight: .*inf"),
        (replace(EXACT, gradients=gradients(bias=torch.tensor([1e-3]))), "gradient of bias"),
        (replace(EXACT, gradients={"bias": torch.tensor([0.0])}), "gradient of weight: relative difference 1.00e[+]00"),
        (replace(EXACT, gradients=gradients(frozen=torch.tensor([1.0]))), "gradient of frozen"),
        (replace(EXACT, buffers={**EXACT.buffers, "count": torch.tensor(8)}), "buffer count"),
        (replace(EXACT, buffers={**EXACT.buffers, "mean": torch.tensor([1.0, -1.001])}), "buffer mean"),
        (replace(EXACT, buffers={"count": torch.tensor(7)}), "buffer mean: relative difference inf"),
        (replace(EXACT, sent={"all_reduce": 12}), "sent {'all_reduce': 12} bytes, predicted {'all_reduce': 8}"),
        (replace(EXACT, sent={}), "sent {} bytes"),
    ],
)
def test_each_fault_is_found_and_named(found: Step, message: str) -> None:
    (line,) = faults(found)
    assert re.match(message, line), line


def test_ranks_that_disagree_and_a_wrong_loss_are_found() -> None:
    assert faults(EXACT, other_loss=2.1) == ["ranks disagree about the loss"]
    assert faults(replace(EXACT, loss=torch.tensor(2.1)), other_loss=2.1)[0].startswith("loss: relative difference 5")


def test_results_in_the_repository_cover_the_zoo_and_are_equal() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    wanted = {(model, plan) for model in (*zoo.NAMES, *zoo.STEP_NAMES) for plan in planned.STEP_PLANS}
    assert {(row["model"], row["plan"]) for row in rows} == wanted, "run python -m benchmarks.equivalence.run"
    assert [row["faults"] for row in rows if not row["equal"]] == []
