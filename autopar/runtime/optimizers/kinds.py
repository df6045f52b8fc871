"""What a step of an optimizer looks at, as far as it is known: that decides what it is given of sharded parameters.

    elements    each element by itself, with operators that DTensors know: it steps on the parameters as they are
    shards      each element by itself, by kernels that DTensors do not know: it steps on this rank's plain parts
    parameters  one parameter as a whole, whatever the others are: whole tensors of those that this rank has a part of
    everything  what nobody has told: whole tensors of all parameters of all stages, as on one device

An optimizer is known by the class that has its step. A subclass of a known one that changes more than how it is made
is not: that it clips, centralizes or looks ahead is in methods that nobody has read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from autopar.runtime.errors import ProgramError

Kind = Literal["elements", "shards", "parameters", "everything"]

_ELEMENTS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
_SHARDS_IF_FUSED = (torch.optim.SGD, torch.optim.Adagrad)
_KINDS: dict[type[Optimizer], Kind] = {
    **{getattr(torch.optim, name): "elements" for name in _ELEMENTS},
    torch.optim.Rprop: "shards",
    **{getattr(torch.optim, name): "parameters" for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)},
}
_HARMLESS = {"__init__", "__repr__", "__str__"}


def declare_optimizer(kind: type[Optimizer], *, looks_at: str) -> None:
    """Tells what a step of an optimizer's class looks at, where autopar cannot know: then less is gathered for it.

    looks_at: "elements", where no element's update depends on another's, as in Lion (it steps on shards; an operator
    that is not pointwise is refused); "parameters", where a parameter's update depends on that parameter alone, as in
    LAMB or Shampoo (no stage of a pipeline sees those of others). "everything", which is what is taken where nothing
    is told: a norm over all parameters, as in Prodigy. Raises ProgramError for another word.
    """
    known: dict[str, Kind] = {"elements": "shards", "parameters": "parameters", "everything": "everything"}
    if looks_at not in known:
        raise ProgramError(f"expected looks_at to be one of {', '.join(known)}, found {looks_at!r}")
    _KINDS[kind] = known[looks_at]


def kind_of(optimizer: Optimizer) -> Kind:
    """What a step of it looks at."""
    for owner in type(optimizer).__mro__:
        known = _KINDS.get(owner)
        if known is not None:
            fused = isinstance(optimizer, _SHARDS_IF_FUSED) and any(g.get("fused") for g in optimizer.param_groups)
            return "shards" if fused and known == "elements" else known
        if _changes(owner):
            return "everything"
    return "everything"


def is_torch(optimizer: Optimizer) -> bool:
    """Whether the step is one of torch's own, which is read and tested here: nothing of it need be watched."""
    owner = next(owner for owner in type(optimizer).__mro__ if owner in _KINDS or _changes(owner))
    return owner.__module__.startswith("torch.optim.")


def _changes(owner: type) -> bool:
    """Whether a class has methods of its own besides how it is made. torch puts hooks around an inherited step."""
    found = {name: item for name, item in vars(owner).items() if callable(item) and name not in _HARMLESS}
    return any(not _is_inherited(owner, name, item) for name, item in found.items())


def _is_inherited(owner: type, name: str, item: Callable[..., Any]) -> bool:
    above = getattr(super(owner, owner), name, None)
    return _plain(item) is _plain(above)


def _plain(function: Any) -> Any:
    while getattr(function, "hooked", False) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def own_methods(optimizer: Optimizer) -> list[str]:
    """Public methods that torch's optimizers do not have, such as SAM's `first_step`: they may change parameters."""
    classes = type(optimizer).__mro__
    below = classes[: classes.index(Optimizer)]
    found = {name: item for owner in reversed(below) for name, item in vars(owner).items()}
    return [
        name
        for name, item in found.items()
        if callable(item) and not isinstance(item, type | staticmethod | classmethod)
        and not name.startswith(("_", "get", "state", "load")) and not hasattr(Optimizer, name)
    ]  # fmt: skip
