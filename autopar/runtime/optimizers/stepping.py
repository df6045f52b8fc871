"""Where steps of optimizers pass by: of one that is given a parameter of a rank, every method that may change it.

Its `step` is wrapped when it gets the parameters (`Optimizer.add_param_group`), and so is whatever public method
torch's optimizers do not have, such as SAM's `first_step` or the `eval` of schedule-free ones.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.runtime.errors import ProgramError
from autopar.runtime.optimizers.kinds import is_torch, kind_of, own_methods
from autopar.runtime.optimizers.session import Session
from autopar.runtime.optimizers.shards import Shards
from autopar.runtime.state import ProgramState
from autopar.runtime.stored import StoredParameter

_states: Any = WeakIdKeyDictionary()  # by parameter: a reference to the state of its program
_stepping: list[Optimizer] = []  # those within a step of ours
_SESSION = "_session_of_rank"  # attribute of an optimizer: it lives as long as that


def register(state: ProgramState, nothing: Tensor) -> None:
    """Tells whose parameters these are. nothing: what stands for them where a rank has none that is trained; it steps
    with the others all the same."""
    for tensor in [*(stored.tensor for stored in state.parameters.values()), nothing]:
        _states[tensor] = ref(state)


def state_of(parameter: Any) -> ProgramState | None:
    """Of the program that stores a parameter; None where it is none of ours."""
    found = _states.get(parameter) if isinstance(parameter, Tensor) else None
    return found() if found is not None else None


def parameter_of_gradient(gradient: Tensor) -> Tensor | None:
    """The parameter of a rank whose gradient a tensor is."""
    return next((parameter for parameter in list(_states) if parameter.grad is gradient), None)


def _own(optimizer: Optimizer) -> dict[int, ProgramState]:
    """The programs that an optimizer has parameters of."""
    every = (state_of(p) for group in optimizer.param_groups for p in group["params"])
    return {id(state): state for state in every if state is not None}


def _call(optimizer: Optimizer, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A method of the optimizer, on what it may see of the parameters."""
    if optimizer in _stepping:
        return method(*args, **kwargs)
    programs, kind = list(_own(optimizer).values()), kind_of(optimizer)
    if not programs or kind == "elements":
        return method(*args, **kwargs)
    if len(programs) > 1:
        raise ProgramError(
            f"expected {type(optimizer).__name__} to have parameters of one program, found those of {len(programs)}; "
            "make an optimizer for each"
        )
    if programs[0].has_copies:
        raise ProgramError(
            f"expected an optimizer that looks at elements by themselves, such as AdamW or SGD, found "
            f"{type(optimizer).__name__}: ranks would share the work on whole parameters, of which they have copies "
            "of their own under local_sgd; declare it (rt.declare_optimizer), or leave the algorithm out"
        )
    _check_on_host(optimizer, programs[0], kind)
    given = _given(optimizer, programs[0], kind)
    args, kwargs = _with_closure(given, args, kwargs)
    _stepping.append(optimizer)
    try:
        with given.running():
            return method(*args, **kwargs)
    finally:
        _stepping.remove(optimizer)


def _check_on_host(optimizer: Optimizer, state: ProgramState, kind: str) -> None:
    """Raises ProgramError where whole tensors would stand in on the device for parameters that are on the host."""
    on_host = next((name for name, stored in state.parameters.items() if stored.is_on_host), None)
    if on_host is not None and kind != "shards":
        raise ProgramError(
            f"expected an optimizer that computes each element by itself, since {on_host} is on the host, found "
            f"{type(optimizer).__name__}, which is given whole tensors; use AdamW or the like, tell "
            'rt.declare_optimizer(…, looks_at="elements") where that is so, or plan without offload'
        )


def _given(optimizer: Optimizer, state: ProgramState, kind: str) -> Session | Shards:
    if kind == "shards":
        own: dict[int, StoredParameter] = {id(item.tensor): item for item in state.parameters.values()}
        return Shards(optimizer, own, is_watched=not is_torch(optimizer))
    known: Session | None = vars(optimizer).get(_SESSION)
    if known is None or known.state is not state or known.is_asked_everywhere != (kind == "everything"):
        known = vars(optimizer)[_SESSION] = Session(optimizer, state, kind == "everything")
    return known


def _with_closure(given: Session | Shards, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, with closures that train the parameters themselves."""

    def closed(value: Any) -> Any:
        return given.closure(value) if callable(value) and not isinstance(value, type) else value

    return tuple(map(closed, args)), {key: closed(value) for key, value in kwargs.items()}


def _watched(optimizer: Optimizer) -> None:
    """Puts our call around the methods of an optimizer that has a parameter of ours."""
    if "step" in vars(optimizer) or not _own(optimizer):
        return
    for name in dict.fromkeys(["step", *own_methods(optimizer)]):
        method = getattr(type(optimizer), name, None)
        if method is not None:
            setattr(optimizer, name, MethodType(_around(method), optimizer))


def _around(method: Any) -> Callable[..., Any]:
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _call(self, MethodType(method, self), args, kwargs)

    call.__name__ = call.__qualname__ = method.__name__
    return call


def _check_seen(optimizer: Optimizer, *_: Any) -> None:
    """Raises ProgramError for a step that did not pass by here, such as that of a copy of an optimizer."""
    if optimizer in _stepping or not _own(optimizer) or kind_of(optimizer) == "elements":
        return
    raise ProgramError(
        f"expected {type(optimizer).__name__} as it was made with the parameters of a rank, found a copy of it, or its "
        "class's step called by hand; make an optimizer of rank.parameters(), and call its step"
    )


def _count(optimizer: Optimizer, *_: Any) -> None:
    """After a step of any optimizer."""
    for state in _own(optimizer).values():
        state.num_updates += 1


def guard_optimizers() -> None:
    """From now on, what an optimizer does to the parameters of a rank passes by here."""
    add = Optimizer.add_param_group

    def added(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        _watched(self)

    Optimizer.add_param_group = added  # type: ignore[method-assign] # the public method that every group goes through
    register_optimizer_step_pre_hook(_check_seen)
    register_optimizer_step_post_hook(_count)
