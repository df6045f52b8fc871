"""Placements of one tensor over the mesh axes, the local sizes they give, and the steps between two of them.

A placement is one type for each axis, outermost first: "S(d)" shard, "R" replicate, "I" invariant, "P"
partial. Several axes may shard one dim; the outer one splits first. A dim of length s on an axis of n ranks
is cut into chunks of ceil(s / n): the last ranks may hold a shorter chunk or none, as in `torch.chunk` and
DTensor. An axis with shares cuts it in these proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis


@dataclass(frozen=True, slots=True)
class AxisType:
    """One of S, R, I, P on one axis; `dim` is meaningful for S alone."""

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"


@dataclass(frozen=True, slots=True)
class TypeChange:
    """A change of type on one axis (given by its position among the axes of the mesh)."""

    axis: int
    source: AxisType
    target: AxisType


@cache
def parse_type(text: str) -> AxisType:
    """Reads "S(1)", "R", "I" or "P"."""
    if text in ("R", "I", "P"):
        return AxisType(text)
    if text.startswith("S(") and text.endswith(")") and text[2:-1].isdecimal():
        return AxisType("S", int(text[2:-1]))
    raise ProgramError(f"expected a placement type S(d), R, I or P; found {text!r}")


@cache
def parse_placement(text: str, num_axes: int) -> tuple[AxisType, ...]:
    """Reads one type for each axis, separated by spaces. An empty mesh has the empty placement."""
    types = tuple(parse_type(word) for word in text.split())
    if len(types) != num_axes:
        raise ProgramError(f"placement {text!r} has {len(types)} types; the mesh has {num_axes} axes")
    return types


def parse_way(text: str, num_axes: int) -> list[tuple[AxisType, ...]]:
    """Reads placements joined by "->", as in "S(0) R -> R R": a conversion passes through them to the last."""
    return [parse_placement(part, num_axes) for part in text.split("->")]


def local_size(size: int, *axes: Axis) -> int:
    """Length that this rank holds of a dim of `size`, split over `axes` from the outer one to the inner."""
    for axis in axes:
        start, end = part_of(size, axis)
        size = end - start
    return size


def local_offset(size: int, *axes: Axis) -> int:
    """Where this rank's part of a dim of `size` begins, split over `axes` from the outer one to the inner."""
    offset = 0
    for axis in axes:
        start, end = part_of(size, axis)
        offset, size = offset + start, end - start
    return offset


def part_of(size: int, axis: Axis, index: int | None = None) -> tuple[int, int]:
    """Where a rank's part (this one's, if no index is given) of a dim begins and ends. Raises ProgramError for a length
    that the shares of the axis do not divide."""
    index = axis.index if index is None else index
    if not axis.shares:
        chunk = -(-size // axis.size)
        return min(index * chunk, size), min((index + 1) * chunk, size)
    unit, rest = divmod(size, sum(axis.shares))
    if rest:
        raise ProgramError(
            f"expected a length that the shares {axis.shares} of axis {axis.name} divide, found {size}; plan again"
        )
    start = unit * sum(axis.shares[:index])
    return start, start + unit * axis.shares[index]


def longest_part(size: int, axis: Axis) -> int:
    """The length of the longest part, to which the others are padded where they travel."""
    return size * max(axis.shares) // sum(axis.shares) if axis.shares else -(-size // axis.size)


def shard_axes(types: Sequence[AxisType], dim: int, axes: Sequence[Axis]) -> list[Axis]:
    """The axes that shard `dim`, outermost first."""
    return [axis for axis, kind in zip(axes, types, strict=True) if kind.is_shard and kind.dim == dim]


def local_shape(shape: Sequence[int], types: Sequence[AxisType], axes: Sequence[Axis]) -> tuple[int, ...]:
    """Shape that this rank holds of a tensor of the given global shape."""
    return tuple(local_size(size, *shard_axes(types, dim, axes)) for dim, size in enumerate(shape))


def local_slices(shape: Sequence[int], types: Sequence[AxisType], axes: Sequence[Axis]) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    slices = []
    for dim, size in enumerate(shape):
        split = shard_axes(types, dim, axes)
        start = local_offset(size, *split)
        slices.append(slice(start, start + local_size(size, *split)))
    return tuple(slices)


def conversion_way(stored: Sequence[AxisType], use: str) -> list[TypeChange]:
    """The steps from the stored placement to a use: those that the use names, or the usual ones to its placement."""
    placements = parse_way(use, len(stored))
    if len(placements) == 1:
        return conversion_steps(stored, placements[0])
    steps = []
    for before, after in pairwise([tuple(stored), *placements]):
        changes = [TypeChange(axis, *types) for axis, types in enumerate(zip(before, after, strict=True))]
        changed = [step for step in changes if step.source != step.target]
        if len(changed) != 1 or _blocker(changed[0], list(before)) is not None:
            raise ProgramError(
                f"expected each step of {use!r} to change one type, on no axis outside one that shards the same dim, "
                f"found {' '.join(map(str, before))} -> {' '.join(map(str, after))}"
            )
        steps += changed
    return steps


def conversion_steps(stored: Sequence[AxisType], used: Sequence[AxisType]) -> list[TypeChange]:
    """Lists the single-axis steps from one placement to another, in the order in which they are taken.

    Cheap steps come first, so that the dear ones move fewer bytes, forward and backward (backward runs the
    list from its end): slices, then steps that move nothing, then all-to-alls, then gathers; inner axes
    first. The outer of two axes that shard one dim can only change while the inner one does not shard it:
    where needed, the inner one is gathered first, and cut again afterwards. Slices become summands by way of R.
    """
    now, steps = list(stored), []
    while now != list(used):
        step = _next_step(now, used)
        steps.append(step)
        now[step.axis] = step.target
    return steps


def _next_step(now: list[AxisType], used: Sequence[AxisType]) -> TypeChange:
    wanted = [TypeChange(axis, now[axis], used[axis]) for axis in range(len(now)) if now[axis] != used[axis]]
    possible = [step for step in wanted if _blocker(step, now) is None and not _comes_too_early(step, wanted)]
    if possible:
        step = min(possible, key=lambda step: (_cost_class(step), -step.axis))
        by_way_of_r = step.source.is_shard and step.target.kind == "P"
        return TypeChange(step.axis, step.source, AxisType("R")) if by_way_of_r else step
    blocker = max(axis for step in wanted if (axis := _blocker(step, now)) is not None)
    return TypeChange(blocker, now[blocker], AxisType("R"))


def _blocker(step: TypeChange, now: list[AxisType]) -> int | None:
    """The innermost axis inside the step's own that shards a dim which the step cuts or joins."""
    dims = {kind.dim for kind in (step.source, step.target) if kind.is_shard}
    inner = [axis for axis in range(step.axis + 1, len(now)) if now[axis].is_shard and now[axis].dim in dims]
    return max(inner, default=None)


def _comes_too_early(step: TypeChange, wanted: list[TypeChange]) -> bool:
    """Whether the step would cut a dim that an axis outside its own has yet to cut or join."""
    outer = [kind for other in wanted if other.axis < step.axis for kind in (other.source, other.target)]
    return step.target.is_shard and step.target in outer


def _cost_class(step: TypeChange) -> int:
    if step.target.is_shard:
        return 2 if step.source.is_shard else 0
    return 3 if step.source.is_shard else 1
