"""What forward asks the machine that it runs on: clocks, and the system's random bytes.

While a model is exported it is noted what it asks, and in which line. When forward runs again, clocks tell later times,
by jumps from nanoseconds to years: whatever forward takes of the time (its last digit, the hour), it is told another.
What torch and autopar ask for themselves, other threads (progress bars), what runs while garbage is collected,
and what log records are dated with, stays what it is.
"""

from __future__ import annotations

import datetime
import gc
import logging
import os
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from autopar.trace.lines import place_of

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
_BROKEN_DOWN = ("localtime", "gmtime", "ctime")
"""What tells the time in parts: now, where it is given no time."""
_NOTED_ALONE = ("urandom", "getrandom", "times", "getloadavg")
"""Of module os: tells something else each time anyway."""
_LARGEST_JUMP = 56
"""Of a clock between two questions, as a power of two of nanoseconds: two years."""
_LATEST_NS = int(5_000 * 365 * 86_400e9)
"""So far a calendar is set forward: years end at 9999."""
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
_OWN = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


class MachineAnswers:
    """Stands between forward, on this thread, and the machine. asked: what it asked, by name, with its line's place."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[str, int] | None] = {}
        self._random, self._jumped_ns = random.Random(0), 0
        self._thread, self._collecting = threading.get_ident(), False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While inside, what forward asks is noted; it is told the truth."""
        others = {own: self._noting(name, own) for name, own in (_clocks() | _others()).items()}
        with self._answering(others | _calendars(self._noting)):
            yield

    @contextmanager
    def later(self) -> Iterator[None]:
        """While inside, forward is told a later time whenever it asks."""
        others = {own: self._jumping(name, own) for name, own in _clocks().items()}
        with self._answering(others | _calendars(self._jumping)):
            yield

    @contextmanager
    def _answering(self, others: dict[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
        with _replaced(others), _told_of_garbage(partial(self._collects, True), partial(self._collects, False)):
            yield

    def _collects(self, collecting: bool) -> None:
        self._collecting = collecting

    def _noting(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if self._is_forwards(frame):
                self.asked.setdefault(name, place_of(frame))
            return own(*args, **kwargs)

        return noted

    def _jumping(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def jumped(*args: Any, **kwargs: Any) -> Any:
            if not self._is_forwards(sys._getframe(1)):
                return own(*args, **kwargs)
            if name.rpartition(".")[2] in _BROKEN_DOWN:
                return own(*args or [time.time() + self._jump_ns() % _LATEST_NS / 1e9])
            return self._later(own(*args, **kwargs), name)

        return jumped

    def _later(self, told: Any, name: str) -> Any:
        jumped_ns = self._jump_ns()
        if isinstance(told, datetime.date):
            return told + datetime.timedelta(microseconds=jumped_ns % _LATEST_NS / 1e3)
        return told + (jumped_ns if name.endswith("_ns") else jumped_ns / 1e9)

    def _jump_ns(self) -> int:
        self._jumped_ns += int(2 ** self._random.uniform(0, _LARGEST_JUMP))
        return self._jumped_ns

    def _is_forwards(self, frame: FrameType) -> bool:
        return threading.get_ident() == self._thread and not self._collecting and _asks(frame)


def _clocks() -> dict[str, Callable[..., Any]]:
    names = [*(name for clock in _CLOCKS for name in (clock, f"{clock}_ns")), *_BROKEN_DOWN]
    return {f"time.{name}": getattr(time, name) for name in names if hasattr(time, name)}


def _others() -> dict[str, Callable[..., Any]]:
    return {f"os.{name}": getattr(os, name) for name in _NOTED_ALONE if hasattr(os, name)}


def _calendars(answer: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> dict[type, type]:
    """Classes that stand for date and datetime, to be asked the time by the answer to each of their questions."""
    return {own: _Calendar(own.__name__, (own,), _asked_by(own, answer)) for own in (datetime.date, datetime.datetime)}


def _asked_by(own: type, answer: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> dict[str, Any]:
    questions = [name for name in ("now", "today", "utcnow") if hasattr(own, name)]
    return {name: staticmethod(answer(f"{own.__name__}.{name}", getattr(own, name))) for name in questions}


class _Calendar(type):
    """Of a class that makes what the class it stands for makes, and has its instances."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.mro()[1](*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.mro()[1])


def _asks(frame: FrameType | None) -> bool:
    """Whether a question is the model's, through the standard library or not: what dates a log record is not."""
    asking = frame
    while frame is not None and _is_of_library(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") == "logging":
            return False
        frame = frame.f_back
    is_models = frame is not None and not frame.f_code.co_filename.startswith(_OWN)
    return is_models and not _makes_a_record(asking)


def _makes_a_record(frame: FrameType | None) -> bool:
    """Whether a log record is made, by whatever makes them: packages put their own in that place, which date them."""
    while frame is not None and frame.f_code is not logging.Logger.makeRecord.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def _told_of_garbage(began: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """While inside, begins and ends of the collector's runs are told, around all else that it calls."""

    def first(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            began()

    def last(phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            ended()

    gc.callbacks.insert(0, first)
    gc.callbacks.append(last)
    try:
        yield
    finally:
        gc.callbacks.remove(first)
        gc.callbacks.remove(last)


@cache
def _is_of_library(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STDLIB) and "site-packages" not in file)


@contextmanager
def _replaced(others: dict[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """While inside, every module has others in the place of some functions, under whatever name it took them."""
    by_id = {id(own): other for own, other in others.items()}
    places = _places(frozenset(by_id))
    try:
        for names, name, value in places:
            names[name] = by_id[id(value)]
        yield
    finally:
        for names, name, value in places:
            names[name] = value


_FOUND_HERE = {id(own): own for own in (*_clocks().values(), *_others().values(), datetime.date, datetime.datetime)}
"""By their ids, which nothing else has while they are held: what is looked for where nobody has replaced it."""

_LOOKED_AT: dict[frozenset[int], dict[str, tuple[ModuleType, int, list[str]]]] = {}
"""Installed modules by the functions that were looked for: the module, how much it held, under which names it had some.

Looking through all again takes an eighth of the time that tracing a small model does. What is not installed, which
may be the model's own, is looked through each time, and so is what holds more, or less, than it did."""


def _places(wanted: frozenset[int]) -> list[tuple[dict[str, Any], str, Any]]:
    """Where modules hold objects of these ids: the module's names, the name, and the object."""
    known = _LOOKED_AT.setdefault(wanted, {}) if wanted <= _FOUND_HERE.keys() else {}
    places = []
    modules: list[tuple[str, Any]] = list(sys.modules.items())  # some are none
    for module_name, module in modules:
        seen = known.get(module_name)
        if seen is not None and seen[0] is module and seen[1] == len(module.__dict__):
            found = seen[2]
        elif isinstance(module, ModuleType):
            is_own = module.__name__.startswith(("torch.", "autopar."))
            found = [] if is_own else _names_in(module, wanted)
            if is_own or _is_installed(module):
                known[module_name] = module, len(module.__dict__), found
        else:
            continue
        if found:
            names = module.__dict__
            places += [(names, name, names[name]) for name in found if id(names.get(name)) in wanted]
    return places


def _names_in(module: ModuleType, wanted: frozenset[int]) -> list[str]:
    names = module.__dict__
    if wanted.isdisjoint(map(id, list(names.values()))):  # most modules have none of them
        return []
    return [name for name, value in list(names.items()) if id(value) in wanted]


def _is_installed(module: ModuleType) -> bool:
    file = module.__dict__.get("__file__")
    return isinstance(file, str) and ("site-packages" in file or file.startswith(_STDLIB))
