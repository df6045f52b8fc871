"""What memory holds through a step, one stretch of time after another.

A step of thousands of microbatches changes memory millions of times. Its passes are few lists of changes that begin at
many times; they are put in order for a stretch of time, looked at, and let go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from autopar.simulate.engine import Change, Moment

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
            place = np.argmax(stretch.totals, keepdims=True)
            if int(stretch.totals[place[0]]) > most:
                most, held = int(stretch.totals[place[0]]), stretch.held(place)[0]
        return int(held.sum()), {kind: size for kind, size in zip(self.kinds, held.tolist(), strict=True) if size}

    def samples(self, step_time_ns: int, most: int) -> Samples:
        """What is held, at the fullest moment in each of at most `most` equal intervals of the step."""
        found: dict[int, tuple[int, int, Numbers]] = {}  # by interval: bytes, when, by kind
        for stretch in self.stretches():
            interval = stretch.times_ns * most // max(1, step_time_ns + 1)
            fullest = _last_of_most(stretch.totals, interval)
            rows = zip(
                *(column[fullest].tolist() for column in (interval, stretch.totals, stretch.times_ns)), strict=True
            )
            for (number, total, time_ns), held in zip(rows, stretch.held(fullest), strict=True):
                if number not in found or total >= found[number][0]:
                    found[number] = total, time_ns, held
        rows_of = [found[number] for number in sorted(found)]
        columns = np.array([held for _, _, held in rows_of]).T
        by_kind = {kind: own.tolist() for kind, own in sorted(zip(self.kinds, columns, strict=True)) if own.any()}
        return Samples([time_ns for _, time_ns, _ in rows_of], by_kind)


def _last_of_most(totals: Numbers, groups: Numbers) -> Numbers:
    """Where each group's largest total is, the last time; groups are one after another."""
    begins = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
    lengths = np.diff(begins, append=len(groups))
    largest = np.flatnonzero(totals == np.repeat(np.maximum.reduceat(totals, begins), lengths))
    return largest[np.diff(groups[largest], append=groups[-1] + 1) > 0]


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
