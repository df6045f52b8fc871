"""What a simulated step looks like: its events, where its time goes, and what its memory holds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from autopar.ir.plan import Breakdown, Prediction
from autopar.ir.writing import write_whole
from autopar.simulate.engine import Change, Sent, Task
from autopar.simulate.memory import Memory, Samples
from autopar.views import view

Stream = tuple[int, str]  # rank, name
Changes = list[Change]

BETWEEN = -1  # in the place of a mesh axis: from one submesh to another


class Event(NamedTuple):
    """A task as it ran: half-open interval of nanoseconds on a stream of a rank."""

    stream: Stream
    name: str
    start_ns: int
    end_ns: int
    kind: str


class TimelinePiece(NamedTuple):
    """Tasks and changes of memory whose times count from `begin_ns`; the same lists may stand for several pieces.

    rename: of a task that was played for an equal piece of the model, the name that it has here.
    """

    begin_ns: int
    label: str
    tasks: list[Task]
    changes: Changes
    rename: Callable[[str], str] | None = None


@dataclass(frozen=True, eq=False)
class Lane:
    """What one rank did; the other ranks of its submesh do the same.

    played: pieces with the names that they were played with. along: by mesh axis (its position in the logical mesh, or
    `BETWEEN`) and kind, as of tasks: what it sent.
    """

    ranks: range
    played: tuple[TimelinePiece, ...]
    breakdown: Breakdown
    exposed: Mapping[str, int]
    comm_bytes: Mapping[str, int]
    bytes_between: Mapping[str, int]  # the part of them that is for other submeshes
    along: Mapping[tuple[int, str], Sent]

    @cached_property
    def pieces(self) -> tuple[TimelinePiece, ...]:
        """What was played, with its own names."""
        known: dict[tuple[int, int], list[Task]] = {}
        found = []
        for piece in self.played:
            key, rename = (id(piece.tasks), id(piece.rename)), piece.rename
            if rename is not None and key not in known:
                known[key] = [(task[0], rename(task[1]), *task[2:]) for task in piece.tasks]
            found.append(piece._replace(tasks=known.get(key, piece.tasks)))
        return tuple(found)

    @cached_property
    def _memory(self) -> Memory:
        return Memory(self.played)

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """(ns, bytes) after each change."""
        return tuple(
            pair
            for part in self._memory.stretches()
            for pair in zip(part.times_ns.tolist(), part.totals.tolist(), strict=True)
        )

    @property
    def memory_changes(self) -> Iterator[tuple[int, int, str, int]]:
        """After each change: ns, bytes in all, the kind that changed, and its bytes."""
        held = [0] * len(self._memory.kinds)
        for part in self._memory.stretches():
            columns = (part.times_ns.tolist(), part.totals.tolist(), part.numbers.tolist(), part.sizes.tolist())
            for time_ns, total, number, size in zip(*columns, strict=True):
                held[number] += size
                yield time_ns, total, self._memory.kinds[number], held[number]

    @property
    def peak_bytes(self) -> int:
        return self._memory.fullest[0]

    @property
    def memory_at_peak(self) -> dict[str, int]:
        """Bytes by kind, the first time that the peak is reached."""
        return dict(sorted(self._memory.fullest[1].items()))

    def memory_samples(self, step_time_ns: int, most: int) -> Samples:
        """What memory holds, at its fullest moment in each of at most `most` equal intervals of the step."""
        return self._memory.samples(step_time_ns, most)


@dataclass(frozen=True, eq=False)
class Timeline:
    """One training step (or inference batch): a lane for each submesh of equal ranks.

    breakdown, exposed: of the lane that ends last. `exposed` says by kind of communication how long compute stood
    still for it. peak_bytes, memory, memory_at_peak: of the lane with the highest peak. comm_bytes: what a rank hands
    to each collective in a step, of the lane that sends most.
    """

    lanes: tuple[Lane, ...]
    step_time_ns: int
    breakdown: Breakdown
    exposed: Mapping[str, int]
    comm_bytes: Mapping[str, int]

    @cached_property
    def _fullest(self) -> Lane:
        return max(self.lanes, key=lambda lane: lane.peak_bytes)

    @property
    def memory(self) -> tuple[tuple[int, int], ...]:
        return self._fullest.memory

    @property
    def peak_bytes(self) -> int:
        return self._fullest.peak_bytes

    @property
    def memory_at_peak(self) -> Mapping[str, int]:
        return self._fullest.memory_at_peak

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every task of every lane."""
        return tuple(
            Event(
                (lane.ranks.start, stream), f"{name}{piece.label}", piece.begin_ns + start, piece.begin_ns + end, kind
            )
            for lane in self.lanes
            for piece in lane.pieces
            for stream, name, start, end, kind in piece.tasks
        )

    def work_ns(self) -> dict[Stream, int]:
        """How long each stream was busy."""
        busy: dict[Stream, int] = defaultdict(int)
        known: dict[int, dict[str, int]] = {}
        for lane in self.lanes:
            for piece in lane.played:
                if id(piece.tasks) not in known:
                    known[id(piece.tasks)] = _work(piece.tasks)
                for stream, spent in known[id(piece.tasks)].items():
                    busy[lane.ranks.start, stream] += spent
        return dict(busy)

    def picture(self) -> dict[str, Any]:
        """The timeline as plain data that a page draws, equal passes written once (`show.picture`)."""
        data: dict[str, Any] = view("picture")(self)
        return data

    def to_chrome(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format, which Perfetto and chrome://tracing open (`show.perfetto`)."""
        data: dict[str, Any] = view("perfetto")(self)
        return data

    def save(self, path: str | Path) -> None:
        """Writes the timeline for Perfetto, whole or not at all."""
        write_whole(Path(path), json.dumps(self.to_chrome()))


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


def _work(tasks: list[Task]) -> dict[str, int]:
    busy: dict[str, int] = defaultdict(int)
    for stream, _, start, end, _ in tasks:
        busy[stream] += end - start
    return busy
