"""Hugging Face's `Trainer` under a plan. A script changes three lines: this import, and `plan=` where it makes one.

    from autopar.adapters.transformers import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=…, plan={"dp": 2, "tp": 2})

under torchrun. The script is written for one process, and so are its numbers: `per_device_train_batch_size` is the
whole batch, and the plan says how ranks share it. Losses, norms, schedules, evaluation and weights are those of one
process. What a plan leaves without a meaning is refused (`options`).
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_pt_utils import safe_globals

from autopar import runtime as rt
from autopar.adapters.accelerator import PlannedAccelerator
from autopar.adapters.building import WantedPlan, built, on_first
from autopar.adapters.evaluating import evaluation_source
from autopar.adapters.options import check_arguments, check_trainer
from autopar.adapters.own_loss import inputs_of_call
from autopar.adapters.planned import PlannedModel, on_meta, tensors_of
from autopar.adapters.predicting import Predictor
from autopar.adapters.rows import in_rows
from autopar.adapters.samples import as_before, first_batch, num_rows, row_counts
from autopar.adapters.smoothing import SmoothedLoss
from autopar.adapters.unchanged import as_reads, as_text, recorded_reads
from autopar.ir.plan import Plan
from autopar.runtime import ProgramError
from autopar.runtime.packed import parts_of

_STATE = "autopar"  # the folder in a checkpoint with parameters and optimizer state, for any plan
_RANDOM = "rng_state.pth"
_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")


class Trainer(transformers.Trainer):
    """As `transformers.Trainer`; the model's passes follow a plan.

    plan: a Plan; the name of its file, written after a search where there is none; arguments of `template_plan`; None
    for a search. mesh: by default, as many CPU ranks as there are processes. shapes: further shapes of batches, as for
    `parallelize`; numbers of rows that follow from the datasets are known. example_inputs: a batch to plan for, where
    the dataset is a stream. options: of `parallelize` or `template_plan`, such as precision.

    `trainer.plan` is the plan. After training, `trainer.save_model()` writes Hugging Face's files; the model itself is
    left without weights, which the ranks have in parts. Raises ProgramError for what cannot be done under a plan.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *rest: Any, plan: Any = None, mesh: Any = None,
        shapes: Sequence[Any] = (), example_inputs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None, **named: Any,
    ) -> None:  # fmt: skip
        self._asked = WantedPlan(plan, mesh, options)
        self._shapes, self._example_inputs = shapes, example_inputs
        self._planned: PlannedModel | None = None
        if args is not None:
            check_arguments(args)
        super().__init__(model, args, *rest, **named)
        check_trainer(self, self.model_init)

    plan: Plan

    # What is built, and when ----------------------------------------

    @property
    def planned(self) -> PlannedModel:
        """The planned model; made when it is first asked for, on all processes together."""
        if self._planned is None:
            self._planned = self._make()
            self.accelerator.planned = self._planned
            self.model_wrapped = self._planned
        return self._planned

    @property
    def _given(self) -> nn.Module:
        assert self.model is not None, "the trainer was given a model"
        return self.model

    def _make(self) -> PlannedModel:
        with as_before():
            inputs, rows = self._example()
            source, text, evaluation, why_not, reads = on_first(lambda: self._written(inputs, rows))
        self.plan = Plan.from_json(text)
        step = self._step()
        rank = built(source, step)
        other = rank if evaluation == source else built(evaluation, step) if evaluation else None
        on_meta(self._given)
        rt.seed_dropout(self.args.seed)
        return PlannedModel(rank, other, self._given, why_not, as_reads(reads))

    def _written(self, inputs: dict[str, Any], rows: list[int]) -> tuple[str, ...]:
        """Source and plan, the source for evaluation or why there is none, and what was read of the model."""
        found = set[tuple[str, str]]()
        with recorded_reads(found):
            written = self._programs(inputs, rows)
        return *written, as_text(found)

    def _programs(self, inputs: dict[str, Any], rows: list[int]) -> tuple[str, ...]:
        step = self._step()
        step.train()
        source, text = in_rows(self._asked, step, inputs, rows, self._shapes)
        if self.eval_dataset is None:
            return source, text, "", "expected eval_dataset= when the trainer is made, found none to plan for"
        return source, text, *evaluation_source(self._asked, step, inputs, rows, self._shapes, (source, text))

    def _step(self) -> nn.Module:
        """What is planned: the model, or that with the loss that Trainer makes of its outputs."""
        if self.label_smoother is None:
            return self._given
        if self._has_own_loss:
            raise ProgramError(
                "expected label_smoothing_factor=0 beside a compute_loss of the script's own, which may smooth or not, "
                f"found {self.args.label_smoothing_factor}; put the smoothed loss into the model's forward"
            )
        return SmoothedLoss(self._given, self.label_smoother, self.model_accepts_loss_kwargs)

    @property
    def _has_own_loss(self) -> bool:
        """Whether the script computes the loss by a function of its own."""
        return getattr(self.compute_loss, "__func__", None) is not Trainer.compute_loss

    def _as_called(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with for a batch of the loader."""
        given = self._given
        items = self._get_num_items_in_batch([batch], torch.device("cpu"))
        if self._has_own_loss:
            given.train()
            return inputs_of_call(given, lambda model: self.compute_loss(model, dict(batch), num_items_in_batch=items))
        takes_count = self.model_accepts_loss_kwargs and items is not None
        return {**batch, "num_items_in_batch": items} if takes_count else batch

    def _example(self) -> tuple[dict[str, Any], list[int]]:
        """A batch of full size, as the model is called with it, and how many rows others have."""
        loaders = [(self.get_train_dataloader(), self.args.train_batch_size)] if self.train_dataset is not None else []
        if self.eval_dataset is not None and not isinstance(self.eval_dataset, Mapping):
            loaders.append((self.get_eval_dataloader(), self.args.eval_batch_size))
        if isinstance(self.eval_dataset, Mapping):
            loaders += [(self.get_eval_dataloader(name), self.args.eval_batch_size) for name in self.eval_dataset]
        found = self._example_inputs if self._example_inputs is not None else first_batch(*loaders[0])
        if found is None:
            raise ProgramError("expected example_inputs=, a batch to plan for, beside a dataset without a length")
        batch = tensors_of(self._as_called(tensors_of(found)))
        rows = [n for loader, size in loaders for n in row_counts(loader, size, self.args.dataloader_drop_last)]
        return batch, [count for count in dict.fromkeys(rows) if count != num_rows(batch)]

    # What Trainer asks for in its loop ----------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As in Trainer, with an accelerator for processes that have the same data."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PlannedAccelerator

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Each rank gets its part of the model there."""

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        planned = self.planned
        found = super()._prepare_for_training(*args, **kwargs)
        self.callback_handler.model = planned  # callbacks see what is trained
        return found

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.planned

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Of the rank's parameters."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(self.planned)
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """By the modules of the model. Raises ProgramError where one stored tensor holds parameters of both sorts."""
        names = set(super().get_decay_parameter_names(self._given))
        found = []
        for name, stored in self.planned.rank.stored_parameters.items():
            sources = [part.name for part in parts_of(name, stored.declared)] or [name]
            if len({source in names for source in sources}) > 1:
                raise ProgramError(
                    f"expected the parameters stored as {name} to decay alike, found that some of {', '.join(sources)} "
                    "do not; plan with options={'search': autopar.SearchBudget(substitutions=False)}"
                )
            if sources[0] in names:
                found.append(name)
        return found

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the rank knows the norm over all stages

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step: each process has them all."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; a smoothed loss is the program's."""
        smoother, self.label_smoother = self.label_smoother, None
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.label_smoother = smoother

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, with the weights of now."""
        predictor = self._predictor
        predictor.rows = row_counts(dataloader, self.args.eval_batch_size, self.args.dataloader_drop_last)
        predictor.forget_weights()
        return super().evaluation_loop(dataloader, *args, **kwargs)

    @cached_property
    def _predictor(self) -> Predictor:
        ignored = getattr(getattr(self._given, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
        planned = self.planned
        return Predictor(self._asked, self.plan.mesh, self._step(), planned.rank, planned.unchanged, tuple(ignored))

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss of a batch, and all outputs where they are asked for."""
        self.planned.__dict__["predictor"] = None if prediction_loss_only else self._predictor
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self.planned.__dict__["predictor"] = None

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ProgramError: each trial would need a model of its own."""
        raise ProgramError("expected to train one model, found a search of hyperparameters; start a run for each")

    # What is saved and loaded ----------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Hugging Face's files, of which each rank writes its slices; then what belongs to them, as Trainer does."""
        folder = Path(output_dir or str(self.args.output_dir))
        part = folder / "weights.part"
        if self.is_world_process_zero():
            shutil.rmtree(part, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        _wait()
        self.planned.rank.save_safetensors(part)
        if self.is_world_process_zero():
            _put_in_place(part, folder)
            self._save_beside(folder)
        _wait()

    def _save_beside(self, folder: Path) -> None:
        for item in (getattr(self.model, "config", None), getattr(self.model, "generation_config", None)):
            if item is not None:
                item.save_pretrained(folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        shutil.rmtree(Path(output_dir, _STATE), ignore_errors=True) if self.is_world_process_zero() else None
        _wait()
        rt.save_checkpoint(
            Path(output_dir, _STATE), self.planned.rank, _plain(self.optimizer), step=self.state.global_step
        )
        if self.args.should_save:
            assert self.lr_scheduler is not None, "it was made before the first step"
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not Path(checkpoint, _STATE).is_dir():
            raise ProgramError(
                f"expected a checkpoint of a planned run, with a folder {_STATE}, found none in {checkpoint}: its "
                "optimizer state is for one process. Load its weights with from_pretrained to go on without it"
            )
        rt.load_checkpoint(Path(checkpoint, _STATE), self.planned.rank, _plain(self.optimizer))
        assert self.lr_scheduler is not None, "it is made before a checkpoint is loaded"
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.planned.rank.load_safetensors(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self.planned.rank.load_safetensors(str(self.state.best_model_checkpoint))

    def _save_rng_state(self, output_dir: str) -> None:
        """Random numbers are equal on all processes: the first one's are kept, for any number of them."""
        if self.is_world_process_zero():
            state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}
            torch.save(state, Path(output_dir, _RANDOM))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with safe_globals():
            state = torch.load(Path(checkpoint, _RANDOM), weights_only=True)
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["cpu"])


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """What Accelerate has wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _put_in_place(part: Path, folder: Path) -> None:
    """Moves weights to where older ones may be, of which none is left."""
    for pattern in _WEIGHTS:
        for old in folder.glob(pattern):
            old.unlink()
    for file in part.iterdir():
        os.replace(file, folder / file.name)
    part.rmdir()
