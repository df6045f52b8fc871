"""What a simulated step looks like: its events, where its time goes, and what its memory holds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.plan import Breakdown, Prediction
from autopar.ir.serialization import write_whole
from autopar.simulate.engine import Change, Moment, Sent, Task
from autopar.simulate.perfetto import trace
from autopar.simulate.picture import picture

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


class Piece(NamedTuple):
    """Tasks and changes of memory whose times count from `begin_ns`; the same lists may stand for several pieces."""

    begin_ns: int
    label: str
    tasks: list[Task]
    changes: Changes


Numbers = np.ndarray[Any, np.dtype[np.int64]]


class _Memory(NamedTuple):
    """Changes in order: when, which kind (by number) by how much, and the memory after each; kinds by number."""

    times_ns: Numbers
    totals: Numbers
    sizes: Numbers
    numbers: Numbers
    kinds: tuple[str, ...]

    def after(self, changes: Numbers) -> dict[str, Numbers]:
        """By kind: the bytes after each of some changes, which ascend."""
        until = np.searchsorted(changes, np.arange(len(self.sizes))) * len(self.kinds)
        added = np.bincount(until + self.numbers, self.sizes, (len(changes) + 1) * len(self.kinds))  # exact below 9 PB
        held = np.cumsum(added.reshape(-1, len(self.kinds))[: len(changes)], axis=0).astype(np.int64)
        return {kind: held[:, number] for number, kind in sorted(enumerate(self.kinds), key=lambda item: item[1])}


class MemorySamples(NamedTuple):
    """Memory at some moments of a step, exact: bytes by kind at each, kinds that are never there left out."""

    times_ns: list[int]
    by_kind: dict[str, list[int]]


@dataclass(frozen=True, eq=False)
class Lane:
    """What one rank did; the other ranks of its submesh do the same.

    along: by mesh axis (its position in the logical mesh, or `BETWEEN`) and kind, as of tasks: what it sent.
    """

    ranks: range
    pieces: tuple[Piece, ...]
    breakdown: Breakdown
    exposed: Mapping[str, int]
    comm_bytes: Mapping[str, int]
    bytes_between: Mapping[str, int]  # the part of them that is for other submeshes
    along: Mapping[tuple[int, str], Sent]

    @cached_property
    def _memory(self) -> _Memory:
        return _played_memory(self.pieces)

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """(ns, bytes) after each change."""
        return tuple(zip(self._memory.times_ns.tolist(), self._memory.totals.tolist(), strict=True))

    @property
    def memory_changes(self) -> Iterator[tuple[int, int, str, int]]:
        """After each change: ns, bytes in all, the kind that changed, and its bytes."""
        memory, held = self._memory, np.zeros(len(self._memory.times_ns), np.int64)
        for number in range(len(memory.kinds)):
            own = memory.numbers == number
            held[own] = np.cumsum(memory.sizes[own])
        names = [memory.kinds[number] for number in memory.numbers]
        yield from zip(memory.times_ns.tolist(), memory.totals.tolist(), names, held.tolist(), strict=True)

    @cached_property
    def peak_bytes(self) -> int:
        return int(self._memory.totals.max())

    @cached_property
    def memory_at_peak(self) -> dict[str, int]:
        """Bytes by kind, the first time that the peak is reached."""
        found = self._memory.after(np.argmax(self._memory.totals, keepdims=True))
        return {kind: int(sizes[0]) for kind, sizes in found.items() if sizes[0]}

    def memory_samples(self, step_time_ns: int, most: int) -> MemorySamples:
        """What memory holds, at its fullest moment in each of at most `most` equal intervals of the step."""
        memory = self._memory
        interval = memory.times_ns * most // max(1, step_time_ns + 1)
        order = np.lexsort((memory.totals, interval))  # the last of each interval is its fullest
        fullest = np.sort(order[np.diff(interval[order], append=most) > 0])
        by_kind = {kind: sizes.tolist() for kind, sizes in memory.after(fullest).items() if sizes.any()}
        return MemorySamples(memory.times_ns[fullest].tolist(), by_kind)


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
            for piece in lane.pieces:
                if id(piece.tasks) not in known:
                    known[id(piece.tasks)] = _work(piece.tasks)
                for stream, spent in known[id(piece.tasks)].items():
                    busy[lane.ranks.start, stream] += spent
        return dict(busy)

    def picture(self) -> dict[str, Any]:
        """The timeline as plain data that a page draws, equal passes written once."""
        return picture(self)

    def to_chrome(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format, which Perfetto and chrome://tracing open (`simulate.perfetto`)."""
        return trace(self)

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


def _played_memory(pieces: tuple[Piece, ...]) -> _Memory:
    """At equal times changes go by their moments; at equal moments memory is given back before more is taken."""
    kinds: dict[str, int] = {}
    begins: dict[int, list[int]] = defaultdict(list)
    lists: dict[int, Changes] = {}
    for piece in pieces:
        if piece.changes:
            lists[id(piece.changes)] = piece.changes
            begins[id(piece.changes)].append(piece.begin_ns)
    if not lists:
        nothing = np.zeros(1, np.int64)
        return _Memory(nothing, nothing, nothing, nothing, ("nothing",))
    found = [(np.array(begins[key], np.int64), _columns(changes, kinds)) for key, changes in lists.items()]
    times = np.concatenate([np.add.outer(begin, columns[0]).ravel() for begin, columns in found])
    sizes, numbers, moments = (
        np.concatenate([np.tile(columns[which], len(begin)) for begin, columns in found]) for which in (1, 2, 3)
    )
    order = np.lexsort((sizes, times * Moment.COUNT + moments))
    totals = np.cumsum(sizes[order])
    return _Memory(times[order], totals, sizes[order], numbers[order], tuple(kinds))


def _columns(changes: Changes, kinds: dict[str, int]) -> tuple[Any, ...]:
    """Times, sizes, kinds by number and moments."""
    times, sizes, names, moments = zip(*changes, strict=True)
    for name in dict.fromkeys(names):
        kinds.setdefault(name, len(kinds))
    numbers = [kinds[name] for name in names]
    return tuple(np.array(column, np.int64) for column in (times, sizes, numbers, moments))
