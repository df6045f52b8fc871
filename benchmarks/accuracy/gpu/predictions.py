"""Predicted step times and memory of measured rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost import Profile
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.profiler import load_profile
from autopar.simulate import simulate
from benchmarks.accuracy.gpu.plans import graphs, plan_of, profile_name, reason_against
from benchmarks.accuracy.gpu.rows import Row
from benchmarks.accuracy.gpu.softwares import Software, software_of


@dataclass(frozen=True)
class Planned:
    """A row with its plan and the graph that it is on; or why it has none."""

    row: Row
    graph: Graph | None = None
    plan: Plan | None = None
    reason: str = ""


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a row; or why nothing is. reserved_bytes: what the device has given at the peak."""

    row: Row
    seconds: float = 0.0
    reserved_bytes: float = 0.0
    fits: bool = True
    reason: str = ""


def planned(rows: Sequence[Row], softwares: tuple[Software, ...]) -> Iterator[Planned]:
    """Each row, in an order in which those of a model are together."""
    reasons = [reason_against(row, softwares) for row in rows]
    yield from (Planned(row, reason=reason) for row, reason in zip(rows, reasons, strict=True) if reason)
    wanted, done = [row for row, reason in zip(rows, reasons, strict=True) if not reason], 0
    for graph, members in graphs(wanted, softwares):
        for row in members:
            done += 1
            progress(f"{done} of {len(wanted)} rows")
            try:
                part, plan = plan_of(graph, row)
                yield Planned(row, part, replace(plan, simulator=None))
            except AutoparError as error:
                yield Planned(row, reason=f"template_plan: {error}")


def predict(item: Planned, softwares: tuple[Software, ...]) -> Predicted:
    """The simulator's word on a planned row."""
    row = item.row
    if item.graph is None or item.plan is None:
        return Predicted(row, reason=item.reason)
    software = software_of(row.framework, softwares)
    profile = used_profile(profile_name(row.gpu), software)
    timeline = simulate(item.graph, item.plan, profile, sums_early=software.sums_early)
    return Predicted(
        row, timeline.step_time_ns / 1e9, timeline.peak_bytes, timeline.peak_bytes <= profile.facts.capacity_bytes
    )


_profiles: dict[tuple[str, int], tuple[Software, Profile]] = {}


def used_profile(name: str, software: Software) -> Profile:
    """One for equal software, since costs are remembered by profile."""
    known = _profiles.get((name, id(software)))
    if known is None:
        known = _profiles[name, id(software)] = software, software.on(load_profile(name))
    return known[1]


def progress(text: str) -> None:
    """On a terminal, in place."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
