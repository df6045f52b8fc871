"""What torch's own tools do with a rank's parameters: steps of optimizers (see `optimizers`), clipping, numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from autopar.runtime.errors import ProgramError
from autopar.runtime.numbers_out import take_whole_numbers
from autopar.runtime.optimizers import guard_optimizers, register
from autopar.runtime.optimizers.stepping import parameter_of_gradient, state_of

__all__ = ["register"]


def _guard_clipping() -> None:
    """torch.nn.utils.clip_grad_norm_ scales each stage by a norm of its own: refused, before anything is scaled. So is
    `get_total_norm` of gradients, where it would be the norm of one stage."""
    scale, norm = getattr(clip_grad, "_clip_grads_with_norm_", None), getattr(clip_grad, "_get_total_norm", None)
    if scale is None or norm is None:
        return

    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = _listed(parameters)
        _check_stages(parameters)
        return scale(parameters, *args, **kwargs)

    def whole(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = _listed(tensors)
        told = (owner for x in tensors if (owner := parameter_of_gradient(x)) is not None)
        _check_stages([*tensors, *told])
        return norm(tensors, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = guarded
    clip_grad._get_total_norm = nn.utils.get_total_norm = whole


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _check_stages(parameters: Iterable[Tensor]) -> None:
    """Raises ProgramError for parameters of a rank that lacks those of other stages."""
    if any((state := state_of(parameter)) is not None and state.group is not None for parameter in parameters):
        raise ProgramError(
            "expected rank.clip_grad_norm_(max_norm), found torch.nn.utils.clip_grad_norm_ or get_total_norm: this "
            "rank has the parameters of its stages alone, and would take another norm than the other stages. "
            "clip_grad_norm_(math.inf) returns the norm and scales nothing"
        )


guard_optimizers()
_guard_clipping()
take_whole_numbers()
