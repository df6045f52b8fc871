"""Values that are the same at every step: computed at the first one, kept until what they are made of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.declare import Parameters

_KEPT = "constants_of_module"

Method = Callable[[Any], tuple[Tensor, ...]]


def computed_once(method: Method) -> Method:
    """A method of a module whose results do not depend on inputs or parameters; they need no gradient.

    They may depend on buffers, but for those that forward sets, such as a cache of keys. A checkpoint is read into
    buffers in place, past `load_full_state_dict`, so what is kept holds for the version of those that it was made from.
    """
    return _kept(method, _buffers)


def folded(method: Method) -> Method:
    """As `computed_once`, of parameters too, in a program that trains none of them."""
    return _kept(method, _everything_stored)


def _kept(method: Method, made_of: Callable[[Any], list[Tensor]]) -> Method:
    name = method.__name__

    @wraps(method)
    def once(module: Any) -> tuple[Tensor, ...]:
        all_kept = module.__dict__.setdefault(_KEPT, {})
        kept: _FoldedConstants | None = all_kept.get(name)
        if kept is None or kept.versions != [tensor._version for tensor in kept.made_of]:
            with torch.no_grad():
                kept = all_kept[name] = _FoldedConstants(method(module), made_of(module))
        return kept.values

    return once


class _FoldedConstants:
    def __init__(self, values: tuple[Tensor, ...], made_of: list[Tensor]) -> None:
        self.values, self.made_of = values, made_of
        self.versions = [tensor._version for tensor in made_of]
        for value in values:
            storage = value.untyped_storage()
            _memory[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # torch's


_memory: dict[int, StorageWeakRef] = {}
"""Of all that is kept, by its address."""


def is_constant(address: int) -> bool:
    """Whether the memory at an address is of values that are computed once."""
    known = _memory.get(address)
    if known is not None and known.expired():  # type: ignore[no-untyped-call] # torch's
        del _memory[address]
        return False
    return known is not None


def _holders(module: Any) -> Iterator[Parameters]:
    return (holder for holder in module.modules() if isinstance(holder, Parameters))


def _buffers(module: Any) -> list[Tensor]:
    """This rank's part of every buffer that forward has not set so far: tensors that stay the same objects as long as
    the program lives. After a first step, those that it sets have another version at each, and no constant is made of
    them."""
    return [
        holder.__dict__[name]
        for holder in _holders(module)
        for name in holder.declared_buffers
        if name not in holder.set_by_forward
    ]


def _everything_stored(module: Any) -> list[Tensor]:
    """Of parameters what is loaded into, and what optimizers and people see: each may have versions of its own."""
    parameters = (stored for holder in _holders(module) for stored in holder.stored_parameters.values())
    return [*_buffers(module), *(tensor for stored in parameters for tensor in (stored.local, stored.tensor))]


def forget_constants(program: Any) -> None:
    """Computes them again at their next use."""
    for module in program.modules():
        module.__dict__.pop(_KEPT, None)
