"""A tensor that was written to where autograd did not look: the value is another, the gradient passes as before.

    overwritten(x, value) = value        gradient: to x as it comes, none to value

What `x.mul_(2)` under `no_grad`, or by `x.data` or `x.detach()`, leaves of x (`trace.writes`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.local import LocalCall

OVERWRITTEN = "autopar.overwritten.default"

torch.library.define("autopar::overwritten", "(Tensor x, Tensor value) -> Tensor", tags=(torch.Tag.pointwise,))
overwritten = torch.ops.autopar.overwritten.default


@torch.library.impl("autopar::overwritten", "CompositeExplicitAutograd")
def _overwritten(x: Tensor, value: Tensor) -> Tensor:
    return value.clone()


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


torch.library.register_autograd(overwritten, _gradients)


def overwritten_call(local: LocalCall) -> str:
    """The runtime's function always: the operator is autopar's own."""
    return f"rt.overwritten({', '.join(local.names)})"
