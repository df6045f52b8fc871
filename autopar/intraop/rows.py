"""The memory rows of a network: one inequality for each time at which memory could run out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.intraop.network import Network
from autopar.intraop.problem import Int64Array

_MAX_COMPARED = 400
"""Rows compared pairwise for dominance; beyond, the quadratic cost is not worth it."""


@dataclass(frozen=True, eq=False)
class Row:
    """Σ_v usages[v][value of v] ≤ slack, at one time; variables that use nothing are left out."""

    time: int
    slack: int
    usages: dict[int, Int64Array]


class UsageSweep:
    """The usage of every variable's values, as one flat vector, at chosen times."""

    def __init__(self, network: Network) -> None:
        self.network = network
        sizes = [costs.size for costs in network.unary]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.starting: defaultdict[int, list[int]] = defaultdict(list)
        self.ending: defaultdict[int, list[int]] = defaultdict(list)
        for index, use in enumerate(network.uses):
            self.starting[use.lo].append(index)
            self.ending[use.hi].append(index)

    def tight_times(self) -> list[int]:
        """Returns times whose rows imply the rows of all others.

        Between two events the same uses are live, so the time with least room stands for all. Across an
        event at which uses only start, the later ones include the earlier; likewise, reversed, for ends.
        """
        events = sorted(set(self.starting) | set(self.ending))
        times = [self._tightest(now, after) for now, after in pairwise(events)]
        rooms = [self.network.room_at(time) for time in times]
        only_starts = [event not in self.ending for event in events[1:-1]]
        only_ends = [event not in self.starting for event in events[1:-1]]
        implied = np.array(_implied(rooms, only_starts), dtype=bool) | np.array(
            _implied(rooms[::-1], only_ends[::-1])[::-1], dtype=bool
        )
        return [time for time, drop in zip(times, implied, strict=True) if not drop]

    def _tightest(self, lo: int, hi: int) -> int:
        """Returns the first time in [lo, hi) with the least room."""
        starts, room = self.network.room_starts, self.network.room
        first = int(np.searchsorted(starts, lo, side="right")) - 1
        last = int(np.searchsorted(starts, hi))
        return max(lo, int(starts[first + int(np.argmin(room[first:last]))]))

    def vectors(self, times: list[int]) -> Iterator[tuple[int, Int64Array]]:
        """Yields (time, usages) for ascending times; the vector is reused between steps."""
        current = np.zeros(self.offsets[-1], dtype=np.int64)
        wanted = set(times)
        for time in sorted(wanted | set(self.starting) | set(self.ending)):
            for index in self.ending.get(time, ()):
                self._add(current, index, -1)
            for index in self.starting.get(time, ()):
                self._add(current, index, 1)
            if time in wanted:
                yield time, current

    def _add(self, current: Int64Array, index: int, sign: int) -> None:
        use = self.network.uses[index]
        part = slice(self.offsets[use.variable], self.offsets[use.variable + 1])
        current[part] += sign * use.usages


def memory_rows(network: Network) -> list[Row]:
    """Returns the rows that some choice could violate, tightest first, none of them dominated when few."""
    sweep = UsageSweep(network)
    distinct: dict[bytes, tuple[int, int]] = {}
    for time, usages in sweep.vectors(sweep.tight_times()):
        residual, slack, most = _residual(sweep.offsets, usages, network.room_at(time))
        if most > slack:
            key = residual.tobytes()
            if key not in distinct or slack < distinct[key][1]:
                distinct[key] = (time, slack)
    vectors = [(np.frombuffer(key, dtype=np.int64), time, slack) for key, (time, slack) in distinct.items()]
    vectors.sort(key=lambda row: (-float(row[0].sum()) / max(row[2], 1), row[1]))
    if len(vectors) <= _MAX_COMPARED:
        vectors = _undominated(vectors)
    return [_row(sweep.offsets, *vector) for vector in vectors]


def _implied(rooms: list[int], grows: list[bool]) -> list[bool]:
    """Marks each segment whose uses a later one includes with no more room; `grows[k]`: k + 1 includes k."""
    implied = [False] * len(rooms)
    least = None
    for k in range(len(rooms) - 2, -1, -1):
        least = (rooms[k + 1] if least is None else min(least, rooms[k + 1])) if grows[k] else None
        implied[k] = least is not None and least <= rooms[k]
    return implied


def row_at(sweep: UsageSweep, time: int) -> Row:
    """Returns the row of one time."""
    _, usages = next(sweep.vectors([time]))
    residual, slack, _ = _residual(sweep.offsets, usages, sweep.network.room_at(time))
    return _row(sweep.offsets, residual, time, slack)


def _residual(offsets: Int64Array, usages: Int64Array, room: int) -> tuple[Int64Array, int, int]:
    """Moves what every value of a variable uses into the slack; also returns the most that can be used."""
    least = np.minimum.reduceat(usages, offsets[:-1])
    residual = usages - np.repeat(least, np.diff(offsets))
    most = int(np.maximum.reduceat(residual, offsets[:-1]).sum())
    return residual, room - int(least.sum()), most


def _undominated(vectors: list[tuple[Int64Array, int, int]]) -> list[tuple[Int64Array, int, int]]:
    """Drops a row when another has no more slack and no smaller usage."""
    kept: list[tuple[Int64Array, int, int]] = []
    for usages, time, slack in vectors:
        if not any(other_slack <= slack and (other >= usages).all() for other, _, other_slack in kept):
            kept.append((usages, time, slack))
    return kept


def _row(offsets: Int64Array, residual: Int64Array, time: int, slack: int) -> Row:
    parts = enumerate(np.split(residual, offsets[1:-1]))
    return Row(time, slack, {variable: part for variable, part in parts if part.any()})
