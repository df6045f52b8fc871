"""What a loss function stores: its parameters and buffers belong to the program, under names that begin with `loss_fn.`

A loss is a module, a method of one, a partial or a function that has some in its closure, or keeps none at all. What is
the model's own stays the model's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError

NAME = "loss_fn"
MAX_ELEMENTS = 4096
"""Of a tensor whose values stand in the source."""


def name_of_loss(model: nn.Module) -> str:
    """What its module is called beside the model's: `loss_fn`, with underscores behind it where the model has one."""
    name = NAME
    while hasattr(model, name):
        name += "_"
    return name


def loss_module(model: nn.Module, loss_fn: Callable[..., Any] | None) -> nn.Module | None:
    """The module that holds what the loss stores; None where that is nothing that the model does not.

    Raises TraceError for a parameter that is in no module: its gradient would be lost.
    """
    own = set(map(id, model.modules()))
    held = dict(_held(loss_fn, "", set()))
    stored = set(map(id, (*model.parameters(), *model.buffers())))
    for name, value in held.items():
        if isinstance(value, torch.Tensor) and value.requires_grad and id(value) not in stored:
            raise TraceError(
                f"expected parameters of the loss function in a module, found {name!r} ({list(value.shape)}) beside "
                "one; make the loss an nn.Module that holds it, and it is trained and saved as loss_fn.*"
            )
    modules = {name: value for name, value in held.items() if isinstance(value, nn.Module) and id(value) not in own}
    modules = {name: m for name, m in modules.items() if any(True for _ in (*m.parameters(), *m.buffers()))}
    if len(modules) == 1:
        return next(iter(modules.values()))
    return nn.ModuleDict(modules) if modules else None


def _held(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The modules and tensors that a function reads without being given them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (nn.Module, torch.Tensor)):
        yield name.replace(".", "_") or NAME, value
    elif isinstance(value, functools.partial):
        parts = [("", value.func), *((str(n), item) for n, item in enumerate(value.args)), *value.keywords.items()]
        for key, item in parts:
            yield from _held(item, _joined(name, key), seen)
    elif isinstance(value, (list, tuple, dict)):
        for key, item in dict(value if isinstance(value, dict) else enumerate(value)).items():
            yield from _held(item, _joined(name, str(key)), seen)
    elif callable(value) and not isinstance(value, type):
        yield from _held_by_function(value, name, seen)


def _held_by_function(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    owner = getattr(value, "__self__", None)
    if owner is not None and isinstance(owner, nn.Module):
        yield from _held(owner, name, seen)
    elif owner is not None or not hasattr(value, "__code__"):
        for key, item in getattr(owner if owner is not None else value, "__dict__", {}).items():
            yield from _held(item, _joined(name, key), seen)
    code, cells = getattr(value, "__code__", None), getattr(value, "__closure__", None) or ()
    for key, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            inside = cell.cell_contents
        except ValueError:  # not set yet
            continue
        yield from _held(inside, _joined(name, key), seen)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or key


def with_loss(model: nn.Module, loss_fn: Callable[..., Any] | None) -> nn.Module:
    """The model with the loss's module as one more of its own: an object to be looked at, with the same tensors."""
    loss = loss_module(model, loss_fn)
    if loss is None:
        return model
    whole: nn.Module = object.__new__(type(model))
    whole.__dict__.update(model.__dict__)
    whole.__dict__["_modules"] = {**model._modules, name_of_loss(model): loss}
    return whole


def loss_values(model: nn.Module, loss_fn: Callable[..., Any] | None) -> dict[str, torch.Tensor]:
    """What the loss stores, by name, as far as it is small: the program begins with it where a state has none of it."""
    loss = loss_module(model, loss_fn)
    stored = {} if loss is None else dict(loss.named_parameters()) | dict(loss.named_buffers())
    name = name_of_loss(model)
    return {f"{name}.{k}": x.detach() for k, x in stored.items() if not x.is_meta and x.numel() <= MAX_ELEMENTS}
