"""The time of a search: it is over at its end, or as soon as the user asks for that (Ctrl-C).

A search that is interrupted ends with the best plan so far; a second Ctrl-C, or the first with no plan yet, gives up.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_asked = threading.Event()


@dataclass(frozen=True)
class Clock:
    """A span of time, in seconds of `time.monotonic`."""

    began: float
    end: float

    @classmethod
    def of(cls, seconds: float) -> Clock:
        """From now on."""
        now = time.monotonic()
        return cls(now, now + seconds)

    def part(self, share: float) -> Clock:
        """The first part of it."""
        return Clock(self.began, self.began + share * (self.end - self.began))

    @property
    def passed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Until its end; less than nothing after that."""
        return self.end - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to begin: its time is over, or the user has asked for an end."""
        return _asked.is_set() or time.monotonic() > self.end

    @property
    def stop_reason(self) -> str:
        """Of a search that it has ended."""
        return "interrupted" if _asked.is_set() else "time limit"


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
