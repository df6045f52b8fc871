"""Where the search says how far it is: the caller's function, a line a pass and a bar on a terminal, or nowhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.clock import Clock

Report = Callable[[str], None]


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


class Passes:
    """A line for each pass that has ended: what it made, and how long it took."""

    def __init__(self, report: Report | None) -> None:
        self._report = report or (_printed if sys.stderr.isatty() else None)
        self._clock = Clock.of_time(0.0)

    def ended(self, name: str, made: str) -> None:
        """A pass has ended; the next begins."""
        if self._report is not None:
            self._report(f"{name}: {made} ({self._clock.passed_s:.1f} s)")
        self._clock = Clock.of_time(0.0)


def _printed(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False)


def _bar() -> Progress:
    """A bar that leaves nothing behind when it is done, so that a printed plan stands alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
