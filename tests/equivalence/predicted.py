"""The bytes that a plan of several stages foretells, by submesh."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import one_microbatch, one_microbatch_plan, types_of
from autopar.pipeline import simulated_step
from autopar.simulate import traffic_by_submesh


def bytes_by_submesh(plan: Plan, whole: Graph) -> list[tuple[range, dict[str, int]]]:
    """What a rank of each submesh hands to each collective in a step, as predicted; sends are the busiest rank's."""
    part = one_microbatch(whole, types_of(plan), plan.microbatches) if plan.microbatches > 1 else whole
    timeline: Any = replace(plan, simulator=partial(simulated_step, whole)).timeline()
    sent = traffic_by_submesh(whole, plan, part, one_microbatch_plan(plan), timeline)
    return [(lane.ranks, counts) for lane, counts in zip(timeline.lanes, sent, strict=True)]
