"""Exact search with memory rows added as they are needed.

Most rows never bind: the network is first solved without any, and each time the optimum does not fit, the
rows that it violates join. The first optimum that fits is the optimum of the whole problem, since it
solves a relaxation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from autopar.intraop.network import Network
from autopar.intraop.prices import cost_of
from autopar.intraop.problem import INFINITE
from autopar.intraop.rows import Row, UsageSweep, row_at
from autopar.intraop.timeline import Timeline
from autopar.intraop.toulbar import minimise_here

SMALL_ENTRIES = 300_000
"""Networks up to this size are searched in this process, which saves starting another (0.2 s)."""
_BACKTRACKS = 2_000
"""Seconds at most for a small network; a limit in backtracks keeps the outcome independent of the clock."""
_ROWS_A_ROUND = 4


@dataclass(frozen=True)
class Outcome:
    """What an exact search found."""

    values: list[int] | None
    cost: int
    """Of the values; INFINITE without."""
    lower_bound: int
    """INFINITE when nothing is feasible."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left to search."""
        return self.cost <= self.lower_bound


def search_exactly(network: Network, deadline: float, seed: int) -> Outcome:
    """Searches a small network until it is solved, the backtracks are spent, or the deadline has passed."""
    rows: dict[int, Row] = {}
    bound = 0
    sweep, timeline = UsageSweep(network), Timeline(network)
    while time.monotonic() < deadline or not rows:
        if any(row.slack < 0 for row in rows.values()):
            return Outcome(None, INFINITE, INFINITE)
        result = minimise_here(network, list(rows.values()), INFINITE, _BACKTRACKS, seed)
        bound = max(bound, result["lower_bound"])
        if result["choice"] is None:
            break
        violated = timeline.violated_times(result["choice"], _ROWS_A_ROUND)
        if not violated:
            return Outcome(result["choice"], cost_of(network, result["choice"]), bound)
        rows.update((row_time, row_at(sweep, row_time)) for row_time in violated)
        if not result["complete"]:
            break
    return Outcome(None, INFINITE, bound)
