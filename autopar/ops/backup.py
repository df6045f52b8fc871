"""Synchronous steps without their last ranks: the update of a step is made of the gradients of the first n - b copies.

A copy decides by its arrival, so that no rank may wait for another within a step: neither for the sum of the loss, nor
for the count that its mean divides by. Ranks have the loss of their own samples, and the sums of losses, counts and
gradients meet when the passes have ended (`runtime.backup`). That takes a loss in which nothing else crosses ranks.

Source: Chen et al. 2016, "Revisiting distributed synchronous SGD" (arXiv:1604.00981), section 3.
"""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.placement import I, P, R
from autopar.ir.plan import COMPILED, Plan, Stage
from autopar.ops.call import call_of
from autopar.ops.communication import is_mean_over_samples

_REMEDY = 'template_plan(…, dp=4, algorithm="backup(1)") makes one'


def check_backup(graph: Graph, plan: Plan, size: int) -> None:
    """Raises PlanError for a plan of so many copies whose steps cannot go on without some of them, beside what all
    algorithms of copies refuse (`copies`).

    graph: of one microbatch.
    """
    assert plan.algorithm is not None, "asked for of plans under an algorithm"
    late, stage = int(plan.algorithm.amount), plan.stages[0]

    def refused(what: str, found: str, remedy: str = _REMEDY) -> PlanError:
        return PlanError(f"expected {what} with {plan.algorithm}, found {found}; {remedy}")

    if late >= size:
        raise refused(f"fewer late copies than the {size} that there are", str(late), f"use backup(1) to ({size - 1})")
    if len(plan.stages) > 1 or plan.microbatches > 1:
        raise refused("one stage and one microbatch", f"{len(plan.stages)} and {plan.microbatches}")
    if other := next((a for a in stage.axes if a.size > 1 and a.name != plan.algorithm.axis), None):
        raise refused("copies of a device each", f"{other.size} devices a copy, along {other.name}")
    if not plan.mesh.is_homogeneous:
        raise refused("equal devices, of which any may be late", f"{plan.mesh}, where the slow ones always were")
    if plan.precision is not None or plan.runs == COMPILED:
        raise refused("operators that run as they are, on stored parameters", "other precision, or compiled blocks")
    if graph.mutations:
        found = f"one that sets {next(iter(graph.mutations))}"
        remedy = "use layers without running statistics, such as layer norm for batch norm"
        raise refused("a forward pass that changes nothing that is stored", found, remedy)
    axis = [item.name for item in stage.axes].index(plan.algorithm.axis)
    _check_inputs(graph, plan, stage, axis, size)
    _check_loss(graph, plan, stage, axis)


def _check_inputs(graph: Graph, plan: Plan, stage: Stage, axis: int, size: int) -> None:
    """That copies have as many samples each: a mean is then that of the means of those that take part."""
    for name in graph.inputs:
        kind = stage.inputs[name][axis]
        if kind.kind == "S" and graph.kept(name).shape[kind.dim] % size:
            raise PlanError(
                f"expected equal parts of {name} for {size} copies with {plan.algorithm}, found "
                f"{graph.kept(name).shape[kind.dim]} along dim {kind.dim}; use a batch that {size} divides"
            )


def _check_loss(graph: Graph, plan: Plan, stage: Stage, axis: int) -> None:
    """That nothing but the loss crosses the copies, and at most one count, which all of the loss is divided by."""
    is_summed = False
    for item in stage.redistributes:
        kinds = [(step.before, step.after) for step in item.steps if step.axis == axis]
        if not kinds or (item.tensor in stage.storage and kinds == [(I, R)]):
            continue
        is_summed = item.tensor == graph.loss and kinds == [(P, I)]
        if not is_summed:
            way = ", ".join(f"{before} -> {after}" for before, after in kinds)
            raise _crossing(plan, f"{item.tensor} ({way})")
    if not is_summed:
        raise _crossing(plan, "a loss that is the same on all ranks")
    for node in graph.nodes:
        if is_mean_over_samples(call_of(graph, node)) and graph.loss not in node.results:
            raise _crossing(plan, f"a count for {node.name} ({node.op}) at {node.source or 'an unknown line'}")


def _crossing(plan: Plan, found: str) -> PlanError:
    return PlanError(
        f"expected nothing that crosses ranks within a step but the loss, a sum or a mean, with {plan.algorithm}, "
        f"which waits for none, found {found}; return the mean over samples itself, or leave the algorithm out"
    )
