"""Models that do not fit here are built without weights, and yet with the values that they compute of numbers alone.

Under `torch.device("meta")` nothing has a value, tables of positions and masks neither, which no checkpoint holds. Here
only what is large and to be filled later is on meta; in the end parameters are, whatever made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_FILLED_LATER = (torch.empty, torch.rand, torch.randn, torch.randint, torch.normal, torch.empty_strided)
_MOST = 1 << 20
"""Elements of what is computed; twice as much takes that much more memory for each tensor of a model's __init__."""
_MOST_FILLED_LATER = 1 << 12


def built_on_meta(build: Callable[[], Any]) -> Any:
    """What `build()` returns, parameters on meta, buffers with their values as far as those are known.

    Where its code cannot take tensors of both kinds, all is on meta.
    """
    try:
        with torch.device("cpu"), _ValuesOfNumbers():
            made = build()
    except (RuntimeError, NotImplementedError):  # a tensor on meta beside one that is not
        with torch.device("meta"):
            made = build()
    if isinstance(made, nn.Module):
        _put_on_meta(made)
    return made


class _ValuesOfNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        on_meta = func(*args, **{**kwargs, "device": "meta"})
        most = _MOST_FILLED_LATER if func in _FILLED_LATER else _MOST
        is_small = isinstance(on_meta, Tensor) and on_meta.numel() <= most
        return func(*args, **kwargs) if is_small else on_meta


def _put_on_meta(model: nn.Module) -> None:
    """Parameters that are one stay one, with their attributes."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None and not own.is_meta:
                if id(own) not in moved:
                    moved[id(own)] = nn.Parameter(own.detach().to("meta"), requires_grad=own.requires_grad)
                    moved[id(own)].__dict__.update(own.__dict__)
                module._parameters[name] = moved[id(own)]
