"""Hugging Face's Trainer under plans: what it logs, saves and goes on with is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs accelerate")

from torch import Tensor, nn

import autopar
from autopar.adapters.loss import loss_with_backward
from autopar.adapters.planned import LossAlone, Unchanged
from autopar.adapters.transformers import Trainer
from autopar.runtime import ProgramError
from tests.adapters.trained import Rows, arguments, job, model, reset, run
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tp": 2}), "zero3": (2, {"dp": 2, "zero": 3}), "stages": (2, {"pp": 2}), "both": (4, {"dp": 2, "tp": 2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("alone"))


def equal(found: Any, expected: Any, since: int = 0) -> None:
    """Losses, norms, learning rates and evaluation of each logged step, the last evaluation, and the weights."""
    logged, evaluated, weights = found
    theirs = [entry for entry in expected[0] if entry["step"] > since]
    ours = [entry for entry in logged if entry["step"] > since]
    assert [set(entry) for entry in ours] == [set(entry) for entry in theirs]
    for own, other in zip(ours, theirs, strict=True):
        for name in {"loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "step"} & set(own):
            assert own[name] == pytest.approx(other[name], rel=2e-5), (name, other["step"])
    assert evaluated["eval_loss"] == pytest.approx(expected[1]["eval_loss"], rel=2e-5)
    assert set(weights) == set(expected[2])
    for name, weight in expected[2].items():
        torch.testing.assert_close(weights[name], weight, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.sampled(only=("stages", "both"))
@pytest.mark.parametrize("name", [pytest.param("tp", marks=pytest.mark.whole), "zero3", "stages", "both"])
def test_a_run_is_that_of_one_process(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, alone: Any, name: str
) -> None:
    """Steps of two accumulated batches with unlike numbers of tokens, the last one short, clipped, with decay."""
    world, plan = PLANS[name]
    for found in rank_pool(world).run(job, tmp_path, plan):
        equal(found, alone)


def test_a_run_goes_on_under_another_plan(rank_pool: Callable[[int], RankPool], tmp_path: Path, alone: Any) -> None:
    """Two steps under one plan, saved; the other two under another, as if nothing had been."""
    rank_pool(2).run(
        job, tmp_path, {"tp": 2}, {"named": {"changed": {"max_steps": 2, "lr_scheduler_type": "constant"}}}
    )
    changed = {"max_steps": 4, "lr_scheduler_type": "constant"}
    expected = run(tmp_path / "alone", changed=changed)
    saved = str(tmp_path / "checkpoint-2")
    for found in rank_pool(2).run(job, tmp_path, {"pp": 2}, {"named": {"changed": changed, "resume": saved}}):
        equal(found, expected, since=2)


def test_a_model_with_dropout_is_evaluated_without(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """In a program of its own, with the weights of now."""
    expected = run(tmp_path / "alone", dropout=0.5, train=False)
    options = {"named": {"dropout": 0.5, "train": False}}
    for _, evaluated, _ in rank_pool(2).run(job, tmp_path, {"tp": 2}, options):
        assert evaluated["eval_loss"] == pytest.approx(expected[1]["eval_loss"], rel=1e-5)


def test_what_a_plan_leaves_without_a_meaning_is_refused(tmp_path: Path) -> None:
    changed = {"bf16": True, "label_smoothing_factor": 0.1, "gradient_checkpointing": True}
    with pytest.raises(ProgramError, match=r"bf16=True .*gradient_checkpointing=True .*label_smoothing_factor=0.1"):
        Trainer(model=model(), args=arguments(tmp_path, **changed), plan={})
    reset()
    with pytest.raises(ProgramError, match=r"compute_loss_func \(put it into.*compute_metrics \(evaluation returns"):
        Trainer(
            model=model(), args=arguments(tmp_path), plan={}, compute_loss_func=lambda *_, **__: None,
            compute_metrics=lambda _: {}, train_dataset=Rows(4, 0), eval_dataset=Rows(4, 0),
        )  # fmt: skip
    reset()


def test_other_outputs_than_the_loss_are_refused_in_words() -> None:
    outputs = LossAlone(loss=torch.zeros(()))
    for ask in (lambda: outputs["logits"], lambda: outputs.logits):
        with pytest.raises(ProgramError, match="all that a training program returns, found 'logits'"):
            ask()


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def test_a_loss_that_is_scaled_scales_its_gradients_once() -> None:
    """What loops make of a loss; gradients are added to those that were there."""
    model = nn.Linear(3, 1)
    x = torch.randn(4, 3)
    program = autopar.parallelize(_Mean(model), autopar.Mesh("cpu", devices_per_node=1), {"x": x}, check=False)
    rank = program.build()
    for factor in (0.25, 3.0):
        loss = loss_with_backward(rank, {"x": x})
        (loss * factor).backward()
    expected = torch.autograd.grad(model(x).square().mean() * 3.25, list(model.parameters()))
    for parameter, gradient in zip(rank.parameters(), expected, strict=True):
        torch.testing.assert_close(local(parameter.grad), gradient)
    with pytest.raises(ProgramError, match="found a second"):
        loss.backward()


def test_what_is_changed_on_the_model_after_planning_is_refused() -> None:
    """It would be of no effect: the ranks have the parameters, and the program's blocks run."""
    given = model()
    unchanged = Unchanged(given)
    unchanged.check()
    given.head.bias.requires_grad_(False)
    with pytest.raises(ProgramError, match=r"found changes of requires_grad of head\.bias"):
        unchanged.check()
    given.head.bias.requires_grad_(True)
    given.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ProgramError, match=r"found changes of hooks of layers\.0"):
        unchanged.check()
