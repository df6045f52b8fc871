"""Lightning under plans: losses, what is logged, and checkpoints are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="the strategy is Lightning's")

from autopar.adapters.steps import TrainingStep, tried
from autopar.runtime import ProgramError
from tests.adapters.lit import Classifier, data, job, run
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("alone"))


def equal(found: Any, expected: Any) -> None:
    losses, logged, weights = found
    assert losses == pytest.approx(expected[0][-len(losses) :], rel=2e-5)
    assert logged == pytest.approx(expected[1], rel=2e-5)
    for name, weight in expected[2].items():
        torch.testing.assert_close(weights[name], weight, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.sampled(only=("4-{'dp': 2, 'tp': 2}",))
@pytest.mark.parametrize(("world", "plan"), [(2, {"dp": 2, "zero": 3}), (4, {"dp": 2, "tp": 2})], ids=str)
def test_a_run_is_that_of_one_process(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, alone: Any, world: int, plan: dict[str, int]
) -> None:
    """Accumulated, clipped, scheduled, with a short last batch; evaluated in a program of its own."""
    for found in rank_pool(world).run(job, tmp_path, plan):
        equal(found, alone)
    module = Classifier.load_from_checkpoint(tmp_path / "epochs2.ckpt")
    torch.testing.assert_close(module.head.weight, alone[2]["head.weight"], rtol=2e-4, atol=2e-5)


def test_a_run_goes_on_under_another_plan(rank_pool: Callable[[int], RankPool], tmp_path: Path, alone: Any) -> None:
    rank_pool(2).run(job, tmp_path, {"tp": 2}, 1)
    for found in rank_pool(2).run(job, tmp_path, {"dp": 2}, 2, str(tmp_path / "epochs1.ckpt")):
        assert len(found[0]) == 3
        equal(found, alone)


class Looking(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.global_step)


class Counting(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        return super().training_step(batch, batch_idx)


class Numbering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


class Logging(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("largest", self(batch[0]).max())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Looking, "reads trainer"), (Counting, "it changes seen"), (Numbering, "the batch's number"),
        (Logging, "found largest, which is neither"),
    ],
)  # fmt: skip
def test_steps_that_do_more_than_compute_are_refused(kind: type[Classifier], why: str) -> None:
    with pytest.raises(ProgramError, match=why):
        tried(TrainingStep(kind()), data(8, 0)[:])
