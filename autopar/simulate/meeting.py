"""Plays lanes of ranks that do unlike work side by side: they meet in the collectives between them.

Each plays the same pass in a thread of its own, and only one thing passes between them: when a collective over an axis
that joins lanes starts, which is when the last of them is ready. So the result does not depend on which thread runs
when. Lanes that wait for others which will not come are told so: ranks would wait for ever.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from autopar.errors import PlanError
from autopar.simulate.player import Meet

Key = tuple[int, ...]
Result = TypeVar("Result")


class Meeting:
    """Where lanes meet. keys: by the position of an axis in the logical mesh, a key for each lane: lanes with one key
    take part in the same collectives over that axis. Over other axes no lane meets another.
    """

    def __init__(self, keys: Mapping[int, Sequence[Key]]) -> None:
        self._groups: dict[tuple[int, Key], list[int]] = {}
        self._keys = keys
        for axis, own in keys.items():
            for lane, key in enumerate(own):
                self._groups.setdefault((axis, key), []).append(lane)
        self._threads = ThreadPoolExecutor(max(map(len, keys.values()), default=1))
        self._changed = threading.Condition()

    def play(self, begins: Sequence[int], plays: Sequence[Callable[[Meet], Result]]) -> list[Result]:
        """What each lane's play returns, which counts its times from its own begin; all of them run at once.

        Raises PlanError where lanes wait for each other in unlike collectives.
        """
        self._busy, self._gone = len(plays), False  # lanes that neither wait nor have ended; whether one has failed
        self._met = {group: defaultdict[int, dict[int, int]](dict) for group in self._groups}  # starts, by number
        futures = [
            self._threads.submit(self._run, play, self._meet(lane, begin))
            for lane, (begin, play) in enumerate(zip(begins, plays, strict=True))
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, _Left)):
            if isinstance(error, _Left):
                raise PlanError(
                    "expected ranks that take part in the same collectives in the same order, found some that wait for "
                    f"others in one over axis {error.axis} which the others do not reach: this is a fault of autopar's"
                )
            raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _run(self, play: Callable[[Meet], Result], meet: Meet) -> Result:
        failed = True
        try:
            result = play(meet)
            failed = False
            return result
        finally:
            with self._changed:
                self._busy -= 1
                self._gone = self._gone or failed
                self._changed.notify_all()

    def _meet(self, lane: int, begin: int) -> Meet:
        numbers = dict.fromkeys(self._keys, 0)

        def meet(axis: int, start: int) -> int:
            if axis not in self._keys:
                return start
            numbers[axis] += 1
            return self._latest(axis, lane, numbers[axis], begin + start) - begin

        return meet

    def _latest(self, axis: int, lane: int, number: int, start: int) -> int:
        """Waits for all of the lane's group; the latest start of any."""
        group = axis, self._keys[axis][lane]
        size = len(self._groups[group])
        with self._changed:
            starts = self._met[group][number]
            starts[lane] = start
            if len(starts) == size:
                self._busy += size - 1  # those that waited go on
                self._changed.notify_all()
            else:
                self._busy -= 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: len(starts) == size or not self._busy or self._gone)
            if len(starts) < size:
                raise _Left(axis)
            self._met[group].pop(number - 1, None)
            return max(starts.values())


class _Left(Exception):
    """A lane waits for others that will not come."""

    def __init__(self, axis: int) -> None:
        super().__init__(axis)
        self.axis = axis
