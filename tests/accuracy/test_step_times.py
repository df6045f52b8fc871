"""How predicted step times are judged."""

from __future__ import annotations

import pytest

from autopar.ir.placement import I, P, R, S
from autopar.ir.redistribution import Step
from autopar.simulate.lowering import copied_bytes
from benchmarks.accuracy.cpu import Row, contenders, losses, measured, spearman, summary
from benchmarks.accuracy.pairs import Pair


def row(model: str, plan: str, predicted: float, found: float) -> Row:
    return Row(Pair(model, plan), predicted, found, 0.0, 0.0, found, 1.25, found / 1.25)


ROWS = [row("gpt", "dp", 90, 100), row("gpt", "tp", 100, 80), row("moe", "dp", 50, 40), row("moe", "tp", 55, 50)]


def test_the_figures_are_those_of_the_rows() -> None:
    found = summary(ROWS)
    assert found["mape"] == pytest.approx((0.1 + 0.25 + 0.25 + 0.1) / 4)
    assert found["worst"] == pytest.approx(0.25)


def test_plans_near_the_fastest_and_the_one_predicted_best_are_timed_again() -> None:
    rows = [row("gpt", "dp", 90, 100), row("gpt", "tp", 95, 80), row("gpt", "sp", 80, 120), row("gpt", "zero1", 99, 87)]
    alone = [row("moe", "dp", 50, 40), row("moe", "tp", 55, 50)]
    assert [pair.plan for pair in contenders([*rows, *alone])] == ["sp", "tp", "zero1"]


def test_of_plans_timed_again_ratios_within_a_round_count() -> None:
    def rounds(*times: float) -> list[tuple[float, float, float, float]]:
        return [(time, 0.0, time, 1.0) for time in times]

    settled = {"gpt/dp": rounds(102, 204, 51), "gpt/tp": rounds(100, 200, 50), "gpt/zero1": rounds(204, 51, 102)}
    found = losses([*ROWS, row("gpt", "zero1", 95, 90)], settled)
    assert found["gpt"].share == pytest.approx(0.02) and found["gpt"].against == "tp", "a slow round is slow for all"
    assert (found["moe"].share, found["moe"].against) == (0.0, "")


def test_what_slow_cores_took_is_told_apart() -> None:
    even = [one.even for one in ROWS]
    assert even[0].error == pytest.approx(90 * 1.25 / 100 - 1) and even[0].predicted_ms == 90
    assert summary(even)["spearman"] == summary(ROWS)["spearman"], "a factor that all have changes no order"


def test_rank_correlation_sees_order_alone() -> None:
    assert spearman([1, 2, 3], [10, 200, 3000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


def test_the_rounds_that_others_disturbed_least_count() -> None:
    rounds = [
        (100.0, 0.0, 90.0, 1.0), (300.0, 0.5, 95.0, 1.0), (104.0, 0.1, 91.0, 1.04), (250.0, 0.4, 95.0, 1.0),
        (240.0, 0.3, 95.0, 1.0),
    ]  # fmt: skip
    assert measured(rounds) == (102.0, pytest.approx(4 / 102), pytest.approx(0.05), 90.5, pytest.approx(1.02), 100.0)
    quiet = [(100.0, 0.0, 90.0, 1.0), (110.0, 0.01, 90.0, 1.1), (130.0, 0.02, 90.0, 1.3), (90.0, 0.03, 90.0, 1.0)]
    assert measured(quiet)[:4] == (110.0, pytest.approx(30 / 110), pytest.approx(0.01), 90.0)
    assert measured(quiet)[4:] == (1.1, pytest.approx(100.0))


@pytest.mark.parametrize(
    ("before", "after", "forward", "backward"),
    [(P, I, 100, 0), (I, R, 0, 100), (S(0), R, 0, 0), (S(2), R, 100, 100), (S(0), S(1), 100, 100), (P, S(1), 100, 100)],
)
def test_copies_around_collectives(before: object, after: object, forward: int, backward: int) -> None:
    """A sum has a buffer of its own; shards along the first dim lie as they are sent."""
    step = Step(0, before, after)  # type: ignore[arg-type]
    assert (copied_bytes(step, 100, 0), copied_bytes(step, 100, 1)) == (forward, backward)
