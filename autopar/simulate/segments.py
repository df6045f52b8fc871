"""How long each repeated block takes on a kind of device: what stages of unequal devices are sized by."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate.program import Item, lower_stages


def block_times_ns(graph: Graph, plan: Plan, profile: Profile, block_paths: Sequence[str]) -> list[int]:
    """Nanoseconds of a microbatch in each block, forward and backward, with the collectives inside.

    graph, plan: of one microbatch and one stage, on devices of the profile, slowed down where they share cores.
    block_paths: module paths of the blocks, in any order; the result has the order in which they run. What runs before
    the first block counts to that, anything else outside of blocks to the one before.
    """
    (program,) = lower_stages(graph, plan, [profile])
    trains = plan.mode == "train" and graph.loss is not None
    times: dict[str, int] = {}
    before, current = 0, ""
    for item in program.items:
        current = _block(program.units[item.unit], block_paths) or current
        spent = _spent_ns(item, trains)
        if current:
            times[current] = times.get(current, 0) + spent
        else:
            before += spent
    found = [*times.values()]
    return [found[0] + before, *found[1:]] if found else []


def _block(unit: str, block_paths: Sequence[str]) -> str:
    return next((path for path in block_paths if f"{unit}.".startswith(f"{path}.")), "")


def _spent_ns(item: Item, trains: bool) -> int:
    """Forward, once more where it is recomputed, and backward."""
    forward = item.forward_ns + sum(sent.duration_ns for sent in (*item.forward, *item.inner))
    if not trains:
        return forward
    again = forward if item.region >= 0 else 0
    backward = item.backward_ns + sum(sent.duration_ns for sent in (*item.backward, *item.inner_backward))
    return forward + again + (backward if item.runs_backward else 0)
