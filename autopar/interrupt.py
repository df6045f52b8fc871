"""Ctrl-C during a search: it ends with the best plan so far; a second one, or the first with no plan yet, gives up."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = threading.Event()


class Interrupted(KeyboardInterrupt):
    """A search was asked to end before it had a plan. One that has a plan of another graph goes on with that."""


@contextmanager
def caught() -> Iterator[None]:
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


def is_asked() -> bool:
    """Whether the search is to end with what it has."""
    return _asked.is_set()


def ends(has_plan: bool) -> bool:
    """Whether a search that has a plan, or has none yet, ends here. Raises Interrupted where it has none."""
    if _asked.is_set() and not has_plan:
        raise Interrupted
    return _asked.is_set()
