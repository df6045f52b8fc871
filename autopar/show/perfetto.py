"""A timeline in the Trace Event Format ("Chrome JSON"), which Perfetto and chrome://tracing open.

A process for each lane (ranks with equal work), a thread for each of its streams, memory as counters: in all, and by
kind. Perfetto drops a slice that overlaps another of its thread, and cuts off what is less than a nanosecond of the
format's microseconds: times are written so that it reads each to the nanosecond. Process and thread 0 are the idle task
of Linux there, so numbers begin at 1, and no two threads share one.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from autopar.simulate.engine import COMPUTE
from autopar.simulate.timeline import Lane, Timeline

Event = dict[str, Any]


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace: metadata first, then everything in the order of time."""
    streams = [_streams(lane) for lane in timeline.lanes]
    width = max(map(len, streams), default=1)
    numbers = [1 + position * width for position in range(len(streams))]  # of processes, and of their first threads
    lanes = list(zip(timeline.lanes, streams, numbers, strict=True))
    names = [event for order, lane in enumerate(lanes) for event in _names(order, *lane)]
    events = [event for lane in lanes for event in (*_spans(*lane), *_samples(lane[0], lane[2]))]
    return {"traceEvents": names + sorted(events, key=lambda event: event["ts"]), "displayTimeUnit": "ns"}


def _streams(lane: Lane) -> list[str]:
    """Compute first."""
    found = {task[0] for piece in lane.pieces for task in piece.tasks}
    return sorted(found, key=lambda name: (name != COMPUTE, name))


def _names(order: int, lane: Lane, streams: list[str], number: int) -> Iterator[Event]:
    first, last = lane.ranks.start, lane.ranks.stop - 1
    text = f"rank {first}" if first == last else f"ranks {first} to {last}"
    yield _metadata("process_name", number, number, {"name": text})
    yield _metadata("process_sort_index", number, number, {"sort_index": order})
    for thread, stream in enumerate(streams, number):
        yield _metadata("thread_name", number, thread, {"name": stream})
        yield _metadata("thread_sort_index", number, thread, {"sort_index": thread})


def _metadata(name: str, process: int, thread: int, arguments: Event) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _spans(lane: Lane, streams: list[str], number: int) -> Iterator[Event]:
    threads = {stream: thread for thread, stream in enumerate(streams, number)}
    for piece in lane.pieces:
        for stream, name, start, end, kind in piece.tasks:
            if end > start:
                yield {
                    "ph": "X",
                    "name": f"{name or 'launch'}{piece.label}",
                    "cat": kind,
                    "pid": number,
                    "tid": threads[stream],
                    "ts": microseconds(piece.begin_ns + start),
                    "dur": microseconds(end - start),
                }


def _samples(lane: Lane, number: int) -> Iterator[Event]:
    """After each change: all memory, and that of its kind."""
    for time_ns, total, kind, size in lane.memory_changes:
        for name, value in (("memory", total), (f"memory of {kind}", size)):
            sample = {"pid": number, "tid": number, "ts": microseconds(time_ns), "args": {"bytes": value}}
            yield {"ph": "C", "name": name, **sample}


def microseconds(time_ns: int) -> float:
    """The time in microseconds, as the next float of which a thousandfold is not below it: what Perfetto cuts off."""
    value = time_ns / 1000
    return value if value * 1000 >= time_ns else math.nextafter(value, math.inf)
