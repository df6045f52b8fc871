"""Searches for plans that leave a device's allocator the room that it works in, where a larger limit is asked for.

By default plans stay below `Profile.usable_bytes`. Where a user asks for more, the fastest plan by its simulated step
may be one that fills the device, and what its allocator takes then is in no simulation (`autopar.cost.device`). So a
plan without that is looked for first, and the larger limit is used where there is none, or where a fuller plan is
faster with what refilling may take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.clock import is_interrupted
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.profiler import profile_of
from autopar.request import Request

Found = tuple[Graph, Plan]


def in_and_out_of_margin(request: Request, searched: Callable[[Request], Found]) -> Found:
    """The better of what a search finds out of the margin and in it, with what refilling may take; one search where the
    limit that is asked for keeps all plans out of it, or nothing is known of it. Raises like `searched`."""
    limit, room = request.memory_limit, room_of(request)
    if limit is None or room is None:
        return searched(request)
    usable_bytes, refill_ns = room
    try:
        graph, plan = searched(replace(request, memory_limit=usable_bytes))
    except InfeasibleError:
        return searched(request)
    roomy = graph, replace(plan, memory_limit=limit)
    if is_interrupted() or plan.predicted.step_time_ns <= refill_ns:  # of one microbatch, and all plans have one
        return roomy
    return min(roomy, searched(request), key=longest_ns)


def room_of(request: Request) -> tuple[int, int] | None:
    """What may be allocated out of the margin, and what each microbatch may take longer in it; None where plans within
    the request's limit are not in it, or where that is not known."""
    profile = profile_of(request.mesh) if request.mesh.is_homogeneous else None
    if profile is None or profile.memory is None or not profile.memory.refill_ns:
        return None
    is_larger = request.memory_limit is not None and request.memory_limit > profile.usable_bytes
    return (profile.usable_bytes, profile.memory.refill_ns) if is_larger else None


def longest_ns(found: Found) -> int:
    """The step with what refilling may take."""
    return found[1].predicted.step_time_ns + (found[1].predicted.refilling_ns or 0)
