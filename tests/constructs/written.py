"""A model as a text with places for lines, in one of which it differs from the plain one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha1


@dataclass(frozen=True)
class Written:
    """The part of `Model` that is asked for where a plan is judged."""

    what: str
    source: str
    seed: int = 0
    used: tuple[()] = ()
    is_random: bool = False

    @property
    def name(self) -> str:
        """Of its module."""
        return f"written_{sha1(self.source.encode()).hexdigest()[:12]}"


def written(what: str, text: str, lines: Mapping[str, str]) -> Written:
    """The text with each place filled; several lines in one place are indented as the place is."""
    for place, given in lines.items():
        before, _, after = text.partition("{" + place + "}")
        indent = " " * (len(before) - len(before.rstrip(" ")))
        text = before + given.replace("\n", f"\n{indent}") + after
    return Written(what, text)
