"""The bytes that a plan of several stages foretells, by submesh."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.pipeline import simulated_step
from autopar.simulate import traffic_by_submesh


def bytes_by_submesh(plan: Plan, whole: Graph) -> list[tuple[range, dict[str, int]]]:
    """What a rank of each submesh hands to each collective in a step, as predicted; sends are the busiest rank's."""
    timeline: Any = replace(plan, simulator=partial(simulated_step, whole)).timeline()
    sent = traffic_by_submesh(whole, plan, timeline)
    return [(lane.ranks, counts) for lane, counts in zip(timeline.lanes, sent, strict=True)]
