"""What choices of values use over time: where a choice does not fit, and the memory row of one time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.selection.network import Network
from autopar.selection.problem import INFINITE, Int64Array

_WINDOWS = 32
"""Violated times closer than 1/32 of the time line to a worse one are left for the next round."""
_GOLDEN_SECTION = 0.6180339887498949


def worst_positions(excess: Int64Array, most: int) -> list[int]:
    """Returns up to `most` positions whose excess is positive, worst first and well apart."""
    excess, width = excess.copy(), max(1, len(excess) // _WINDOWS)
    positions: list[int] = []
    while len(positions) < most and excess[worst := int(np.argmax(excess))] > 0:
        positions.append(worst)
        excess[max(0, worst - width) : worst + width] = 0
    return positions


@dataclass(frozen=True, eq=False)
class Row:
    """Σ_v usages[v][value of v] ≤ slack, at one time; variables that always use the same are left out."""

    time: int
    slack: int
    usages: dict[int, Int64Array]

    @property
    def implied(self) -> bool:
        """Whether every choice keeps it."""
        return sum(int(usage.max()) for usage in self.usages.values()) <= self.slack

    @property
    def num_usages(self) -> int:
        """Over all values of its variables."""
        return sum(len(usage) for usage in self.usages.values())


class Usage:
    """A network's uses as flat arrays, placed among the times at which its room changes."""

    def __init__(self, network: Network) -> None:
        self.network = network
        sizes = np.array([costs.size for costs in network.unary], dtype=np.int64)
        self.offsets: Int64Array = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._bounds = np.array([(use.lo, use.hi) for use in network.uses], dtype=np.int64).reshape(-1, 2)
        self._first, self._last = np.searchsorted(network.room_starts, self._bounds).T
        self._variables = np.array([use.variable for use in network.uses], dtype=np.int64)
        self._usages = np.concatenate([np.zeros(0, np.int64), *(use.usages for use in network.uses)])
        lengths = sizes[self._variables]
        self._starts = np.cumsum(lengths) - lengths
        self._entries = np.repeat(self.offsets[self._variables] - self._starts, lengths) + np.arange(lengths.sum())
        self._lengths = lengths

    def excess(self, values: Sequence[int], held: npt.NDArray[np.bool_] | None = None) -> Int64Array:
        """Returns usage less room from each of the network's `room_starts` on; positive does not fit.

        Only the variables that are `held` count, all of them without.
        """
        amounts = self._usages[self._starts + np.asarray(values, dtype=np.int64)[self._variables]]
        if held is not None:
            amounts = np.where(held[self._variables], amounts, 0)
        change = np.zeros(len(self.network.room_starts) + 1, dtype=np.int64)
        np.add.at(change, self._first, amounts)
        np.add.at(change, self._last, -amounts)
        return np.cumsum(change)[:-1] - self.network.room

    def violated_times(self, values: Sequence[int], most: int) -> list[int]:
        """Returns up to `most` times that do not fit, worst first and well apart."""
        return [int(self.network.room_starts[worst]) for worst in worst_positions(self.excess(values), most)]

    def priced(self, prices: npt.NDArray[np.float64]) -> Int64Array:
        """Returns what values' usages cost by a price from each of the network's `room_starts` on, flat."""
        until = np.concatenate([[0.0], np.cumsum(prices)])
        weights = np.repeat(until[self._last] - until[self._first], self._lengths)
        total = np.bincount(self._entries, self._usages * weights, minlength=self.offsets[-1])
        return np.minimum(total, INFINITE // 2).astype(np.int64)

    def usages_at(self, time: int) -> Int64Array:
        """Returns what each value of each variable uses at a time, flat: variable v's from offsets[v] on."""
        live = np.repeat((self._bounds[:, 0] <= time) & (time < self._bounds[:, 1]), self._lengths)
        usages = np.zeros(self.offsets[-1], dtype=np.int64)
        np.add.at(usages, self._entries[live], self._usages[live])
        return usages

    def total_usages(self) -> npt.NDArray[np.float64]:
        """Returns what each value uses over all its intervals, flat, each weighted by another number in [1, 2).

        The weights keep apart values that use as much in all, but not at the same times.
        """
        weights = 1.0 + (np.arange(len(self._lengths)) * _GOLDEN_SECTION) % 1.0
        usages = np.zeros(self.offsets[-1])
        np.add.at(usages, self._entries, self._usages * np.repeat(weights, self._lengths))
        return usages

    def row(self, time: int) -> Row:
        """Returns the memory row of a time; what every value of a variable uses is taken off the slack."""
        usages = self.usages_at(time)
        least = np.minimum.reduceat(usages, self.offsets[:-1])
        residual = usages - np.repeat(least, np.diff(self.offsets))
        live = np.flatnonzero(np.maximum.reduceat(residual, self.offsets[:-1]))
        parts = {int(v): residual[self.offsets[v] : self.offsets[v + 1]] for v in live}
        return Row(time, self.network.room_at(time) - int(least.sum()), parts)
