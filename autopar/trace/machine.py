"""What forward asks the machine that it runs on: clocks, and the system's random bytes.

While a model is exported it is noted what it asks, and in which line. When forward runs again, clocks tell later times,
by jumps from nanoseconds to years: whatever forward takes of the time (its last digit, the hour), it is told another.
What torch and autopar ask for themselves, and what log records are dated with, stays what it is.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from autopar.trace.evidence import place_of

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_LARGEST_JUMP = 56
"""Of a clock between two questions, as a power of two of nanoseconds: two years."""
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
_OWN = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


class MachineAnswers:
    """Stands between forward and the machine. asked: what forward asked, by name, with the place of its line."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[str, int] | None] = {}
        self._random, self._jumped_ns = random.Random(0), 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While inside, what forward asks is noted; it is told the truth."""
        with _replaced({own: self._noting(name, own) for name, own in _functions().items()}):
            yield

    @contextmanager
    def later(self) -> Iterator[None]:
        """While inside, forward is told a later time whenever it asks."""
        clocks = {name: own for name, own in _functions().items() if own is not os.urandom}
        with _replaced({own: self._jumping(own, name.endswith("_ns")) for name, own in clocks.items()}):
            yield

    def _noting(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            frame = sys._getframe(1)
            if _is_forwards(frame):
                self.asked.setdefault(name, place_of(frame))
            return own(*args)

        return noted

    def _jumping(self, own: Callable[..., Any], is_ns: bool) -> Callable[..., Any]:
        def jumped(*args: Any) -> Any:
            if not _is_forwards(sys._getframe(1)):
                return own(*args)
            self._jumped_ns += int(2 ** self._random.uniform(0, _LARGEST_JUMP))
            return own(*args) + (self._jumped_ns if is_ns else self._jumped_ns / 1e9)

        return jumped


def _functions() -> dict[str, Callable[..., Any]]:
    names = [name for clock in _CLOCKS for name in (clock, f"{clock}_ns") if hasattr(time, name)]
    return {f"time.{name}": getattr(time, name) for name in names} | {"os.urandom": os.urandom}


def _is_forwards(frame: FrameType | None) -> bool:
    """Whether a question is the model's, through the standard library or not: what dates a log record is not."""
    while frame is not None and _is_of_library(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") == "logging":
            return False
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_OWN)


@cache
def _is_of_library(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STDLIB) and "site-packages" not in file)


@contextmanager
def _replaced(others: dict[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """While inside, every module has others in the place of some functions, under whatever name it took them."""
    by_id = {id(own): other for own, other in others.items()}
    places = [
        (names, name, value)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and not module.__name__.startswith(("torch.", "autopar."))
        for names in (vars(module),)
        for name, value in list(names.items())
        if id(value) in by_id
    ]
    try:
        for names, name, value in places:
            names[name] = by_id[id(value)]
        yield
    finally:
        for names, name, value in places:
            names[name] = value


__all__ = ["MachineAnswers"]
