"""Values that are the same at every step: computed at the first one, kept until the program's state is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_KEPT = "constants_of_program"


def computed_once(method: Callable[[Any], tuple[torch.Tensor, ...]]) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """A method of the program whose results do not depend on inputs or parameters; they need no gradient."""

    @wraps(method)
    def once(program: Any) -> tuple[torch.Tensor, ...]:
        if _KEPT not in program.__dict__:
            with torch.no_grad():
                program.__dict__[_KEPT] = method(program)
        kept: tuple[torch.Tensor, ...] = program.__dict__[_KEPT]
        return kept

    return once


def forget_constants(program: Any) -> None:
    """Constants may depend on buffers: after these are loaded, they are computed again."""
    program.__dict__.pop(_KEPT, None)
