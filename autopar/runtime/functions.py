"""Calls of autograd Functions of the model: found by module and name, and called as the model calls them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.errors import ProgramError


@cache
def imported(name: str) -> Any:
    """What a module holds: "module:qualified.name". Raises ProgramError where there is no such thing to import."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ProgramError(
            f"expected to import {path} of module {module}, which the model calls: {error}. Add the folder that holds "
            f"{module} to PYTHONPATH on every rank"
        ) from error
    return found


def apply(function: str, *args: Any) -> Any:
    """Calls an autograd Function of the model on whole tensors; only the tensors that it returns.

    Tensors are passed in order of their dims, as they are in a model of one device.
    """
    given = [x.contiguous() if isinstance(x, Tensor) else x for x in args]
    with _read_again():
        returned = torch.autograd.Function.apply.__func__(imported(function), *given)  # type: ignore[attr-defined]
    found = tensors_in(returned)
    return found[0] if len(found) == 1 else tuple(found)


class _Saved:
    """What a Function has saved, as whoever keeps it for the backward pass has packed it; unpacked once."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed
        self.tensor: Tensor | None = None


@contextmanager
def _read_again() -> Iterator[None]:
    """While inside, what is saved may be read any number of times in the backward pass: recomputed blocks give it
    once, and a Function may ask for `ctx.saved_tensors` more often."""
    around: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if around is None:
        yield
        return
    pack, unpack = around

    def unpacked(saved: _Saved) -> Tensor:
        if saved.tensor is None:
            saved.tensor = unpack(saved.packed)
        return saved.tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda x: _Saved(pack(x)), unpacked):
        yield


class _HookedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: Callable[..., Tensor], *others: Tensor) -> Tensor:
        ctx.hook = hook
        ctx.save_for_backward(*others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        others = ctx.saved_tensors  # which recomputed blocks give once
        return ctx.hook(gradient, *others), None, *(None for _ in others)


def hooked(x: Tensor, hook: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """Passes a tensor on; its gradient is what the model's hook makes of it and of other tensors."""
    made: Tensor = _HookedFunction.apply(x, hook, *others)  # type: ignore[no-untyped-call] # torch's
    return made


def tensors_in(value: Any) -> list[Tensor]:
    """Those in tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [x for item in items for x in tensors_in(item)]
