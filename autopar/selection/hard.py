"""Searches networks that exact search does not finish at once, with two processes.

The other process looks for bounds: it minimises under prices of memory until these have settled, then branches on
what they cannot tell apart. This one looks for choices: what the prices lead to is repaired where it does not fit,
and the best is improved part by part; when that has not helped for long, a second process joins the first.

By a clock that counts work, the two go on in step: this one does as much as the other's last minimisation took, then
waits for it. By one that shows the time, whatever has ended is taken in as soon as it has.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from autopar.clock import Clock
from autopar.selection.branching import PriceBranching, SearchNode
from autopar.selection.duals import PriceSearch
from autopar.selection.exact import ExactOutcome
from autopar.selection.neighbourhood import NeighbourhoodSearch
from autopar.selection.network import Network
from autopar.selection.pricing import PriceLedSearch
from autopar.selection.problem import INFINITE
from autopar.selection.repair import repair
from autopar.selection.simplification import Simplified, simplify
from autopar.selection.start import fitting_choice, frugal_choice
from autopar.selection.subproblems import Subproblems
from autopar.selection.toulbar import SearchApart, SearchHere, backtracks_within
from autopar.selection.toulbar_worker import NO_BACKTRACK_LIMIT, Result
from autopar.selection.worth import Worths

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

_PRICES = 1
"""The place of the search by prices among the ways to improve a choice."""
_EARLY_ROUNDS, _EARLY_SHARE = 16, 0.3
"""Prices have been found after so many rounds; by then no more than this share of the time has gone."""


def search_hard(network: Network, known: ExactOutcome, clock: Clock, seed: int, gap_limit: float) -> ExactOutcome:
    """Searches until the clock ends, a proof, or (cost − bound) / cost ≤ gap_limit."""
    simple = simplify(network)
    values = None if known.values is None else simple.restrict(known.values)
    begin = ExactOutcome(values, known.cost - simple.constant, known.lower_bound - simple.constant)
    if not simple.network.unary:
        return _settled(network, simple)
    outcome = _search_simplified(simple, begin, clock, seed, gap_limit)
    bound = max(known.lower_bound, min(outcome.lower_bound + simple.constant, INFINITE))
    if outcome.values is None:
        return ExactOutcome(None, INFINITE, bound)
    found = simple.expand(outcome.values)
    return ExactOutcome(found, network.cost(found), bound)


def _settled(network: Network, simple: Simplified) -> ExactOutcome:
    """What is left when simplification has made every choice."""
    found = simple.expand([])
    if network.cost(found) >= INFINITE or simple.network.room.min(initial=0) < 0:
        return ExactOutcome(None, INFINITE, INFINITE)
    return ExactOutcome(found, network.cost(found), network.cost(found))


def _search_simplified(
    simple: Simplified, known: ExactOutcome, clock: Clock, seed: int, gap_limit: float
) -> ExactOutcome:  # fmt: skip
    """The same for what simplification has left, all costs less its constant."""
    network = simple.network
    seconds = max(0.0, clock.left_s)
    clock = clock.within(seconds - min(_CLOSING_S, _CLOSING_SHARE * seconds))
    bounds = _BoundSearch(network, known, clock, seed, _JOB_SHARE * seconds)
    choices = _ChoiceSearch(network, known, clock, seed)
    try:
        bounds.advance(choices.cost, 1)
        choices.begin()
        while not clock.is_over and not _close_enough(choices.cost, bounds.lower_bound, simple.constant, gap_limit):
            offers = bounds.advance(choices.cost, 2 if bounds.branching and choices.stagnant else 1)
            for offer in offers:
                choices.consider(offer, mend=not bounds.branching)
            if clock.is_counted:
                is_better = _improved(choices, bounds, clock)
            else:
                is_better = not offers and choices.improve(rests=bounds.branching)
            if clock.is_counted and not (offers or is_better or bounds.is_busy):
                break
            if not (clock.is_counted or offers or is_better):
                time.sleep(min(_POLL_S, max(0.0, clock.left_s)))
        # By work, what has not ended yet is let go: how far it has come depends on the machine.
        for offer in () if clock.is_counted else bounds.collect(choices.cost):
            choices.consider(offer, mend=False)
    finally:
        bounds.cancel()
    return ExactOutcome(choices.values, choices.cost, bounds.lower_bound)


def _improved(choices: _ChoiceSearch, bounds: _BoundSearch, clock: Clock) -> bool:
    """Improves the best choice for as long as what runs beside it is likely to take; whether that did anything."""
    turn, steps = clock.within(bounds.likely_s), 0
    while not (steps and turn.is_over) and choices.improve(rests=True):
        steps += 1
    return steps > 0


def _close_enough(cost: int, lower_bound: int, constant: int, gap_limit: float) -> bool:
    return cost - lower_bound <= gap_limit * (cost + constant)


@dataclass(frozen=True, eq=False)
class _Job:
    """One minimisation in another process."""

    search: SearchApart | SearchHere
    node: SearchNode | None
    """Whose network it minimises; None for the prices before branching."""
    until: float
    """When it ends, where a clock shows the time."""


class _BoundSearch:
    """Keeps the other process busy and collects what it proves: prices first, then branching on them."""

    def __init__(self, network: Network, known: ExactOutcome, clock: Clock, seed: int, most_s: float) -> None:
        self.lower_bound = known.lower_bound
        self.likely_s = 0.0  # of work, what a minimisation takes: what the last one took
        self._clock, self._seed = clock, seed
        self._prices = PriceSearch(network)
        self._branching: PriceBranching | None = None
        self._running: list[_Job] = []
        self._most_s = most_s

    @property
    def is_busy(self) -> bool:
        """Whether another process works on a bound."""
        return bool(self._running)

    @property
    def branching(self) -> bool:
        """Whether the prices have settled."""
        return self._branching is not None

    def advance(self, upper_bound: int, processes: int) -> list[list[int]]:
        """Takes in what has ended and starts what comes next, in so many processes; returns new choices."""
        now = time.monotonic()
        ended = [job for job in self._running if self._clock.is_counted or job.search.done or now >= job.until]
        choices = self._end(ended, self._clock.wait_until if self._clock.is_counted else now, upper_bound)
        while len(self._running) < processes and self._start(upper_bound):
            pass
        return choices

    def collect(self, upper_bound: int) -> list[list[int]]:
        """Ends the other processes; returns what choices they have."""
        for job in self._running:
            job.search.interrupt()
        return self._end(self._running, time.monotonic(), upper_bound)

    def cancel(self) -> None:
        """Ends the other processes, whatever they have."""
        for job in self._running:
            job.search.cancel()

    def _end(self, jobs: list[_Job], wait_until: float, upper_bound: int) -> list[list[int]]:
        self._running = [job for job in self._running if job not in jobs]
        choices = [self._learn(job, job.search.result(wait_until), upper_bound) for job in jobs]
        self.likely_s = max((job.search.work_s for job in jobs), default=self.likely_s)
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
        span = self._clock if thoroughly else self._clock.within(self._most_s)
        backtracks = min(backtracks, backtracks_within(span, network, ()))
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

    def __init__(self, network: Network, known: ExactOutcome, clock: Clock, seed: int) -> None:
        self.cost = INFINITE
        self._clock = clock
        self._started = self._improved = self._next_try = clock.now
        self._span = clock.left_s
        self._parts = Subproblems(network)
        self._seed = seed
        self._searches: list[NeighbourhoodSearch | PriceLedSearch] = []
        self._worths = Worths[int]((), random.Random(seed))
        if known.values is not None:
            self._adopt(known.values)

    @property
    def values(self) -> list[int] | None:
        """The best choice that fits."""
        return self._searches[0].values if self._searches else None

    @property
    def stagnant(self) -> bool:
        """Whether the last improvement lies so far back that the processor is better used elsewhere."""
        now = self._clock.now
        return not self._is_early and now - self._improved > max(
            _STAGNATION_S, _STAGNATION_SHARE * (now - self._started)
        )

    def begin(self) -> None:
        """Finds something to go on from where nothing is known."""
        if not self._searches:
            self.consider(frugal_choice(self._parts), mend=True)
        if not self._searches:
            fitting = fitting_choice(self._parts.network, self._clock, self._seed)
            if fitting is not None:
                self._adopt(fitting)

    def consider(self, values: list[int], *, mend: bool) -> None:
        """Goes on from a choice where it is cheaper than the best and fits, or can be made to."""
        if self._searches and mend:
            mend = self._parts.usage.excess(values).max() <= _MENDABLE * self._parts.network.room.max()
        if self._parts.network.cost(values) < self.cost:
            span = self._clock.within(_REPAIR_SHARE * self._clock.left_s if mend else 0.0)
            mended = repair(self._parts, values, span, self._seed, self.cost)
            if mended is not None:
                self._adopt(mended)

    def improve(self, *, rests: bool) -> bool:
        """Improves the best choice by one step; False when there is none, no time, or little hope just now.

        rests: whether another process has a use for the processor where there is little hope.
        """
        started = self._clock.now
        if not self._searches or (rests and self.stagnant and started < self._next_try):
            return False
        way = _PRICES if self._is_early else self._worths.choose(self._clock.left_s)
        advanced = way is not None and self._advance(way)
        self._next_try = self._clock.now + _STAGNANT_REST * (self._clock.now - started)
        return advanced

    @property
    def _is_early(self) -> bool:
        """Whether prices are still to be found: before, re-solving parts leads to where little is left to gain."""
        led = self._searches[_PRICES] if len(self._searches) > _PRICES else None
        spent = self._clock.now - self._started
        return isinstance(led, PriceLedSearch) and led.rounds < _EARLY_ROUNDS and spent < _EARLY_SHARE * self._span

    def _advance(self, way: int) -> bool:
        started, search = self._clock.now, self._searches[way]
        advanced = search.step(self._clock)
        gain = self.cost - search.cost
        self._worths.remember(way, self._clock.now - started, gain)
        if gain > 0:
            self._adopt(search.values)
        return advanced

    def _adopt(self, values: list[int]) -> None:
        if not self._searches:
            self._searches = [NeighbourhoodSearch(self._parts, values, self._seed)]
            if self._parts.network.uses:
                self._searches.append(PriceLedSearch(self._parts, values, self._seed))
            self._worths = Worths(range(len(self._searches)), random.Random(self._seed))
        for search in self._searches:
            if search.values != values:
                search.adopt(values)
        self.cost, self._improved = self._searches[0].cost, self._clock.now
