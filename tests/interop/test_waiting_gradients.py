"""What 1f1b gains where gradients of stored tensors wait: as if it was played, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.interop import StageKind
from autopar.ir.schedule import BACKWARD, BACKWARD_WEIGHT, FORWARD, Turn, makes_rounds, turns
from autopar.staged.ways import hidden_bubble


def played(schedule: str, times: Sequence[int], microbatches: int, added: Sequence[int] = ()) -> int:
    """How long stages take that need so much of three for a microbatch: forward, and for each of two gradients.

    added: what each takes longer for the second of these, where that waits.
    """
    orders = turns(schedule, [[stage] for stage in range(len(times))], microbatches, True)
    ends: dict[Turn, int] = {}
    free, left = [0] * len(times), [list(order) for order in orders]
    while any(left):
        for stage, order in enumerate(left):
            while order and (begin := ready(order[0], len(times), ends)) is not None:
                turn = order.pop(0)
                is_whole = turn.direction == BACKWARD and schedule != "zero_bubble"
                length = times[stage] * (2 if is_whole else 1)
                length += added[stage] if added and turn.direction == BACKWARD_WEIGHT else 0
                free[stage] = ends[turn] = max(free[stage], begin) + length
    return max(free)


def ready(turn: Turn, stages: int, ends: dict[Turn, int]) -> int | None:
    before = turn.stage - 1 if turn.direction == FORWARD else turn.stage + 1
    if turn.direction == BACKWARD_WEIGHT or not 0 <= before < stages:
        return 0
    return ends.get(turn._replace(stage=before))


def estimated(times: Sequence[int], microbatches: int, added: Sequence[int] = ()) -> int:
    """Stages of one layer each."""
    nothing = np.zeros(len(times), np.int64)
    split = np.array(added or nothing)
    kind = StageKind("", 1, 3 * np.array(times), *[nothing] * 15, split, memory_limit=1)
    return hidden_bubble([kind] * len(times), range(len(times)), microbatches, "zero_bubble")


@pytest.mark.parametrize("stages", range(2, 9))
def test_of_equal_stages_it_is_exact(stages: int) -> None:
    for count in filter(lambda count: makes_rounds(count, stages), range(1, 25)):
        gain = played("1f1b", [5] * stages, count) - played("zero_bubble", [5] * stages, count)
        assert estimated([5] * stages, count) == gain


def test_of_stages_that_take_longer_in_two_parts_each_microbatch_is_later() -> None:
    for stages, count, longer in ((2, 2, 9), (3, 6, 1), (4, 4, 7), (6, 12, 30)):
        times, added = [9] * stages, [0] + [longer] * (stages - 1)
        gain = played("1f1b", times, count) - played("zero_bubble", times, count, added)
        assert estimated(times, count, added) == gain


@settings(max_examples=60, deadline=None)
@given(times=st.lists(st.integers(1, 40), min_size=2, max_size=6), rounds=st.integers(1, 3))
def test_of_unequal_stages_no_more_is_hidden_than_there_is(times: list[int], rounds: int) -> None:
    count = rounds * len(times)
    step = sum(3 * time for time in times) + (count - 1) * 3 * max(times)
    assert step - estimated(times, count) >= count * 3 * max(times)
    assert step - estimated(times, count) == pytest.approx(played("zero_bubble", times, count), rel=0.15)
