"""Shares time among ways to search, in proportion to what each has gained in it of late."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

_MEMORY, _MEMORY_S = 0.9, 0.5
"""How much of the past a mean keeps at each step, or for each so many seconds of a longer one."""
_LEAST_SHARE = 0.1
"""The time given to a way, relative to the best one."""

Way = TypeVar("Way")


@dataclass
class _WaysWorth:
    """What steps of one way have been worth."""

    seconds: float
    """Mean time of one."""
    gain: float
    """Mean gain of one."""


class Worths(Generic[Way]):
    """What each way was worth; None while it has not been tried."""

    def __init__(self, ways: Iterable[Way], chance: random.Random) -> None:
        self._worths: dict[Way, _WaysWorth | None] = dict.fromkeys(ways)
        self._chance = chance

    def choose(self, seconds: float) -> Way | None:
        """Returns a way not yet tried, else any that is likely to end in so many seconds; None where none is."""
        affordable = {way: known for way, known in self._worths.items() if not known or known.seconds <= seconds}
        for way, known in affordable.items():
            if known is None:
                return way
        tried = {way: known for way, known in affordable.items() if known}
        if not tried:
            return None
        rates = {way: known.gain / known.seconds for way, known in tried.items()}
        floor = max(_LEAST_SHARE * max(rates.values()), 1e-9)
        weights = [max(rates[way], floor) / known.seconds for way, known in tried.items()]
        return self._chance.choices(list(tried), weights)[0]

    def remember(self, way: Way, seconds: float, gain: int) -> None:
        """Takes in one more step."""
        known = self._worths[way] or _WaysWorth(seconds, gain)
        kept = _MEMORY ** max(1.0, seconds / _MEMORY_S)
        known.seconds = kept * known.seconds + (1 - kept) * seconds
        known.gain = kept * known.gain + (1 - kept) * gain
        self._worths[way] = known
