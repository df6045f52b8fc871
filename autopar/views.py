"""What shows plans and timelines, by name: these are plain data, and know of none.

`autopar/__init__` says where each view is (`fill`); it is imported when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {}


def fill(homes: Mapping[str, str]) -> None:
    """Says where views are: by name, "module:function"."""
    _HOMES.update(homes)


def view(name: str) -> Any:
    """The function that shows something so. Raises LookupError where nobody has said which that is."""
    if name not in _HOMES:
        raise LookupError(f"expected a view named {name!r}, found {sorted(_HOMES)}; autopar/__init__.py fills them in")
    module, _, function = _HOMES[name].partition(":")
    return getattr(import_module(module), function)


__all__ = ["fill", "view"]
