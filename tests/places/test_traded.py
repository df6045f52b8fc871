"""A place traded against memory: the rung of a ladder, against all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.places.traded import TradedPlace

LIMIT = 1_000


@dataclass(eq=False)
class Ladder(TradedPlace):
    """One whose rungs are (peak, step), so that nothing is played. played: those that were asked for."""

    played: list[Any] = field(default_factory=list)

    def _with(self, plan: Any, again: Any) -> Any:
        self.played.append(again)
        return _plan(*again)


def _plan(peak_bytes: int, step_ns: int) -> Any:
    return SimpleNamespace(
        memory_limit=LIMIT, predicted=SimpleNamespace(peak_bytes=peak_bytes, step_time_ns=step_ns)
    )  # fmt: skip


def _rungs(rng: random.Random, straight: bool) -> list[tuple[int, int]]:
    """From a peak above the limit down, each slower."""
    peak, step, found = rng.randint(LIMIT + 1, 3 * LIMIT), 100, []
    for _ in range(rng.randint(1, 99)):
        found.append((peak, step))
        peak, step = max(0, peak - (20 if straight else rng.choice((0, 1, 5, 90)))), step + rng.randint(0, 3)
    return found


def _first(rungs: Sequence[tuple[int, int]], most_ns: float) -> tuple[int, int] | None:
    fitting = [rung for rung in rungs[1:] if rung[0] <= LIMIT]
    return fitting[0] if fitting and fitting[0][1] <= most_ns else None


def _found(rungs: Sequence[tuple[int, int]], most_ns: float) -> tuple[Any, list[Any]]:
    ladder: Any = Ladder(None, [], None, 0.0, 0.0)  # type: ignore[arg-type]
    plan = ladder._first_that_fits(_plan(*rungs[0]), rungs[1:], most_ns)
    return plan and (plan.predicted.peak_bytes, plan.predicted.step_time_ns), ladder.played


@pytest.mark.parametrize("seed", range(50))
def test_the_first_rung_that_fits_is_found(seed: int) -> None:
    rng = random.Random(seed)
    rungs, most_ns = _rungs(rng, straight=False), rng.choice((90, 130, 200, float("inf")))
    assert _found(rungs, most_ns)[0] == _first(rungs, most_ns)


def test_where_rungs_save_alike_few_are_played() -> None:
    counts = [len(_found(_rungs(random.Random(seed), straight=True), float("inf"))[1]) for seed in range(50)]
    assert max(counts) <= 5
