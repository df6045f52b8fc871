"""Small numbers, several in a byte: what a backward pass needs of an operator that asks of each element only which way
it went.

    planes = 8 / bits      a byte holds a number of each plane: number i in plane i // m, byte i % m, m = ⌈n / planes⌉

Planes lie one after the other, so that packing adds up halves of memory and unpacking shifts all of it: no element is
looked at by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def room_for(shape: torch.Size, bits: int, like: Tensor) -> Tensor:
    """Bytes for so many numbers of so many bits (1, 2, 4 or 8), before they are packed: write into `written`."""
    planes = 8 // bits
    count = -(-shape.numel() // planes) * planes
    room = torch.empty(count, dtype=torch.uint8, device=like.device)
    room[shape.numel() :] = 0
    return room


def written(room: Tensor, shape: torch.Size, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Where the numbers of a tensor of that shape lie in the room, row-major; as bool where that is asked for."""
    return room[: shape.numel()].view(dtype).view(shape)


def packed(room: Tensor, bits: int) -> Tensor:
    """The numbers of a room, each below 2^bits, in as few bytes as hold them. The room is written over."""
    planes = 8 // bits
    rows = room.view(planes, -1)
    while planes > 1:
        planes //= 2
        rows[:planes].add_(rows[planes : 2 * planes], alpha=1 << (bits * planes))
    return rows[0].clone()


def unpacked(packed: Tensor, bits: int, shape: torch.Size, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The inverse: a tensor of that shape, of one byte a number."""
    if bits == 8:
        return packed.view(shape)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    rows = torch.bitwise_right_shift(packed, shifts.unsqueeze(1)).bitwise_and_((1 << bits) - 1)
    return rows.flatten()[: shape.numel()].view(dtype).view(shape)
