"""Hugging Face's Trainer under plans: what it logs, saves and goes on with is that of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs accelerate")

from torch import Tensor, nn

import autopar
from autopar.adapters.loss import loss_with_backward
from autopar.adapters.options import BESIDE, REFUSED, TESTED, check_arguments
from autopar.adapters.own_loss import check_loss
from autopar.adapters.planned import LossAlone
from autopar.adapters.transformers import Trainer
from autopar.adapters.unchanged import Unchanged
from autopar.errors import AutoparError
from autopar.runtime import ProgramError
from tests.adapters.trained import Net, Rows, arguments, job, model, reset, run
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


@pytest.mark.parametrize(("world", "plan"), [(2, {"tp": 2}), (4, {"dp": 2, "tp": 2, "zero": 3})])
def test_metrics_and_predictions_are_those_of_one_process(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, world: int, plan: dict[str, int]
) -> None:
    """Logits of all rows, also of the short last batch, by the weights before and after training."""
    changed = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
    _, expected, _ = run(tmp_path / "alone", changed=changed, metrics=True)
    options = {"named": {"changed": changed, "metrics": True}}
    for _, found, _ in rank_pool(world).run(job, tmp_path, plan, options):
        torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=2e-4, atol=2e-5)
        for name in ("eval_accuracy", "eval_loss", "test_accuracy", "test_loss"):
            assert found[name] == pytest.approx(expected[name], rel=2e-5), name


ARGUMENTS: dict[str, dict[str, Any]] = {
    "smoothed": {
        "label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine_with_restarts", "warmup_steps": 1,
        "lr_scheduler_kwargs": {"num_cycles": 2}, "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
        "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 2, "eval_on_start": True,
        "include_num_input_tokens_seen": "all", "data_seed": 7, "seed": 11, "dataloader_drop_last": True,
        "logging_first_step": True, "max_steps": 3,
    },
    "factored": {
        "optim": "adafactor", "lr_scheduler_type": "reduce_lr_on_plateau", "max_grad_norm": 0.0, "eval_delay": 1,
        "gradient_accumulation_steps": 1, "save_only_model": True, "average_tokens_across_devices": False,
        "train_sampling_strategy": "sequential", "logging_strategy": "epoch", "prediction_loss_only": True,
        "remove_unused_columns": False, "label_names": ["labels"], "save_strategy": "epoch",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_arguments_have_the_effect_of_one_process(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, name: str
) -> None:
    changed = ARGUMENTS[name]
    expected = run(tmp_path / "alone", changed=changed)
    for found in rank_pool(2).run(job, tmp_path, {"tp": 2}, {"named": {"changed": changed}}):
        equal(found, expected)
        for own, other in zip(found[0], expected[0], strict=True):
            assert own.get("num_input_tokens_seen") == other.get("num_input_tokens_seen")
    kept = sorted(path.name for path in (tmp_path / "alone").glob("checkpoint-*"))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == kept


OWN_LOSSES = {
    "WeightedLoss": {"tp": 2},
    "TwiceLoss": {"dp": 2},
    "SuperLoss": {"pp": 2},
    "PenaltyLoss": {"dp": 2, "zero": 3},
}


@pytest.mark.parametrize("name", list(OWN_LOSSES))
def test_a_loss_of_the_scripts_own_is_that_of_one_process(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, name: str
) -> None:
    """Whatever is made of the model's loss, by a subclass that calls the model as it likes."""
    changed = {"max_steps": 2, "save_strategy": "no", "dataloader_drop_last": True}
    expected = run(tmp_path / "alone", changed=changed, loss=name)
    for found in rank_pool(2).run(job, tmp_path, OWN_LOSSES[name], {"named": {"changed": changed, "loss": name}}):
        equal(found, expected)


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("LogitsLoss", {}, "loss"),
        ("AuxLoss", {}, "found 'aux_loss'"),
        ("OtherModelLoss", {}, "call the model that it is given"),
        ("DetachedLoss", {}, "found one that it has no part in"),
        ("SuperLoss", {"label_smoothing_factor": 0.1}, "expected label_smoothing_factor=0"),
    ],
)
def test_a_loss_that_a_plan_cannot_have_is_refused_in_words(
    tmp_path: Path, name: str, changed: dict[str, Any], told: str
) -> None:
    more = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no", **changed}
    with pytest.raises((ProgramError, AutoparError), match=told):
        run(tmp_path, {}, changed=more, loss=name)
    reset()


def test_terms_of_parameters_are_refused_in_a_pipeline() -> None:
    """Each rank has those of its stage."""
    held = torch.nn.Parameter(torch.ones(2))
    inner = _Mean(torch.nn.Linear(2, 1))
    rank = SimpleNamespace(parameters=inner.parameters, train_step=lambda x: _with_gradients(inner, x))
    loss = loss_with_backward(rank, {"x": torch.ones(3, 2)}) + held.sum()  # type: ignore[arg-type]
    check_loss(loss, {id(held): "held"}, 1)
    with pytest.raises(ProgramError, match=r"found terms of parameters \(held\)"):
        check_loss(loss, {id(held): "held"}, 2)


def _with_gradients(inner: nn.Module, x: Tensor) -> Tensor:
    loss = inner(x)
    loss.backward()
    return loss.detach()


def test_batches_padded_to_their_own_lengths_are_shapes(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    changed = {"gradient_accumulation_steps": 1, "dataloader_drop_last": True, "eval_strategy": "no", "max_steps": 4}
    expected = run(tmp_path / "alone", changed=changed, pads=True)
    for found in rank_pool(2).run(job, tmp_path, {"tp": 2}, {"named": {"changed": changed, "pads": True}}):
        equal(found, expected)


def test_each_argument_is_tested_or_known_to_be_beside_or_refused(tmp_path: Path) -> None:
    """Of the version that is installed; one that nobody has looked at is refused where it is given."""
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    beside = [name for names in BESIDE.values() for name in names.split()]
    known = [*TESTED, *REFUSED, *beside]
    assert set(known) == names and len(set(known)) == len(known)
    unknown = _Later(output_dir=str(tmp_path))
    check_arguments(unknown)
    unknown.sharded_by_hand = 2
    with pytest.raises(ProgramError, match=r"sharded_by_hand=2 \(what it does under a plan is not known\)"):
        check_arguments(unknown)


@dataclasses.dataclass
class _Later(transformers.TrainingArguments):
    """As of a later version."""

    sharded_by_hand: int = 0


_Later.__module__ = "transformers.training_args"


def test_what_a_plan_leaves_without_a_meaning_is_refused(tmp_path: Path) -> None:
    changed = {"bf16": True, "neftune_noise_alpha": 0.1, "gradient_checkpointing": True}
    with pytest.raises(ProgramError, match=r"bf16=True .*gradient_checkpointing=True .*neftune_noise_alpha=0.1"):
        Trainer(model=model(), args=arguments(tmp_path, **changed), plan={})
    reset()
    with pytest.raises(ProgramError, match=r"compute_loss_func \(put it into"):
        Trainer(
            model=model(), args=arguments(tmp_path), plan={}, compute_loss_func=lambda *_, **__: None,
            train_dataset=Rows(4, 0), eval_dataset=Rows(4, 0),
        )  # fmt: skip
    reset()


class OwnOptimizer(Trainer):
    """Steps what it says."""

    of = "model"

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(getattr(self, self.of).parameters(), lr=0.1)
        return self.optimizer


@pytest.mark.parametrize("of", ["model", "model_wrapped"])
def test_an_optimizer_of_the_scripts_own_steps_what_is_trained(tmp_path: Path, of: str) -> None:
    """Once, one of the model as it was given stepped nothing, and nothing said so."""
    changed = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
    trainer = OwnOptimizer(
        model=model(), args=arguments(tmp_path, **changed), plan={}, options={"check": False},
        train_dataset=Rows(24, 0), eval_dataset=Rows(8, 1),
    )  # fmt: skip
    trainer.of = of
    before = {name: x.clone() for name, x in trainer.planned.rank.full_state_dict().items()}
    if of == "model_wrapped":
        trainer.train()
        assert all(not torch.equal(x, before[name]) for name, x in trainer.planned.rank.full_state_dict().items())
    else:
        with pytest.raises(ProgramError, match=r"rank's parameters, found \d+ that are none of them.*model_wrapped"):
            trainer.train()
    reset()


def test_other_outputs_than_the_loss_are_refused_in_words() -> None:
    outputs = LossAlone(loss=torch.zeros(()))
    for ask in (lambda: outputs["logits"], lambda: outputs.logits):
        with pytest.raises(ProgramError, match="all that a training program returns, found 'logits'"):
            ask()
    assert "loss" in outputs and outputs.get("loss") is outputs["loss"]
    for ask in (
        lambda: outputs.get("aux_loss"),
        lambda: "aux_loss" in outputs,
        lambda: getattr(outputs, "aux_loss", 0),
    ):
        with pytest.raises(ProgramError, match="all that a training program returns, found 'aux_loss'"):
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


class Weighted(Net):
    """Its loss has a weight that training may change; by steps in `rates`, an object of the script's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rates, self.seen = 0.5, SimpleNamespace(steps=[1.0]), 0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None, **_: Any) -> Any:
        found = super().forward(input_ids, labels, num_items_in_batch)
        penalty = self.scale * self.weight * self.rates.steps[0] * self.head.bias.square().sum()
        return {**found, "loss": found["loss"] + penalty}


class Changing(transformers.TrainerCallback):
    """Changes something before each step."""

    def __init__(self, change: Callable[[Any, int], None]) -> None:
        self.change, self.model = change, Weighted()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.change(self.model, state.global_step)


def _annealed(folder: Path, callback: Any, plan: Any) -> list[float]:
    reset()
    kind: Any = transformers.Trainer if plan is None else Trainer
    own = {} if plan is None else {"plan": plan, "options": {"check": False}}
    changed = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no"}
    trainer = kind(
        model=callback.model, args=arguments(folder, **changed), train_dataset=Rows(12, 0), callbacks=[callback], **own
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("weight", lambda model, step: setattr(model, "weight", step / 10)),
        (r"rates", lambda model, step: model.rates.steps.__setitem__(0, float(step))),
        (r"buffer scale", lambda model, step: model.scale.fill_(step)),
    ],
)  # fmt: skip
def test_what_forward_reads_may_not_change_while_training(tmp_path: Path, what: str, change: Any) -> None:
    """The program has it as it was planned, so that a loss's weight that a callback anneals would stay."""
    with pytest.raises(ProgramError, match=rf"found changes of {what}"):
        _annealed(tmp_path, Changing(change), {})
    reset()


def test_what_forward_does_not_read_may_change(tmp_path: Path) -> None:
    counting = Changing(lambda model, step: setattr(model, "seen", step))
    assert len(_annealed(tmp_path, counting, {})) == 3


class Filling(Changing):
    """Writes to the buffer of the model that it is given."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        dict(kwargs["model"].named_buffers())["scale"].fill_(state.global_step)


def test_a_buffer_of_the_planned_model_may_be_written_to(tmp_path: Path) -> None:
    found = []
    for plan in (None, {}):
        torch.manual_seed(3)
        found.append(_annealed(tmp_path / str(plan), Filling(lambda *_: None), plan))
    assert found[1] == pytest.approx(found[0], rel=2e-5) and len(set(found[0])) == 3
