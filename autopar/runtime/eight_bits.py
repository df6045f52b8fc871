"""Floating-point values in 8 bits each: what a backward pass needs of an activation, nearly.

    step = (high - low) / 255        of each block of 256 values in row-major order, the last one as long as is left
    code = round((x - low) / step)   to the nearest, ties to even
    x'   = low + code · step         at most half a step from x

A block's `low` and `step` are kept in float32 (float64 of float64), so that float32 takes 8.25 bits a value. Blocks
with a value that is no number, or infinite, come back as no numbers, so that these are seen. ActNN: Chen et al.,
ICML'21, section 3.2, there with stochastic rounding; nearest draws no random numbers and halves the largest error.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Values that share a range. Halved, ranges take twice the bytes, and steps are 8% shorter; doubled, the reverse."""
LEVELS = 255


def packed_bytes(count: int, itemsize: int) -> int:
    """Bytes of so many values of so many bytes each, when they are packed."""
    return count + -(-count // BLOCK) * 2 * max(4, itemsize)


def packed_values(x: Tensor) -> Tensor:
    """The values in bytes: the ranges of all blocks first."""
    flat, kind = x.detach().reshape(-1), _kind(x.dtype)
    count = flat.numel()
    room = torch.empty(packed_bytes(count, x.element_size()), dtype=torch.uint8, device=x.device)
    ranges, codes = _parts(room, count, kind)
    whole = count - count % BLOCK
    for values, own, told in (
        (flat[:whole].view(-1, BLOCK), ranges[: whole // BLOCK], codes[:whole].view(-1, BLOCK)),
        (flat[whole:].unsqueeze(0), ranges[whole // BLOCK :], codes[whole:].unsqueeze(0)),
    ):
        if values.numel():
            low, high = torch.aminmax(values, dim=1, keepdim=True)
            low, high = low.to(kind), high.to(kind)
            step = (high - low).div_(LEVELS)
            torch.cat([low, step], 1, out=own)
            told.copy_((values - low).div_(torch.where(step == 0, 1, step)).round_().clamp_(0, LEVELS))
    return room


def unpacked_values(room: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The inverse, to half a step: a contiguous tensor of that shape."""
    count, kind = shape.numel(), _kind(dtype)
    ranges, codes = _parts(room, count, kind)
    made, whole = torch.empty(count, dtype=kind, device=room.device), count - count % BLOCK
    for values, own, told in (
        (made[:whole].view(-1, BLOCK), ranges[: whole // BLOCK], codes[:whole].view(-1, BLOCK)),
        (made[whole:].unsqueeze(0), ranges[whole // BLOCK :], codes[whole:].unsqueeze(0)),
    ):
        if values.numel():
            torch.mul(told, own[:, 1:], out=values)
            values.add_(own[:, :1])
    return made.view(shape).to(dtype)


def _kind(dtype: torch.dtype) -> torch.dtype:
    """What ranges are kept in, and codes made from."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parts(room: Tensor, count: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of packed values: low and step of each block, and codes."""
    ahead = room.numel() - count
    return room[:ahead].view(kind).view(-1, 2), room[ahead:]
