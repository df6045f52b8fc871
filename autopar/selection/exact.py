"""Exact search with memory rows added as they are needed.

Most rows never bind: the network is first solved without any, and each time the optimum does not fit, the
rows that it violates join. The first optimum that fits is the optimum of the whole problem, since it
solves a relaxation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.clock import Clock
from autopar.selection.network import Network
from autopar.selection.problem import INFINITE
from autopar.selection.toulbar import SearchApart, backtracks_within, minimise_here
from autopar.selection.toulbar_worker import NO_BACKTRACK_LIMIT, Result
from autopar.selection.usage import Row, Usage

SMALL_ENTRIES = 300_000
"""Networks up to this size are searched in this process, which saves starting another (0.2 s)."""
_BACKTRACKS = 500
"""A limit in backtracks keeps the outcome for small networks independent of the clock."""
_ROW_EFFORT = 500_000
"""Usages in rows times backtracks that a search in this process may take: at most some seconds, since each has taken
6 us where rows were tight (40 rows of 40 variables of 12 values, a minute for 500 backtracks). Beyond that a search
needs a process of its own to end in time."""
_ROWS_A_ROUND = 4


@dataclass(frozen=True)
class ExactOutcome:
    """What an exact search found."""

    values: list[int] | None
    cost: int
    """Of the values; INFINITE without."""
    lower_bound: int
    """No choice costs less than this, or than the upper bound asked for; INFINITE: nothing is feasible."""
    times: tuple[int, ...] = ()
    """The times whose rows were needed."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left to search."""
        return self.cost <= self.lower_bound


class RowsAsNeeded:
    """The rows that the choices seen so far call for, and what their relaxations prove."""

    def __init__(self, network: Network, times: Iterable[int] = ()) -> None:
        self.network = network
        self.usage = Usage(network)
        self.lower_bound = 0
        self.outcome = ExactOutcome(None, INFINITE, 0)
        self._rows = {row_time: self.usage.row(row_time) for row_time in times}

    @property
    def rows(self) -> list[Row]:
        """Those that some choice could violate."""
        return [row for row in self._rows.values() if not row.implied]

    @property
    def impossible(self) -> bool:
        """Whether one of the rows fits no choice at all."""
        return any(row.slack < 0 for row in self._rows.values())

    def learn(self, result: Result) -> bool:
        """Takes in the minimum under the rows; False when it does not fit, so that rows have joined."""
        self.lower_bound = max(self.lower_bound, result["lower_bound"])
        violated = []
        if result["choice"] is not None:
            violated = self.usage.violated_times(result["choice"], _ROWS_A_ROUND)
            if not violated:
                cost = self.network.cost(result["choice"])
                self.outcome = ExactOutcome(result["choice"], cost, self.lower_bound, tuple(self._rows))
        self._rows.update((row_time, self.usage.row(row_time)) for row_time in violated)
        return not violated

    def finish(self) -> ExactOutcome:
        """Returns the choice that fits, if one was met, with what is proven."""
        bound = INFINITE if self.impossible else self.lower_bound
        return ExactOutcome(self.outcome.values, self.outcome.cost, bound, tuple(self._rows))


def search_exactly(
    network: Network, clock: Clock, seed: int, *, upper_bound: int = INFINITE, backtracks: int = _BACKTRACKS,
    times: Iterable[int] = (), small_entries: int = SMALL_ENTRIES,
) -> ExactOutcome:  # fmt: skip
    """Searches for the cheapest choice below `upper_bound`, until it is found or a limit is met.

    The limits are the clock and, on networks of no more than `small_entries`, the backtracks of each round; these are
    searched in this process unless their rows make that long. `times` are those whose rows are there from the start. At
    least one round is made.
    """
    search = RowsAsNeeded(network, times)
    first = True
    while (first or not clock.is_over) and not search.impossible:
        first = False
        rows, is_small = search.rows, network.num_entries <= small_entries
        if is_small and backtracks * sum(row.num_usages for row in rows) <= _ROW_EFFORT:
            result = minimise_here(network, rows, upper_bound, backtracks, seed)
        else:
            most = backtracks if is_small else NO_BACKTRACK_LIMIT
            limit = min(most, backtracks_within(clock, network, rows))
            apart = SearchApart(network, rows, upper_bound, seed, backtracks=limit, message_passing=not is_small)
            result = apart.result(clock.wait_until)
        if search.learn(result):
            break
    return search.finish()
