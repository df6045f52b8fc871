"""Plan files of versions 1 and 2, stated as version 3.

    version 1    one stage, at the top of the file; no schedule, nothing of recomputation in the breakdown
    version 2    one stage at the top, or several in `stages`; placements also on an axis of microbatches, the outermost
    version 3    one stage or several in `stages`, placements of one microbatch

What an operator does on the axis of microbatches follows from the model. A file that says something else of it is
refused when it is held against the model (`microbatch.check_plan`): what it said stays with the plan, as `told`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import Placement
from autopar.ir.plan import NodePlan, Plan, Redistribute, Stage
from autopar.ir.reading import MalformedError
from autopar.ir.redistribution import Step
from autopar.ir.schedule import PLAIN

_PLACED = ("axes", "inputs", "storage", "nodes", "redistributes", "forks")


def as_of_now(data: dict[str, Any]) -> dict[str, Any]:
    """The file's data with the fields of version 3, as far as it is what a file of its version says it is.

    Placements are as they were (`of_one_microbatch`). Raises MalformedError for placements beside stages.
    """
    if data["autopar_plan"] == 1:
        data = _of_version_2(data)
    if data["autopar_plan"] == 2:
        rest = {name: value for name, value in data.items() if name not in _PLACED}
        placed = {name: data[name] for name in _PLACED if name in data}
        return {**rest, "autopar_plan": 3, "stages": _stages(data.get("stages"), placed)}
    return data


def _of_version_2(data: dict[str, Any]) -> dict[str, Any]:
    for name in ("schedule", "stages"):
        if name in data:
            raise MalformedError((name,), "no such field in a plan of version 1", "one")
    predicted = data.get("predicted")
    if isinstance(predicted, dict) and isinstance(predicted.get("breakdown"), dict):
        predicted = {**predicted, "breakdown": {"recompute_ns": 0, **predicted["breakdown"]}}
    added = {"autopar_plan": 2, "schedule": PLAIN, "stages": [], "sources": {}}
    return {**added, **data, "autopar_plan": 2, "predicted": predicted}


def _stages(stages: Any, placed: dict[str, Any]) -> Any:
    if stages != []:
        for name, found in placed.items():
            if found:
                raise MalformedError((name,), "nothing beside stages, which have their own", "some")
        return stages
    return [{"first_rank": 0, **placed}]


def of_one_microbatch(plan: Plan) -> Plan:
    """A plan whose placements are on the axis of microbatches as well, without it; `told` is what they said of it.

    Raises MalformedError where not all stages have the axis, outermost, and as long as there are microbatches.
    """
    for number, stage in enumerate(plan.stages):
        found = [axis.size for axis in stage.axes[:1] if axis.name == MICROBATCH] or [1]
        if found != [plan.microbatches]:
            where = "stages", number, "axes"
            raise MalformedError(where, f"an outermost axis of {plan.microbatches} microbatches", str(found[0]))
    if plan.microbatches == 1:
        return plan
    return replace(plan, stages=tuple(map(_inner, plan.stages)), told=tuple(map(_outer, plan.stages)))


def _inner(stage: Stage) -> Stage:
    """Without the first axis."""
    items: dict[tuple[str, Placement], Redistribute] = {}
    for item in stage.redistributes:
        steps = tuple(step._replace(axis=step.axis - 1) for step in item.steps if step.axis)
        if _moves(steps):
            items.setdefault((item.tensor, item.target[1:]), replace(item, target=item.target[1:], steps=steps))
    return replace(
        stage,
        axes=stage.axes[1:],
        inputs={name: placement[1:] for name, placement in stage.inputs.items()},
        storage={name: replace(kept, placement=kept.placement[1:]) for name, kept in stage.storage.items()},
        nodes={name: _cut(node, slice(1, None)) for name, node in stage.nodes.items()},
        redistributes=tuple(items.values()),
    )


def _moves(steps: tuple[Step, ...]) -> bool:
    """Whether steps end elsewhere than they begin."""
    begin, end = {step.axis: step.before for step in reversed(steps)}, {step.axis: step.after for step in steps}
    return begin != end


def _outer(stage: Stage) -> Stage:
    """What is said of the first axis."""
    return Stage(
        stage.first_rank,
        stage.axes[:1],
        {name: placement[:1] for name, placement in stage.inputs.items()},
        {name: replace(kept, placement=kept.placement[:1]) for name, kept in stage.storage.items()},
        {name: _cut(node, slice(1)) for name, node in stage.nodes.items()},
    )


def _cut(node: NodePlan, axes: slice) -> NodePlan:
    return NodePlan(tuple(p[axes] for p in node.operands), tuple(p[axes] for p in node.results))
