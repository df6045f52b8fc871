"""What travels where each rank has a slice of the experts and tokens of its own: rows, or slices, by the load.

A table holds from so many rows of the busiest rank on, up to the next line's:

    0 rows       tensor   rows go to all slices, and what these add to them home
    4,096        data     slices go to all rows, and their gradients home

Ranks that share slices see each other's loads, so that all read the same line. Whatever a table says, the same is
computed, and what is stored stays where it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autopar.errors import PlanError

TENSOR, DATA = "tensor", "data"
SLICE_WAYS = (TENSOR, DATA)
_LINE = re.compile(r"(\d{1,19}):([a-z]+)")
_FORM = '"0:tensor;4096:data": from so many rows of the busiest rank on, whether rows or slices travel'


class SliceWay(NamedTuple):
    """From `rows` rows of the busiest rank on, it is done so."""

    rows: int
    how: str

    def __str__(self) -> str:
        return f"{self.how}{f' from {self.rows:,} rows' if self.rows else ''}"


@dataclass(frozen=True)
class SliceTable:
    """Ways by load, that of the fewest rows first. Raises PlanError where they are none that ranks can take."""

    ways: tuple[SliceWay, ...] = (SliceWay(0, TENSOR),)

    def __post_init__(self) -> None:
        starts = [way.rows for way in self.ways]
        is_rising = bool(starts) and starts[0] == 0 and starts == sorted(set(starts))
        if not is_rising or any(way.how not in SLICE_WAYS for way in self.ways):
            raise PlanError(f"expected ways to compute sliced experts by load, as {_FORM}, found {self.text!r}")

    def at(self, rows: float) -> str:
        """What is done where the busiest rank has so many rows."""
        return next(way.how for way in reversed(self.ways) if way.rows <= rows or not way.rows)

    @property
    def hows(self) -> set[str]:
        """Every way that some load asks for."""
        return {way.how for way in self.ways}

    @property
    def text(self) -> str:
        """What `parse` reads again."""
        return ";".join(f"{rows}:{how}" for rows, how in self.ways)

    @staticmethod
    def parse(text: object) -> SliceTable:
        """Reads what `text` gives; of nothing, that rows travel at any load. Raises PlanError."""
        if not isinstance(text, str):
            raise PlanError(f"expected ways to compute sliced experts by load, as {_FORM}, found {text!r}")
        return _parsed(text)

    def __str__(self) -> str:
        return ", ".join(map(str, self.ways))


@lru_cache(maxsize=256)
def _parsed(text: str) -> SliceTable:
    if not text:
        return SliceTable()
    found = [_LINE.fullmatch(line) for line in text.split(";")]
    if not all(found):
        raise PlanError(f"expected ways to compute sliced experts by load, as {_FORM}, found {text[:200]!r}")
    return SliceTable(tuple(SliceWay(int(line[1]), line[2]) for line in found if line is not None))
