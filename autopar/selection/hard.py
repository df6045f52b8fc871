"""Searches networks that exact search does not finish at once, with two processes.

The other process looks for bounds: it minimises under prices of memory until these have settled, then branches on
what they cannot tell apart. This one looks for choices: what the prices lead to is repaired where it does not fit,
and the best is improved part by part; when that has not helped for long, a second process joins the first.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from autopar.selection.branching import PriceBranching, SearchNode
from autopar.selection.duals import PriceSearch
from autopar.selection.exact import ExactOutcome
from autopar.selection.neighbourhood import NeighbourhoodSearch
from autopar.selection.network import Network
from autopar.selection.problem import INFINITE
from autopar.selection.repair import repair
from autopar.selection.start import fitting_choice, frugal_choice
from autopar.selection.subproblems import Subproblems
from autopar.selection.toulbar import SearchApart, SearchHere
from autopar.selection.toulbar_worker import NO_BACKTRACK_LIMIT, Result

_REPAIR_SHARE = 0.1
"""At most this share of the time that is left goes into making one choice fit."""
_CLOSING_SHARE, _CLOSING_S = 0.05, 1.5
"""At most so much of the time is kept for ending what runs and for checking the choice."""
_MENDABLE = 0.15
"""Excess, as a share of the largest room, up to which a choice is worth repairing once there is another."""
_JOB_SHARE = 0.25
"""At most this share of the time goes into one minimisation under prices."""
_POLL_S = 0.02
_TINY_ENTRIES = 2_000
"""Networks up to this size are minimised sooner than a process starts."""
_EFFORT = 500_000_000
"""Entries times backtracks that one minimisation under prices may take: some seconds."""
_STAGNATION_S, _STAGNATION_SHARE = 5.0, 0.25
"""The search for choices stagnates after this long without a gain: seconds, and a share of the time it has had."""
_STAGNANT_REST = 10.0
"""It then rests this many times as long as it works."""


def search_hard(network: Network, known: ExactOutcome, deadline: float, seed: int, gap_limit: float) -> ExactOutcome:
    """Searches until the deadline (of time.monotonic), a proof, or (cost − bound) / cost ≤ gap_limit."""
    seconds = max(0.0, deadline - time.monotonic())
    deadline -= min(_CLOSING_S, _CLOSING_SHARE * seconds)
    bounds = _BoundSearch(network, known, seed, _JOB_SHARE * seconds)
    choices = _ChoiceSearch(network, known, seed)
    try:
        bounds.advance(choices.cost, 1)
        choices.begin(deadline)
        while time.monotonic() < deadline and not _close_enough(choices.cost, bounds.lower_bound, gap_limit):
            offers = bounds.advance(choices.cost, 2 if bounds.branching and choices.stagnant else 1)
            for offer in offers:
                choices.consider(offer, deadline, mend=not bounds.branching)
            if not offers and not choices.improve(deadline):
                time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
        for offer in bounds.collect(choices.cost):
            choices.consider(offer, deadline, mend=False)
    finally:
        bounds.cancel()
    return ExactOutcome(choices.values, choices.cost, bounds.lower_bound)


def _close_enough(cost: int, lower_bound: int, gap_limit: float) -> bool:
    return cost - lower_bound <= gap_limit * cost


@dataclass(frozen=True, eq=False)
class _Job:
    """One minimisation in another process."""

    search: SearchApart | SearchHere
    node: SearchNode | None
    """Whose network it minimises; None for the prices before branching."""
    until: float


class _BoundSearch:
    """Keeps the other process busy and collects what it proves: prices first, then branching on them."""

    def __init__(self, network: Network, known: ExactOutcome, seed: int, most_s: float) -> None:
        self.lower_bound = known.lower_bound
        self._seed = seed
        self._prices = PriceSearch(network)
        self._branching: PriceBranching | None = None
        self._running: list[_Job] = []
        self._most_s = most_s

    @property
    def branching(self) -> bool:
        """Whether the prices have settled."""
        return self._branching is not None

    def advance(self, upper_bound: int, processes: int) -> list[list[int]]:
        """Takes in what has ended and starts what comes next, in so many processes; returns new choices."""
        now = time.monotonic()
        choices = self._end([job for job in self._running if job.search.done or now >= job.until], upper_bound)
        while len(self._running) < processes and self._start(upper_bound):
            pass
        return choices

    def collect(self, upper_bound: int) -> list[list[int]]:
        """Ends the other processes; returns what choices they have."""
        for job in self._running:
            job.search.interrupt()
        return self._end(self._running, upper_bound)

    def cancel(self) -> None:
        """Ends the other processes, whatever they have."""
        for job in self._running:
            job.search.cancel()

    def _end(self, jobs: list[_Job], upper_bound: int) -> list[list[int]]:
        self._running = [job for job in self._running if job not in jobs]
        choices = [self._learn(job, job.search.result(time.monotonic()), upper_bound) for job in jobs]
        self._note_bound(upper_bound)
        return [choice for choice in choices if choice is not None]

    def _start(self, upper_bound: int) -> bool:
        """Starts the next minimisation; False when there is none to start."""
        if self._prices.settled and self._prices.times and self._branching is None:
            self._branching = PriceBranching(self._prices)
        if self._branching is not None:
            node = self._branching.next_node(upper_bound)
            if node is not None:
                self._minimise(node.search.next_network(), node)
            self._note_bound(upper_bound)
            return node is not None
        if self._running:
            return False
        # Settled without any row that binds: what is left is to minimise without prices, however long that takes.
        self._minimise(self._prices.next_network(), None, thoroughly=self._prices.settled)
        return True

    def _minimise(self, network: Network, node: SearchNode | None, *, thoroughly: bool = False) -> None:
        backtracks = NO_BACKTRACK_LIMIT if thoroughly else max(1, _EFFORT // max(1, network.num_entries))
        search: SearchApart | SearchHere
        if network.num_entries <= _TINY_ENTRIES:
            search = SearchHere(network, (), INFINITE, backtracks, self._seed)
        else:
            search = SearchApart(network, (), INFINITE, self._seed, backtracks=backtracks, message_passing=True)
        self._running.append(_Job(search, node, math.inf if thoroughly else time.monotonic() + self._most_s))

    def _learn(self, job: _Job, result: Result, upper_bound: int) -> list[int] | None:
        if job.node is None or self._branching is None:
            choice = self._prices.learn(result)
            self.lower_bound = max(self.lower_bound, self._prices.lower_bound)
            return choice
        return self._branching.learn(job.node, result, upper_bound)

    def _note_bound(self, upper_bound: int) -> None:
        """Nodes are closed by upper bounds that some choice has: none costs less than the best choice, then."""
        if self._branching is not None:
            self.lower_bound = max(self.lower_bound, min(self._branching.lower_bound, upper_bound))


class _ChoiceSearch:
    """Holds the best choice that fits."""

    def __init__(self, network: Network, known: ExactOutcome, seed: int) -> None:
        self.cost = INFINITE
        self._started = self._improved = self._next_try = time.monotonic()
        self._parts = Subproblems(network)
        self._seed = seed
        self._search: NeighbourhoodSearch | None = None
        if known.values is not None:
            self._adopt(known.values)

    @property
    def values(self) -> list[int] | None:
        """The best choice that fits."""
        return None if self._search is None else self._search.values

    @property
    def stagnant(self) -> bool:
        """Whether the last improvement lies so far back that the processor is better used elsewhere."""
        now = time.monotonic()
        return now - self._improved > max(_STAGNATION_S, _STAGNATION_SHARE * (now - self._started))

    def begin(self, deadline: float) -> None:
        """Finds something to go on from where nothing is known."""
        if self._search is None:
            self.consider(frugal_choice(self._parts), deadline, mend=True)
        if self._search is None:
            fitting = fitting_choice(self._parts.network, deadline, self._seed)
            if fitting is not None:
                self._adopt(fitting)

    def consider(self, values: list[int], deadline: float, *, mend: bool) -> None:
        """Goes on from a choice where it is cheaper than the best and fits, or can be made to."""
        now = time.monotonic()
        if self._search is not None and mend:
            mend = self._parts.usage.excess(values).max() <= _MENDABLE * self._parts.network.room.max()
        if self._parts.network.cost(values) < self.cost:
            until = now + _REPAIR_SHARE * (deadline - now) if mend else now
            mended = repair(self._parts, values, until, self._seed, self.cost)
            if mended is not None:
                self._adopt(mended)

    def improve(self, deadline: float) -> bool:
        """Improves the best choice by one part; False when there is none, no time, or little hope just now."""
        started = time.monotonic()
        if self._search is None or (self.stagnant and started < self._next_try):
            return False
        advanced = self._search.step(deadline)
        if self._search.cost < self.cost:
            self.cost, self._improved = self._search.cost, time.monotonic()
        self._next_try = time.monotonic() + _STAGNANT_REST * (time.monotonic() - started)
        return advanced

    def _adopt(self, values: list[int]) -> None:
        if self._search is None:
            self._search = NeighbourhoodSearch(self._parts, values, self._seed)
        else:
            self._search.adopt(values)
        self.cost, self._improved = self._search.cost, time.monotonic()
