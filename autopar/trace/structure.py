"""Inputs and outputs of any form as flat lists of tensors with names, and back: dicts, lists, tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.ir.graph import Fields, Ref

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, by key, field or number; None for anything else."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return [(str(number), item) for number, item in enumerate(value)]
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors, in order."""
    if isinstance(value, Tensor):
        yield value
    for _, item in parts_of(value) or ():
        yield from tensors_in(item)


def filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same containers and constants with other tensors, in order."""
    if isinstance(value, Tensor):
        return next(tensors)
    parts = parts_of(value)
    if parts is None or not any(True for _ in tensors_in(value)):
        return value
    return _like(value, [filled(item, tensors) for _, item in parts])


def _like(value: Any, items: list[Any]) -> Any:
    """A container of the same type with other items."""
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return items
    made = copy.copy(value)
    if isinstance(value, Mapping):
        if made is value or not hasattr(made, "__setitem__"):
            return dict(zip(value, items, strict=True))
        for key, item in zip(list(value), items, strict=True):
            made[key] = item
    else:
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            object.__setattr__(made, field.name, item)
    return made


def outputs_in(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors that forward returns, with their dotted paths; what torch knows as a container is looked into."""
    parts = parts_of(value)
    if parts is None and not isinstance(value, Tensor) and type(value) in pytree.SUPPORTED_NODES:
        parts = [(str(number), item) for number, item in enumerate(pytree.tree_leaves(value))]
    if parts is None:
        yield where, value
    for key, item in parts or ():
        yield from outputs_in(item, f"{where}.{key}" if where else key)


def left_out(value: Any) -> list[str]:
    """What forward returns that a program leaves out: what the transformers library keeps for the next token, which it
    returns by default.

    Raises TraceError for another object, in which tensors may be that nobody would get.
    """
    found = []
    for path, item in outputs_in(value):
        if _is_cache(item):
            found.append(f"a {type(item).__name__}{f' as {path}' if path else ''}")
        elif not isinstance(item, (Tensor, *_PLAIN)):
            raise TraceError(
                f"expected forward to return tensors and containers of such, found {type(item).__name__}"
                f"{f' as {path}' if path else ''}; return its tensors, or turn it off (use_cache=False)"
            )
    return found


def _is_cache(value: Any) -> bool:
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__)
    return any(package == "transformers" and name.endswith("Cache") for package, name in kinds)


class Namer:
    """Names of tensors inside of arguments: `batch["image"]` is `batch_image`."""

    def __init__(self, taken: list[str]) -> None:
        self.taken = set(taken)
        self.names: list[str] = []

    def tree(self, value: Any, path: tuple[str, ...]) -> Any:
        """The argument as plain data, with a `Ref` for each tensor. Raises TraceError for what is neither."""
        if isinstance(value, Tensor):
            self.names.append(path[0] if len(path) == 1 else self._fresh(path))
            return Ref(self.names[-1])
        parts = parts_of(value)
        if parts is not None and all(type(key) in (str, int) for key in (value if isinstance(value, Mapping) else ())):
            found = [(key, self.tree(item, (*path, key))) for key, item in parts]
            if isinstance(value, Mapping):
                return dict(zip(value, (item for _, item in found), strict=True))
            if dataclasses.is_dataclass(value):
                return Fields(tuple(found))
            items = [item for _, item in found]
            return tuple(items) if isinstance(value, tuple) else items
        if type(value) in _PLAIN:  # none of a subclass, which the source would not be equal to
            return value
        raise TraceError(
            f"expected example inputs to be tensors, numbers, strings or None, or dicts, lists, tuples and dataclasses "
            f"of such, found {type(value).__name__} as {'.'.join(path)}; pass its tensors instead"
        )

    def _fresh(self, path: tuple[str, ...]) -> str:
        name = "_".join(re.sub(r"\W", "_", part) for part in path)
        while name in self.taken or not name.isidentifier():
            name += "_"
        self.taken.add(name)
        return name
