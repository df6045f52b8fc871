"""A plan as the plain data that the report page is made from. Times in ns, sizes in bytes; nothing is formatted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autopar.ir.mesh import LogicalMesh, ranks_within_node
from autopar.ir.plan import Plan
from autopar.show.text import (
    copied_out_text,
    fork_text,
    in_bits_text,
    in_eight_bits_text,
    offload_text,
    recompute_text,
    share_lines,
    stage_blocks,
)
from autopar.show.tree import Data, model_tree


def plan_data(plan: Plan, name: str, timeline: Mapping[str, Any] | None) -> Data:
    """Everything that the page shows of a plan. timeline: `Timeline.picture`, of a plan that has its model's graph."""
    layouts: list[LogicalMesh] = list(dict.fromkeys(stage.axes for stage in plan.stages))
    return {
        "name": name,
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "mesh": str(plan.mesh),
        "num_devices": plan.mesh.num_devices,
        "mode": plan.mode,
        "optimizer": plan.optimizer,
        "precision": plan.precision or "",
        "routing": "" if plan.routing is None else str(plan.routing),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule if len(plan.stages) > 1 else "",
        "memory_limit": plan.memory_limit,
        "predicted": asdict(plan.predicted),
        "layouts": [_layout(plan, axes) for axes in layouts],
        "stages": _stages(plan, layouts),
        "tree": model_tree(plan, layouts),
        "recompute": recompute_text(plan) if plan.recompute else "",
        **({"in_bits": kept} if (kept := in_bits_text(plan)) else {}),
        **({"gradient_error": str(plan.gradient_error)} if plan.gradient_error else {}),
        **({"in_eight_bits": eight} if (eight := in_eight_bits_text(plan)) else {}),
        **({"copied_out": copied_out_text(plan)} if plan.copied_out else {}),
        "offload": offload_text(plan),
        "forks": [[text, n] for text, n in Counter(fork_text(plan, f) for s in plan.stages for f in s.forks).items()],
        "shares": [line.strip() for line in share_lines(plan)],
        "substitutions": [_substitution(step) for step in plan.substitutions],
        "search": _search(plan),
        "coverage": dict(plan.coverage),
        "sources": dict(plan.sources),
        "timeline": timeline,
    }


def _layout(plan: Plan, axes: LogicalMesh) -> list[Data]:
    """Axes with how many of an axis's ranks share a node."""
    return [
        {
            "name": axis.name,
            "size": axis.size,
            "stride": axis.stride,
            "shares": list(axis.shares),
            "near": ranks_within_node(axis, plan.mesh.devices_per_node),
        }
        for axis in axes
    ]


def _stages(plan: Plan, layouts: list[LogicalMesh]) -> list[Data]:
    return [
        {
            "ranks": [stage.ranks.start, stage.ranks.stop - 1],
            "layout": layouts.index(stage.axes),
            "blocks": stage_blocks(plan, stage) if len(plan.stages) > 1 else "",
            "operators": len(stage.nodes),
        }
        for stage in plan.stages
    ]


def _substitution(step: Any) -> Data:
    return {**asdict(step), "binding": {key: str(value) for key, value in step.binding.items()}}


def _search(plan: Plan) -> Data:
    """The report, in its rows without what is empty."""
    return {**asdict(plan.search), "tried": [row.told for row in plan.search.tried]}
