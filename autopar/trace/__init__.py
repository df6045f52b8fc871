"""Turns a model and example inputs into the forward `Graph`: export, convert, clean, find repeated blocks.

What exports, and with it torch.export, is imported when it is asked for: blocks are found without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.trace.blocks import Blocks, find_blocks

if TYPE_CHECKING:
    from autopar.trace.guard import held_against_eager
    from autopar.trace.inexact import gradient_error, is_inexact
    from autopar.trace.losses import with_loss
    from autopar.trace.tracing import trace

__all__ = ["Blocks", "find_blocks", "gradient_error", "held_against_eager", "is_inexact", "trace", "with_loss"]

_HOMES = {
    "gradient_error": "inexact",
    "held_against_eager": "guard",
    "is_inexact": "inexact",
    "trace": "tracing",
    "with_loss": "losses",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
