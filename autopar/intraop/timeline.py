"""What a choice of values uses over time, and the times at which it does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.intraop.network import Network
from autopar.intraop.problem import Int64Array

_WINDOWS = 32
"""Violated times closer than 1/32 of the time line to a worse one are left for the next round."""


class Timeline:
    """Positions of a network's uses among the times at which its room changes."""

    def __init__(self, network: Network) -> None:
        self.network = network
        bounds = np.array([(use.lo, use.hi) for use in network.uses], dtype=np.int64).reshape(-1, 2)
        self.first, self.last = np.searchsorted(network.room_starts, bounds).T
        self.variables = np.array([use.variable for use in network.uses], dtype=np.int64)
        sizes = [use.usages.size for use in network.uses]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64)
        self.usages = np.concatenate([np.zeros(0, np.int64), *(use.usages for use in network.uses)])

    def excess(self, values: Sequence[int]) -> Int64Array:
        """Returns usage less room from each of the network's `room_starts` on; positive does not fit."""
        chosen = np.asarray(values, dtype=np.int64)[self.variables]
        amounts = self.usages[self.offsets + chosen]
        change = np.zeros(len(self.network.room_starts) + 1, dtype=np.int64)
        np.add.at(change, self.first, amounts)
        np.add.at(change, self.last, -amounts)
        return np.cumsum(change)[:-1] - self.network.room

    def violated_times(self, values: Sequence[int], most: int) -> list[int]:
        """Returns up to `most` times that do not fit, worst first and well apart."""
        excess = self.excess(values)
        width = max(1, len(excess) // _WINDOWS)
        times = []
        while len(times) < most and (worst := int(np.argmax(excess))) is not None and excess[worst] > 0:
            times.append(int(self.network.room_starts[worst]))
            excess[max(0, worst - width) : worst + width] = 0
        return times
