"""What a measured software holds of a device, beside what its plan's tensors take.

taken = reserved by the allocator for (allocated + sums and gradients that it keeps + pinned) + outside of it

    pinned   what collectives along tensor parallelism read and wrote, and nobody needs any more. A block that another
             stream has used is free only when the device has come so far (`record_stream`, what torch.distributed did
             until 2025), and the host, ahead of the device by the launches that its queue holds, asks for new memory
             meanwhile. What is sent is whole where what is kept is a slice, so that this is up to half of the peak.
             Where the host is slower than the device, or waits for it, nothing is pinned: a run takes up to so much,
             not always, and that is most of what is not sure (`Held.spread`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.cost.device import DeviceMemory
from autopar.ir.graph import DTYPE_BYTES, Graph
from autopar.ir.placement import P, local_shape
from autopar.ir.plan import Plan, Stage
from autopar.ops.table import operator
from autopar.simulate import Timeline
from autopar.simulate.engine import Change
from autopar.simulate.timeline import Lane, Memory
from benchmarks.accuracy.gpu.softwares import Software

FLOAT32_BYTES = 4
QUEUED_LAUNCHES = 1024  # that CUDA's queue of a process holds: so far the host is ahead of the device
PASSES = 3  # over an operator of a microbatch: forward, and backward a kernel for each of the two gradients


class Held(NamedTuple):
    """What a submesh's allocator reserves, and the standard deviation of log(measured / predicted) of it."""

    reserved_bytes: int
    spread: float


def held(graph: Graph, plan: Plan, software: Software, timeline: Timeline, memory: DeviceMemory) -> list[Held]:
    """Of each submesh. graph: of one microbatch."""
    found = []
    for lane, allocated in zip(timeline.lanes, allocated_bytes(graph, plan, software, timeline), strict=True):
        pinned = software.pinned * sent_ahead_bytes(graph, plan, lane.ranks.start) if software.pinned else 0.0
        reserved = memory.reserved_bytes(allocated + round(pinned / memory.fragmentation))
        unsure = software.pinned_spread * pinned / reserved
        found.append(Held(reserved, math.hypot(memory.spread, unsure)))
    return found


def allocated_bytes(graph: Graph, plan: Plan, software: Software, timeline: Timeline) -> list[int]:
    """The peak of each submesh, without what is pinned. graph: of one microbatch."""
    if not software.keeps_sums:
        return [lane.peak_bytes for lane in timeline.lanes]
    return [
        peak_beside_gradients(lane) + kept_bytes(graph, plan, software, lane.ranks.start) for lane in timeline.lanes
    ]


class _Piece(NamedTuple):
    begin_ns: int
    changes: list[Change]


def peak_beside_gradients(lane: Lane) -> int:
    """The most of all else that a submesh holds: where gradients have memory all the time, they are not what makes a
    moment the fullest."""
    own: dict[int, list[Change]] = {}
    pieces = list[_Piece]()
    for piece in lane.played:
        if id(piece.changes) not in own:
            own[id(piece.changes)] = [one for one in piece.changes if not one[2].startswith("gradients")]
        pieces.append(_Piece(piece.begin_ns, own[id(piece.changes)]))
    return Memory(pieces).fullest[0]


def kept_bytes(graph: Graph, plan: Plan, software: Software, rank: int) -> int:
    """Of sums of gradients in float32 and, where they are kept, the gradients in 16 bits."""
    sums = sums_bytes(graph, plan, rank)
    return sums + (sums // 2 if software.keeps_gradients else 0)


def sent_ahead_bytes(graph: Graph, plan: Plan, rank: int) -> float:
    """What a rank's collectives along tensor parallelism read and write in the forward passes of as many microbatches
    as the host can be ahead of the device."""
    stages = [stage for stage in plan.stages if stage.first_rank == rank]
    launches = PASSES * sum(kernels(stage, graph) for stage in stages)
    passes = min(plan.microbatches, QUEUED_LAUNCHES / max(1, launches))
    return passes * sum(reduced_bytes(stage, graph) for stage in stages)


def kernels(stage: Stage, graph: Graph) -> int:
    """Operators of a stage that run something."""
    return sum(not operator(graph.node_by_name[name].op).is_view for name in stage.nodes)


def reduced_bytes(stage: Stage, graph: Graph) -> float:
    """Results of a stage's operators of which each rank has a summand, and the slices of their sums."""
    found = 0.0
    for node, placed in stage.nodes.items():
        for name, placement in zip(graph.node_by_name[node].results, placed.results, strict=True):
            tensor = graph.tensors[name]
            if P in placement and len(tensor.shape) > 1:
                ranks = math.prod(axis.size for axis, at in zip(stage.axes, placement, strict=True) if at == P)
                whole = math.prod(local_shape(tensor.shape, placement, stage.axes)) * DTYPE_BYTES[tensor.dtype]
                found += whole * (1 + 1 / ranks)
    return found


def sums_bytes(graph: Graph, plan: Plan, rank: int) -> int:
    """Of the float32 sums of all gradients of a rank, as its operators use the parameters."""
    found = 0
    for stage in (stage for stage in plan.stages if stage.first_rank == rank):
        used = {
            name: placement
            for node in graph.nodes if node.name in stage.nodes
            for name, placement in zip(node.operands, stage.nodes[node.name].operands, strict=True)
            if name in stage.storage
        }  # fmt: skip
        found += sum(math.prod(local_shape(graph.tensors[name].shape, at, stage.axes)) for name, at in used.items())
    return found * FLOAT32_BYTES
