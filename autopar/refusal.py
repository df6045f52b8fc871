"""When no plan fits: the plan of least memory, used when it fits after all, or the error that names what it needs.

In each place (a logical mesh with a number of microbatches) the plan of the least intra-op usage is simulated; from
the smallest of these peaks on, plans are asked for below the best peak so far, until `MAX_FAILURES` places have none.
Nothing of this depends on the user's limit, so a limit of what the error names can be met; but where the clock ended a
search for one of these plans, it may find less another time. So a plan within the limit itself is looked for at last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.cost.memory import optimizer_of
from autopar.cost.profile import host_of
from autopar.errors import InfeasibleError, PlanError
from autopar.intraop import LeastMemory
from autopar.ir.mesh import Mesh
from autopar.ir.offload import stored_on_host, uses_host
from autopar.ir.outline import sizes_text
from autopar.ir.plan import Plan, Prediction
from autopar.ir.recompute import again_text
from autopar.profiler import load_profile
from autopar.tunables import MAX_FAILURES

Place = TypeVar("Place")


def fit_or_refuse(
    places: Sequence[Place],
    least_of: Callable[[Place], tuple[Plan, LeastMemory]],
    plan_below: Callable[[Place, int], Plan],
    plan_at_last: Callable[[Place, LeastMemory], Plan],
) -> tuple[Place, Plan]:
    """The plan with the least peak memory that is found, if it is within its own `memory_limit`, and its place.

    least_of(place): the plan of least usage and what is largest in it. plan_below(place, limit): a plan within that
    limit in bytes. plan_at_last(place, least): one within the user's, looked for at length. All raise InfeasibleError.
    Raises InfeasibleError naming the smallest limit that can be met, or, when the constraints leave no strategy at all,
    what says so.
    """
    found, refusals = [], []
    for place in places:
        try:
            found.append((place, *least_of(place)))
        except InfeasibleError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    found.sort(key=lambda item: item[1].predicted.peak_bytes)
    where, best, least = found[0]
    limit, failures = best.memory_limit, 0
    for place, _, own_least in found * 2:  # twice: an early place may do better once a late one has lowered the peak
        while failures < MAX_FAILURES and own_least.usage_bytes < best.predicted.peak_bytes > limit:
            try:
                lower = plan_below(place, best.predicted.peak_bytes - 1)
            except InfeasibleError:
                failures += 1
                break
            where, best, least = place, replace(lower, memory_limit=limit), own_least
    if best.predicted.peak_bytes > limit:
        with contextlib.suppress(InfeasibleError):
            return where, plan_at_last(where, least)
        raise _does_not_fit(best, least)
    return where, best


def _does_not_fit(plan: Plan, least: LeastMemory) -> InfeasibleError:
    where = _on_meshes(plan)
    where += f", in {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    where += f", {again_text(plan.recompute)} recomputed" if plan.recompute else ""
    return does_not_fit(plan.mesh, plan.memory_limit, plan.predicted, where, least.largest)


def does_not_fit(
    mesh: Mesh, limit: int, least: Prediction, where: str, largest: Sequence[tuple[str, str, int]] = ()
) -> InfeasibleError:  # fmt: skip
    """What is raised where nothing fits. least: of the plan of least memory; where it was found. largest: its tensors
    by name, kind and bytes."""
    also = {"stored": " with gradient and optimizer state"}
    sizes = ", ".join(f"{name} ({size:,} bytes{also.get(kind, '')})" for name, kind, size in largest)
    return InfeasibleError(
        f"expected a plan within memory_limit = {limit:,} bytes a device of {mesh}, found none: "
        f"the smallest limit that can be met is {least.peak_bytes:,} bytes ({where}), "
        f"most of it {most_of(least.memory)}{f'; the largest tensors are {sizes}' if sizes else ''}. "
        "Raise memory_limit to that, use more devices, or a smaller batch.",
        least.peak_bytes,
    )


def devices_hold_more(what: str, mesh: Mesh, needs: Sequence[str], remedy: str) -> InfeasibleError:
    """What is raised where devices of several kinds cannot hold what they would. needs: of each that holds too much."""
    return InfeasibleError(
        f"found no {what} within the bytes of each device of {mesh}: {', '.join(needs)}; use {remedy} or more devices"
    )


def check_host(plan: Plan) -> None:
    """That the hosts hold what a plan keeps there, and update it. Raises InfeasibleError, naming what they hold and
    need; PlanError where the optimizer looks at whole parameters, ProfileError where a profile does not say."""
    if not uses_host(plan):
        return
    if any(map(stored_on_host, plan.stages)) and not optimizer_of(plan.optimizer).is_elementwise:
        raise PlanError(
            f"expected an optimizer whose update of an element depends on no other, since parameters are on the host, "
            f"found {plan.optimizer}; use adamw or the like, or keep everything on the device"
        )
    for stage in plan.stages:
        group = plan.mesh.group_of(stage.ranks)
        host = host_of(load_profile(group.profile).shared_by(group.devices_per_node))
        needed = plan.predicted.host_bytes or 0
        if needed > host.capacity_bytes:
            raise InfeasibleError(
                f"expected at most {host.capacity_bytes:,} bytes on the host of a device of {plan.mesh}, found "
                f"{needed:,}; shard parameters over more devices (zero=1 to 3), or state what the host holds as "
                f"host_memory in the profile {group.profile}"
            )


def most_of(memory: Mapping[str, int]) -> str:
    """ "optimizer (1,024 bytes), activations (512 bytes)": the three largest kinds."""
    kinds = sorted(memory.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{kind} ({size:,} bytes)" for kind, size in kinds)


def _on_meshes(plan: Plan) -> str:
    meshes = " and ".join(dict.fromkeys(sizes_text(stage.axes) for stage in plan.stages))
    return f"on logical mesh {meshes}" if len(plan.stages) == 1 else f"in {len(plan.stages)} stages on {meshes}"
