"""Plain values of a traced model as Python text, for the emitted program."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autopar.ops.functions import import_error

_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class UnwritableError(Exception):
    """A value has no form as text; says of what kind it is."""


def written(value: Any, tensors: list[Tensor]) -> str:
    """The text; a tensor is `{k}`, where it is the k-th of `tensors`, to which it is added. Braces are doubled.

    Raises UnwritableError.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"{{{len(tensors) - 1}}}"
    if value is None or value is Ellipsis or type(value) in (bool, int, str, bytes):
        return repr(value).replace("{", "{{").replace("}", "}}")
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if type(value) is complex:
        return f"complex({written(value.real, tensors)}, {written(value.imag, tensors)})"
    if isinstance(value, _CONSTANTS):
        return str(value)
    if isinstance(value, torch.device):
        return "self.mesh.device"
    if isinstance(value, slice):
        return f"slice({', '.join(written(part, tensors) for part in (value.start, value.stop, value.step))})"
    if isinstance(value, torch.Size):
        return f"torch.Size({written(list(value), tensors)})"
    if type(value) in (tuple, list):
        items = ", ".join(written(item, tensors) for item in value)
        return f"[{items}]" if type(value) is list else f"({items}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        items = ", ".join(f"{written(key, tensors)}: {written(item, tensors)}" for key, item in value.items())
        return f"{{{{{items}}}}}"
    if callable(value) and not hasattr(value, "__self__") and import_error(value) is None:
        return f"rt.imported({f'{value.__module__}:{value.__qualname__}'!r})"
    raise UnwritableError(type(value).__name__)
