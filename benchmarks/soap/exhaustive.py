"""The best of all plans of a small graph, proved by branch and bound.

Decisions are taken one after another, operators in their order, each with what it reads of inputs and parameters.
Whatever is left open adds at least what the cheapest of its completions does: the prices that the chain's own bound
adds up (`soap.ledger`) are tables over the few decisions that each depends on, and minimising their sum over one
decision after another, last ones first (bucket elimination; Dechter, 1999), leaves tables over those before. So a
branch is left as soon as the compute stream, or a link, has more to do than the best plan known takes; what is left at
the end is simulated, the most promising first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.plan import Plan
from autopar.soap import Ledger, Score, Space
from autopar.soap.space import Change, Option

NEVER = 1 << 50
MOST_ENTRIES = 200_000  # of a table: what depends on more decisions is left out of the bound
BUSY, INSIDE, ACROSS = range(3)

Array = np.ndarray[Any, np.dtype[np.int64]]


class Proof(NamedTuple):
    """The shortest step of all plans that fit, or what was asked for to be beaten, if none is shorter; whether all that
    could be was looked at; how many were simulated, and how many branches were taken."""

    step_ns: int
    is_proved: bool
    simulated: int
    branches: int


class _Table(NamedTuple):
    """Nanoseconds of the compute stream, of links inside nodes and between them, by options of some decisions, which
    are numbered in order."""

    scope: tuple[int, ...]
    amounts: Array  # the first dimension is what of


@dataclass
class _Search:
    """Depth first. below_ns: the shortest step so far; limit: of plans that are simulated."""

    space: Space
    plan: Plan
    score: Score
    ledger: Ledger
    below_ns: int
    limit: int
    simulated: int = 0
    branches: int = 0

    def run(self) -> Proof:
        space = self.space
        choices = {**space.inputs, **space.strategies, **space.storages}
        self.names = _in_order(space)
        self.options: list[Sequence[Option]] = [choices[name] for name in self.names]
        self.draft = space.draft(self.plan)
        self.moved = [self._moved(name) for name in self.names]
        self.least_moved = [sum(int(own.min()) for own in self.moved[n:]) for n in range(len(self.names) + 1)]
        tables = [*self._tables()]
        self.closing = [[one for one in tables if one.scope[-1] == n] for n in range(len(self.names))]
        self.left = self._eliminated()
        is_proved = self._branch([], np.zeros(3, np.int64), 0)
        return Proof(self.below_ns, is_proved, self.simulated, self.branches)

    # The bound ----------------------------------------

    def _moved(self, name: str) -> Array:
        """Bytes that the optimizer moves, by option."""
        options, prices = self.space.storages.get(name), self.ledger.prices
        if options is None:
            return np.zeros(len(self.options[self.names.index(name)]), np.int64)
        return np.array([prices.moved_bytes(name, option) for option in options])

    def _tables(self) -> Iterator[_Table]:
        numbers = {name: number for number, name in enumerate(self.names)}
        for group in self.ledger._groups:
            decided = tuple(sorted({numbers[name] for name in group.decisions[0]}))
            sizes = [len(self.options[n]) for n in decided]
            if math.prod(sizes) > MOST_ENTRIES:
                continue
            amounts = np.empty((3, *sizes), np.int64)
            for chosen in product(*map(range, sizes)):
                of = {self.names[n]: self.options[n][at] for n, at in zip(decided, chosen, strict=True)}
                amounts[(slice(None), *chosen)] = self._amounts(group, of)
            yield _Table(decided, amounts)

    def _amounts(self, group: Any, options: Mapping[str, Option]) -> tuple[int, int, int]:
        """What a group of the ledger, whose members are worth the same, comes to with these options."""
        codes = tuple([self.ledger._code(options[name]) for name in group.decisions[0]])
        row, count = self.ledger._worth(group, 0, codes), len(group.members)
        if row is None:
            return NEVER, NEVER, NEVER
        busy_ns = self.ledger.microbatches * (row.forward_ns + row.backward_ns)
        return count * busy_ns, count * row.inside_ns, count * row.across_ns

    def _eliminated(self) -> list[_Table]:
        """For so many decisions that are taken, what those left add at least."""
        left = [_Table((), np.zeros(3, np.int64))]
        for number in reversed(range(len(self.names))):
            tables = [*self.closing[number], left[0]]
            scope = tuple(sorted({n for one in tables for n in one.scope} | {number}))
            total = np.zeros((3, *(len(self.options[n]) for n in scope)), np.int64)
            for one in tables:
                total += one.amounts.reshape(3, *(len(self.options[n]) if n in one.scope else 1 for n in scope))
            left.insert(0, _Table(scope[:-1], np.minimum(total.min(axis=-1), NEVER)))
        return left

    def _next(self, tables: Sequence[_Table], chosen: Sequence[int]) -> Array:
        """What tables add, by option of the next decision."""
        total = np.zeros((3, len(self.options[len(chosen)])), np.int64)
        for one in tables:
            index = tuple(slice(None) if n == len(chosen) else chosen[n] for n in one.scope)
            found = one.amounts[(slice(None), *index)]
            total += found if found.ndim == 2 else found[:, None]
        return total

    # Branches ----------------------------------------

    def _branch(self, chosen: list[int], spent: Array, moved: int) -> bool:
        """Whether all that may be better was looked at."""
        number = len(chosen)
        if number == len(self.names):
            return self._simulate(chosen)
        self.branches += 1
        after = spent[:, None] + self._next(self.closing[number], chosen)
        least = after + self._next([self.left[number + 1]], chosen)
        count = sum(self.ledger._counts)
        moves = [moved + int(own) + self.least_moved[number + 1] for own in self.moved[number]]
        updates = [self.ledger.prices.optimizer_ns(num_bytes, count) for num_bytes in moves]
        bound = np.maximum(least[BUSY] + np.array(updates), np.maximum(least[INSIDE], least[ACROSS]))
        for at in np.argsort(bound, kind="stable").tolist():
            if bound[at] >= self.below_ns:
                break
            if not self._branch([*chosen, at], after[:, at], moved + int(self.moved[number][at])):
                return False
        return True

    def _simulate(self, chosen: Sequence[int]) -> bool:
        if self.simulated >= self.limit:
            return False
        pairs = zip(self.names, self.options, chosen, strict=True)
        found = self.space.changed(self.draft, Change("all", "", {name: options[at] for name, options, at in pairs}))
        if found is None:
            return True
        self.simulated += 1
        step_ns = self.score.step_time_ns(found.plan, self.below_ns - 1)
        if step_ns < self.below_ns and not self.score.excess_bytes(found.plan, self.plan.memory_limit):
            self.below_ns = step_ns
        return True


def least_step(space: Space, plan: Plan, score: Score, ledger: Ledger, below_ns: int, limit: int = 1 << 62) -> Proof:
    """The shortest step of all plans that fit, if it is below so many nanoseconds. limit: of plans to simulate."""
    return _Search(space, plan, score, ledger, below_ns, limit).run()


def _in_order(space: Space) -> list[str]:
    """Decisions, those that belong together one after another."""
    found: dict[str, None] = {}
    for node in space.graph.nodes:
        found.update((name, None) for name in node.operands if name in space.inputs or name in space.storages)
        found[node.name] = None
    return [*found, *(name for name in (*space.inputs, *space.storages) if name not in found)]
