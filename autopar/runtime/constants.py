"""Values that are the same at every step: computed at the first one, kept until the program's buffers change."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_KEPT = "constants_of_program"


def computed_once(method: Callable[[Any], tuple[torch.Tensor, ...]]) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """A method of the program whose results do not depend on inputs or parameters; they need no gradient.

    They may depend on buffers. A checkpoint is read into these in place, past `load_full_state_dict`, so what is kept
    holds for the version of the buffers that it was made from.
    """

    @wraps(method)
    def once(program: Any) -> tuple[torch.Tensor, ...]:
        kept = program.__dict__.get(_KEPT)
        if kept is None or kept.versions != [buffer._version for buffer in kept.buffers]:
            with torch.no_grad():
                kept = program.__dict__[_KEPT] = _Kept(method(program), _buffers(program))
        values: tuple[torch.Tensor, ...] = kept.values
        return values

    return once


class _Kept:
    def __init__(self, values: tuple[torch.Tensor, ...], buffers: list[torch.Tensor]) -> None:
        self.values, self.buffers = values, buffers
        self.versions = [buffer._version for buffer in buffers]


def _buffers(program: Any) -> list[torch.Tensor]:
    """This rank's part of every buffer: tensors that stay the same objects as long as the program lives."""
    holders = [module for module in program.modules() if hasattr(module, "declared_buffers")]
    return [holder.__dict__[name] for holder in holders for name in holder.declared_buffers]


def forget_constants(program: Any) -> None:
    """Computes them again at their next use."""
    program.__dict__.pop(_KEPT, None)
