"""What a simulated step looks like: its events, where its time goes, and what its memory holds.

A step of thousands of microbatches changes memory millions of times. Its passes are few lists of changes that begin at
many times; they are put in order for a stretch of time, looked at, and let go.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from autopar.clock import worked
from autopar.ir.plan import Breakdown, Prediction
from autopar.ir.writing import write_whole
from autopar.simulate.engine import Change, Moment, Sent, Task, busy_ns
from autopar.tunables import PEAK_S
from autopar.views import view

Numbers = np.ndarray[Any, np.dtype[np.int64]]

STRETCH = 1 << 17  # changes that are put in order at once, about


class MemoryPiece(Protocol):
    """Changes whose times count from `begin_ns`; the same list may stand in several pieces."""

    @property
    def begin_ns(self) -> int: ...
    @property
    def changes(self) -> list[Change]: ...


class Columns(NamedTuple):
    """Changes: when, by how many bytes, of which kind (by number), at which moment."""

    times_ns: Numbers
    sizes: Numbers
    numbers: Numbers
    moments: Numbers


class Stretch(NamedTuple):
    """Changes in order: when, which kind (by number) by how much, and the memory after each; before: what each kind
    holds when it begins."""

    times_ns: Numbers
    totals: Numbers
    sizes: Numbers
    numbers: Numbers
    before: Numbers

    def held(self, changes: Numbers) -> Numbers:
        """Bytes of each kind after each of some changes, which ascend."""
        count = len(self.before)
        until = np.searchsorted(changes, np.arange(len(self.sizes))) * count
        added = np.bincount(until + self.numbers, self.sizes, (len(changes) + 1) * count)  # exact below 9 PB
        held: Numbers = self.before + np.cumsum(added.reshape(-1, count)[: len(changes)], axis=0).astype(np.int64)
        return held


class Samples(NamedTuple):
    """Memory at some moments of a step, exact: bytes by kind at each, kinds that are never there left out."""

    times_ns: list[int]
    by_kind: dict[str, list[int]]


class Memory:
    """The changes of some pieces: at equal times they go by their moments, at equal moments memory is given back before
    more is taken. kinds: by number."""

    def __init__(self, pieces: Sequence[MemoryPiece]) -> None:
        kinds: dict[str, int] = {}
        number_of: dict[int, int] = {}
        self._lists: list[Columns] = []
        numbers, begins = [], []
        for piece in pieces:
            if piece.changes:
                number = number_of.setdefault(id(piece.changes), len(self._lists))
                if number == len(self._lists):
                    self._lists.append(_columns(piece.changes, kinds))
                numbers.append(number)
                begins.append(piece.begin_ns)
        self.kinds = tuple(kinds) or ("nothing",)
        self._numbers, self._begins = np.array(numbers, np.int64), np.array(begins, np.int64)

    def stretches(self) -> Iterator[Stretch]:
        """All changes, and an empty one where there are none: nothing is held then."""
        before = np.zeros(len(self.kinds), np.int64)
        if not self._lists:
            nothing = np.zeros(1, np.int64)
            yield Stretch(nothing, nothing, nothing, nothing, before)
            return
        earliest = self._begins + np.array([columns.times_ns.min() for columns in self._lists])[self._numbers]
        order = np.argsort(earliest, kind="stable")
        counts = np.array([len(columns.times_ns) for columns in self._lists])[self._numbers[order]]
        of_piece = np.cumsum(counts) // STRETCH
        starts = [0, *(np.flatnonzero(np.diff(of_piece)) + 1).tolist(), len(order)]
        left: Columns | None = None
        for start, end in pairwise(starts):
            found = self._changes(order[start:end], left)
            left = None
            if end < len(order):
                is_over = found.times_ns >= earliest[order[end]]
                left, found = (Columns(*(column[part] for column in found)) for part in (is_over, ~is_over))
            if len(found.times_ns):
                stretch = _in_order(found, before)
                yield stretch
                before = before + np.bincount(stretch.numbers, stretch.sizes, len(before)).astype(np.int64)

    def _changes(self, pieces: Numbers, more: Columns | None) -> Columns:
        """Those of some pieces, by their places, in absolute time; and more."""
        found = [more] if more is not None else []
        of_each = self._numbers[pieces]
        for number in np.unique(of_each).tolist():
            own, begins = self._lists[number], self._begins[pieces[of_each == number]]
            times = np.add.outer(begins, own.times_ns).ravel()
            found.append(Columns(times, *(np.tile(column, len(begins)) for column in own[1:])))
        return Columns(*map(np.concatenate, zip(*found, strict=True)))

    @cached_property
    def fullest(self) -> tuple[int, dict[str, int]]:
        """The peak in bytes, and what is held by kind the first time that it is reached."""
        most, held = -math.inf, np.zeros(len(self.kinds), np.int64)
        for stretch in self.stretches():
            worked(PEAK_S * len(stretch.totals))
            place = np.argmax(stretch.totals, keepdims=True)
            if int(stretch.totals[place[0]]) > most:
                most, held = int(stretch.totals[place[0]]), stretch.held(place)[0]
        return int(held.sum()), {kind: size for kind, size in zip(self.kinds, held.tolist(), strict=True) if size}

    def samples(self, step_time_ns: int, most: int) -> Samples:
        """What is held, at the fullest moment in each of at most `most` equal intervals of the step."""
        found: dict[int, tuple[int, int, Numbers]] = {}  # by interval: bytes, when, by kind
        for stretch in self.stretches():
            interval = stretch.times_ns * most // max(1, step_time_ns + 1)
            fullest = _first_of_most(stretch.totals, interval)
            rows = zip(
                *(column[fullest].tolist() for column in (interval, stretch.totals, stretch.times_ns)), strict=True
            )
            for (number, total, time_ns), held in zip(rows, stretch.held(fullest), strict=True):
                if number not in found or total > found[number][0]:
                    found[number] = total, time_ns, held
        rows_of = [found[number] for number in sorted(found)]
        columns = np.array([held for _, _, held in rows_of]).T
        by_kind = {kind: own.tolist() for kind, own in sorted(zip(self.kinds, columns, strict=True)) if own.any()}
        return Samples([time_ns for _, time_ns, _ in rows_of], by_kind)


def _first_of_most(totals: Numbers, groups: Numbers) -> Numbers:
    """Where each group's largest total is, the first time; groups are one after another."""
    begins = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
    lengths = np.diff(begins, append=len(groups))
    largest = np.flatnonzero(totals == np.repeat(np.maximum.reduceat(totals, begins), lengths))
    return largest[np.diff(groups[largest], prepend=groups[0] - 1) > 0]


def _in_order(found: Columns, before: Numbers) -> Stretch:
    order = np.lexsort((found.sizes, found.times_ns * Moment.COUNT + found.moments))
    sizes = found.sizes[order]
    return Stretch(found.times_ns[order], int(before.sum()) + np.cumsum(sizes), sizes, found.numbers[order], before)


def _columns(changes: Sequence[Change], kinds: dict[str, int]) -> Columns:
    """Kinds get numbers as they come."""
    times, sizes, names, moments = zip(*changes, strict=True)
    for name in dict.fromkeys(names):
        kinds.setdefault(name, len(kinds))
    numbers = [kinds[name] for name in names]
    return Columns(*(np.array(column, np.int64) for column in (times, sizes, numbers, moments)))


# The step ----------------------------------------


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
    to each collective in a step, of the lane that sends most. host_bytes: what is kept on the host, of the lane that
    has most there.
    """

    lanes: tuple[Lane, ...]
    step_time_ns: int
    breakdown: Breakdown
    exposed: Mapping[str, int]
    comm_bytes: Mapping[str, int]
    host_bytes: int = 0

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
        """How long each compute stream was busy, and each level of links."""
        busy: dict[Stream, int] = defaultdict(int)
        known: dict[int, dict[str, int]] = {}
        for lane in self.lanes:
            times = Counter([id(piece.tasks) for piece in lane.played])
            for tasks in {id(piece.tasks): piece.tasks for piece in lane.played}.values():
                if id(tasks) not in known:
                    known[id(tasks)] = busy_ns(tasks)
                for stream, spent in known[id(tasks)].items():
                    busy[lane.ranks.start, stream] += spent * times[id(tasks)]
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
    """The plan's prediction; the bound is the busiest stream's or link level's work, which no overlap beats."""
    return Prediction(
        step_time_ns=timeline.step_time_ns,
        lower_bound_ns=min(timeline.step_time_ns, max(timeline.work_ns().values(), default=0)),
        peak_bytes=timeline.peak_bytes,
        comm_bytes=dict(timeline.comm_bytes),
        breakdown=timeline.breakdown,
        memory=dict(timeline.memory_at_peak),
        host_bytes=timeline.host_bytes or None,
    )
