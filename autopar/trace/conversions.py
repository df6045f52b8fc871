"""Modules that forward converts, `self.router = self.router.to(dtype)`: nothing where they are like that already.

torch converts a module by putting other tensors in the place of its own, which it cannot do while a model is exported,
not even where each of them is its own conversion. What would change them is refused with its line: the program holds
each parameter as the model does when it is planned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autopar.errors import TraceError
from autopar.trace.lines import user_line

_Convert = Callable[[Tensor], Tensor]


@contextmanager
def conversions_passed(model: nn.Module) -> Iterator[None]:
    """While inside, modules of the model that are converted to what they are stay as they are; others of its modules
    raise TraceError."""
    known = set(model.modules())
    torchs_own: Callable[[nn.Module, _Convert, bool], nn.Module] = nn.Module._apply

    def apply(module: nn.Module, convert: _Convert, recurse: bool = True) -> nn.Module:
        if module not in known:
            return torchs_own(module, convert, recurse)
        own = chain(module.named_parameters(recurse=recurse), module.named_buffers(recurse=recurse))
        for name, tensor in own:
            found = _converted(tensor, convert)
            if found != (tensor.dtype, tensor.device):
                raise TraceError(
                    f"expected forward to leave {name!r} of a {type(module).__name__} in {tensor.dtype} on "
                    f"{tensor.device}, found it converted to {found[0]} on {found[1]} at\n  "
                    f"{user_line(sys._getframe(1))}\nConvert the module before it is planned, or what is computed with "
                    "it: F.linear(x, weight.to(x.dtype))."
                )
        return module

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


def _converted(tensor: Tensor, convert: _Convert) -> tuple[Any, Any]:
    """The dtype and device that a tensor would get, of which nothing is recorded."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        found = convert(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return found.dtype, found.device
