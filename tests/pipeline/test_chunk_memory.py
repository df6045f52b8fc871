"""What submeshes hold of their chunks, beside every pass of the schedule counted one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, SCHEDULES
from autopar.staged.chunk_memory import Chunked, most_held, most_held_between


def counted(schedule: str, submeshes: int, microbatches: int, sizes: list[np.ndarray]) -> list[int]:
    """Of each submesh the most bytes at any backward pass."""
    kept, gradients, workspace = sizes
    chunks, found = len(kept), list[int]()
    for position in range(submeshes):
        held, begun, before, most = 0, set[int](), 0, 0
        for turn in SCHEDULES[schedule].order(position, submeshes, range(chunks), microbatches):
            own = int(workspace[turn.stage, position])
            if turn.direction == BACKWARD:
                begun.add(turn.stage)
                there = sum(int(gradients[chunk, position]) for chunk in begun)
                most = max(most, held + there + max(own, before))
                held -= int(kept[turn.stage, position])
            else:
                held, before = held + int(kept[turn.stage, position]), own
        found.append(most)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_equal_to_counting_all_passes(seed: int) -> None:
    rng = random.Random(seed)
    submeshes, chunks, rounds = rng.choice((2, 3, 4)), rng.choice((2, 3, 5)), rng.choice((1, 2, 3, 6))
    sizes = [np.array([[rng.randint(0, 50) for _ in range(submeshes)] for _ in range(chunks)]) for _ in range(3)]
    count = submeshes * rounds
    found = most_held("interleaved", submeshes, count, *sizes)
    assert found.tolist() == counted("interleaved", submeshes, count, sizes)


def test_the_head_of_a_model_is_in_flight_once() -> None:
    """The last chunk on the last submesh goes back as it came, though many microbatches of others are in flight."""
    kept = np.ones((4, 2), np.int64)
    kept[-1, -1] = 1_000
    nothing = np.zeros_like(kept)
    assert most_held("interleaved", 2, 8, kept, nothing, nothing)[-1] < 1_100


@pytest.mark.parametrize(("submeshes", "microbatches"), [(2, 4), (2, 11), (3, 7), (4, 8), (4, 40)])
def test_equal_to_counting_all_passes_where_some_backward_passes_come_in_two_parts(
    submeshes: int, microbatches: int
) -> None:
    rng = random.Random(submeshes * microbatches)
    of = Chunked(*(np.array([[rng.randint(0, 50) for _ in range(submeshes)] for _ in range(2)]) for _ in range(4)))
    for position, found in enumerate(most_held_between("dualpipev", submeshes, microbatches, of)):
        kept, waits, workspace, second = ([int(size) for size in sizes[:, position]] for sizes in of)
        held, most = 0, 0
        for stage, direction, _ in SCHEDULES["dualpipev"].order(position, submeshes, range(2), microbatches):
            held += kept[stage] if direction == FORWARD else 0
            most = max(most, held + (second if direction == BACKWARD_WEIGHT else workspace)[stage])
            held -= kept[stage] if direction in (BACKWARD, BACKWARD_INPUT) else 0
            held += waits[stage] if direction == BACKWARD_INPUT else 0
            held -= waits[stage] if direction == BACKWARD_WEIGHT else 0
        assert (found, held) == (most, 0)
