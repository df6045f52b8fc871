"""Tensors as shards held by virtual ranks: dealing out by placement, joining back, and sums over an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from autopar.ir.placement import Axis, Placement, Type, chunk_length

Coordinate = tuple[int, ...]
Shards = dict[Coordinate, Tensor]


def make_axes(sizes: tuple[int, ...]) -> tuple[Axis, ...]:
    return tuple(Axis("xyz"[i], size, math.prod(sizes[i + 1 :])) for i, size in enumerate(sizes))


def deal(value: Tensor, placement: Placement, sizes: tuple[int, ...]) -> Shards:
    """What each rank holds of `value`, outer axis first; each shard is a contiguous tensor of its own."""
    return {c: part.detach().clone(memory_format=torch.contiguous_format) for c, part in _deal(value, placement, sizes)}


def _deal(value: Tensor, placement: Placement, sizes: tuple[int, ...]) -> Iterator[tuple[Coordinate, Tensor]]:
    if not sizes:
        yield (), value
    elif placement[0].kind in ("R", "I"):  # the copies agree on how inner axes split them into summands
        inner = list(_deal(value, placement[1:], sizes[1:]))
        yield from (((index, *c), part) for index in range(sizes[0]) for c, part in inner)
    else:
        for index, part in enumerate(_parts(value, placement[0], sizes[0])):
            yield from (((index, *c), piece) for c, piece in _deal(part, placement[1:], sizes[1:]))


def _parts(value: Tensor, type_: Type, size: int) -> list[Tensor]:
    if type_.kind == "S":
        lengths = [chunk_length(value.shape[type_.dim], size, index) for index in range(size)]
        return list(torch.split(value, lengths, type_.dim))
    parts = [torch.randint(-4, 5, value.shape).to(value.dtype) for _ in range(size - 1)]
    return [*parts, value - sum(parts, start=torch.zeros_like(value))]


def combine(shards: Shards, placement: Placement, equal: Callable[[Tensor, Tensor], bool]) -> Tensor | None:
    """The whole tensor; None when copies that must be equal are not."""
    held = dict(shards)
    for axis, type_ in enumerate(placement):
        if type_.kind in ("R", "I") and not all(equal(part, held[_first(c, axis)]) for c, part in held.items()):
            return None
    for axis in reversed(range(len(placement))):
        groups: dict[Coordinate, list[Tensor]] = {}
        for coordinate, part in held.items():
            groups.setdefault(coordinate[:axis], []).append(part)
        held = {prefix: _join(parts, placement[axis]) for prefix, parts in groups.items()}
    return held[()]


def _first(coordinate: Coordinate, axis: int) -> Coordinate:
    return (*coordinate[:axis], 0, *coordinate[axis + 1 :])


def _join(parts: list[Tensor], type_: Type) -> Tensor:
    if type_.kind == "S":
        return torch.cat(parts, type_.dim)
    return torch.stack(parts).sum(0) if type_.kind == "P" else parts[0]


def sum_over(shards: Shards, axes: set[int], *, invariant: bool = False) -> Shards:
    """All-reduce over some axes. P → R, whose backward sums the ranks' gradients too; or P → I, whose doesn't."""
    groups: dict[Coordinate, list[Coordinate]] = {}
    for coordinate in shards:
        key = tuple(-1 if axis in axes else index for axis, index in enumerate(coordinate))
        groups.setdefault(key, []).append(coordinate)
    summed: Shards = {}
    for members in groups.values():
        for own in members:
            terms = [shards[c] if c == own or not invariant else shards[c].detach() for c in members]
            summed[own] = torch.stack(terms).sum(0)
    return summed


def axes_with(placement: Placement, dims: set[int]) -> set[int]:
    """The mesh axes that shard one of the dims."""
    return {axis for axis, type_ in enumerate(placement) if type_.kind == "S" and type_.dim in dims}


def offset(size: int, placement: Placement, dim: int, sizes: tuple[int, ...], coordinate: Coordinate) -> int:
    """Where a rank's slice along `dim` begins in the whole tensor."""
    start, length = 0, size
    for axis, type_ in enumerate(placement):
        if type_.kind == "S" and type_.dim == dim:
            start += min(length, coordinate[axis] * -(-length // sizes[axis]))
            length = chunk_length(length, sizes[axis], coordinate[axis])
    return start
