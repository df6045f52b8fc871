"""What it takes copies of the parameters to meet under a training algorithm, as `runtime.copies` does it.

local_sgd   an all-reduce of the parameters after every `period` updates: large ones by themselves and in place,
            small ones in buffers. Nothing else runs meanwhile.
pipedream   no meeting: updates after each microbatch, and copies of the weights
adasum      log₂ n exchanges of the gradients with one other copy, at twice the distance each time, after the passes
backup      the first n - b copies' gradients go to one of them, one by one, and the mean from there to all others
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from autopar.cost.collectives import collective_time_ns
from autopar.cost.compute import copy_time_ns, optimizer_time_ns
from autopar.cost.memory import most_workspace, optimizer_moved_bytes, optimizer_of, optimizer_workspace_bytes
from autopar.cost.profile import Profile
from autopar.ir.algorithm import ADASUM, BACKUP, INT8, POWERSGD, TOPK, Algorithm
from autopar.ir.graph import Graph
from autopar.ir.placement import Axis, Shape, evenly, local_shape
from autopar.ir.plan import Stage
from autopar.runtime.packing import (
    BEHIND,
    BLOCK,
    BUCKET_BYTES,
    LONE_BYTES,
    SAMPLED,
    backup_message_bytes,
    compressed_matrix,
    num_kept,
    padded_length,
)

_WIDEST = 8  # bytes of an element


class CopiesMeeting(NamedTuple):
    """Of a rank: time, bytes by collective, memory beside the parameters, gradients and optimizer state while copies
    meet, the bytes of the gradients then, and those that are kept between steps: of what was left out of sums in fewer
    bits, and of values to see updates by."""

    duration_ns: int
    sent: Mapping[str, int]
    buffer_bytes: int
    gradient_bytes: int
    kept_bytes: int


def meeting(
    graph: Graph, stages: Iterable[Stage], algorithm: Algorithm, devices_per_node: int, profile: Profile
) -> CopiesMeeting:  # fmt: skip
    """Of the stages of one rank. Communication alone: what is added and scaled is left out, some passes over memory."""
    stages = list(stages)
    axis = next(axis for axis in evenly(stages[0].axes) if axis.name == algorithm.axis)
    if algorithm.is_compressed:
        return _in_fewer_bits(graph, stages, algorithm, axis, devices_per_node, profile)
    sizes = [size for stage in stages for size in _stored_sizes(graph, stage)]
    seen = _WIDEST * SAMPLED * min(SAMPLED, len(sizes))
    if algorithm.name == BACKUP:
        return _of_the_first(sizes, axis, int(algorithm.amount), devices_per_node, profile)
    if algorithm.name == ADASUM:
        groups = _buffers(sizes)
        pairs = [Axis(axis.name, 2, axis.stride << level) for level in range(axis.size.bit_length() - 1)]
        taken = sum(
            collective_time_ns("all_to_all", 2 * size, pair, devices_per_node, profile)
            for pair in pairs for size in groups
        )  # fmt: skip
        most = max(groups, default=0)
        return CopiesMeeting(taken, {"all_to_all": sum(groups) * len(pairs)}, 5 * most, sum(sizes), seen)
    groups = [size for size in sizes if size >= LONE_BYTES]
    small = _buffers([size for size in sizes if size < LONE_BYTES])
    taken = sum(collective_time_ns("all_reduce", size, axis, devices_per_node, profile) for size in (*groups, *small))
    return CopiesMeeting(taken, {"all_reduce": sum(sizes)}, max(small, default=0), sum(sizes), seen)


def _of_the_first(
    sizes: list[int], axis: Axis, late: int, devices_per_node: int, profile: Profile
) -> CopiesMeeting:  # fmt: skip
    """As the rank sees it that sums: all are there at once, so that nothing is saved. Kept between steps is what ranks
    that are behind have not taken yet."""
    message = backup_message_bytes(sum(sizes), len(sizes))
    each_ns = collective_time_ns("send", message, Axis(axis.name, 2, axis.stride), devices_per_node, profile)
    received, sent = axis.size - late - 1, axis.size - 1
    taken_ns = (received + sent) * each_ns
    return CopiesMeeting(taken_ns, {"send": sent * message}, 2 * message, sum(sizes), BEHIND * message)


def stashing(
    graph: Graph, stage: Stage, versions: int, microbatches: int, optimizer: str | None, profile: Profile
) -> CopiesMeeting:
    """Of a stage of one device that updates its weights after each microbatch, and keeps so many versions of them: the
    updates but for the one that any step makes, and the copies. Kept is what an update takes for a while, too: it is
    made while activations of other microbatches are there."""
    shapes = _stored_shapes(graph, stage)
    trained = {item.tensor for item in graph.parameters if item.requires_grad}
    dtypes = [graph.kept(name).dtype for name in stage.storage if name in trained]
    size = sum(math.prod(shape) * itemsize for shape, itemsize in shapes)
    moved = sum(
        optimizer_moved_bytes(optimizer, shape, dtype) for (shape, _), dtype in zip(shapes, dtypes, strict=True)
    )
    update_ns = optimizer_time_ns(moved, len(shapes), len(shapes), False, profile)
    taken = (microbatches - 1) * update_ns + microbatches * copy_time_ns(size, profile)
    each = zip(shapes, dtypes, strict=True)
    workspaces = [optimizer_workspace_bytes(optimizer, shape, dtype) for (shape, _), dtype in each]
    room = most_workspace(workspaces, optimizer_of(optimizer).is_elementwise)
    return CopiesMeeting(taken, {}, 0, 0, versions * size + room)


# In fewer bits ----------------------------------------

_WIDE = 4  # bytes of a value that is summed, and of a place or a scale
_PASSES = {INT8: 24, TOPK: 16, POWERSGD: 8}
"""Reads and writes of a buffer's bytes, as `runtime.compressing` is written: of operators that each go once over it."""
_HELD = {INT8: 6, TOPK: 5, POWERSGD: 4}
"""Buffers of a group's size that are there at once, its copy among them."""


def _in_fewer_bits(
    graph: Graph, stages: list[Stage], algorithm: Algorithm, axis: Axis, devices_per_node: int, profile: Profile
) -> CopiesMeeting:  # fmt: skip
    """Gradients are summed group by group, in the order in which parameters are stored."""
    shapes = [shape for stage in stages for shape in _stored_shapes(graph, stage)]
    alone = algorithm.name == POWERSGD
    counts = [math.prod(shape) for shape, _ in shapes]
    groups = counts if alone else [size // _WIDE for size in _buffers([_WIDE * count for count in counts])]
    sent, taken, kept, most = Counter[str](), 0, 0, 0
    for number, count in enumerate(groups):
        rank = compressed_matrix(shapes[number][0], int(algorithm.amount)) if alone else 0
        calls, left = _sent_of(algorithm, count, axis.size, rank, shapes[number][0] if alone else ())
        for kind, size in calls:
            sent[kind] += size
            taken += collective_time_ns(kind, size, axis, devices_per_node, profile)
        kept += left
        if left:
            taken += optimizer_time_ns(_PASSES[algorithm.name] * _WIDE * count, 1, 1, False, profile)
        most = max(most, (_HELD[algorithm.name] if left else 1) * _WIDE * count)
    return CopiesMeeting(taken, sent, most, _WIDE * sum(counts), kept)


def _sent_of(
    algorithm: Algorithm, count: int, ranks: int, rank: int, shape: Shape
) -> tuple[list[tuple[str, int]], int]:  # fmt: skip
    """What is sent of a group of so many values, and the bytes of what is kept of it between steps."""
    whole = [("all_reduce", _WIDE * count)], 0
    if algorithm.name == INT8:
        length = padded_length(count, ranks)
        coded = length + _WIDE * (length // BLOCK)
        return [("all_to_all", coded), ("all_gather", coded)], _WIDE * (length + length // ranks)
    if algorithm.name == TOPK:
        largest = num_kept(count, algorithm.amount)
        if 2 * ranks * largest >= count:
            return whole
        return [("all_gather", 2 * _WIDE * ranks * largest)], _WIDE * count
    if not rank:
        return whole
    rows, columns = shape[0], math.prod(shape[1:])
    left, right = (_WIDE * rank * length for length in (rows, columns))
    return [("all_reduce", left), ("all_reduce", right)], _WIDE * count + right


def _stored_shapes(graph: Graph, stage: Stage) -> list[tuple[Shape, int]]:
    """Of the trained parameters that the first rank of a stage stores, and the bytes of an element."""
    axes, trained = evenly(stage.axes), {item.tensor for item in graph.parameters if item.requires_grad}
    found = []
    for name, kept in stage.storage.items():
        if name in trained:
            tensor = graph.kept(name)
            found.append((local_shape(tensor.shape, kept.placement, axes), tensor.itemsize))
    return found


def _stored_sizes(graph: Graph, stage: Stage) -> list[int]:
    """Bytes of the trained parameters that the first rank of a stage stores, one by one."""
    return [math.prod(shape) * itemsize for shape, itemsize in _stored_shapes(graph, stage)]


def _buffers(sizes: Iterable[int]) -> list[int]:
    """How tensors fill buffers, one after the other."""
    groups: list[int] = []
    for size in sizes:
        if groups and groups[-1] + size <= BUCKET_BYTES:
            groups[-1] += size
        else:
            groups.append(size)
    return groups
