"""Where the search says how far it is: the caller's function, a bar on a terminal, or nowhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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


def _bar() -> Progress:
    """A bar that leaves nothing behind when it is done, so that a printed plan stands alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
