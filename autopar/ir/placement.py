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


def gradient_type(type_: Type) -> Type:
    """The type of the gradient of a tensor of the given type (the table above)."""
    return {"R": P, "P": R}.get(type_.kind, type_)


class Axis(NamedTuple):
    """One axis of a logical mesh: neighbours along it are `stride` ranks apart."""

    name: str
    size: int
    stride: int


def num_shards(placement: Placement, dim: int, axes: tuple[Axis, ...]) -> int:
    """Into how many slices the axes cut `dim`."""
    count = 1
    for type_, axis in zip(placement, axes, strict=True):
        if type_.kind == "S" and type_.dim == dim:
            count *= axis.size
    return count


def local_shape(
    shape: tuple[int, ...],
    placement: Placement,
    axes: tuple[Axis, ...],
    coordinate: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The shape of the slice that a rank holds; of the largest slice (rank 0's) when no coordinate is given."""
    sizes = list(shape)
    for position, (type_, axis) in enumerate(zip(placement, axes, strict=True)):
        if type_.kind == "S":
            index = coordinate[position] if coordinate else 0
            sizes[type_.dim] = chunk_length(sizes[type_.dim], axis.size, index)
    return tuple(sizes)


def chunk_length(size: int, parts: int, index: int) -> int:
    """The length of part `index` when `torch.chunk` cuts `size` into `parts`; 0 for parts that get nothing."""
    chunk = -(-size // parts)
    return max(0, min(size, (index + 1) * chunk) - index * chunk)


@cache
def slice_lengths(size: int, parts: tuple[int, ...]) -> frozenset[int]:
    """All lengths that ranks hold of a dim that axes of these sizes cut, the outer one first: (7, (4,)) -> {2, 1}."""
    found = {size}
    for count in parts:
        found = {chunk_length(length, count, index) for length in found for index in range(count)}
    return frozenset(found)


def lengths_along(shape: tuple[int, ...], placement: Placement, dim: int, axes: tuple[Axis, ...]) -> frozenset[int]:
    """The lengths that ranks hold of one dim."""
    cutting = (axis.size for type_, axis in zip(placement, axes, strict=True) if type_.kind == "S" and type_.dim == dim)
    return slice_lengths(shape[dim], tuple(cutting))


def leaves_none_empty(shape: tuple[int, ...], placement: Placement, axes: tuple[Axis, ...]) -> bool:
    """Whether every rank holds at least one row of each dim that is cut, evenly or not."""
    return all(min(lengths_along(shape, placement, t.dim, axes)) > 0 for t in placement if t.kind == "S")


def is_even(shape: tuple[int, ...], placement: Placement, axes: tuple[Axis, ...]) -> bool:
    """Whether every rank holds a slice of the same shape."""
    return all(
        shape[type_.dim] % num_shards(placement, type_.dim, axes) == 0 for type_ in placement if type_.kind == "S"
    )
