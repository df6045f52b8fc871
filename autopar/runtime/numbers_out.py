"""Numbers that a training loop takes out of DTensors: a norm's `.item()`, `float(…)`, `if norm > limit`.

Torch takes them from what this rank has: of a norm that is yet to be added up, a part of it, silently, and another one
on each rank. Here they are the whole tensor's, as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

_ITEM = torch.ops.aten._local_scalar_dense.default


def _whole_number(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All ranks of the tensor's mesh take it together, where it is not whole on each."""
    (tensor,) = args
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    return (tensor.to_local() if is_whole else tensor.full_tensor()).item()


def take_whole_numbers() -> None:
    """From here on, `.item()` of any DTensor of this process is the whole tensor's."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # as torch.distributed.tensor.parallel.loss adds its own
    handlers[_ITEM] = _whole_number
