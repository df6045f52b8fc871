"""What torch's own tools do with a rank's parameters: steps of optimizers, and clipping.

Most optimizers compute each element by itself, with operators that DTensors know. Of the others in torch.optim
    by shard      Rprop, fused SGD and Adagrad: each element by itself; they step on the local tensors
    by parameter  Adafactor, Muon: one parameter after the other is gathered, stepped whole on all ranks, and cut again
    refused       LBFGS: one vector of all parameters, which no rank has
State that has a parameter's shape is kept in shards between two steps, so that checkpoints cut it like the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.runtime.errors import ProgramError
from autopar.runtime.placement import local_slices
from autopar.runtime.state import whole_tensor
from autopar.runtime.stored import StoredParameter, local_part, wrap

_stored: Any = WeakIdKeyDictionary()  # by parameter: what it is the tensor of, and the number of ranks and stages
_inner: Any = WeakIdKeyDictionary()  # optimizers within a step of ours
_held: Any = WeakIdKeyDictionary()  # by optimizer, whose parameters we have stepped: those of its groups

_BY_SHARD = (torch.optim.Rprop,)
_BY_SHARD_IF_FUSED = (torch.optim.SGD, torch.optim.Adagrad)
_BY_PARAMETER = tuple(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))


def register(parameters: Iterable[StoredParameter], num_ranks: int, num_stages: int) -> None:
    """Tells whose tensors these are."""
    for stored in parameters:
        _stored[stored.tensor] = stored, num_ranks, num_stages


# Optimizers ----------------------------------------


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Does the step of those parameters that the optimizer cannot do as they are, and leaves it the others."""
    own = [p for group in optimizer.param_groups for p in group["params"] if p in _stored]
    if optimizer in _inner or not own:
        return None
    is_whole = isinstance(optimizer, _BY_PARAMETER)
    _check_optimizer(optimizer, own, is_whole)
    is_fused = isinstance(optimizer, _BY_SHARD_IF_FUSED) and any(g.get("fused") for g in optimizer.param_groups)
    if not (is_whole or is_fused or isinstance(optimizer, _BY_SHARD)):
        return None
    args, kwargs = _closed(args, kwargs)
    own = [p for p in own if isinstance(p, DTensor) and p.grad is not None]
    groups = [group["params"] for group in optimizer.param_groups]
    _inner[optimizer] = True
    try:
        for batch in [[p] for p in own] if is_whole else [own]:
            with _standing_in(optimizer, groups, batch, is_whole):
                type(optimizer).step(optimizer)
    finally:
        del _inner[optimizer]
        _set(optimizer, groups)
    done = {id(p) for p in own}
    _held[optimizer] = groups
    _set(optimizer, [[p for p in params if id(p) not in done] for params in groups])
    return args, kwargs


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _held and optimizer not in _inner:
        _set(optimizer, _held.pop(optimizer))


def _set(optimizer: Optimizer, groups: Sequence[list[Tensor]]) -> None:
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = params


def _closed(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a step whose closure was called, since it makes gradients of the parameters themselves."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {**kwargs, "closure": lambda: loss}


def _check_optimizer(optimizer: Optimizer, own: Sequence[Tensor], is_whole: bool) -> None:
    num_ranks = max(_stored[p][1] for p in own)
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS) and num_ranks > 1:
        raise ProgramError(
            f"expected an optimizer that steps each parameter by itself, found {name}, which joins all of them in one "
            f"vector that none of the {num_ranks} ranks has. Take another, such as AdamW, or train on one device"
        )
    packed = [_stored[p][0].name for p in own if _stored[p][0].declared.pieces]
    if is_whole and packed:
        raise ProgramError(
            f"expected parameters as the model has them, found {', '.join(packed)} packed by a substitution: {name} "
            "computes with a matrix as a whole. Take an elementwise optimizer, or plan without substitutions "
            "(autopar.SearchBudget(substitutions=False))"
        )


@contextmanager
def _standing_in(
    optimizer: Optimizer, groups: Sequence[list[Tensor]], batch: Sequence[Tensor], is_whole: bool
) -> Iterator[None]:
    """Plain tensors in the places of parameters, with their gradients and state; what they become is stored."""
    others: Any = WeakIdKeyDictionary()
    plain = partial(_plain, is_whole=is_whole)
    for parameter in batch:
        others[parameter] = nn.Parameter(plain(parameter), requires_grad=True)
        if parameter.grad is not None:
            others[parameter].grad = plain(parameter.grad)
        if parameter in optimizer.state:
            optimizer.state[others[parameter]] = _mapped(optimizer.state.pop(parameter), parameter.shape, plain)
    try:
        _set(optimizer, [[others[p] for p in params if p in others] for params in groups])
        yield
    finally:
        for parameter in batch:
            stored, other = _stored[parameter][0], others[parameter]
            if other in optimizer.state:
                kept = partial(_kept, stored, is_whole=is_whole)
                optimizer.state[parameter] = _mapped(optimizer.state.pop(other), other.shape, kept)
            if is_whole:
                with torch.no_grad():
                    stored.local.copy_(_cut(stored, other))


def _plain(tensor: Tensor, is_whole: bool) -> Tensor:
    """A parameter, or something cut like it, in plain memory: whole, or the local part itself."""
    return (whole_tensor(tensor) if is_whole else local_part(tensor.detach())).detach()


def _mapped(state: Any, shape: torch.Size, change: Callable[[Tensor], Tensor]) -> Any:
    """An optimizer's state of one parameter, with what has its shape changed."""
    return {
        key: change(value) if isinstance(value, Tensor) and value.dim() and value.shape == shape else value
        for key, value in state.items()
    }


def _kept(stored: StoredParameter, value: Tensor, is_whole: bool) -> Tensor:
    local = _cut(stored, value).clone() if is_whole else value
    return wrap(local, stored.declared.shape, stored.types, stored.mesh)


def _cut(stored: StoredParameter, whole: Tensor) -> Tensor:
    return whole[local_slices(stored.declared.shape, stored.types, stored.mesh.axes)]


# Clipping ----------------------------------------


def _guard_clipping() -> None:
    """torch.nn.utils.clip_grad_norm_ scales each stage by a norm of its own: refused, before anything is scaled."""
    scale = getattr(clip_grad, "_clip_grads_with_norm_", None)
    if scale is None:
        return

    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(p in _stored and _stored[p][2] > 1 for p in parameters):
            raise ProgramError(
                "expected rank.clip_grad_norm_(max_norm), found torch.nn.utils.clip_grad_norm_: this rank has the "
                "parameters of its stages alone, and would scale them by another norm than the other stages"
            )
        return scale(parameters, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = guarded


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
_guard_clipping()
