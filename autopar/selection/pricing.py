"""Searches by prices of memory: whole choices at the going prices, of which one that fits takes what is better.

    round    all variables at their best under prices, a few at a time held (`conditioning`): the trial
             what is cheaper in it, as far as it fits, is taken over by the best choice (`merging`)
             prices rise where the trial uses more than there is, and fall where it uses less

A price makes places far apart in the network and in time agree on what memory is worth; what is re-solved under rows
(`neighbourhood`) has to be small, and cannot trade with what it does not hold. Prices alone do not tell where half of
what they are indifferent to has to be chosen: that is left to merging, which knows the rows.
Each round that leaves the trial as it is begins another way: from messages through all of the network (`messages`), at
first and ever less often, or by another value of a hub.
Rounds that no longer make the best choice cheaper begin another course, from no prices: where prices settle depends on
chance, and what courses have in common is worth less than what `merging` takes from each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from autopar.clock import Clock, worked
from autopar.selection.conditioning import solve_beside_cutset
from autopar.selection.elimination import eliminate
from autopar.selection.merging import merged
from autopar.selection.messages import Messages
from autopar.selection.problem import INFINITE, Int64Array
from autopar.selection.subproblems import Subproblems
from autopar.selection.usage import worst_positions
from autopar.tunables import PART_S, REDUCE_S

_COURSE_ROUNDS, _FRUITLESS_ROUNDS, _LEAST_GAIN = 24, 12, 1e-4
"""A course of prices has so many rounds at least, and ends after so many in a row, each of which made the best choice
cheaper by a smaller share of its cost."""
_EARLY_ROUNDS, _ANEW_EVERY = 8, 10
"""Trials begin anew at each of the first rounds, while prices are far from those that hold, then at one in so many."""
_PASSES, _FIRST_PASSES = 3, 6
"""So often a trial is solved beside a cutset at each round's prices, and after it began another way."""
_FIRST_SWEEPS, _SWEEPS = 10, 4
"""Messages are sent there and back so often."""
_KICK_PASSES = 2
_ROWS_A_ROUND = 4
_STEP, _STEP_HALVES = 3.0, 15
"""A price changes by the power e of this times the share of the room by which the trial missed it; half after so many
rounds."""
_LARGEST_STEP = 0.5
_FIRST_PRICE = 0.1
"""Of a row, as a share of what a choice costs in all per byte of the room."""
_RISES = (1.25, 1.6, 2.5)
"""A trial that does not fit is solved again at so many times the prices until it does."""
_LURES = (0.0, 0.5, 0.8, 1.0, 1.25)
"""The best choice is solved again at so many times the prices: less draws it to what costs less, more to what uses
less."""


class PriceLedSearch:
    """Holds the best choice that fits, a trial that need not, and the prices."""

    def __init__(self, parts: Subproblems, values: Sequence[int], seed: int) -> None:
        self.values = list(values)
        self.cost = parts.network.cost(values)
        self._parts = parts
        self._chance = random.Random(seed)
        self._prices = np.zeros(len(parts.network.room_starts))
        self._rows: set[int] = set()
        self.rounds = 0
        self._course_rounds = self._fruitless = 0
        self._messages: Messages | None = None
        self._trial = list(values)
        self._entries = parts.network.num_entries

    def adopt(self, values: Sequence[int]) -> None:
        """Goes on from another choice that fits."""
        self.values, self.cost = list(values), self._parts.network.cost(values)

    def step(self, clock: Clock) -> bool:
        """One round; False when the clock is over."""
        if clock.is_over:
            return False
        if self._fruitless >= _FRUITLESS_ROUNDS and self._course_rounds >= _COURSE_ROUNDS:
            self._begin_course()
        before, cost = self._trial, self.cost
        unary = self._priced(1.0)
        if self._course_rounds < _EARLY_ROUNDS or self._course_rounds % _ANEW_EVERY == 0:
            self._begin_anew(unary)
        self._trial = self._solved(unary, self._trial, _PASSES)
        self._take(self._frugal())
        if self._course_rounds:
            lured = self._priced(self._chance.choice(_LURES))
            self._take(self._solved(lured, self.values, 1))
        if self._trial == before:
            self._kick(unary)
        self._change_prices()
        self._fruitless = 0 if cost - self.cost > _LEAST_GAIN * cost else self._fruitless + 1
        self.rounds += 1
        self._course_rounds += 1
        return True

    def _begin_course(self) -> None:
        """Forgets prices and the trial, and what messages tell; the best choice stays, and which rows bind."""
        self._prices[:] = 0.0
        self._messages = None
        self._course_rounds = self._fruitless = 0

    def _priced(self, share: float) -> list[Int64Array]:
        """What values cost, with their usage at a share of the prices."""
        usage = self._parts.usage
        priced = np.split(usage.priced(share * self._prices), usage.offsets[1:-1])
        return [
            np.minimum(costs + more, INFINITE) for costs, more in zip(self._parts.network.unary, priced, strict=True)
        ]

    def _solved(
        self, unary: list[Int64Array], values: Sequence[int], passes: int, free: Sequence[int] = ()
    ) -> list[int]:
        found = list(values)
        for _ in range(passes):
            worked(PART_S + self._entries * REDUCE_S)
            found = solve_beside_cutset(self._parts, unary, found, self._chance, free)
        return found

    def _frugal(self) -> list[int]:
        """The trial, or what becomes of it at prices at which it fits, if it does at any of some."""
        found = self._trial
        for share in _RISES:
            if self._parts.usage.excess(found).max(initial=0) <= 0:
                break
            found = self._solved(self._priced(share), found, 1)
        return found

    def _begin_anew(self, unary: list[Int64Array]) -> None:
        """Goes on from what messages lead to, where that is better at these prices."""
        core = eliminate(unary, self._parts.network.pairs)
        first = self._messages is None
        self._messages = self._messages or Messages(core)
        values = self._messages.values(core, _FIRST_SWEEPS if first else _SWEEPS)
        found = self._solved(unary, core.expand(values), _FIRST_PASSES if first else _PASSES)
        if self._course_rounds == 0 or self._cost(unary, found) < self._cost(unary, self._trial):
            self._trial = found

    def _kick(self, unary: list[Int64Array]) -> None:
        """Forbids a hub its value, and keeps what all else makes of it where that is better at these prices."""
        parts = self._parts
        weights = [len(parts.neighbours(v)) * (len(costs) > 1) for v, costs in enumerate(unary)]
        if not any(weights):
            return
        variable = self._chance.choices(range(len(unary)), weights)[0]
        other = list(unary)
        other[variable] = other[variable].copy()
        other[variable][self._trial[variable]] = INFINITE
        kicked = self._solved(other, self._trial, 1, [variable])
        kicked = self._solved(unary, kicked, _KICK_PASSES)
        self._take(kicked)
        if self._cost(unary, kicked) < self._cost(unary, self._trial):
            self._trial = kicked

    def _cost(self, unary: Sequence[Int64Array], values: Sequence[int]) -> int:
        own = sum(int(costs[value]) for costs, value in zip(unary, values, strict=True))
        pairs = self._parts.network.pairs.items()
        return own + sum(int(table[values[i], values[j]]) for (i, j), table in pairs)

    def _take(self, other: Sequence[int]) -> None:
        """Takes over from another choice what makes the best one cheaper."""
        found = merged(self._parts, self.values, other)
        cost = self._parts.network.cost(found)
        if cost < self.cost:
            self.values, self.cost = found, cost

    def _change_prices(self) -> None:
        network = self._parts.network
        excess = self._parts.usage.excess(self._trial)
        self._rows.update(worst_positions(excess, _ROWS_A_ROUND))
        step = _STEP / (1.0 + self._course_rounds / _STEP_HALVES)
        first = _FIRST_PRICE * network.cost(self._trial) / max(1, int(network.room.max()))
        for row in self._rows:
            missed = float(excess[row]) / max(1, int(network.room[row]))
            if self._prices[row] > 0:
                self._prices[row] *= np.exp(np.clip(step * missed, -_LARGEST_STEP, _LARGEST_STEP))
            elif missed > 0:
                self._prices[row] = first * min(1.0, missed)
