"""What it takes copies of the parameters to meet under a training algorithm, as `runtime.copies` does it.

local_sgd   an all-reduce of the parameters after every `period` updates: large ones by themselves and in place,
            small ones in buffers. Nothing else runs meanwhile.
adasum      log₂ n exchanges of the gradients with one other copy, at twice the distance each time, after the passes
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from autopar.cost.collectives import collective_time_ns
from autopar.cost.profile import Profile
from autopar.ir.algorithm import ADASUM, Algorithm
from autopar.ir.graph import Graph
from autopar.ir.placement import Axis, evenly, local_shape
from autopar.ir.plan import Stage
from autopar.runtime.packing import BUCKET_BYTES, LONE_BYTES, SAMPLED

_WIDEST = 8  # bytes of an element


class CopiesMeeting(NamedTuple):
    """Of a rank: time, bytes by collective, memory beside the parameters, gradients and optimizer state while copies
    meet, the bytes of the gradients then, and those of the values that are kept to see updates by."""

    duration_ns: int
    sent: Mapping[str, int]
    buffer_bytes: int
    gradient_bytes: int
    sample_bytes: int


def meeting(
    graph: Graph, stages: Iterable[Stage], algorithm: Algorithm, devices_per_node: int, profile: Profile
) -> CopiesMeeting:  # fmt: skip
    """Of the stages of one rank. Communication alone: what is added and scaled is left out, some passes over memory."""
    stages = list(stages)
    axis = next(axis for axis in evenly(stages[0].axes) if axis.name == algorithm.axis)
    sizes = [size for stage in stages for size in _stored_sizes(graph, stage)]
    seen = _WIDEST * SAMPLED * min(SAMPLED, len(sizes))
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


def _stored_sizes(graph: Graph, stage: Stage) -> list[int]:
    """Bytes of the trained parameters that the first rank of a stage stores, one by one."""
    axes, trained = evenly(stage.axes), {item.tensor for item in graph.parameters if item.requires_grad}
    found = []
    for name, kept in stage.storage.items():
        if name in trained:
            tensor = graph.kept(name)
            found.append(math.prod(local_shape(tensor.shape, kept.placement, axes)) * tensor.itemsize)
    return found


def _buffers(sizes: Iterable[int]) -> list[int]:
    """How tensors fill buffers, one after the other."""
    groups: list[int] = []
    for size in sizes:
        if groups and groups[-1] + size <= BUCKET_BYTES:
            groups[-1] += size
        else:
            groups.append(size)
    return groups
