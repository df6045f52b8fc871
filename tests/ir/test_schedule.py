"""Schedules as orders of passes: complete, possible, and with the bubbles that theory gives them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import get_schedule_class

from autopar.errors import PlanError
from autopar.ir.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SCHEDULES,
    Schedule,
    Turn,
    num_in_two_parts,
    turns,
)
from autopar.runtime.arrivals import may_come_early

UNITS = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}  # of time, of a pass of one chunk


def orders(schedule: str, submeshes: int, chunks: int, microbatches: int) -> list[list[Turn]]:
    return turns(schedule, stages_on(schedule, submeshes, chunks), microbatches, trains=True)


def stages_on(schedule: str, submeshes: int, chunks: int) -> list[list[int]]:
    """Of each submesh."""
    on = SCHEDULES[schedule].in_turn(range(submeshes), chunks)
    return [[stage for stage, place in enumerate(on) if place == submesh] for submesh in range(submeshes)]


def makespan(rows: list[list[Turn]], num_stages: int, travel: float = 0) -> float:
    """Plays the orders with unit times. Fails when they wait for each other. travel: of what a stage on another submesh
    made, from the begin of the pass before on if it may be received that early."""
    ends: dict[Turn, float] = {}  # those backward but the second parts as if they were whole
    free, heads, asked = [0.0] * len(rows), [0] * len(rows), [0.0] * len(rows)
    home = {turn.stage: p for p, row in enumerate(rows) for turn in row}
    while any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        before = sum(heads)
        for p, row in enumerate(rows):
            while heads[p] < len(row) and all(turn in ends for turn in needed(row[heads[p]], num_stages)):
                turn = row[heads[p]]
                is_early = heads[p] > 0 and may_come_early(row[heads[p] - 1], turn)
                begin = free[p]
                for other in needed(turn, num_stages):
                    came = max(ends[other], asked[p] if is_early else free[p]) + travel
                    begin = max(begin, ends[other] if home[other.stage] == p else came)
                free[p], asked[p] = begin + UNITS[turn.direction], begin
                ends[as_awaited(turn)] = free[p]
                heads[p] += 1
        assert sum(heads) > before, "deadlock"
    return max(free)


def needed(turn: Turn, num_stages: int) -> list[Turn]:
    stage, direction, microbatch = turn
    if direction == FORWARD:
        return [Turn(stage - 1, FORWARD, microbatch)] if stage else []
    if direction == BACKWARD_WEIGHT:
        return [Turn(stage, BACKWARD, microbatch)]
    later = [Turn(stage + 1, BACKWARD, microbatch)] if stage < num_stages - 1 else []
    return [Turn(stage, FORWARD, microbatch), *later]


def as_awaited(turn: Turn) -> Turn:
    return turn._replace(direction=BACKWARD) if turn.direction == BACKWARD_INPUT else turn


def in_flight(row: list[Turn]) -> int:
    held = most = 0
    for turn in row:
        held += {FORWARD: 1, BACKWARD_INPUT: 0}.get(turn.direction, -1)
        most = max(most, held)
    return most


CASES = st.tuples(
    st.sampled_from([*SCHEDULES]),
    st.integers(1, 6),
    st.integers(2, 3),
    st.integers(1, 5),
)


@given(CASES)
@settings(max_examples=150, deadline=None)
def test_every_pass_is_made_once_in_a_possible_order_with_the_known_bubble(case: tuple[str, int, int, int]) -> None:
    schedule, submeshes, chunks, rounds = case
    schedule = schedule if submeshes > 1 else "1f1b"
    row = SCHEDULES[schedule]
    chunks = row.num_chunks or (chunks if row.has_chunks else 1)
    microbatches = max(rounds * submeshes, row.fewest(submeshes))
    rows = orders(schedule, submeshes, chunks, microbatches)
    stages = chunks * submeshes
    split = row.splits_backward
    directions = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if split else (FORWARD, BACKWARD)
    passes = [(s, f, m) for s in range(stages) for f in directions for m in range(microbatches)]
    assert sorted((t.stage, f, t.microbatch) for own in rows for t in own for f in parts_of(t, row)) == sorted(passes)
    work = 3 * chunks * microbatches
    # Of 1/chunks of a submesh's share: Megatron-LM (SC'21), 2.2; of forward + input - weight: Zero Bubble, 2.2.
    bubble = (submeshes - 1) * (1 if split else 3)
    assert makespan(rows, stages) == work + (2 * bubble if row.turns_back and microbatches == submeshes else bubble)


def parts_of(turn: Turn, row: Schedule) -> tuple[str, ...]:
    """A pass that others make in two parts may be whole."""
    is_both = row.splits_some and turn.direction == BACKWARD
    return (BACKWARD_INPUT, BACKWARD_WEIGHT) if is_both else (turn.direction,)


@given(CASES, st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_bubbles_and_what_is_held_are_as_the_row_says(case: tuple[str, int, int, int], microbatches: int) -> None:
    schedule, submeshes, chunks, _ = case
    row = SCHEDULES[schedule]
    chunks = row.num_chunks or (chunks if row.has_chunks else 1)
    if submeshes == 1 or not row.takes(microbatches, submeshes):
        return
    rows = orders(schedule, submeshes, chunks, microbatches)
    told = 3 * chunks * (microbatches + row.bubble(submeshes, microbatches, chunks))
    assert makespan(rows, submeshes * chunks) == told
    for position, own in enumerate(rows):
        left = submeshes - position
        held = row.in_flight(left, microbatches, chunks, submeshes)
        assert in_flight(own) == held, (position, own)
        if row.splits_backward and (position or row.splits_some):
            waiting = row.waiting(left, microbatches, chunks, submeshes)
            is_exact = not row.turns_back or not submeshes < microbatches < 2 * submeshes - 1
            assert most_waiting(own) == waiting or (most_waiting(own) < waiting and not is_exact)


@pytest.mark.parametrize("schedule", [row.name for row in SCHEDULES.values() if row.awaited])
@pytest.mark.parametrize(("submeshes", "chunks"), [(2, 2), (2, 5), (3, 3), (4, 2), (4, 7)])
def test_of_what_is_on_its_way_few_tensors_are_waited_for(schedule: str, submeshes: int, chunks: int) -> None:
    """However many microbatches there are: between the others, passes are made."""
    row = SCHEDULES[schedule]
    chunks = row.num_chunks or chunks
    for microbatches in (2 * submeshes, 6 * submeshes):
        rows = orders(schedule, submeshes, chunks, microbatches)
        assert row.awaited is not None
        awaited = row.awaited(submeshes, microbatches, chunks)
        longer = makespan(rows, submeshes * chunks, travel=0.125) - makespan(rows, submeshes * chunks)
        assert longer == 0.125 * awaited


HELD: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda p, count, microbatches: microbatches,
    "1f1b": lambda p, count, microbatches: min(microbatches, count - p),
    "zero_bubble": lambda p, count, microbatches: min(microbatches, count),
}


@pytest.mark.parametrize("schedule", HELD)
@pytest.mark.parametrize(("count", "microbatches"), [(4, 8), (4, 2), (3, 9)])
def test_microbatches_in_flight(schedule: str, count: int, microbatches: int) -> None:
    rows = orders(schedule, count, 1, microbatches)
    assert [in_flight(row) for row in rows] == [HELD[schedule](p, count, microbatches) for p in range(count)]


@pytest.mark.parametrize(("count", "microbatches"), [(4, 8), (4, 2), (3, 9), (8, 8)])
def test_microbatches_whose_gradients_wait(count: int, microbatches: int) -> None:
    """The first submesh has received nothing, so its first part is empty: none of its microbatches wait."""
    rows = orders("zero_bubble", count, 1, microbatches)
    told = [SCHEDULES["zero_bubble"].waiting(count - p, microbatches, 1, count) for p in range(count)]
    assert told == [0, *(most_waiting(row) for row in rows[1:])]


def most_waiting(row: list[Turn]) -> int:
    held = itertools.accumulate({BACKWARD_INPUT: 1, BACKWARD_WEIGHT: -1}.get(turn.direction, 0) for turn in row)
    return max(held)


def test_which_backward_passes_of_dualpipev_come_in_two_parts() -> None:
    """Few, whatever the number of microbatches: those at the ends, where others wait for them."""
    for microbatches in (8, 9, 40):
        found = num_in_two_parts("dualpipev", tuple(map(tuple, stages_on("dualpipev", 4, 2))), microbatches)
        assert [found[stage] for stage in range(8)] == [4, 3, 3, 2, 2, 2, 3, 3]
    assert num_in_two_parts("zero_bubble", ((0,), (1,)), 6) == {0: 6, 1: 6}
    assert not num_in_two_parts("1f1b", ((0,), (1,)), 6)


def test_interleaving_refuses_microbatches_that_make_no_equal_rounds() -> None:
    with pytest.raises(
        PlanError, match=r"equal rounds over 4 submeshes with schedule .*, found 9; take a multiple of 4"
    ):
        orders("interleaved", 4, 2, 9)


def test_without_training_there_are_only_forward_passes() -> None:
    assert turns("1f1b", [[0], [1]], 2, trains=False)[1] == [Turn(1, FORWARD, 0), Turn(1, FORWARD, 1)]


NAMES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}


class Recorder:
    """A stage of torch's that computes nothing and notes what it is asked to compute."""

    is_first = is_last = False
    has_backward, submod, stage_index_to_group_rank = True, None, None

    def __init__(self, stage_index: int, num_stages: int, group_size: int, group_rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size = stage_index, num_stages, group_size
        self.group_rank = group_rank
        self.turns: list[Turn] = []

    def forward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.turns.append(Turn(self.stage_index, FORWARD, microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: object) -> None:
        self.turns.append(Turn(self.stage_index, BACKWARD, microbatch))

    def no_transfers(self, microbatch: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def torch_orders(schedule: str, submeshes: int, chunks: int, microbatches: int) -> list[list[Turn]]:
    """What torch's own schedules compute on each rank: as it is run, or as it is listed for several stages a rank."""
    on = SCHEDULES[schedule].in_turn(range(submeshes), chunks)
    stages = [Recorder(number, submeshes * chunks, submeshes, place) for number, place in enumerate(on)]
    if schedule in ("gpipe", "1f1b"):
        for stage in stages:
            single = get_schedule_class({"gpipe": "GPipe", "1f1b": "1F1B"}[schedule])(stage, microbatches)
            single._initialize_stage = lambda *args: None
            single._step_microbatches()
        return [stage.turns for stage in stages]
    name = LOOPED[schedule]
    several = get_schedule_class(name)([stage for stage in stages if stage.group_rank == 0], microbatches)
    listed = [[action for action in several.pipeline_order[rank] if action] for rank in range(submeshes)]
    rows = [[action for one in row for action in one.sub_actions or (one,)] for row in listed]
    return [[Turn(a.stage_index, NAMES[a.computation_type.value], a.microbatch_index) for a in row] for row in rows]


LOOPED = {
    "interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble",
    "interleaved_zero_bubble": "InterleavedZeroBubble", "zero_bubble_v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}  # fmt: skip
KINDS = [
    *(("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)),
    *(("interleaved_zero_bubble", 2), ("interleaved_zero_bubble", 3), ("zero_bubble_v", 2), ("dualpipev", 2)),
]


@pytest.mark.parametrize(("submeshes", "microbatches"), [(2, 2), (3, 3), (4, 8), (4, 10), (8, 24), (5, 3)])
@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
def test_orders_are_those_of_torch(schedule: str, chunks: int, submeshes: int, microbatches: int) -> None:
    if schedule == "1f1b" and microbatches < submeshes:
        pytest.skip("torch asks for as many microbatches as stages")
    if microbatches < SCHEDULES[schedule].fewest(submeshes):
        with pytest.raises(PlanError, match=f"at least {2 * submeshes} microbatches .*, found {microbatches}; take"):
            orders(schedule, submeshes, chunks, microbatches)
        return
    ours = orders(schedule, submeshes, chunks, microbatches)
    assert ours == torch_orders(schedule, submeshes, chunks, microbatches)
