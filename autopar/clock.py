"""The time of a search: counted work, so that what is found does not depend on how fast or busy a machine is.

    work    what searches do, counted where it is done (problems built and solved, plans simulated, rules tried), in
            seconds that it takes on an idle core (`tunables`): a budget ends after the same work everywhere
    guard   a limit by the wall clock, far beyond the budget; when it strikes, the search ends with what it has, says
            so, and may have found something else than on another machine

A search that is interrupted (Ctrl-C) ends with the best plan so far; a second Ctrl-C, or the first with no plan yet,
gives up.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

_asked = threading.Event()


class _Counter(threading.local):
    """Of this thread: the work that was done, and the guard of the search that runs."""

    work_s = 0.0
    guard_end = math.inf
    struck = False


_counter = _Counter()


def worked(seconds: float) -> None:
    """Counts work that was done: what an idle core takes for it, by a count that depends on nothing else."""
    _counter.work_s += seconds


def work_done_s() -> float:
    """All that this thread has counted."""
    return _counter.work_s


def worked_beside(seconds: float, since: float) -> None:
    """Counts work of another process, which began when the count stood at `since`: two at a time take no longer."""
    _counter.work_s = max(_counter.work_s, since + seconds)


@contextmanager
def guarded(seconds: float) -> Iterator[None]:
    """Ends all searches inside after so many seconds of the wall clock. Of several guards the outermost holds.

    Work is counted from zero inside: sums of floats depend on where they begin.
    """
    if _counter.guard_end < math.inf:
        yield
        return
    before, _counter.work_s = _counter.work_s, 0.0
    _counter.guard_end, _counter.struck = time.monotonic() + seconds, False
    try:
        yield
    finally:
        _counter.guard_end, _counter.struck = math.inf, False
        _counter.work_s += before


def guard_struck() -> bool:
    """Whether the guard of the search that runs has ended what it looked at."""
    _counter.struck |= time.monotonic() > _counter.guard_end
    return _counter.struck


def is_ending() -> bool:
    """Whether the search is to end with what it has: the user has asked for that, or the guard struck."""
    return _asked.is_set() or guard_struck()


@dataclass(frozen=True)
class Clock:
    """A span of counted work; with `is_counted` false, of the wall clock's time. In seconds."""

    began: float
    end: float
    is_counted: bool = True

    @classmethod
    def of(cls, seconds: float) -> Clock:
        """Of work, from now on."""
        now = _counter.work_s
        return cls(now, now + seconds)

    @classmethod
    def of_time(cls, seconds: float) -> Clock:
        """Of the wall clock's time, from now on: for whoever would rather have a limit kept than a result again."""
        now = time.monotonic()
        return cls(now, now + seconds, is_counted=False)

    @property
    def now(self) -> float:
        """Of work, or of time, in all."""
        return _counter.work_s if self.is_counted else time.monotonic()

    def part(self, share: float) -> Clock:
        """The first part of it."""
        return replace(self, end=self.began + share * (self.end - self.began))

    def within(self, seconds: float) -> Clock:
        """What is left of it, at most so much, from now on."""
        now = self.now
        return replace(self, began=now, end=min(self.end, now + seconds))

    @property
    def passed_s(self) -> float:
        """Since it began."""
        return self.now - self.began

    @property
    def left_s(self) -> float:
        """Until its end; nothing, or less than that, when it is over."""
        return 0.0 if guard_struck() else self.end - self.now

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to begin: all is done, the guard struck, or the user has asked for an end."""
        return _asked.is_set() or self.now >= self.end or guard_struck()

    @property
    def wait_until(self) -> float:
        """When a wait for another process ends, of `time.monotonic`."""
        return _counter.guard_end if self.is_counted else min(self.end, _counter.guard_end)

    @property
    def stop_reason(self) -> str:
        """Of a search that it has ended."""
        if _asked.is_set():
            return "interrupted"
        return "work limit" if self.is_counted and not guard_struck() else "time limit"


class Interrupted(KeyboardInterrupt):
    """A search was asked to end before it had a plan. One that has a plan of another graph goes on with that."""


@contextmanager
def interrupts_caught() -> Iterator[None]:
    """Takes interrupts while inside; only in the main thread, where Python delivers them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.clear()
    before = signal.signal(signal.SIGINT, _first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _asked.clear()


def _first(number: int, frame: FrameType | None) -> None:
    _asked.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("autopar: stopping with the best plan so far; interrupt again to give up", file=sys.stderr)


def is_interrupted() -> bool:
    """Whether the search is to end with what it has."""
    return _asked.is_set()


def ends(has_plan: bool) -> bool:
    """Whether a search that has a plan, or has none yet, ends here. Raises Interrupted where it has none."""
    if _asked.is_set() and not has_plan:
        raise Interrupted
    return _asked.is_set()
