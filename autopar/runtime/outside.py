"""What torch's own tools do with a rank's parameters: steps of optimizers (see `optimizers`), and clipping."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from autopar.runtime.errors import ProgramError
from autopar.runtime.optimizers import guard_optimizers, register
from autopar.runtime.optimizers.stepping import state_of

__all__ = ["register"]


def _guard_clipping() -> None:
    """torch.nn.utils.clip_grad_norm_ scales each stage by a norm of its own: refused, before anything is scaled."""
    scale = getattr(clip_grad, "_clip_grads_with_norm_", None)
    if scale is None:
        return

    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any((state := state_of(p)) is not None and state.group is not None for p in parameters):
            raise ProgramError(
                "expected rank.clip_grad_norm_(max_norm), found torch.nn.utils.clip_grad_norm_: this rank has the "
                "parameters of its stages alone, and would scale them by another norm than the other stages"
            )
        return scale(parameters, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = guarded


guard_optimizers()
_guard_clipping()
