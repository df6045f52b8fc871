"""A profile learns from a traced run what calls, collectives, updates and the host took, in a copy (`cost.seen`).

Bounded to what was seen: curves, tables and facts stay. What an operator took is the median over the statements that
are equal calls (those of equal blocks), of what each takes in a step. What the host takes around them is shared out to
all calls, since models with more of them have more of it. What waits for other ranks, and what is sent
beside compute, teaches as much as is known of it: it took no less than the last rank waited for it, and no more than
passed since that rank started it. What it is priced at counts as far as that lets.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.cost.collectives import collective_time_ns
from autopar.cost.compute import priced_call_ns, priced_gradient_ns
from autopar.cost.profile import Profile, Provenance
from autopar.cost.seen import (
    SeenCall,
    SeenCollective,
    SeenGradients,
    SeenHost,
    SeenRuns,
    SeenUpdate,
    call_from_json,
    merged,
)
from autopar.errors import TraceFileError
from autopar.ir.placement import Axis
from autopar.ir.schedule import BACKWARD, FORWARD
from autopar.observed.expected import from_json
from autopar.observed.kineto import RankTrace, SentJourney, StatementPass
from autopar.observed.measured import Measured, measured
from autopar.observed.simulated import Simulated
from autopar.ops.work import WorkKey

MOST_LESSONS = 12  # that are told of


class Lesson(NamedTuple):
    """What was learned of equal calls of an operator: forward and backward, priced (before) and seen. names: of the
    statements that were seen."""

    op: str
    names: tuple[str, ...]
    priced_ns: tuple[int, int]
    seen_ns: tuple[int | None, int | None]

    @property
    def gain_ns(self) -> int:
        """How far off all of them were in a step together."""
        pairs = zip(self.priced_ns, self.seen_ns, strict=True)
        return len(self.names) * sum(abs(seen - priced) for priced, seen in pairs if seen is not None)

    def __str__(self) -> str:
        names = self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} like it"
        sides = zip(("forward", "backward"), self.priced_ns, self.seen_ns, strict=True)
        told = [f"{side} {priced / 1e3:.4g} → {seen / 1e3:.4g} µs" for side, priced, seen in sides if seen is not None]
        return f"{self.op} ({names}): {', '.join(told)}"


class Learned(NamedTuple):
    """The profile with what was seen, and what that is of each operator, the largest differences first."""

    profile: Profile
    lessons: tuple[Lesson, ...]


def learned(profile: Profile, traces: Sequence[RankTrace], date: str) -> Learned:
    """The profile with what the ranks of one run show. Raises TraceFileError for a run on devices of another kind."""
    told = traces[0].expected
    _check_device(profile, traces[0])
    source = f"{told['model']} on {told['mesh']} as it ran, {len(traces[0].steps)} steps, torch {traces[0].torch}"
    provenance = Provenance("measured", source, date)
    shared = profile.shared_by(told["devices_per_node"])
    found, lessons = SeenRuns(), list[Lesson]()
    for stage, lane, seen in _lanes(traces):
        calls, more = _calls(stage, seen, shared, provenance)
        updates, hosts = _updates(lane, seen, shared, provenance), _hosts(lane, seen, shared, provenance)
        sent = _collectives(stage, seen, shared, provenance, told["devices_per_node"])
        found = merged(found, SeenRuns(calls, sent, updates, hosts, _gradients(seen, shared, provenance)))
        lessons += [*more, *(_of_host(lane, one.call_ns, shared) for one in hosts)]
    made = replace(profile, seen=merged(profile.seen, found), _shared={})
    return Learned(made, tuple(sorted(lessons, key=lambda lesson: -lesson.gain_ns)))


def _check_device(profile: Profile, trace: RankTrace) -> None:
    names = [name.partition("-")[0].lower() for name in (profile.name, *profile.aliases)]
    is_cpu = trace.device == "cpu"
    if is_cpu != (profile.device_type == "cpu") or not (is_cpu or any(name in trace.device.lower() for name in names)):
        raise TraceFileError(
            f"expected a trace of {profile.title!r} ({profile.device_type}), found one of {trace.device!r}: what one "
            "kind of device takes says nothing of another; name the profile of that device with --into"
        )


def _lanes(traces: Sequence[RankTrace]) -> Iterator[tuple[Mapping[str, Any], Simulated, Measured]]:
    """Each lane that was traced, with its stage and what was measured."""
    told, ranks = traces[0].expected, {trace.rank for trace in traces}
    for data in told["simulated"]:
        lane = from_json(data)
        if ranks.isdisjoint(lane.ranks):
            continue
        for stage in told["stages"]:  # a rank may have several
            first, count = stage["ranks"]
            if lane.first_rank in range(first, first + count):
                yield stage, lane, measured(traces, lane.ranks)


# Calls ----------------------------------------


def _calls(
    stage: Mapping[str, Any], seen: Measured, profile: Profile, provenance: Provenance
) -> tuple[tuple[SeenCall, ...], list[Lesson]]:
    """Equal calls of a stage are one."""
    names: dict[WorkKey, list[str]] = defaultdict(list)
    for name, data in stage["calls"].items():
        if StatementPass(name, FORWARD) in seen.work:
            names[call_from_json(data)].append(name)
    found, lessons = [], []
    for call, own in names.items():
        spent = _typical(own, FORWARD, seen), _typical(own, BACKWARD, seen) if any(call.differentiable) else None
        found.append(SeenCall(call, *spent, profile.ranks_sharing, seen.num_steps, provenance))
        lessons.append(Lesson(call.op, tuple(own), priced_call_ns(call, profile), spent))
    return tuple(found), lessons


def _typical(names: Sequence[str], direction: str, seen: Measured) -> int | None:
    """Of one call: what a statement takes in a step, by how often it runs; None where it was not seen to."""
    spent = [
        seen.work[StatementPass(name, direction)] / seen.calls[StatementPass(name, FORWARD)]
        for name in names
        if seen.work.get(StatementPass(name, direction), 0.0) > 0.0
    ]
    return max(1, round(statistics.median(spent))) if spent else None


# What is sent, and updates ----------------------------------------


def _collectives(
    stage: Mapping[str, Any], seen: Measured, profile: Profile, provenance: Provenance, devices_per_node: int
) -> tuple[SeenCollective, ...]:
    spent: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for key, total in seen.sent.items():
        if key.axis in stage["axes"] and total > 0 and key.num_bytes > 0:
            ranks, inside = stage["axes"][key.axis]
            spent[key.collective, ranks, inside, key.num_bytes].append(total / seen.sent_calls[key])
    for key, journey in seen.journeys.items():
        if key.axis in stage["axes"] and key.num_bytes > 0:
            ranks, inside = stage["axes"][key.axis]
            if (key.collective, ranks, inside, key.num_bytes) not in spent:
                axis = Axis(key.axis, ranks, 1 if inside == ranks else max(1, devices_per_node // inside))
                priced = collective_time_ns(key.collective, key.num_bytes, axis, devices_per_node, profile)
                spent[key.collective, ranks, inside, key.num_bytes].append(within(journey, priced))
    return tuple(
        SeenCollective(*key, max(1, round(statistics.median(own))), profile.ranks_sharing, seen.num_steps, provenance)
        for key, own in spent.items()
        if key[1] > 1
    )


def within(journey: SentJourney, priced_ns: int) -> int:
    """What is sent beside compute: what it is priced at, as far as what was seen of it lets."""
    return min(max(priced_ns, journey.waited_ns), journey.passed_ns)


def _updates(lane: Simulated, seen: Measured, profile: Profile, provenance: Provenance) -> tuple[SeenUpdate, ...]:
    """What an update is priced at without what was learned before; where that is not known, nothing is learned."""
    spent, priced = round(seen.optimizer_ns), lane.optimizer_ns
    if profile.seen.updates:
        priced = next((item.priced_ns for item in profile.seen.updates if abs(item.duration_ns - priced) <= 1), 0)
    if not spent or not priced:
        return ()
    return (SeenUpdate(priced, spent, profile.ranks_sharing, seen.num_steps, provenance),)


def _gradients(seen: Measured, profile: Profile, provenance: Provenance) -> tuple[SeenGradients, ...]:
    priced = sum(count * priced_gradient_ns(size, profile) for size, count in seen.gradients.items())
    spent = round(seen.gradients_ns)
    return (
        (SeenGradients(priced, spent, profile.ranks_sharing, seen.num_steps, provenance),) if priced and spent else ()
    )


# The host ----------------------------------------


def _hosts(lane: Simulated, seen: Measured, profile: Profile, provenance: Provenance) -> tuple[SeenHost, ...]:
    """What is left of a rank's time for each of its calls: without what was simulated of operators that the trace does
    not have, such as sums of gradients, and of what the runtime does beside them."""
    if not lane.num_calls:
        return ()
    ran = {key.name for key in seen.work} | {key.name for key in seen.sent}
    before = profile.seen.host_ns(profile.ranks_sharing)
    unseen = sum(max(0, spent - before) for (name, _), spent in lane.work.items() if name not in ran)
    left = max(0.0, seen.host_ns - unseen - seen.gradients_ns - max(0, lane.host_ns))
    return (SeenHost(round(left / lane.num_calls), profile.ranks_sharing, seen.num_steps, provenance),)


def _of_host(lane: Simulated, call_ns: int, profile: Profile) -> Lesson:
    before = profile.seen.host_ns(profile.ranks_sharing)
    return Lesson("host", (f"around each of {lane.num_calls} calls",), (before, 0), (call_ns, None))
