"""How tokens travel to experts, by the load that is seen at run time: a table that a planner has priced.

A row holds from so many rows of the busiest rank on, up to the next one's:

    0 rows      flat, 1 chunk
    12,288      two-level, 4 chunks

"flat" sends to each rank that shares the experts at once; "two-level" along one mesh axis after the other, those inside
of a node first. Every rank of an exchange sees the loads of all, so that all read the same row. Whatever a table says,
the same is computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autopar.errors import PlanError

FLAT, TWO_LEVEL = "flat", "two-level"
EXCHANGES = (FLAT, TWO_LEVEL)
"""How tokens may travel to experts: to each rank at once, or along the ranks of a node first, then across nodes."""
MOST_CHUNKS = 8
"""In which tokens are exchanged: more are not worth their starts."""
EVERY_WAY = 1 << 60
"""More rows than any rank has: a row from there on is never taken, and memory counts it."""
_ROW = re.compile(r"(\d{1,19}):([a-z-]+):(\d{1,3})")
_FORM = '"0:flat:1;4096:two-level:4": from so many rows of the busiest rank on, how, and in how many chunks'


class ExchangeWay(NamedTuple):
    """From `rows` rows of the busiest rank on, tokens travel so, in so many chunks."""

    rows: int
    how: str
    chunks: int

    def __str__(self) -> str:
        start = f" from {self.rows:,} rows" if self.rows else ""
        return f"{self.how} in {self.chunks} chunk{'s' * (self.chunks > 1)}{start}"


@dataclass(frozen=True)
class ExchangeTable:
    """Ways by load, that of the fewest rows first. Raises PlanError where they are none that ranks can take."""

    ways: tuple[ExchangeWay, ...]

    def __post_init__(self) -> None:
        wrong = _fault(self.ways)
        if wrong:
            raise PlanError(f"expected ways to exchange tokens by load, as {_FORM}, found {wrong} in {self.text!r}")

    @property
    def chunks(self) -> int:
        """The most that any way has; those of the others divide it."""
        return max(way.chunks for way in self.ways)

    def at(self, rows: float) -> ExchangeWay:
        """The way that is taken where the busiest rank has so many rows."""
        return next(way for way in reversed(self.ways) if way.rows <= rows or not way.rows)

    @property
    def text(self) -> str:
        """What `parse` reads again."""
        return ";".join(f"{rows}:{how}:{chunks}" for rows, how, chunks in self.ways)

    @staticmethod
    def parse(text: object) -> ExchangeTable:
        """Reads what `text` gives. Raises PlanError."""
        if not isinstance(text, str):
            raise PlanError(f"expected ways to exchange tokens by load, as {_FORM}, found {text!r}")
        return _parsed(text)

    def __str__(self) -> str:
        return ", ".join(map(str, self.ways))


@lru_cache(maxsize=256)
def _parsed(text: str) -> ExchangeTable:
    found = [_ROW.fullmatch(row) for row in text.split(";")]
    if not all(found):
        raise PlanError(f"expected ways to exchange tokens by load, as {_FORM}, found {text[:200]!r}")
    rows = [row.groups() for row in found if row is not None]
    return ExchangeTable(tuple(ExchangeWay(int(start), how, int(chunks)) for start, how, chunks in rows))


def _fault(ways: Sequence[ExchangeWay]) -> str:
    """What is wrong with them, in words; nothing where nothing is."""
    starts = [way.rows for way in ways]
    if not ways or starts[0] != 0 or starts != sorted(set(starts)):
        return "no row from 0 on, or rows that do not rise"
    for way in ways:
        if way.how not in EXCHANGES:
            return f"{way.how!r}, which is none of {', '.join(EXCHANGES)},"
        if not 1 <= way.chunks <= MOST_CHUNKS:
            return f"{way.chunks} chunks, which are not 1 to {MOST_CHUNKS},"
        if max(own.chunks for own in ways) % way.chunks:
            return f"{way.chunks} chunks, which do not divide the most of any row,"
    return ""
