"""What a search looked at beside the plan that it returns: rows of its report, which are written and never read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Tried:
    """One way to run the model, and what came of it; None stands for what is not known.

    mesh: sizes of the logical mesh of each stage, "2x4", or "2x4 + 4" where stages differ; setting: the same in words,
    on unequal devices. recompute: by name, or how much. estimated: before it was simulated. infeasible: why it
    is no plan. seconds: what looking at it took, of which solve_seconds were spent on its placements.
    """

    mesh: str | None = None
    setting: str | None = None
    template: str | None = None
    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    recompute: str | int | None = None
    estimated_ns: int | None = None
    estimated_bytes: int | None = None
    infeasible: str | None = None
    seconds: float | None = None
    step_time_ns: int | None = None
    peak_bytes: int | None = None
    solve_seconds: float | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Tried:
        """The row of a plan file, as far as it says what is known here."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in row.items() if name in names})

    @property
    def told(self) -> dict[str, Any]:
        """What is known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}
