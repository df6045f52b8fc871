"""Gradients that meet as factors: linear operators over split rows, whose weight is used I (`ops.factors`)."""

from __future__ import annotations

import re
from collections import Counter

from autopar.ir.placement import I
from autopar.ir.plan import NodePlan, Plan, Stage
from autopar.ops.factors import LINEAR, factor_axes


def factors_text(plan: Plan) -> str:
    """ "of fc, blocks.*.up ×4 as factors over dp": modules of a like name together; "" where there are none."""
    found: dict[str, Counter[str]] = {}
    for stage in plan.stages:
        for name, node in stage.nodes.items():
            module, op, _ = plan.scope(name)
            if op == LINEAR and (over := _over(stage, node)):
                found.setdefault(over, Counter())[re.sub(r"\.\d+(?=\.|$)", ".*", module) or "(root)"] += 1
    return "; ".join(
        f"of {', '.join(name if count == 1 else f'{name} ×{count}' for name, count in names.items())} "
        f"as factors over {over}"
        for over, names in found.items()
    )


def _over(stage: Stage, node: NodePlan) -> str:
    if not any(type_ == I for type_ in node.operands[1]):
        return ""
    return " × ".join(stage.axes[place].name for place in factor_axes(node.operands, stage.axes))
