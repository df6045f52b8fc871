"""The redistribution table: which communication turns one type into another, forward and backward.

Communication happens nowhere else (except inside operators that declare it). A redistribution between two
placements is a sequence of *steps*, each on one mesh axis; b is the bytes of the tensor that the axis splits,
n the axis size. The backward of a step is the redistribution of the gradient types, so it needs no entry of
its own; the table states it because the cost model prices it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.ir.graph import Tensor
from autopar.ir.placement import Axis, P, Placement, R, Type, longest_part, part_length


class RowCollective(NamedTuple):
    """One collective: its name in torch.distributed, or None where nothing is sent."""

    collective: str | None


NOTHING = RowCollective(None)
ALL_REDUCE = RowCollective("all_reduce")
ALL_GATHER = RowCollective("all_gather")
REDUCE_SCATTER = RowCollective("reduce_scatter")
ALL_TO_ALL = RowCollective("all_to_all")
SERVED = RowCollective("servers")  # in the place of an all-reduce

#: (kind before, kind after) -> (forward, backward)
TABLE: dict[tuple[str, str], tuple[RowCollective, RowCollective]] = {
    ("I", "R"): (NOTHING, ALL_REDUCE),
    ("R", "I"): (NOTHING, NOTHING),  # backward: one rank keeps the gradient
    ("I", "S"): (NOTHING, ALL_GATHER),
    ("R", "S"): (NOTHING, NOTHING),  # backward: the slice pads into a summand
    ("S", "R"): (ALL_GATHER, REDUCE_SCATTER),
    ("S", "I"): (ALL_GATHER, NOTHING),
    ("S", "S"): (ALL_TO_ALL, ALL_TO_ALL),
    ("P", "R"): (ALL_REDUCE, ALL_REDUCE),
    ("P", "I"): (ALL_REDUCE, NOTHING),
    ("P", "S"): (REDUCE_SCATTER, ALL_GATHER),
    ("I", "P"): (NOTHING, NOTHING),  # one rank keeps the value
    ("R", "P"): (NOTHING, NOTHING),
}


class Step(NamedTuple):
    """One row of the table applied on one mesh axis (by position in the logical mesh).

    parts: above 1, of the last steps of a parameter, all I → R: the sum of its gradient over their axes goes by levels
    (`gradient_collectives`), for which its elements are padded to that many equal parts.
    is_served: of the last step of a parameter, if that is I → R: the sum of its gradient goes over the mesh's servers
    (`ir.servers`).
    """

    axis: int
    before: Type
    after: Type
    parts: int = 1
    is_served: bool = False

    @property
    def transfers(self) -> tuple[RowCollective, RowCollective]:
        """What the step sends, forward and backward."""
        forward, backward = TABLE[self.before.kind, self.after.kind]
        return forward, SERVED if self.is_served else backward


def is_legal(step: Step, placement: Placement) -> bool:
    """Whether the step exists and may be taken from `placement`.

    A slice along a dim is only contiguous for an axis when no inner axis shards the same dim at that moment.
    """
    if placement[step.axis] != step.before or step.before == step.after:
        return False
    if (step.before.kind, step.after.kind) not in TABLE:
        return False
    inner = placement[step.axis + 1 :]
    return not any(type_.kind == "S" and type_ in inner for type_ in (step.before, step.after))


def apply(step: Step, placement: Placement) -> Placement:
    """The placement after a legal step."""
    return (*placement[: step.axis], step.after, *placement[step.axis + 1 :])


def before(steps: Sequence[Step], target: Placement) -> Placement:
    """The placement that steps to a target begin with."""
    for step in reversed(steps):
        target = (*target[: step.axis], step.before, *target[step.axis + 1 :])
    return target


def split_lengths(
    shape: tuple[int, ...],
    placement: Placement,
    axes: tuple[Axis, ...],
    step: Step,
    coordinate: tuple[int, ...],
) -> tuple[int, ...]:
    """The shape that the ranks of the step's axis hold together: the local shape before that axis splits it."""
    sizes = list(shape)
    for position, (type_, axis) in enumerate(zip(placement, axes, strict=True)):
        if type_.kind == "S" and position != step.axis:
            sizes[type_.dim] = part_length(sizes[type_.dim], axis, coordinate[position])
    return tuple(sizes)


def _padded(shape: tuple[int, ...], type_: Type, axis: Axis) -> int:
    count = 1
    for dim, size in enumerate(shape):
        count *= longest_part(size, axis) * axis.size if type_.kind == "S" and dim == type_.dim else size
    return count


Path = Callable[[Tensor, Placement, Placement], tuple[Step, ...] | None]
"""The cheapest steps from one placement of a tensor to another; None where there are none."""

#: bytes of an element; or forward and backward, where gradients are wider than what they are of (master weights)
ItemSize = int | tuple[int, int]


def transfer_bytes(
    shape: tuple[int, ...],
    itemsize: ItemSize,
    placement: Placement,
    axes: tuple[Axis, ...],
    step: Step,
    coordinate: tuple[int, ...] | None = None,
) -> tuple[int, int]:
    """Bytes handed to the collective of a step, forward and backward, at one rank (rank 0 when not given).

    all_reduce: the buffer; all_gather: the whole output; reduce_scatter: the whole input; all_to_all: the local
    buffer. Dims that do not divide are padded to the longest slice.
    """
    whole = split_lengths(shape, placement, axes, step, coordinate or (0,) * len(axes))
    forward, backward = step.transfers
    sharded = step.before if step.before.kind == "S" else step.after
    count = _padded(whole, sharded, axes[step.axis])
    if step.before.kind == "S" and step.after.kind == "S":
        count = _all_to_all_elements(whole, step, axes[step.axis])
    count = -(-count // step.parts) * step.parts
    sizes = itemsize if isinstance(itemsize, tuple) else (itemsize, itemsize)
    return (count * sizes[0] if forward.collective else 0, count * sizes[1] if backward.collective else 0)


def _all_to_all_elements(whole: tuple[int, ...], step: Step, axis: Axis) -> int:
    count = 1
    for dim, size in enumerate(whole):
        count *= longest_part(size, axis) * axis.size if dim in (step.before.dim, step.after.dim) else size
    return count // axis.size


StepCost = Callable[[Placement, Step], int]


def cheapest_path(source: Placement, target: Placement, cost: StepCost) -> tuple[Step, ...] | None:
    """The cheapest legal sequence of steps from one placement to another (Dijkstra over placements).

    Candidate types are those of the two ends plus R on each axis, plus P where a value may be kept by one rank;
    None when no sequence exists. Ties go to the fewer steps, then to the outer axis, so the result is unique.
    """
    queue: list[tuple[int, int, tuple[Step, ...], Placement]] = [(0, 0, (), source)]
    done: set[Placement] = set()
    while queue:
        spent, length, steps, placement = heapq.heappop(queue)
        if placement == target:
            return steps
        if placement in done:
            continue
        done.add(placement)
        for step in _candidates(placement, source, target):
            after = apply(step, placement)
            if after not in done:
                heapq.heappush(queue, (spent + cost(placement, step), length + 1, (*steps, step), after))
    return None


def _candidates(placement: Placement, source: Placement, target: Placement) -> list[Step]:
    steps = []
    for axis, before in enumerate(placement):
        for after in {target[axis], source[axis], R}:
            step = Step(axis, before, after)
            if is_legal(step, placement) and not (after == P and target[axis] != P):
                steps.append(step)
    return sorted(steps)


# Sums over servers ----------------------------------------


def over_servers(steps: Sequence[Step], axes: tuple[Axis, ...]) -> tuple[Step, ...] | None:
    """A parameter's steps with the sum of its gradient over servers; None where it is not summed over one axis alone
    when it begins its way home."""
    run = _last_sums(steps)
    if [axes[step.axis].size > 1 for step in run].count(True) != 1:
        return None
    marked = (step._replace(is_served=axes[step.axis].size > 1) for step in run)
    return (*steps[: len(steps) - len(run)], *marked)


# Sums by levels ----------------------------------------


class SentOn(NamedTuple):
    """A collective on a mesh axis, by position, and its bytes."""

    collective: str
    axis: int
    num_bytes: int


def by_levels(steps: Sequence[Step], axes: tuple[Axis, ...]) -> tuple[Step, ...] | None:
    """A parameter's steps with the sum of its gradient by levels; None where it is summed over fewer than two axes.

    Backward, the last step comes first: over all axes but that of the run's first step it is scattered.
    """
    run = _last_sums(steps)
    real = [step for step in run if axes[step.axis].size > 1]
    if len(real) < 2:
        return None
    parts = math.prod(axes[step.axis].size for step in real[1:])
    return (*steps[: len(steps) - len(run)], *(step._replace(parts=parts) for step in run))


def _last_sums(steps: Sequence[Step]) -> Sequence[Step]:
    count = 0
    while count < len(steps) and (steps[-1 - count].before.kind, steps[-1 - count].after.kind) == ("I", "R"):
        count += 1
    return steps[len(steps) - count :]


def gradient_collectives(
    steps: Sequence[Step], sizes: Sequence[tuple[int, int]], axes: tuple[Axis, ...]
) -> list[SentOn]:  # fmt: skip
    """What a gradient's way home sends, in order. sizes: bytes of each step, forward and backward.

    By levels, inner axes first: reduce-scatter along each but the last, all-reduce of one part along that, all-gather
    back along the others (BlueConnect, MLSys'19, section 3).
    """
    found: list[SentOn] = []
    rows = [(step, size[1]) for step, size in zip(steps, sizes, strict=True) if size[1] and axes[step.axis].size > 1]
    levels = [(step, size) for step, size in reversed(rows) if step.parts > 1]
    if levels:
        *inner, (last, num_bytes) = levels
        whole = list[SentOn]()
        for step, _ in inner:
            whole.append(SentOn("all_gather", step.axis, num_bytes))
            found.append(SentOn("reduce_scatter", step.axis, num_bytes))
            num_bytes //= axes[step.axis].size
        found += [SentOn("all_reduce", last.axis, num_bytes), *reversed(whole)]
    for step, num_bytes in reversed(rows[: len(rows) - len(levels)]):
        if collective := step.transfers[1].collective:
            found.append(SentOn(collective, step.axis, num_bytes))
    return found
