"""Accelerate's `Accelerator` where a plan says how ranks share the work: each has the whole batch and the whole loss.

So what it does across processes, for processes with batches of their own, it does here for one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.adapters.optimizers import check_optimizer
from autopar.adapters.own_loss import check_loss
from autopar.adapters.planned import PlannedModel
from autopar.runtime import ProgramError


class PlannedAccelerator(Accelerator):
    """Loads the same batches on each process, and adds nothing up: the program does."""

    planned: PlannedModel | None = None

    @property
    def num_processes(self) -> int:
        """1: of those among which data is shared."""
        return 1

    def gather(self, tensor: Any) -> Any:
        """What this process has, since all have it."""
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """What this process has, since all have it."""
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """What this process has, since all have it."""
        return tensor

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:  # fmt: skip
        """The loader as for one process; workers draw as those of the first process do."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        _seed_as_first(data_loader)
        config = self.dataloader_config
        found = prepare_data_loader(
            data_loader, self.device, num_processes=1, process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(), dispatch_batches=False, even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler, data_seed=config.data_seed,
            non_blocking=self.non_blocking, use_stateful_dataloader=self.use_stateful_dataloader,
        )  # fmt: skip
        self._dataloaders.append(found)
        return found

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """A planned model as it is. Raises ProgramError for another."""
        if isinstance(model, PlannedModel):
            return model
        raise ProgramError(
            f"expected the planned model, found {type(model).__name__}, which would be wrapped in "
            "DistributedDataParallel; autopar's Trainer trains the model that it was given, and no other"
        )

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate. Raises ProgramError for one that would leave the planned model as it is."""
        if self.planned is not None:
            remedy = "in create_optimizer, take those of self.model_wrapped or of the model that it is given"
            check_optimizer(optimizer, self.planned.rank, remedy)
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As in Accelerate. Raises ProgramError for a loss that would give other gradients than in one process."""
        if self.planned is not None:
            names = {id(parameter): name for name, parameter in self.planned.named_parameters()}
            check_loss(loss, names, self.planned.rank.num_stages)
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips by the norm over all ranks, which is the single process's. Raises ProgramError for some parameters."""
        if self.planned is None or {id(p) for p in parameters} != {id(p) for p in self.planned.parameters()}:
            raise ProgramError(
                "expected to clip all parameters of the planned model, found others; take model.parameters() of the "
                "model that the trainer calls"
            )
        return self.planned.rank.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips each element, which each rank does of its own."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)


def _seed_as_first(loader: Any) -> None:
    """Transformers seeds workers by the process's number too, so that processes augment unlike data unlike."""
    seeded = loader.worker_init_fn if isinstance(loader, DataLoader) else None
    if isinstance(seeded, partial) and "rank" in seeded.keywords:
        loader.worker_init_fn = partial(seeded.func, *seeded.args, **{**seeded.keywords, "rank": 0})
