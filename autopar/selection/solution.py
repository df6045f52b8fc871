"""What a solver returns: a feasible choice, and how good it is known to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Solution:
    """A feasible choice with what is known about its quality."""

    choice: tuple[int, ...]
    """One strategy for each node."""
    cost: int
    """What was minimised, as the evaluator finds it: the total cost, or the peak usage (`minimise_peak`)."""
    lower_bound: int
    """No feasible choice costs less."""
    peak_usage: int
    stop_reason: str
    """"optimal": cost equals lower_bound; "gap limit": they are as close as asked; else "work limit", or "time limit"
    where a clock ended the search."""
    seconds: float
    seed: int
    method: str
    """The search that found the choice."""

    @property
    def gap(self) -> float:
        """(cost − lower bound) / cost: 0 when proven optimal."""
        return (self.cost - self.lower_bound) / self.cost if self.cost else 0.0
