"""Plays configurations of one model whose graphs differ: of split sequences, and of exchanges in so many chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import inf

from autopar.contexts import for_sequences
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rewrites import in_chunks
from benchmarks.quality.experts.grid import Expert, Placed
from benchmarks.quality.experts.played import Played, Player, most_sharded


class Players:
    """As one `Player`, each configuration by that of its own graph.

    Bounds are of the most submeshes that a grid has for a shape, as each of their operators is the largest; and of as
    many as a configuration has, where that leaves it.
    """

    def __init__(self, graph: Graph, mesh: Mesh, grid: Iterable[Expert] = ()) -> None:
        """grid: what will be asked for."""
        self.graph, self.mesh = graph, mesh
        self._deepest = dict[Placed, tuple[Placed, int]]()
        for one in sorted(grid, key=lambda one: one.pp):
            placed = most_sharded(one.placed)
            self._deepest[_but_for_dp(placed)] = placed, one.pp
        self._player = cache(self._player_of)
        self.plain = self._player(False, False, 1)

    def of(self, placed: Placed) -> Player:
        """The one that plays such."""
        return self._player(placed.cp > 1, placed.cp > 1 and placed.context == "ring", placed.exchange_chunks)

    def _player_of(self, splits: bool, ring: bool, chunks: int) -> Player:
        graph = for_sequences(self.graph, ring)[0] if splits else self.graph
        return Player(in_chunks(graph, chunks)[0], self.mesh, self._deepest_of)

    def _deepest_of(self, placed: Placed, pp: int) -> tuple[Placed, int]:
        return self._deepest.get(_but_for_dp(placed), (placed, pp))

    @property
    def limit(self) -> int:
        """Bytes that a device may hold."""
        return self.plain.limit

    def least_ns(self, expert: Expert, own_count: bool = False) -> float:
        """As `Player.least_ns`."""
        return self.of(expert.placed).least_ns(expert, own_count)

    def likely_ns(self, expert: Expert) -> float:
        """As `Player.likely_ns`."""
        return self.of(expert.placed).likely_ns(expert)

    def likely_bytes(self, expert: Expert, own: bool = False) -> float:
        """As `Player.likely_bytes`."""
        return self.of(expert.placed).likely_bytes(expert, own)

    def played(self, expert: Expert, until_ns: float = inf) -> Played:
        """As `Player.played`."""
        return self.of(expert.placed).played(expert, until_ns)


def _but_for_dp(placed: Placed) -> Placed:
    return replace(placed, dp=0, zero=min(placed.zero, 1))
