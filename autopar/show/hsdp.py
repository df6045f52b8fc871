"""Hierarchical data parallelism (HSDP of FSDP): parameters in shards over some data-parallel axes, in copies on others.

Ranks that share a parameter's shards gather it from one another; gradients are reduce-scattered among them, and their
shards all-reduced over the copies. A data-parallel axis is one that inputs are split on by samples.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Axis, S
from autopar.ir.plan import Plan, Stage


class ShardingGroups(NamedTuple):
    """The axes that a parameter's shards lie along, and those that its copies do."""

    shards: LogicalMesh
    copies: LogicalMesh

    def __str__(self) -> str:
        return f"shards over {_sizes(self.shards)}, copies over {_sizes(self.copies)}"


def _sizes(axes: LogicalMesh) -> str:
    return " × ".join(f"{axis.name}={axis.size}" for axis in axes)


def sharding_groups(stage: Stage) -> dict[str, ShardingGroups]:
    """By stored tensor, its groups where it has shards over some data-parallel axes and copies over others."""
    data = [n for n in range(len(stage.axes)) if any(placement[n] == S(0) for placement in stage.inputs.values())]
    found = {}
    for item in stage.redistributes:
        if item.tensor in stage.storage:
            stored = stage.storage[item.tensor].placement
            shards = _axes(stage, [n for n in data if stored[n].kind == "S" and item.target[n].kind != "S"])
            copies = _axes(stage, [n for n in data if stored[n].kind == "I"])
            if shards and copies:
                found[item.tensor] = ShardingGroups(shards, copies)
    return found


def _axes(stage: Stage, numbers: list[int]) -> tuple[Axis, ...]:
    return tuple([stage.axes[n] for n in numbers])


def hsdp_text(plan: Plan) -> str:
    """ "12 parameters in shards over hsdp=2, copies over dp=4", by groups; "" where there are none."""
    trained = [groups for stage in plan.stages for name, groups in sharding_groups(stage).items()
               if name in plan.parameters]  # fmt: skip
    return "; ".join(f"{count} parameters in {groups}" for groups, count in Counter(map(str, trained)).items())
