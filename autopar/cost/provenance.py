"""Where the numbers of a profile's block come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Provenance:
    """Where a block's numbers come from: `kind` is measured, datasheet, published, fitted or assumed."""

    kind: str
    source: str
    date: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.source} ({self.date})"
