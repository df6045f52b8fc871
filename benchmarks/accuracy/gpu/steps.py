"""What a software does once a step, while its device waits: in none of what is simulated.

step_ns + of the rank with the longest: passes over its gradients + what sums cost beyond theirs + copies of parameters

    sums     a software that sums late gradients in one buffer (`Software.sums_at_once`) has every rank get all of them,
             though each needs its shard alone: an all-reduce where the plan has a reduce-scatter.
    copies   of what is gathered of each parameter from each of the ranks that it is sharded over, one by one.
"""

from __future__ import annotations

from autopar.cost import Profile, collective_time_ns
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Stage
from benchmarks.accuracy.gpu.memory import sums_bytes
from benchmarks.accuracy.gpu.plans import near_devices
from benchmarks.accuracy.gpu.rows import Row
from benchmarks.accuracy.gpu.softwares import Software

DATA = "dp"  # the axis of a template along which gradients are summed


def once_a_step_s(row: Row, graph: Graph, plan: Plan, software: Software, profile: Profile) -> float:
    """Seconds. graph: of one microbatch."""
    longest = 0.0
    for stage in {stage.first_rank: stage for stage in plan.stages}.values():
        num_bytes = sums_bytes(graph, plan, stage.first_rank) if software.has_sums_of_its_own else 0
        passes_ns = 1e9 * software.step_passes * num_bytes / profile.facts.memory_bandwidth
        longest = max(longest, passes_ns + _whole_sums_ns(row, num_bytes, stage, software, profile))
    return (software.step_ns + longest) / 1e9


def _whole_sums_ns(row: Row, num_bytes: int, stage: Stage, software: Software, profile: Profile) -> int:
    """What one buffer that all ranks get whole takes longer than one of shards, and the copies of what comes back."""
    if not (software.sums_at_once and row.zero in software.late_sums):
        return 0
    near, found = near_devices(row), 0
    for axis in (axis for axis in stage.axes if axis.name == DATA):
        whole, shards = (
            collective_time_ns(kind, num_bytes, axis, near, profile) for kind in ("all_reduce", "reduce_scatter")
        )
        found += whole - shards + (axis.size > 1) * axis.size * len(stage.storage) * software.copy_ns
    return found
