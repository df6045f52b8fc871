"""A timeline as plain data that a page can draw: every task to the nanosecond, equal passes written once.

Steps repeat their passes over microbatches: passes with equal tasks are one entry of `passes`, which `lanes` place in
time, so that the size follows the distinct work and the number of passes, not that of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from typing import Any

from autopar.simulate.engine import Task
from autopar.simulate.timeline import Lane, Timeline

MEMORY_SAMPLES = 800  # of each lane: about a pixel each


def picture(timeline: Timeline, most_samples: int = MEMORY_SAMPLES) -> dict[str, Any]:
    """The timeline as data; times in ns, sizes in bytes.

    sample_ns: of each such interval, memory is the fullest moment.
    streams, names, kinds, labels: texts, which the rest refers to by position.
    passes: of each, columns of tasks in order of start: stream, name, start (from the pass's begin; each but the first
    as what it adds to the one before), duration, kind.
    lanes: ranks (first, last), passes as columns (begin, likewise added; which of `passes`; label), memory at moments
    (`Lane.memory_samples`), peak_bytes, breakdown, exposed, and what it sent (axis, kind, count, bytes, ns).
    """
    streams, names, kinds, labels = _TextNumbers(), _TextNumbers(), _TextNumbers(), _TextNumbers()
    known: dict[int, int] = {}  # by identity, for most passes are the same object
    passes: dict[tuple[Task, ...], int] = {}
    lanes = []
    for lane in timeline.lanes:
        placed = []
        for piece in sorted((piece for piece in lane.pieces if piece.tasks), key=attrgetter("begin_ns")):
            if id(piece.tasks) not in known:
                known[id(piece.tasks)] = passes.setdefault(tuple(piece.tasks), len(passes))
            placed.append((piece.begin_ns, known[id(piece.tasks)], labels[piece.label.strip()]))
        lanes.append(_lane(lane, placed, timeline.step_time_ns, most_samples))
    return {
        "step_time_ns": timeline.step_time_ns,
        "sample_ns": -(-timeline.step_time_ns // most_samples),
        "passes": [_columns(tasks, streams, names, kinds) for tasks in passes],
        "lanes": lanes,
        "streams": [*streams],
        "names": [*names],
        "kinds": [*kinds],
        "labels": [*labels],
    }


class _TextNumbers(dict[str, int]):
    """Numbers for texts, in the order in which they are asked for."""

    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


def _columns(tasks: Iterable[Task], streams: _TextNumbers, names: _TextNumbers, kinds: _TextNumbers) -> list[list[int]]:
    rows = sorted((task for task in tasks if task[3] > task[2]), key=lambda task: task[2])
    return [
        [streams[row[0]] for row in rows],
        [names[row[1]] for row in rows],
        _added([row[2] for row in rows]),
        [row[3] - row[2] for row in rows],
        [kinds[row[4]] for row in rows],
    ]


def _added(numbers: list[int]) -> list[int]:
    """The first number, then what each adds to the one before: short texts."""
    return [number - before for before, number in zip(chain([0], numbers), numbers, strict=False)]


def _lane(lane: Lane, placed: list[tuple[int, int, int]], step_time_ns: int, most_samples: int) -> dict[str, Any]:
    memory = lane.memory_samples(step_time_ns, most_samples)
    return {
        "ranks": [lane.ranks.start, lane.ranks.stop - 1],
        "passes": [
            _added([begin for begin, _, _ in placed]),
            [number for _, number, _ in placed],
            [label for _, _, label in placed],
        ],
        "memory": {"times": _added(memory.times_ns), "kinds": memory.by_kind},
        "peak_bytes": lane.peak_bytes,
        "memory_at_peak": lane.memory_at_peak,
        "breakdown": asdict(lane.breakdown),
        "exposed": dict(lane.exposed),
        "sent": [[axis, kind, *sent] for (axis, kind), sent in sorted(lane.along.items())],
    }
