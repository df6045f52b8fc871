"""Lightning under a plan: a strategy whose steps are those of a planned program.

    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=PlannedStrategy(plan={"dp": 2, "tp": 2}))

under torchrun. As for Hugging Face's Trainer, the script is one process's: each process loads the whole batch, and the
plan says how ranks share it. The module's parameters become the ranks', so that `configure_optimizers`, hooks and
schedules see those; its steps are planned as they are written (`steps`), and what they do beside is refused.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from autopar import runtime as rt
from autopar.adapters.building import WantedPlan, built, on_all, on_first
from autopar.adapters.evaluations import Evaluations, size_of, with_rows
from autopar.adapters.handing_over import HandedOver
from autopar.adapters.loss import loss_with_backward
from autopar.adapters.optimizers import check_optimizer
from autopar.adapters.samples import as_before, first_batch, row_counts
from autopar.adapters.steps import Logged, TrainingStep, log_again, tried
from autopar.adapters.unchanged import Unchanged, as_reads, as_text, recorded_reads
from autopar.ir.plan import Plan
from autopar.program import model_state
from autopar.runtime import ProgramError, Rank

_AVERAGING = (StochasticWeightAveraging, WeightAveraging)
_STEPS = {"fit": "validation_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class _PlannedPrecision(Precision):
    """Clips by the norm over all ranks."""

    def __init__(self, strategy: PlannedStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """See `Rank.clip_grad_norm_`. Raises ProgramError where the optimizer leaves out parameters that are trained,
        whose gradients are no part of one process's norm."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        left = [
            name for name, parameter in self._strategy.rank.named_parameters()
            if parameter.requires_grad and id(parameter) not in own
        ]  # fmt: skip
        if left:
            raise ProgramError(
                f"expected an optimizer of all parameters that are trained, to clip by their norm, found none of "
                f"{', '.join(left)}; freeze these, or give them a group with lr=0"
            )
        self._strategy.rank.clip_grad_norm_(clip_val)


class PlannedStrategy(SingleDeviceStrategy):
    """Trains, validates, tests and predicts by a plan. plan, mesh, options: as for
    `autopar.adapters.transformers.Trainer`.

    example_batch: a batch to plan for, where the loader's data is a stream. `strategy.plan` is the plan; checkpoints
    (`.ckpt`) have whole weights, which the module loads in one process, and beside them the optimizer's state for any
    plan. Raises ProgramError for what cannot be done under a plan.
    """

    strategy_name = "autopar"

    def __init__(
        self, plan: Any = None, mesh: Any = None, options: Mapping[str, Any] | None = None, example_batch: Any = None
    ) -> None:
        super().__init__(_device())
        self._wanted, self._example_batch = WantedPlan(plan, mesh, options), example_batch
        self.global_rank, self.local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self._planned: HandedOver | None = None  # once it trains
        self._evaluations: Evaluations | None = None
        self._loaded: Path | None = None

    plan: Plan
    _logged: list[Logged]
    _unchanged: Unchanged

    @property
    def rank(self) -> Rank:
        """This process's, where there is a plan for training."""
        assert self._planned is not None, "asked for in training"
        return self._planned.rank

    # How processes are together ----------------------------------------

    def setup_environment(self) -> None:
        """Joins the processes that torchrun has started. Their random numbers are the first one's from now on."""
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.root_device.type == "cuda" else "gloo")
        state = self.broadcast((random.getstate(), numpy.random.get_state(), torch.get_rng_state()))
        random.setstate(state[0])
        numpy.random.set_state(state[1])
        torch.set_rng_state(state[2])
        super().setup_environment()

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes."""
        return self.global_rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What process `src` has."""
        held = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(held, src=src)
        return held[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The first process's: to stop, say."""
        return bool(self.broadcast(decision))

    def model_to_device(self) -> None:
        """The rank's parameters are there."""

    # The plan ----------------------------------------

    def setup(self, trainer: Any) -> None:
        """Plans the steps that will run, and gives the module the rank's parameters where it trains."""
        module: Any = self.lightning_module
        self._check(module, trainer)
        if self._planned is not None and self._planned.module is not module:
            self._planned, self._evaluations = None, None
        with as_before():
            if trainer.state.fn == "fit" and self._planned is None:
                self._train_by_plan(module, *self._example(trainer))
            self._plan_evaluation(trainer)
        self._precision_plugin = _PlannedPrecision(self)
        on_all(lambda: super(PlannedStrategy, self).setup(trainer))
        if self._planned is not None:
            for optimizer in self.optimizers:
                check_optimizer(optimizer, self.rank, "make it in configure_optimizers, of self.parameters()")
        if len(self.optimizers) > 1:
            raise ProgramError(f"expected one optimizer, found {len(self.optimizers)}; use groups of parameters")

    def _check(self, module: Any, trainer: Any) -> None:
        if not module.automatic_optimization:
            raise ProgramError(
                "expected automatic optimization, found automatic_optimization=False: a step is planned as a "
                "loss. Train by rank.train_step in a loop of your own"
            )
        if type(self.precision_plugin) not in (Precision, _PlannedPrecision):
            raise ProgramError(
                f'expected precision="32-true", found {self.precision_plugin.precision}; the plan says in which '
                'precision is computed: options={"precision": "bf16"} of the strategy'
            )
        averaging = [type(one).__name__ for one in trainer.callbacks if isinstance(one, _AVERAGING)]
        if averaging and trainer.state.fn == "fit":
            raise ProgramError(
                f"expected no callback that averages copies of the whole module, found {', '.join(averaging)}: a rank "
                "has parts of it. Average clones of self.parameters() in a callback of your own"
            )
        if self._planned is None and any(isinstance(x, DTensor) for x in module.parameters()):
            raise ProgramError(
                "expected a module with whole parameters, found one that another strategy has trained; load its "
                "checkpoint into a new one (load_from_checkpoint)"
            )

    def _train_by_plan(self, module: Any, batch: Any, rows: list[int]) -> None:
        step = TrainingStep(module)
        self._logged = tried(step, batch)

        def plan() -> tuple[str, ...]:
            found = set[tuple[str, str]]()
            with recorded_reads(found):
                shapes = [with_rows(batch, count) for count in rows]
                return *self._wanted.planned(step, {"batch": batch}, shapes), as_text(found)

        source, text, reads = on_first(plan)
        self.plan = Plan.from_json(text)
        self._evaluations = None  # of weights before
        self._planned = HandedOver(module, built(source, step))
        self._unchanged = Unchanged(module, frozen=False, reads=as_reads(reads), modes=True)

    def _example(self, trainer: Any) -> tuple[Any, list[int]]:
        """A batch of the training loader's, and how many rows others have."""
        loader = trainer.fit_loop._data_source.dataloader()
        batch = self._example_batch
        if batch is None:
            batch = _first(loader)
        if batch is None:
            raise ProgramError("expected example_batch=, a batch to plan for, beside data without a length")
        return self._transferred(trainer, batch, 0), _rows(loader, size_of(batch))

    def _transferred(self, trainer: Any, batch: Any, index: int) -> Any:
        """The batch as a step is given it."""
        module: Any = self.lightning_module
        batch = module._on_before_batch_transfer(batch, dataloader_idx=index)
        return self.batch_to_device(batch, dataloader_idx=index)

    def _plan_evaluation(self, trainer: Any) -> None:
        """Programs for the batches of the loaders that are known; for others they are made when these come."""
        module: Any = self.lightning_module
        name, source = _evaluation(trainer)
        if self._evaluations is None:
            mesh = self._wanted.mesh or (self.plan.mesh if self._planned is not None else None)
            wanted = WantedPlan(self._wanted.plan, mesh, self._wanted.options)
            given = self._planned.as_given if self._planned is not None else nullcontext
            self._evaluations = Evaluations(module, wanted, given, self._fill)
        self._evaluations.forget_weights()
        if not source.is_defined() or (name != "predict_step" and not is_overridden(name, module, LightningModule)):
            return
        found = source.dataloader()
        loaders = list(found) if isinstance(found, (list, tuple)) else [found]
        for index, loader in enumerate(loaders):
            batch = _first(loader)
            if batch is not None:
                more = (index,) if len(loaders) > 1 else ()
                batch = self._transferred(trainer, batch, index)
                self._evaluations.prepare(name, batch, more, _rows(loader, size_of(batch)))
        if self._planned is not None:
            self._unchanged.accept()

    def _fill(self, rank: Rank) -> None:
        if self._planned is not None:
            own = {**self._planned.given_buffers(), **self.rank.full_state_dict()}
            rank.init_from(own, broadcast=False)
            return
        module = self.lightning_module
        assert module is not None, "it is connected at setup"
        state = model_state(module)
        assert state is not None, "it has weights"
        rank.init_from(state, broadcast=dist.is_initialized())

    # Steps ----------------------------------------

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the whole batch; its backward pass hands over the gradients."""
        self._unchanged.check()
        loss = loss_with_backward(self.rank, {"batch": batch})
        module: Any = self.lightning_module
        log_again(module.log, self._logged, [loss.detach()])
        return loss

    def _evaluate(self, name: str, batch: Any, args: Sequence[Any]) -> Any:
        assert self._evaluations is not None, "it is made at setup"
        takes_number = is_param_in_hook_signature(getattr(self.lightning_module, name), "batch_idx", min_args=2)
        return self._evaluations(name, batch, args[1:] if takes_number else args)

    def _forget(self) -> None:
        if self._evaluations is not None:
            self._evaluations.forget_weights()

    def on_validation_start(self) -> None:
        """The evaluation programs get the weights of now."""
        self._forget()

    def on_test_start(self) -> None:
        """As for validation."""
        self._forget()

    def on_predict_start(self) -> None:
        """As for validation."""
        self._forget()

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs and returns what the module's step does."""
        return self._evaluate("validation_step", batch, args)

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As for validation."""
        return self._evaluate("test_step", batch, args)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's step does."""
        return self._evaluate("predict_step", batch, args)

    # Checkpoints ----------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: there is a rank then."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights under the module's names."""
        if self._planned is None:
            return super().lightning_module_state_dict()
        return self.rank.full_state_dict(cpu_offload=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Of whole weights, this rank's parts."""
        self._forget()
        if self._planned is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        self.rank.load_full_state_dict(checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: it is beside the checkpoint."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The checkpoint's file from the first process, and the optimizer's state from all."""
        beside = _beside(filepath)
        if self.is_global_zero:
            shutil.rmtree(beside, ignore_errors=True)
        self.barrier()
        if "optimizer_states" in checkpoint:
            rt.save_checkpoint(beside, self.rank, self._optimizer(), step=int(checkpoint["global_step"]))
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint's file; the optimizer's state is read later."""
        self._loaded = Path(checkpoint_path)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Raises ProgramError for a checkpoint of one process."""
        assert self._loaded is not None, "a checkpoint was loaded"
        if not _beside(self._loaded).is_dir():
            raise ProgramError(f"expected the state of a planned run in {_beside(self._loaded)}, found none")
        rt.load_checkpoint(_beside(self._loaded), self.rank, self._optimizer())

    def remove_checkpoint(self, filepath: Any) -> None:
        """With what is beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def _optimizer(self) -> Any:
        (optimizer,) = self.optimizers
        return optimizer

    def teardown(self) -> None:
        """Leaves parameters where they are."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None, "the trainer has set it"
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def _beside(filepath: Any) -> Path:
    return Path(f"{filepath}.optimizer")


def _evaluation(trainer: Any) -> tuple[str, Any]:
    """The step that a trainer's function evaluates by, and where its loaders come from."""
    loop = {
        "fit": lambda: trainer.fit_loop.epoch_loop.val_loop, "validate": lambda: trainer.validate_loop,
        "test": lambda: trainer.test_loop, "predict": lambda: trainer.predict_loop,
    }[trainer.state.fn]()  # fmt: skip
    return _STEPS[trainer.state.fn], loop._data_source


def _first(loader: Any) -> Any:
    """Its first batch, where it can be had without taking it away."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    return first_batch(loader, loader.batch_size)


def _rows(loader: Any, size: int) -> list[int]:
    """How many rows its batches have, other than `size`."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return []
    return [count for count in row_counts(loader, loader.batch_size, loader.drop_last) if count != size]
