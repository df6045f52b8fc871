"""Plays ranks that do unlike work, because of branches, side by side: they meet in the collectives between them.

Each plays the same pass in a thread of its own, and only one thing passes between them: when a collective over an axis
with branches starts, which is when the last of its ranks is ready. So the result does not depend on which thread runs
when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from autopar.simulate.player import Meet

Key = tuple[int, ...]
Result = TypeVar("Result")


class Meeting:
    """Where the ranks meet, each of which is named by its coordinates on the axes with branches.

    axes: the positions of these axes in the logical mesh, in the order of the coordinates.
    """

    def __init__(self, axes: Sequence[int], ranks: Sequence[Key]) -> None:
        self._axes, self._ranks = list(axes), list(ranks)
        self._groups: dict[tuple[int, Key], _Group] = {}
        for position in range(len(axes)):
            for rank in ranks:
                group = self._groups.setdefault((position, _others(rank, position)), _Group())
                group.members.append(rank)
        self._threads = ThreadPoolExecutor(len(ranks))

    def play(self, begins: Sequence[int], plays: Sequence[Callable[[Meet], Result]]) -> list[Result]:
        """What each rank's play returns, which counts its times from its own begin; all of them run at once."""
        for group in self._groups.values():
            group.open()
        futures = [
            self._threads.submit(self._run, play, self._meet(rank, begin))
            for rank, begin, play in zip(self._ranks, begins, plays, strict=True)
        ]
        errors = [future.exception() for future in futures]
        for error in sorted(
            (e for e in errors if e is not None), key=lambda e: isinstance(e, threading.BrokenBarrierError)
        ):
            raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _run(self, play: Callable[[Meet], Result], meet: Meet) -> Result:
        try:
            return play(meet)
        except BaseException:
            for group in self._groups.values():
                group.barrier.abort()
            raise

    def _meet(self, rank: Key, begin: int) -> Meet:
        def meet(axis: int, start: int) -> int:
            if axis not in self._axes:
                return start
            position = self._axes.index(axis)
            return self._groups[position, _others(rank, position)].latest(rank, begin + start) - begin

        return meet


def _others(rank: Key, position: int) -> Key:
    return rank[:position] + rank[position + 1 :]


class _Group:
    """Ranks that differ on one axis alone."""

    def __init__(self) -> None:
        self.members: list[Key] = []
        self.open()

    def open(self) -> None:
        self._starts: list[dict[Key, int]] = [{}, {}]  # of this meeting and the next, in turn
        self._counts = dict.fromkeys(self.members, 0)
        self.barrier = threading.Barrier(max(1, len(self.members)))

    def latest(self, rank: Key, start: int) -> int:
        """Waits for all; the latest start of any. One that is ahead writes down its next start elsewhere."""
        turn = self._counts[rank] % 2
        self._counts[rank] += 1
        self._starts[turn][rank] = start
        self.barrier.wait()
        return max(self._starts[turn].values())
