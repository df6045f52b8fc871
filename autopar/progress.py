"""Where the search says how far it is: the caller's function, a line a pass and a bar on a terminal, or nowhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.clock import Clock

Report = Callable[[str], None]
Ended = Callable[[str, str], None]
"""Takes the name of a pass that has ended, and what it made."""


@contextmanager
def reporting(report: Report | None, total: int) -> Iterator[Report]:
    """Yields what takes one line for each of `total` candidates; None means a bar when stderr is a terminal."""
    if report is not None:
        yield report
    elif not sys.stderr.isatty():
        yield lambda line: None
    else:
        with _bar() as bar:
            task = bar.add_task("searching", total=total)
            yield lambda line: bar.update(task, advance=1, description=line)


def reporting_passes(report: Report | None) -> Ended:
    """Reports a line for each pass that has ended: what it made, and how long it took since the one before."""
    told, clock = report or (_printed if sys.stderr.isatty() else None), Clock.of_time(0.0)

    def ended(name: str, made: str) -> None:
        nonlocal clock
        if told is not None:
            told(f"{name}: {made} ({clock.passed_s:.1f} s)")
        clock = Clock.of_time(0.0)

    return ended


def _printed(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False)


def _bar() -> Progress:
    """A bar that leaves nothing behind when it is done, so that a printed plan stands alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
