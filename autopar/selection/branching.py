"""Closes the gap that prices leave: branch and bound whose relaxation is the Lagrangian dual.

Prices cannot tell apart a mixture of two choices, one that uses too much and one that uses less than it might,
from a choice between. A node is therefore split at the variable whose usage differs most, in price, among the
choices that the best prices cannot tell apart: one child may only take its frugal values, the other only the rest.
Best bound first. Each child starts from its parent's prices, so that few rounds do.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.selection.duals import Mask, PriceSearch
from autopar.selection.problem import INFINITE
from autopar.selection.toulbar_worker import Result

_ROUNDS = 5
"""So many price updates at most before a node is split."""
_ACTIVE = 4
"""So many choices that cost least under the best prices are compared."""


@dataclass(eq=False)
class SearchNode:
    """A restriction under evaluation."""

    search: PriceSearch
    rounds: int = 0


class PriceBranching:
    """The tree: whoever owns it minimises the networks of the nodes that it hands out, several at a time if need be."""

    def __init__(self, root: PriceSearch) -> None:
        self._open: list[tuple[int, int, PriceSearch]] = []
        self._waiting: deque[SearchNode] = deque()
        self._running: list[SearchNode] = []
        self._unsplittable = INFINITE
        self._count = 0
        self._push(root)

    @property
    def lower_bound(self) -> int:
        """No choice costs less than this, or than the upper bounds that nodes were closed by."""
        evaluated = [node.search.lower_bound for node in (*self._waiting, *self._running)]
        return min(self._unsplittable, *(bound for bound, _, _ in self._open[:1]), *evaluated, INFINITE)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to split or to evaluate."""
        return not (self._open or self._waiting or self._running)

    def next_node(self, upper_bound: int) -> SearchNode | None:
        """Hands out a node to minimise; None when all that are left are handed out already."""
        self._waiting = deque(node for node in self._waiting if node.search.lower_bound < upper_bound)
        while not self._waiting and self._open:
            bound, _, search = heapq.heappop(self._open)
            if bound < upper_bound:
                self._split(search)
        if not self._waiting:
            return None
        node = self._waiting.popleft()
        self._running.append(node)
        return node

    def learn(self, node: SearchNode, result: Result, upper_bound: int) -> list[int] | None:
        """Takes in the minimum of a node's network; returns the choice."""
        self._running.remove(node)
        values = node.search.learn(result)
        node.rounds += 1
        if node.search.lower_bound < upper_bound:
            if node.search.settled or node.rounds >= _ROUNDS:
                self._push(node.search)
            else:
                self._waiting.append(node)
        return values

    def _push(self, search: PriceSearch) -> None:
        self._count += 1
        heapq.heappush(self._open, (search.lower_bound, self._count, search))

    def _split(self, search: PriceSearch) -> None:
        sides = split(search)
        if sides is None and without_what_cannot_fit(search, search.allowed) is not None:
            self._unsplittable = min(self._unsplittable, search.lower_bound)
        for side in sides or ():
            fitting = without_what_cannot_fit(search, side)
            if fitting is not None:
                self._waiting.append(SearchNode(search.restricted(fitting)))


def split(search: PriceSearch) -> tuple[Mask, Mask] | None:
    """Returns the allowed values of two children, together those of the parent; None when all use the same."""
    offsets = search.usage.offsets
    for usages in _weights(search):
        low, high = _contested_range(search, usages)
        if (high > low).any():
            v = int(np.argmax(high - low))
            part = slice(offsets[v], offsets[v + 1])
            frugal = usages[part] <= (low[v] + high[v]) / 2
            sides = search.allowed.copy(), search.allowed.copy()
            sides[0][part] &= frugal
            sides[1][part] &= ~frugal
            return sides
    return None


def _weights(search: PriceSearch) -> list[npt.NDArray[np.float64]]:
    """Returns what values use, flat: at the best prices, else beside the room of the rows, else in all."""
    rooms = {t: 1.0 / max(1, search.network.room_at(t)) for t in search.times}
    return [search.priced_usages(search.prices), search.priced_usages(rooms), search.usage.total_usages()]


def _contested_range(
    search: PriceSearch, usages: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns the least and the most that the active choices use of each variable, or where they agree all values."""
    positions = search.usage.offsets[:-1]
    active = [usages[positions + seen.values] for seen in search.most_active(_ACTIVE)]
    if active and (np.max(active, axis=0) > np.min(active, axis=0)).any():
        return np.min(active, axis=0), np.max(active, axis=0)
    least = np.minimum.reduceat(np.where(search.allowed, usages, np.inf), positions)
    return least, np.maximum.reduceat(np.where(search.allowed, usages, -np.inf), positions)


def without_what_cannot_fit(search: PriceSearch, allowed: Mask) -> Mask | None:
    """Returns the values that fit beside the least usage of all other variables at the known rows; None: none do."""
    offsets = search.usage.offsets
    left = allowed.copy()
    for row_time, usages in search.rows.items():
        least = np.minimum.reduceat(np.where(left, usages, INFINITE), offsets[:-1])
        slack = search.network.room_at(row_time) - int(least.sum())
        if slack < 0:
            return None
        left &= usages - np.repeat(least, np.diff(offsets)) <= slack
    return left
