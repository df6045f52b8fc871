"""The values of buffers that no state_dict holds: whoever loads one into a program has none for these.

A model on meta has lost them. transformers makes them again where it loads a checkpoint, by `_init_weights` of each
module, others by methods such as `reset_parameters`; what these set, whatever was there before, is their value. Of
such a model, so are those that a state_dict does hold: until one is loaded, there is nothing else to begin with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MOST, MOST_ON_META = 1 << 12, 1 << 18  # elements
_RESETS = ("reset_parameters", "reset_running_stats", "reset_buffers", "init_buffers", "init_weights", "rope_init")


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By name in the model, those buffers whose values are known and not too large for a text: a model that is not on
    meta brings its own beside the text."""
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    most = MOST_ON_META if is_meta else MOST
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        names = module._buffers if is_meta else module._non_persistent_buffers_set
        own = {name: module._buffers[name] for name in names}
        known = {name: tensor for name, tensor in own.items() if tensor is not None and not tensor.is_meta}
        if len(known) < sum(tensor is not None for tensor in own.values()):
            known |= _initialised(model, path, module)
        small = {name: tensor.detach() for name, tensor in known.items() if tensor.numel() <= most}
        found |= {f"{path}.{name}" if path else name: tensor for name, tensor in small.items()}
    return found


@contextmanager
def all_on_meta(model: nn.Module) -> Iterator[None]:
    """Where some of a model's parameters are on meta, its buffers are, too: its forward takes them together."""
    held: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
    if any(parameter.is_meta for parameter in model.parameters()):
        held = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    moved: dict[int, Tensor] = {}
    for own, before in held:
        for name, tensor in before.items():
            if tensor is not None and not tensor.is_meta:
                own[name] = moved.setdefault(id(tensor), tensor.to("meta"))
    try:
        yield
    finally:
        for own, before in held:
            own.update(before)


def _initialised(model: nn.Module, path: str, module: nn.Module) -> dict[str, Tensor]:
    """What the nearest module around that can, or else the module itself, initialises of a module's buffers; nothing of
    what depends on what was there before."""
    around = [model.get_submodule(".".join(path.split(".")[:count])) for count in range(len(path.split(".")), -1, -1)]
    own: list[Any] = [one._init_weights for one in around if callable(getattr(one, "_init_weights", None))]
    ways: list[Callable[[nn.Module], Any]] = own[:1]
    ways += [partial(_call, name) for name in _RESETS if callable(getattr(module, name, None))]
    found: dict[str, Tensor] = {}
    for initialise in ways:
        try:
            first, second = (_filled(module, value, initialise) for value in (0, 1))
        except Exception:  # the model's own code, which asks for more than a module
            continue
        found = {name: tensor for name, tensor in first.items() if torch.equal(tensor, second[name])} | found
    return found


def _call(name: str, module: nn.Module) -> None:
    getattr(module, name)()


@torch.no_grad()
def _filled(module: nn.Module, value: int, initialise: Any) -> dict[str, Tensor]:
    """The buffers after the module was initialised, with this value in all of them before; itself it stays as it is."""
    twin = copy.copy(module)
    twin._modules = {}
    held = {name: tensor for name, tensor in module._buffers.items() if tensor is not None}
    twin._buffers = {name: torch.full(tensor.shape, value, dtype=tensor.dtype) for name, tensor in held.items()}
    twin._parameters = {
        name: None if tensor is None else nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
        for name, tensor in module._parameters.items()
    }
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(value)
        initialise(twin)
    return {name: tensor for name, tensor in twin._buffers.items() if tensor is not None and not tensor.is_meta}
