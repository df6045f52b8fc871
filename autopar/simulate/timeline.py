"""What a simulated step looks like: its events, where its time goes, and what its memory holds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.ir.plan import Breakdown, Prediction
from autopar.simulate.engine import COMPUTE, Event, Stream


@dataclass(frozen=True)
class Timeline:
    """One training step (or inference batch) of each simulated rank.

    `exposed` says by kind of communication how long compute stood still for it; `memory` is the number of
    bytes after each change; `comm_bytes` is what a rank hands to each collective in a step.
    """

    events: tuple[Event, ...]
    step_time_ns: int
    breakdown: Breakdown
    exposed: Mapping[str, int]
    memory: tuple[tuple[int, int], ...]
    peak_bytes: int
    memory_at_peak: Mapping[str, int]
    comm_bytes: Mapping[str, int]

    def work_ns(self) -> dict[Stream, int]:
        """How long each stream was busy."""
        busy: dict[Stream, int] = defaultdict(int)
        for event in self.events:
            busy[event.stream] += event.end_ns - event.start_ns
        return dict(busy)

    def to_chrome(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format (microseconds), which Perfetto and chrome://tracing open."""
        streams = sorted({event.stream for event in self.events}, key=lambda s: (s[0], s[1] != COMPUTE, s[1]))
        lanes = {stream: lane for lane, stream in enumerate(streams)}
        names = [_lane_name(stream, lane) for stream, lane in lanes.items()]
        spans = [_span(event, lanes[event.stream]) for event in self.events if event.end_ns > event.start_ns]
        return {"traceEvents": [*names, *spans, *map(_memory_sample, self.memory)], "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Writes the timeline for Perfetto."""
        Path(path).write_text(json.dumps(self.to_chrome()))


def predict(timeline: Timeline) -> Prediction:
    """The plan's prediction; the bound is the busiest stream's work, which no overlap can beat."""
    return Prediction(
        step_time_ns=timeline.step_time_ns,
        lower_bound_ns=max(timeline.work_ns().values(), default=0),
        peak_bytes=timeline.peak_bytes,
        comm_bytes=dict(timeline.comm_bytes),
        breakdown=timeline.breakdown,
        memory=dict(timeline.memory_at_peak),
    )


def _lane_name(stream: Stream, lane: int) -> dict[str, Any]:
    device, name = stream
    return {"ph": "M", "name": "thread_name", "pid": device, "tid": lane, "args": {"name": name}}


def _span(event: Event, lane: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "pid": event.stream[0],
        "tid": lane,
        "ts": event.start_ns / 1000,
        "dur": (event.end_ns - event.start_ns) / 1000,
    }


def _memory_sample(sample: tuple[int, int]) -> dict[str, Any]:
    time, size = sample
    return {"ph": "C", "name": "memory", "pid": 0, "ts": time / 1000, "args": {"bytes": size}}
