"""Schedules as orders of passes: complete, possible, and with the bubbles that theory gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.simulate.passes import Turn, turns

FORWARD, BACKWARD = 1, 2  # time units of a pass of one chunk


def orders(schedule: str, submeshes: int, chunks: int, microbatches: int) -> list[list[Turn]]:
    stages_of = [[chunk * submeshes + p for chunk in range(chunks)] for p in range(submeshes)]
    return turns(schedule, stages_of, microbatches, trains=True)


def makespan(rows: list[list[Turn]], num_stages: int) -> int:
    """Plays the orders with unit times and no transfers. Fails when they wait for each other."""
    ends: dict[Turn, int] = {}
    free, heads = [0] * len(rows), [0] * len(rows)
    while any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        before = sum(heads)
        for p, row in enumerate(rows):
            while heads[p] < len(row) and all(turn in ends for turn in needed(row[heads[p]], num_stages)):
                turn = row[heads[p]]
                begin = max([free[p], *(ends[other] for other in needed(turn, num_stages))])
                ends[turn] = free[p] = begin + (FORWARD if turn.is_forward else BACKWARD)
                heads[p] += 1
        assert sum(heads) > before, "deadlock"
    return max(free)


def needed(turn: Turn, num_stages: int) -> list[Turn]:
    stage, is_forward, microbatch = turn
    if is_forward:
        return [Turn(stage - 1, True, microbatch)] if stage else []
    later = [Turn(stage + 1, False, microbatch)] if stage < num_stages - 1 else []
    return [Turn(stage, True, microbatch), *later]


def in_flight(row: list[Turn]) -> int:
    held = most = 0
    for turn in row:
        held += 1 if turn.is_forward else -1
        most = max(most, held)
    return most


CASES = st.tuples(
    st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 6), st.integers(2, 3), st.integers(1, 5)
)


@given(CASES)
@settings(max_examples=150, deadline=None)
def test_every_pass_is_made_once_in_a_possible_order_with_the_known_bubble(case: tuple[str, int, int, int]) -> None:
    schedule, submeshes, chunks, rounds = case
    chunks = chunks if schedule == "interleaved" and submeshes > 1 else 1
    schedule = schedule if submeshes > 1 else "1f1b"
    microbatches = rounds * submeshes
    rows = orders(schedule, submeshes, chunks, microbatches)
    stages = chunks * submeshes
    passes = [(s, f, m) for s in range(stages) for f in (True, False) for m in range(microbatches)]
    assert sorted(tuple(turn) for row in rows for turn in row) == sorted(passes)
    work = chunks * microbatches * (FORWARD + BACKWARD)
    bubble = (submeshes - 1) * (FORWARD + BACKWARD)
    assert makespan(rows, stages) == work + bubble  # of 1/chunks of a submesh's share: Megatron-LM (SC'21), 2.2


HELD: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda p, count, microbatches: microbatches,
    "1f1b": lambda p, count, microbatches: min(microbatches, count - p),
}


@pytest.mark.parametrize("schedule", HELD)
@pytest.mark.parametrize(("count", "microbatches"), [(4, 8), (4, 2), (3, 7)])
def test_microbatches_in_flight(schedule: str, count: int, microbatches: int) -> None:
    rows = orders(schedule, count, 1, microbatches)
    assert [in_flight(row) for row in rows] == [HELD[schedule](p, count, microbatches) for p in range(count)]


def test_interleaving_refuses_microbatches_that_make_no_equal_rounds() -> None:
    with pytest.raises(PlanError, match=r"equal rounds over 4 submeshes, found 9; take a multiple of 4"):
        orders("interleaved", 4, 2, 9)


def test_without_training_there_are_only_forward_passes() -> None:
    assert turns("1f1b", [[0], [1]], 2, trains=False)[1] == [Turn(1, True, 0), Turn(1, True, 1)]
