"""Searches networks that exact search does not finish at once, with two processes.

The other process looks for bounds: it minimises under prices of memory until these have settled, then exactly,
with the rows that are needed and the best choice's cost as the upper bound. This one looks for choices: what the
prices lead to is repaired where it does not fit, and the best is improved part by part.
"""

from __future__ import annotations

import time

from autopar.intraop.exact import Outcome, RowsAsNeeded
from autopar.intraop.neighbourhood import NeighbourhoodSearch
from autopar.intraop.network import Network
from autopar.intraop.parts import Parts
from autopar.intraop.prices import PriceSearch
from autopar.intraop.problem import INFINITE
from autopar.intraop.repair import repair
from autopar.intraop.toulbar import SearchApart
from autopar.intraop.toulbar_worker import NO_BACKTRACK_LIMIT, Result

_REPAIR_SHARE = 0.1
"""At most this share of the time that is left goes into making one choice fit."""
_HANDOVER_SHARE, _HANDOVER_S = 0.05, 1.0
"""At most so much of the time is kept for the other process to hand over its bound."""
_POLL_S = 0.02


def search_hard(network: Network, known: Outcome, deadline: float, seed: int, gap_limit: float) -> Outcome:
    """Searches until the deadline (of time.monotonic), a proof, or (cost − bound) / cost ≤ gap_limit."""
    bounds = _BoundSearch(network, known, seed)
    choices = _ChoiceSearch(network, known, seed)
    deadline -= min(_HANDOVER_S, _HANDOVER_SHARE * max(0.0, deadline - time.monotonic()))
    try:
        while time.monotonic() < deadline and not _close_enough(choices.cost, bounds.lower_bound, gap_limit):
            offer = bounds.advance(choices.cost)
            if offer is not None:
                choices.consider(offer, deadline)
            elif not choices.improve(bounds.times, deadline):
                time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
    finally:
        bounds.stop()
    return Outcome(choices.values, choices.cost, bounds.lower_bound)


def _close_enough(cost: int, lower_bound: int, gap_limit: float) -> bool:
    return cost - lower_bound <= gap_limit * cost


class _BoundSearch:
    """Keeps the other process busy and collects what it proves."""

    def __init__(self, network: Network, known: Outcome, seed: int) -> None:
        self.lower_bound = known.lower_bound
        self._network = network
        self._seed = seed
        self._prices = PriceSearch(network)
        self._exact: RowsAsNeeded | None = None
        self._running: SearchApart | None = None
        self._finished = False

    @property
    def times(self) -> list[int]:
        """The times that have run out of memory so far."""
        return self._prices.times

    def advance(self, upper_bound: int) -> list[int] | None:
        """Takes in what has ended and starts what comes next; returns a choice when a new one is there."""
        choice = None
        if self._running is not None and self._running.done:
            result = self._running.result(time.monotonic())
            self._running = None
            self._learn(result)
            choice = result["choice"]
        if self._running is None and not self._finished:
            self._running = self._start(upper_bound)
        return choice

    def stop(self) -> None:
        """Ends the other process; an exact search's bound so far is kept."""
        if self._running is not None and self._exact is not None:
            self.lower_bound = max(self.lower_bound, self._running.result(time.monotonic())["lower_bound"])
        elif self._running is not None:
            self._running.cancel()

    def _start(self, upper_bound: int) -> SearchApart:
        if not self._prices.settled:
            return SearchApart(
                self._prices.next_network(), (), INFINITE, self._seed, backtracks=1, message_passing=True
            )  # fmt: skip
        if self._exact is None:
            self._exact = RowsAsNeeded(self._network, self._prices.times)
        return SearchApart(
            self._network, self._exact.rows, upper_bound, self._seed,
            backtracks=NO_BACKTRACK_LIMIT, message_passing=True,
        )  # fmt: skip

    def _learn(self, result: Result) -> None:
        if self._exact is None:
            self._prices.learn(result)
            self.lower_bound = max(self.lower_bound, self._prices.lower_bound)
        else:
            self._finished = self._exact.learn(result)
            bound = INFINITE if self._exact.impossible else self._exact.lower_bound
            self.lower_bound = max(self.lower_bound, bound)


class _ChoiceSearch:
    """Holds the best choice that fits."""

    def __init__(self, network: Network, known: Outcome, seed: int) -> None:
        self.cost = INFINITE
        self._parts = Parts(network)
        self._seed = seed
        self._search: NeighbourhoodSearch | None = None
        if known.values is not None:
            self._adopt(known.values)

    @property
    def values(self) -> list[int] | None:
        """The best choice that fits."""
        return None if self._search is None else self._search.values

    def consider(self, values: list[int], deadline: float) -> None:
        """Makes a choice fit, and goes on from it where that is cheaper than the best."""
        if self._parts.network.cost(values) < self.cost:
            now = time.monotonic()
            mended = repair(self._parts, values, now + _REPAIR_SHARE * (deadline - now), self._seed, self.cost)
            if mended is not None:
                self._adopt(mended)

    def improve(self, times: list[int], deadline: float) -> bool:
        """Improves the best choice by one part; False when there is none, or no time."""
        if self._search is None:
            return False
        advanced = self._search.step(deadline)
        self.cost = self._search.cost
        return advanced

    def _adopt(self, values: list[int]) -> None:
        if self._search is None:
            self._search = NeighbourhoodSearch(self._parts, values, self._seed)
        else:
            self._search.adopt(values)
        self.cost = self._search.cost
