"""Streams, tasks and memory over time: the event-driven core, which knows nothing of plans.

A task runs on the stream of a device when the tasks that it depends on have ended and the stream's earlier
tasks have. Tasks are submitted after those they depend on, so each is placed once, in order of submission:
streams are first-in, first-out, as on the device. While a collective is in flight on a device, its compute
progresses `overlap_slowdown` times slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

Stream = tuple[int, str]  # device, name
COMPUTE = "compute"


class Event(NamedTuple):
    """A task as it ran: half-open interval of nanoseconds on a stream."""

    stream: Stream
    name: str
    start_ns: int
    end_ns: int
    kind: str


class Moment(IntEnum):
    """What happens to memory at one time, in this order.

    A task ends; what several tasks have made is summed; hooks collect gradients; journeys end, which leaves shards;
    new ones and gathers start; the next task starts.
    """

    END = 0
    SUM = 1
    SUMMED = 2
    COLLECT = 3
    COLLECTED = 4
    ARRIVE = 5
    ARRIVED = 6
    SEND = 7
    START = 8


_BEGIN = Event((0, COMPUTE), "", 0, 0, "")


class Engine:
    """Places tasks on streams and records what they allocate and free."""

    def __init__(self, overlap_slowdown: float = 1.0) -> None:
        self.events: list[Event] = []
        self.waited: dict[str, int] = defaultdict(int)  # kind of task waited for -> compute's idle time
        self._slowdown = overlap_slowdown
        self._free: dict[Stream, int] = defaultdict(int)
        self._in_flight: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._allocations: list[tuple[int, Moment, int, str]] = []

    def submit(self, stream: Stream, name: str, kind: str, duration_ns: int, after: Iterable[int] = ()) -> int:
        """Places a task; returns its number, to be given in `after` of those that depend on it."""
        events = self.events
        free = self._free[stream]
        start, cause = free, -1
        for number in after:
            if events[number].end_ns > start:
                start, cause = events[number].end_ns, number
        end = start + duration_ns
        if stream[1] != COMPUTE:
            self._in_flight[stream[0]].append((start, end))
        else:
            if cause >= 0:
                self.waited[events[cause].kind] += start - free
            if self._slowdown > 1.0:
                end = self._slowed_end(stream[0], start, duration_ns)
        self._free[stream] = end
        events.append(Event(stream, name, start, end, kind))
        return len(events) - 1

    def _slowed_end(self, device: int, start: int, duration_ns: int) -> int:
        """When compute ends that makes 1/slowdown of its progress while any collective is in flight."""
        left, now = float(duration_ns), start
        pending = [span for span in self._in_flight[device] if span[1] > start]
        self._in_flight[device] = pending  # compute starts in order: what ended before is of no more use
        for begin, end in sorted(pending):
            begin, end = max(begin, now), max(end, now)
            if left <= begin - now:
                break
            left -= begin - now
            now = begin
            if left * self._slowdown <= end - now:
                return round(now + left * self._slowdown)
            left -= (end - now) / self._slowdown
            now = end
        return round(now + left)

    def allocate(self, task: int, num_bytes: int, kind: str, moment: Moment = Moment.START) -> None:
        """Memory taken when a task starts, or at a moment of its end; task −1 is the begin."""
        if num_bytes:
            event = self.events[task] if task >= 0 else _BEGIN
            time = event.start_ns if moment is Moment.START else event.end_ns
            self._allocations.append((time, moment, num_bytes, kind))

    def later(self, first: int, second: int) -> int:
        """The task that ends later; −1 is the begin."""
        return max(first, second, key=lambda task: self.events[task].end_ns if task >= 0 else 0)

    def release(self, task: int, num_bytes: int, kind: str, moment: Moment = Moment.END) -> None:
        """Memory given back at a moment of a task's end."""
        if num_bytes:
            event = self.events[task] if task >= 0 else _BEGIN
            self._allocations.append((event.end_ns, moment, -num_bytes, kind))

    @property
    def makespan_ns(self) -> int:
        return max(self._free.values(), default=0)

    def memory(self) -> tuple[list[tuple[int, int]], int, dict[str, int]]:
        """(time, bytes) after each change; the peak; and what the peak consists of, by kind."""
        if not self._allocations:
            return [(0, 0)], 0, {}
        times, moments, deltas = (
            np.array([row[column] for row in self._allocations], dtype=np.int64) for column in range(3)
        )
        order = np.lexsort((deltas, moments, times))
        totals = np.cumsum(deltas[order])
        highest = int(np.argmax(totals))
        by_kind: dict[str, int] = defaultdict(int)
        for position in order[: highest + 1].tolist():
            by_kind[self._allocations[position][3]] += self._allocations[position][2]
        series = list(zip(times[order].tolist(), totals.tolist(), strict=True))
        return series, int(totals[highest]), {kind: size for kind, size in sorted(by_kind.items()) if size}
