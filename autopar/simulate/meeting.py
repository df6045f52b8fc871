"""Plays lanes of ranks that do unlike work side by side: they meet in the collectives between them.

Each plays the same pass in a thread of its own, and only one thing passes between them: when a collective over an axis
that joins lanes starts, which is when the last of them is ready. So the result does not depend on which thread runs
when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from autopar.simulate.player import Meet

Key = tuple[int, ...]
Result = TypeVar("Result")


class Meeting:
    """Where lanes meet. keys: by the position of an axis in the logical mesh, a key for each lane: lanes with one key
    take part in the same collectives over that axis. Over other axes no lane meets another.
    """

    def __init__(self, keys: Mapping[int, Sequence[Key]]) -> None:
        self._groups: dict[tuple[int, Key], _Group] = {}
        self._keys = keys
        for axis, own in keys.items():
            for lane, key in enumerate(own):
                self._groups.setdefault((axis, key), _Group()).members.append(lane)
        self._threads = ThreadPoolExecutor(max(map(len, keys.values()), default=1))

    def play(self, begins: Sequence[int], plays: Sequence[Callable[[Meet], Result]]) -> list[Result]:
        """What each lane's play returns, which counts its times from its own begin; all of them run at once."""
        for group in self._groups.values():
            group.open()
        futures = [
            self._threads.submit(self._run, play, self._meet(lane, begin))
            for lane, (begin, play) in enumerate(zip(begins, plays, strict=True))
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

    def _meet(self, lane: int, begin: int) -> Meet:
        def meet(axis: int, start: int) -> int:
            if axis not in self._keys:
                return start
            return self._groups[axis, self._keys[axis][lane]].latest(lane, begin + start) - begin

        return meet


class _Group:
    """Lanes that take part in the same collectives."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.open()

    def open(self) -> None:
        self._starts: list[dict[int, int]] = [{}, {}]  # of this meeting and the next, in turn
        self._counts = dict.fromkeys(self.members, 0)
        self.barrier = threading.Barrier(max(1, len(self.members)))

    def latest(self, lane: int, start: int) -> int:
        """Waits for all; the latest start of any. One that is ahead writes down its next start elsewhere."""
        turn = self._counts[lane] % 2
        self._counts[lane] += 1
        self._starts[turn][lane] = start
        self.barrier.wait()
        return max(self._starts[turn].values())
