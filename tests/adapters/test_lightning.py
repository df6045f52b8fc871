"""Lightning under plans: losses, what is logged, and checkpoints are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="the strategy is Lightning's")

from lightning.pytorch.callbacks import WeightAveraging

from autopar.adapters.steps import TrainingStep, tried
from autopar.runtime import ProgramError
from tests.adapters.lit import Classifier, Kept, apart, apart_job, data, job, loader, run, trainer_of
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"dp": 2, "zero": 3}), "stages": (2, {"pp": 2, "microbatches": 2}),
    "both": (4, {"dp": 2, "tp": 2}), "stages of two": (4, {"pp": 2, "tp": 2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("alone"), evaluated=True)


def equal(found: Any, expected: Any) -> None:
    count = len(found["losses"])
    assert found["losses"] == pytest.approx(expected["losses"][-count:], rel=2e-5)
    assert found["returned"][-2:] == pytest.approx(expected["returned"][-2:], rel=2e-4, abs=1e-4)
    assert found["logged"] == pytest.approx({name: expected["logged"][name] for name in found["logged"]}, rel=2e-5)
    assert found["best"] == pytest.approx(expected["best"], rel=2e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=2e-4, atol=2e-5, msg=name)
    if "predicted" in found:
        torch.testing.assert_close(found["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(only=("stages", "both"))
@pytest.mark.parametrize("name", list(PLANS))
def test_a_run_is_that_of_one_process(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, alone: Any, name: str
) -> None:
    """Accumulated, clipped, scheduled, with a short last batch; evaluated in programs of their own, also afterwards, by
    `validate`, `test` with two loaders and `predict`; the best checkpoint is kept by a callback."""
    world, plan = PLANS[name]
    for found in rank_pool(world).run(job, tmp_path, plan, 2, None, True):
        assert len(found["losses"]) == 6 and len(found["predicted"]) == 11
        equal(found, alone)
    module = Classifier.load_from_checkpoint(tmp_path / "epochs2.ckpt")
    torch.testing.assert_close(module.head.weight, alone["weights"]["head.weight"], rtol=2e-4, atol=2e-5)


def test_a_run_goes_on_under_another_plan(rank_pool: Callable[[int], RankPool], tmp_path: Path, alone: Any) -> None:
    """From the checkpoint that the callback has written last."""
    rank_pool(2).run(job, tmp_path, {"tp": 2}, 1)
    expected = run(tmp_path / "alone", None, 1)
    resumed = run(tmp_path / "alone", None, 2, str(tmp_path / "alone" / "saved" / "last.ckpt"))
    assert len(expected["losses"]) == 3
    for found in rank_pool(2).run(job, tmp_path, {"pp": 2}, 2, str(tmp_path / "saved" / "last.ckpt")):
        assert len(found["losses"]) == 3
        equal(found, resumed)


def test_checkpoints_are_tested_without_training(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    run(tmp_path, None, 1)
    saved = str(tmp_path / "epochs1.ckpt")
    expected = apart(tmp_path, None, saved)
    for found in rank_pool(2).run(apart_job, tmp_path, {"dp": 2}, saved):
        assert found["logged"] == pytest.approx(expected["logged"], rel=2e-5)
        torch.testing.assert_close(found["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5)


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
        samples, labels = data(8, 0)[:]
        tried(TrainingStep(kind()), (samples.float(), labels))


class Annealed(Classifier):
    """A loss whose weight a hook changes: an attribute, a buffer, or a mode of a part."""

    how = "attribute"

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0
        self.register_buffer("scale", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        if self.how == "attribute":
            self.weight = float(self.current_epoch)
        elif self.how == "buffer":
            self.scale.fill_(self.current_epoch)
        elif self.how == "replaced":
            self.scale = torch.tensor(float(self.current_epoch))
        elif self.current_epoch:
            self.layers[0].drop.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y) + (self.weight + self.scale) * self.head.bias.square().sum()
        self.log("loss", loss.detach(), on_step=True)
        return loss


def annealed(folder: Path, how: str, plan: Any) -> list[float]:
    torch.manual_seed(5)
    kept, module = Kept(), Annealed()
    module.how = how
    trainer = trainer_of(folder, plan, callbacks=[kept], limit_val_batches=0)
    trainer.fit(module, loader(16, 0))
    return kept.losses


@pytest.mark.parametrize(
    ("how", "what"),
    [("attribute", "weight"), ("replaced", "scale"), ("mode", r"mode of layers\.0\.drop")],
)  # fmt: skip
def test_what_a_step_reads_may_not_change_while_training(tmp_path: Path, how: str, what: str) -> None:
    """The program has it as it was planned."""
    with pytest.raises(ProgramError, match=rf"found .*{what}"):
        annealed(tmp_path, how, {})


def test_a_buffer_that_a_step_reads_may_be_written_to(tmp_path: Path) -> None:
    assert annealed(tmp_path, "buffer", {}) == pytest.approx(annealed(tmp_path, "buffer", None), rel=2e-5)


class Part(Classifier):
    """Trains all, and has an optimizer of a part."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Metered(Classifier):
    """Logs an object that keeps count in Python."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", {"count": 1})


class Looked(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", float(self(batch[0]).sum().numpy()))


class Early(Classifier):
    """Makes its optimizer of the parameters that it had at first."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.made


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("kind", "changed", "why"),
    [
        (Part, {"gradient_clip_val": 1.0}, "found none of layers"), (Metered, {}, "found seen of dict"),
        (Looked, {}, "computes with tensors alone"), (Manual, {}, "automatic_optimization=False"),
        (Classifier, {"precision": "bf16-mixed"}, "the plan says in which precision"),
        (Early, {}, "expected an optimizer of the rank's parameters, found 10 that are none of them"),
        (Classifier, {"callbacks": [WeightAveraging()]}, "found WeightAveraging: a rank has parts"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_under_a_plan_is_refused(
    tmp_path: Path, kind: type[Classifier], changed: dict[str, Any], why: str
) -> None:
    with pytest.raises(ProgramError, match=why):
        trainer_of(tmp_path, {}, **changed).fit(kind(), loader(16, 0), loader(8, 1))
