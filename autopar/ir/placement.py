"""Typed placements: what the ranks of a mesh axis hold of a tensor, and what they hold of its gradient.

| type | value on the ranks of the axis | its gradient is |
|------|--------------------------------|-----------------|
| S(d) | slices along dim d             | S(d)            |
| R    | equal                          | P               |
| I    | equal                          | I               |
| P    | summands                       | R               |

The duality is that of JAX's shard_map with varying-axes types: because each type fixes the type of the gradient,
running the transposed operator locally is right whenever the forward operator is right locally.
A tensor's *placement* has one type for each mesh axis, outer axis first. Two axes may shard one dim:
the left axis is the outer one, and uneven lengths are split as nested `torch.chunk`, like DTensor.
An axis with *shares* cuts activations in these proportions instead, exactly; what is stored it cuts evenly (`evenly`).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple

from autopar.errors import PlacementError

Kind = Literal["S", "R", "I", "P"]


class Type(NamedTuple):
    """What the ranks of one mesh axis hold of a tensor; `dim` is -1 unless the kind is S."""

    kind: Kind
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind


R = Type("R")
I = Type("I")  # noqa: E741  (the design's name)
P = Type("P")


@cache
def S(dim: int) -> Type:
    """The type of a tensor that is sliced along `dim`."""
    return Type("S", dim)


Placement = tuple[Type, ...]

_TYPE = re.compile(r"R|I|P|S\((\d+)\)")


def parse_type(text: str) -> Type:
    """Reads "S(0)", "R", "I" or "P". Raises PlacementError for anything else."""
    match = _TYPE.fullmatch(text)
    if match is None:
        raise PlacementError(f"expected a placement type S(d), R, I or P; found {text!r}")
    return S(int(match[1])) if match[1] is not None else Type(text)  # type: ignore[arg-type]


def parse_placement(text: str) -> Placement:
    """Reads one type an axis, separated by blanks: "S(0) R"."""
    return tuple(parse_type(part) for part in text.split())


def format_placement(placement: Placement) -> str:
    """The inverse of `parse_placement`."""
    return " ".join(map(str, placement))


Shape = tuple[int, ...]


class Axis(NamedTuple):
    """One axis of a logical mesh: neighbours along it are `stride` ranks apart.

    shares: how many of equal units each rank along it gets of a dim that it cuts, where these differ; else empty.
    """

    name: str
    size: int
    stride: int
    shares: tuple[int, ...] = ()

    @property
    def units(self) -> int:
        """Into how many equal slices a dim must be divisible to be cut without rest."""
        return sum(self.shares) or self.size


def evenly(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes as they cut what is stored: in equal parts."""
    return tuple(axis._replace(shares=()) for axis in axes)


def num_shards(placement: Placement, dim: int, axes: tuple[Axis, ...]) -> int:
    """Into how many equal slices the axes cut `dim`, of which a rank has one, or its share."""
    count = 1
    for type_, axis in zip(placement, axes, strict=True):
        if type_.kind == "S" and type_.dim == dim:
            count *= axis.units
    return count


def local_shape(
    shape: tuple[int, ...],
    placement: Placement,
    axes: tuple[Axis, ...],
    coordinate: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The shape of the slice that a rank holds; of rank 0's when no coordinate is given, which is the largest unless
    shares make others so."""
    sizes = list(shape)
    for position, (type_, axis) in enumerate(zip(placement, axes, strict=True)):
        if type_.kind == "S":
            index = coordinate[position] if coordinate else 0
            sizes[type_.dim] = part_length(sizes[type_.dim], axis, index)
    return tuple(sizes)


def part_length(size: int, axis: Axis, index: int) -> int:
    """The length of a rank's part of a dim that the axis cuts, which shares divide without rest."""
    if not axis.shares:
        return chunk_length(size, axis.size, index)
    return size // axis.units * axis.shares[index]


def longest_part(size: int, axis: Axis) -> int:
    """The length of the longest part: what each is padded to where it is sent."""
    return size // axis.units * max(axis.shares) if axis.shares else -(-size // axis.size)


def chunk_length(size: int, parts: int, index: int) -> int:
    """The length of part `index` when `torch.chunk` cuts `size` into `parts`; 0 for parts that get nothing."""
    chunk = -(-size // parts)
    return max(0, min(size, (index + 1) * chunk) - index * chunk)


def of_new_value(stored: Placement, axes: tuple[Axis, ...]) -> Placement:
    """The placement that the new value of a stored tensor ends in, which has no gradient: as the tensor is stored, but
    whole where axes cut what is stored otherwise than what is computed."""
    if any(type_.kind == "S" and axis.shares for type_, axis in zip(stored, axes, strict=True)):
        return (R,) * len(axes)
    return tuple(R if type_ == I else type_ for type_ in stored)


@cache
def slice_lengths(size: int, axes: tuple[Axis, ...]) -> frozenset[int]:
    """All lengths that ranks hold of a dim that these axes cut, the outer one first: 7 over an axis of 4 -> {2, 1}."""
    found = {size}
    for axis in axes:
        found = {part_length(length, axis, index) for length in found for index in range(axis.size)}
    return frozenset(found)


def lengths_along(shape: tuple[int, ...], placement: Placement, dim: int, axes: tuple[Axis, ...]) -> frozenset[int]:
    """The lengths that ranks hold of one dim."""
    return slice_lengths(shape[dim], axes_along(placement, dim, axes))


def axes_along(placement: Placement, dim: int, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes that cut a dim, the outer one first."""
    return tuple(axis for type_, axis in zip(placement, axes, strict=True) if type_ == S(dim))


def are_alike(shape: tuple[int, ...], placement: Placement, dim: int, axes: tuple[Axis, ...]) -> bool:
    """Whether the axes cut a dim without rest into parts of one length."""
    is_even = shape[dim] % num_shards(placement, dim, axes) == 0
    return is_even and not any(axis.shares for axis in axes_along(placement, dim, axes))


def leaves_none_empty(shape: tuple[int, ...], placement: Placement, axes: tuple[Axis, ...]) -> bool:
    """Whether every rank holds at least one row of each dim that is cut, evenly or not."""
    return all(min(lengths_along(shape, placement, t.dim, axes)) > 0 for t in placement if t.kind == "S")


def is_even(shape: tuple[int, ...], placement: Placement, axes: tuple[Axis, ...]) -> bool:
    """Whether every rank holds a slice of the same shape."""
    return all(are_alike(shape, placement, type_.dim, axes) for type_ in placement if type_.kind == "S")
