"""What is frozen of a case: the predicted step and its parts, peaks, bytes, and a hash of the emitted source."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Prediction
from autopar.microbatch import check_plan
from autopar.pipeline import simulated_step
from autopar.simulate import Timeline
from tests.oracles.frozen.cases import PROFILES, Case, made, slow_profile

Figures = dict[str, Any]


def figures(case: Case) -> Figures:
    """Of the plan as it was made, and of its step simulated anew."""
    graph, plan = made(case)
    check_plan(graph, plan)
    return {**_predicted(plan.predicted), **_simulated(simulated_step(graph, plan)), **_emitted(graph, plan)}


def _predicted(told: Prediction) -> Figures:
    return {
        "step_time_ns": told.step_time_ns, "lower_bound_ns": told.lower_bound_ns, "breakdown": asdict(told.breakdown),
        "peak_bytes": told.peak_bytes, "peak": dict(sorted(told.memory.items())),
        "comm_bytes": dict(sorted(told.comm_bytes.items())),
    }  # fmt: skip


def _simulated(timeline: Timeline) -> Figures:
    """A lane is a submesh of equal ranks, or one rank."""
    lanes = [
        {
            "ranks": f"{lane.ranks.start}-{lane.ranks.stop - 1}", "breakdown": asdict(lane.breakdown),
            "peak_bytes": lane.peak_bytes, "peak": dict(lane.memory_at_peak),
            "sent": dict(sorted(lane.comm_bytes.items())),
        }
        for lane in timeline.lanes
    ]  # fmt: skip
    return {"simulated_ns": timeline.step_time_ns, "events": len(timeline.events), "lanes": lanes}


def _emitted(graph: Graph, plan: Plan) -> Figures:
    source = emit(graph, plan).replace(slow_profile(), Path(slow_profile()).name)
    for name, path in PROFILES.items():
        source = source.replace(path, name)
    return {"source_lines": source.count("\n"), "source": hashlib.sha256(source.encode()).hexdigest()[:16]}
