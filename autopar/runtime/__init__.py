"""The little that an emitted program imports. Imports torch, and safetensors to read and write such files.

Its names (`runtime.surface`) are there from the first that is asked for on: the compiler reads sizes and orders in some
files here, such as `packing`, without the second that the rest takes to import. No file of this room has the name of
one of them, or it would stand in its place.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.runtime.surface import *


def __getattr__(name: str) -> Any:
    if name != "__all__" and name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    surface = vars(import_module("autopar.runtime.surface"))
    globals().update({key: value for key, value in surface.items() if key == "__all__" or not key.startswith("_")})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
