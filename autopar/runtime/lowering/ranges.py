"""Numbers that name a row or a class: one that no rank holds is an error, as on one device, and not a zero."""

from __future__ import annotations

import torch
from torch import Tensor


def check_range(numbers: Tensor, count: int, what: str, ignored: int | None = None) -> None:
    """Raises IndexError for numbers (any shape, whole or this rank's) that are not in 0 … count − 1.

    Of devices that compute by themselves, as GPUs do, the device is told to stop, as torch's own kernels do.
    """
    outside = (numbers < 0) | (numbers >= count)
    if ignored is not None:
        outside = outside & (numbers != ignored)
    if numbers.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(~outside.any(), f"{what} out of range: expected 0 to {count - 1}")
    elif bool(outside.any()):
        found = numbers[outside].flatten()[0].item()
        raise IndexError(f"expected {what} from 0 to {count - 1}, found {found}, which no rank holds")
