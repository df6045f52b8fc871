"""When no plan fits: the plan of least memory, used when it fits after all, or the error that names what it needs.

For each logical mesh the plan of the least intra-op usage is simulated; from the smallest of these peaks, plans are
asked for below the best peak so far until none is found. Nothing of this depends on the user's limit. So a limit of
what the error names can be met, and the search has failed at one byte less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.intraop import LeastMemory
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan

LeastOf = Callable[[LogicalMesh], tuple[Plan, LeastMemory]]
PlanBelow = Callable[[LogicalMesh, int], Plan]

MAX_ROUNDS = 8  # of asking every logical mesh for less


def fit_or_refuse(meshes: Sequence[LogicalMesh], least_of: LeastOf, plan_below: PlanBelow) -> Plan:
    """The plan with the least peak memory that is found, if it is within its own `memory_limit`.

    least_of(axes): the plan of least usage and what is largest in it. plan_below(axes, limit): a plan within that
    limit in bytes. Both raise InfeasibleError. Raises InfeasibleError naming the smallest limit that can be met, or,
    when the constraints leave no strategy at all, what says so.
    """
    found, refusals = [], []
    for axes in meshes:
        try:
            found.append(least_of(axes))
        except InfeasibleError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    best, least = min(found, key=lambda pair: pair[0].predicted.peak_bytes)
    limit = best.memory_limit
    for _ in range(MAX_ROUNDS):
        peak = best.predicted.peak_bytes
        for plan, own_least in found:
            if best.predicted.peak_bytes <= limit:
                return best
            lower = _below(plan.axes, best, plan_below)
            if lower is not None:
                best, least = replace(lower, memory_limit=limit), own_least
        if best.predicted.peak_bytes == peak:
            break
    raise _does_not_fit(best, least)


def _below(axes: LogicalMesh, best: Plan, plan_below: PlanBelow) -> Plan | None:
    try:
        return plan_below(axes, best.predicted.peak_bytes - 1)
    except InfeasibleError:
        return None


def _does_not_fit(plan: Plan, least: LeastMemory) -> InfeasibleError:
    needed = plan.predicted.peak_bytes
    kinds = sorted(plan.predicted.memory.items(), key=lambda item: -item[1])[:3]
    axes = "x".join(str(axis.size) for axis in plan.axes) or "1"
    return InfeasibleError(
        f"expected a plan within memory_limit = {plan.memory_limit:,} bytes a device of {plan.mesh}, found none: the "
        f"smallest limit that can be met is {needed:,} bytes (on logical mesh {axes}), most of it "
        f"{', '.join(f'{kind} ({size:,} bytes)' for kind, size in kinds)}; the largest tensors are "
        f"{', '.join(f'{name} ({size:,} bytes{_with_state(kind)})' for name, kind, size in least.largest)}. "
        "Raise memory_limit to that, use more devices, or a smaller batch.",
        needed,
    )


def _with_state(kind: str) -> str:
    return " with gradient and optimizer state" if kind == "stored" else ""
