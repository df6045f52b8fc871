"""What a plan copies to the host's memory between the forward and the backward pass: activations of whole modules.

`Plan.copied_out` names modules by their paths ("layers.3"). What autograd saves in a call of one goes to the host when
the call ends, and comes back before the backward pass needs it: one call ahead, in the order of that pass. Memory that
something outside of such calls saves too, and what a step keeps anyway (parameters, inputs, constants, what came from
another stage) stays where it is.
"""

from __future__ import annotations

import difflib
from collections import Counter

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import EAGER, Plan
from autopar.ir.recompute import is_operator_call, modules_again
from autopar.ir.schedule import PLAIN, SCHEDULES
from autopar.ir.structure import block_paths

_INSTEAD = 'or offload="none"'


def check_copied_out(graph: Graph, plan: Plan) -> None:
    """Raises PlanError where modules cannot be copied out, or not beside what else the plan says."""
    if not plan.copied_out:
        return
    _check_modules(graph, plan)
    _check_beside(plan)


def _check_modules(graph: Graph, plan: Plan) -> None:
    """That they have modules inside and run, none of them in another."""
    blocks = block_paths(graph) - {""}
    counts = Counter(plan.copied_out)
    for path in plan.copied_out:
        if path not in blocks:
            near = ", ".join(difflib.get_close_matches(path, blocks)) or "none of a name like that"
            raise PlanError(
                f"expected modules with modules inside that run to copy out, found {path!r}; there is {near}"
            )
        inside = _around(path) & counts.keys()
        if inside or counts[path] > 1:
            raise PlanError(
                f"expected each module to copy out once, found {path} inside of {inside.pop() if inside else 'itself'}"
            )


def _check_beside(plan: Plan) -> None:
    """That nothing else of the plan is about what is saved there."""
    if plan.mode != "train":
        raise PlanError('expected mode="train" to copy activations out, found inference, in which none are kept')
    if operators := [name for name in plan.recompute if is_operator_call(name)]:
        raise PlanError(
            f"expected no operators computed again by themselves in a plan that copies activations out, found "
            f'{operators[0]}; take recompute="full" in other blocks, {_INSTEAD}'
        )
    again = modules_again(plan.recompute)
    for path in plan.copied_out:
        both = [other for other in again if other == path or path in _around(other) or other in _around(path)]
        if both:
            raise PlanError(
                f"expected blocks to be copied out or computed again, found {path} copied out and {both[0]} computed "
                f"again; take one of the two for it"
            )
    if len(plan.stages) > 1 and SCHEDULES[plan.schedule].splits_backward:
        raise PlanError(
            f'expected no activations copied out with schedule "{plan.schedule}", whose backward pass in two parts '
            f'would bring them back twice; take schedule="{PLAIN}", {_INSTEAD}'
        )
    if any(stage.forks for stage in plan.stages):
        raise PlanError(
            f"expected no branches beside activations that are copied out, found some; plan without, {_INSTEAD}"
        )
    if not plan.mesh.is_homogeneous or any(axis.shares for stage in plan.stages for axis in stage.axes):
        raise PlanError(
            f"expected devices of one kind with equal shares to copy activations out, found {plan.mesh}; take such a "
            f"mesh, {_INSTEAD}"
        )
    if plan.runs != EAGER:
        raise PlanError(
            f'expected a program that runs eagerly to copy activations out, found runs="{plan.runs}"; take '
            f'runs="eager", {_INSTEAD}'
        )


def _around(path: str) -> set[str]:
    """The paths of the modules around one."""
    parts = path.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}
