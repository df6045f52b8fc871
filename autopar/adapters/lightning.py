"""Lightning under a plan: a strategy whose steps are those of a planned program.

    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=PlannedStrategy(plan={"dp": 2, "tp": 2}))

under torchrun. As for Hugging Face's Trainer, the script is one process's: each process loads the whole batch, and the
plan says how ranks share it. The module's parameters become the ranks', so that `configure_optimizers`, hooks and
schedules see those; its steps are planned as they are written (`steps`), and what they do beside is refused.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autopar import runtime as rt
from autopar.adapters.building import WantedPlan, built, on_first
from autopar.adapters.loss import loss_with_backward
from autopar.adapters.planned import Unchanged
from autopar.adapters.samples import as_before, first_batch, row_counts
from autopar.adapters.steps import EvaluationStep, Logged, TrainingStep, log_again, tried
from autopar.ir.plan import Plan
from autopar.runtime import ProgramError, Rank

_ORDER = ("microbatches", "schedule", "chunks", "recompute")  # of a step's passes: evaluation has one


class _PlannedPrecision(Precision):
    """Clips by the norm over all ranks."""

    def __init__(self, strategy: PlannedStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """See `Rank.clip_grad_norm_`."""
        self._strategy.rank.clip_grad_norm_(clip_val)


class PlannedStrategy(SingleDeviceStrategy):
    """Trains by a plan. plan, mesh, options: as for `autopar.adapters.transformers.Trainer`.

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
        self._evaluation: Rank | None = None
        self._logged_in_evaluation: list[Logged] = []
        self._loaded: Path | None = None

    plan: Plan
    rank: Rank
    _logged: list[Logged]
    _unchanged: Unchanged

    # How processes are together ----------------------------------------

    def setup_environment(self) -> None:
        """Joins the processes that torchrun has started."""
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.root_device.type == "cuda" else "gloo")
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

    def model_to_device(self) -> None:
        """The rank's parameters are there."""

    # The plan ----------------------------------------

    def setup(self, trainer: Any) -> None:
        """Plans the steps that will run, and gives the module the rank's parameters."""
        self._check(trainer)
        module: Any = self.lightning_module
        with as_before():
            batch, rows = self._example(trainer)
            if batch is None:
                raise ProgramError("expected example_batch=, a batch to plan for, beside data without a length")
            self._make(module, batch, rows)
        _hand_over(module, self.rank)
        self._unchanged = Unchanged(module, frozen=False)
        self._precision_plugin = _PlannedPrecision(self)
        super().setup(trainer)
        if len(self.optimizers) > 1:
            raise ProgramError(f"expected one optimizer, found {len(self.optimizers)}; use groups of parameters")

    def _check(self, trainer: Any) -> None:
        module: Any = self.lightning_module
        if not module.automatic_optimization:
            raise ProgramError("expected automatic optimization, found automatic_optimization=False")
        if type(self.precision_plugin) is not Precision:
            raise ProgramError(
                f'expected precision="32-true", found {self.precision_plugin.precision}; the plan says in which '
                'precision is computed: options={"precision": "bf16"} of the strategy'
            )
        if trainer.state.fn != "fit":
            raise ProgramError(f"expected trainer.fit, found {trainer.state.fn}; load the checkpoint in one process")

    def _make(self, module: Any, batch: Any, rows: list[int]) -> None:
        module.train()
        step = TrainingStep(module)
        self._logged = tried(step, batch)
        source, text = on_first(lambda: self._wanted.planned(step, {"batch": batch}, _shapes(batch, rows)))
        self.plan = Plan.from_json(text)
        if type(module).validation_step is not LightningModule.validation_step:
            evaluation = EvaluationStep(module.eval(), "validation_step")
            self._evaluation, self._logged_in_evaluation = self._evaluating(evaluation, batch, rows)
        module.train()
        self.rank = built(source, step)

    def _evaluating(self, step: EvaluationStep, batch: Any, rows: list[int]) -> tuple[Rank, list[Logged]]:
        logged = tried(step, batch)
        plan = self._wanted.plan
        own = {k: v for k, v in plan.items() if k not in _ORDER} if isinstance(plan, Mapping) else None
        options = {**(self._wanted.options or {}), "mode": "inference"}
        wanted = WantedPlan(own, self._wanted.mesh or self.plan.mesh, options)
        source, _ = on_first(lambda: wanted.planned(step, {"batch": batch}, _shapes(batch, rows)))
        return built(source, step), logged

    def _example(self, trainer: Any) -> tuple[Any, list[int]]:
        """A batch of the training loader's, and how many rows others have, of that and of validation."""
        loaders = [trainer.fit_loop._data_source.dataloader()]
        if trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined():
            found = trainer.fit_loop.epoch_loop.val_loop._data_source.dataloader()
            loaders += found if isinstance(found, (list, tuple)) else [found]
        batch = self._example_batch
        if batch is None:
            batch = first_batch(loaders[0], loaders[0].batch_size)
        rows = [n for loader in loaders for n in row_counts(loader, loader.batch_size, loader.drop_last)]
        return batch, [count for count in dict.fromkeys(rows) if count != loaders[0].batch_size]

    # Steps ----------------------------------------

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the whole batch; its backward pass hands over the gradients."""
        self._unchanged.check()
        loss = loss_with_backward(self.rank, {"batch": batch})
        module: Any = self.lightning_module
        log_again(module.log, self._logged, iter([loss.detach()] * len(self._logged)))
        return loss

    def on_validation_start(self) -> None:
        """The evaluation program gets the weights of now."""
        if self._evaluation is not None:
            self._evaluation.load_full_state_dict(self.rank.full_state_dict())

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Logs what the module's step logs."""
        assert self._evaluation is not None, "the module has a validation_step"
        outputs = self._evaluation(batch=batch)
        module: Any = self.lightning_module
        log_again(module.log, self._logged_in_evaluation, iter([outputs] if isinstance(outputs, Tensor) else outputs))

    # Checkpoints ----------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: there is a rank then."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights under the module's names."""
        return self.rank.full_state_dict(cpu_offload=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Of whole weights, this rank's parts."""
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


def _shapes(batch: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    """The lengths of all tensors of a batch, with other numbers of rows."""
    return [{"batch": tree_map(lambda x, n=n: (n, *x.shape[1:]) if isinstance(x, Tensor) else x, batch)} for n in rows]


def _hand_over(module: nn.Module, rank: Rank) -> None:
    """The module's parameters are the rank's from now on; those that other stages have are None."""
    own = dict(rank.named_parameters(remove_duplicate=False))
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((inner, name, f"{path}.{name}".lstrip(".")))
    packed = set(own) - {full for found in places.values() for _, _, full in found}
    if packed:
        raise ProgramError(
            f"expected the module's parameters, found {', '.join(sorted(packed))} stored together; plan with "
            "options={'search': autopar.SearchBudget(substitutions=False)}"
        )
    for found in places.values():
        _put([(inner, name) for inner, name, _ in found], [own[full] for _, _, full in found if full in own])
    for full, buffer in rank.named_buffers():
        owner, _, name = full.rpartition(".")
        module.get_submodule(owner)._buffers[name] = buffer


def _put(places: Iterable[tuple[nn.Module, str]], found: list[nn.Parameter]) -> None:
    for inner, name in places:
        inner._parameters[name] = found[0] if found else None
