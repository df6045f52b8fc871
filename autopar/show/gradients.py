"""How gradients meet, where that is not in a sum along one axis after another: as factors, by levels, or by
servers.

As factors: of linear operators over split rows, whose weight is used I (`ops.factors`). By levels, and by servers of
the mesh (`ir.servers`): of parameters whose last steps are marked so (`ir.redistribution`).
"""

from __future__ import annotations

import re
from collections import Counter

from autopar.ir.mesh import ranks_within_node
from autopar.ir.placement import Axis, I
from autopar.ir.plan import NodePlan, Plan, Redistribute, Stage
from autopar.ir.servers import Servers, split, total
from autopar.ops.factors import LINEAR, factor_axes


def gradients_text(plan: Plan) -> str:
    """ "of fc, blocks.*.up ×4 as factors over dp; of 12 parameters summed by levels: hsdp=8, then dp=4"; "" where there
    are none of either."""
    return "; ".join([*_factors(plan), *_levels(plan), *_served(plan)])


def _factors(plan: Plan) -> list[str]:
    found: dict[str, Counter[str]] = {}
    for stage in plan.stages:
        for name, node in stage.nodes.items():
            module, op, _ = plan.scope(name)
            if op == LINEAR and (over := _over(stage, node)):
                found.setdefault(over, Counter())[re.sub(r"\.\d+(?=\.|$)", ".*", module) or "(root)"] += 1
    return [
        f"of {', '.join(name if count == 1 else f'{name} ×{count}' for name, count in names.items())} "
        f"as factors over {over}"
        for over, names in found.items()
    ]  # fmt: skip


def _over(stage: Stage, node: NodePlan) -> str:
    if not any(type_ == I for type_ in node.operands[1]):
        return ""
    return " × ".join(stage.axes[place].name for place in factor_axes(node.operands, stage.axes))


def _levels(plan: Plan) -> list[str]:
    names: dict[str, set[str]] = {}
    for stage in plan.stages:
        for item in stage.redistributes:
            if any(step.parts > 1 for step in item.steps):
                names.setdefault(_along(stage, item), set()).add(item.tensor)
    return [f"of {len(tensors)} parameters summed by levels: {along}" for along, tensors in names.items()]


def _served(plan: Plan) -> list[str]:
    """ "of 12 parameters summed by 2 servers over dp, of which each sums 3/10, and each rank 1/10"."""
    servers, found = plan.mesh.servers, dict[Axis, set[str]]()
    for stage in plan.stages:
        for item in stage.redistributes:
            for step in item.steps:
                if step.is_served:
                    found.setdefault(stage.axes[step.axis], set()).add(item.tensor)
    if servers is None:
        return []
    many = "a server" if servers.count == 1 else f"{servers.count} servers"
    return [
        f"of {len(tensors)} parameters summed by {many} over {axis.name}, {_split(plan, servers, axis)}"
        for axis, tensors in found.items()
    ]


def _split(plan: Plan, servers: Servers, axis: Axis) -> str:
    inside = ranks_within_node(axis, plan.mesh.devices_per_node)
    own, theirs = parts = split(servers, axis.size, inside, plan.mesh.nodes)
    whole = total(parts, servers.count, axis.size)
    told = f"each of which sums {theirs}/{whole}" if whole > 1 else "which sums all"
    return f"{told}, and each rank {own}/{whole}" if own else told


def _along(stage: Stage, item: Redistribute) -> str:
    axes = [stage.axes[step.axis] for step in reversed(item.steps) if step.parts > 1]
    return ", then ".join(f"{axis.name}={axis.size}" for axis in axes if axis.size > 1)
