"""Turns a model and example inputs into the forward `Graph`: export, convert, clean, find repeated blocks.

What exports, and with it torch.export, is imported when it is asked for: blocks are found without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.trace.blocks import Blocks, find_blocks

if TYPE_CHECKING:
    from autopar.trace.guard import held_against_eager
    from autopar.trace.losses import with_loss
    from autopar.trace.tracing import trace

__all__ = ["Blocks", "find_blocks", "held_against_eager", "trace", "with_loss"]

_HOMES = {"held_against_eager": "guard", "trace": "tracing", "with_loss": "losses"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
