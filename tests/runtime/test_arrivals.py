"""Receives that are started one pass ahead: in the order of the sends, and no rank waits for ever."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from autopar.ir import schedule as schedules
from autopar.ir.schedule import SCHEDULES
from autopar.runtime.arrivals import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    Arrivals,
    Turn,
    may_come_early,
    reach_when_bound,
)
from autopar.runtime.crossing import Side
from autopar.runtime.declare import Received
from autopar.runtime.errors import ProgramError
from autopar.runtime.scheduled import ScheduledStage, _torch_schedule, check_reach, order_of
from autopar.runtime.transport import Channel, group_name

LOCAL: Any = SimpleNamespace(program=nn.Module(), mesh=SimpleNamespace(device=torch.device("cpu")))


class Message(NamedTuple):
    """A tensor of a channel on its way, from rank to rank (one a stage)."""

    group: str
    sender: int
    receiver: int
    number: int
    microbatch: int


@cache
def orders(schedule: str, places: int, chunks: int, microbatches: int) -> list[list[Turn]]:
    """Of each rank, as the runtime has it."""
    found = []
    on = SCHEDULES[schedule].in_turn(range(places), chunks)
    for place in range(places):
        numbers = [number for number, there in enumerate(on) if there == place]
        stages = [ScheduledStage(LOCAL, n, places * chunks, place, places, None, (), (), None) for n in numbers]  # type: ignore[arg-type] # sends nothing
        found.append(order_of(_torch_schedule(schedule, stages, microbatches), stages, microbatches))
    return found


def cases() -> Iterator[tuple[str, int, int, int]]:
    for schedule, places, microbatches in itertools.product(SCHEDULES, range(1, 5), range(1, 7)):
        row = SCHEDULES[schedule]
        if places == 1 and row.turns_back:
            continue
        for chunks in (row.num_chunks,) if row.num_chunks else (2, 3) if row.has_chunks else (1,):
            count = max(microbatches, row.fewest(places))
            if row.takes(count, places) and (count == microbatches or microbatches == 1):
                yield schedule, places, chunks, count


def channels(schedule: str, places: int, chunks: int, apart: range) -> list[Channel]:
    """From each stage to those that are so far apart."""
    count, on = places * chunks, SCHEDULES[schedule].in_turn(range(places), chunks)
    pairs = [(a, b) for b in range(count) for a in range(b) if b - a in apart]
    sides = [Side((place,), (), ()) for place in on]
    return [
        Channel(n, Received(f"t{n}", (), torch.float32, "", a, 0, ""), b, sides[a], sides[b])
        for n, (a, b) in enumerate(pairs)
    ]


class Rank:
    """What it starts, pass by pass, and what it waits for."""

    def __init__(self, place: int, order: list[Turn], known: list[Channel], on: list[int], is_bound: bool) -> None:
        self.place, self.order, self.known, self.on, self.is_bound = place, order, known, on, is_bound
        self.queues: dict[str, list[Message]] = defaultdict(list)
        self.arrivals = Arrivals(order, self._receive)
        self.at = 0
        self.awaited: Turn | None = None
        self.messages: dict[Turn, list[Message]] = {}

    def _receive(self, turn: Turn) -> dict[int, Any]:
        self.messages[turn] = list(self._moving(turn, True))
        for message in self.messages[turn]:
            self.queues[message.group].append(message)
        return {}

    def _moving(self, turn: Turn, is_received: bool) -> Iterator[Message]:
        if turn.direction == BACKWARD_WEIGHT:
            return
        is_forward = turn.direction == FORWARD
        for channel in self.known:
            here, there = channel.target, channel.received.source
            ends = (there, here) if is_forward else (here, there)
            if ends[is_received] == turn.stage and self.on[ends[0]] != self.on[ends[1]]:
                sender, receiver = (self.on[end] for end in ends)
                name = group_name(channel, is_forward)
                group = name if self.is_bound else f"{name} {self._pair(sender, receiver)}"
                yield Message(group, sender, receiver, channel.number, turn.microbatch)

    @staticmethod
    def _pair(sender: int, receiver: int) -> tuple[int, int]:
        return sender, receiver

    def advance(self, done: set[Message]) -> bool:
        """Goes on as far as what has arrived allows. Whether that is anywhere."""
        moved = False
        while self.at < len(self.order):
            turn = self.order[self.at]
            if self.awaited != turn:
                self.arrivals.begin(turn)
                self.awaited, moved = turn, True
            if not done.issuperset(self.messages[turn]):
                break
            for message in self._moving(turn, False):
                self.queues[message.group].append(message)
            self.at, moved = self.at + 1, True
        return moved


def run(schedule: str, places: int, chunks: int, microbatches: int, apart: range, is_bound: bool) -> int:
    """Plays what ranks start, as NCCL may do it: in order over one group, with each peer or (bound to a device) with
    all of them; and a message when both ends come to it.

    Returns how many passes are left when nothing moves any more.
    """
    known, on = channels(schedule, places, chunks, apart), SCHEDULES[schedule].in_turn(range(places), chunks)
    rows = orders(schedule, places, chunks, microbatches)
    ranks = [Rank(place, order, known, on, is_bound) for place, order in enumerate(rows)]
    done: set[Message] = set()
    while True:
        moved = [rank.advance(done) for rank in ranks]
        heads = [{queue[0] for queue in rank.queues.values() if queue} for rank in ranks]
        met = {m for own in heads for m in own if m in heads[m.sender] and m in heads[m.receiver]}
        for rank, message in itertools.product(ranks, met):
            if rank.queues[message.group][:1] == [message]:
                rank.queues[message.group].pop(0)
        done |= met
        if not met and not any(moved):
            return sum(len(rank.order) - rank.at for rank in ranks)


@pytest.mark.parametrize("is_bound", [False, True], ids=["peers", "bound"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_waits_for_ever(schedule: str, is_bound: bool) -> None:
    """Stages that send to the next, to the next two, or to all later ones."""
    row = SCHEDULES[schedule]
    farthest = reach_when_bound(row.has_chunks, row.splits_backward) if is_bound else 99
    reaches = [reach for reach in (1, 2, 99) if reach <= farthest]
    found = ((*case, range(1, reach + 1)) for case in cases() for reach in reaches if case[0] == schedule)
    assert not [case for case in found if run(*case, is_bound)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_whose_ranks_would_wait_for_ever_are_refused(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process group is bound to its device; elsewhere nothing is."""
    row = SCHEDULES[schedule]
    near, far = (channels(schedule, 4, 2, range(1, reach + 1)) for reach in (1, 3))
    check_reach(schedule, row.has_chunks, far)
    monkeypatch.setattr("autopar.runtime.scheduled.is_bound", lambda: True)
    check_reach(schedule, row.has_chunks, near)
    if row.has_chunks:
        with pytest.raises(ProgramError, match="found a tensor that is sent 3 stages on"):
            check_reach(schedule, row.has_chunks, far)
    else:
        check_reach(schedule, row.has_chunks, far)


def test_what_comes_of_this_pass_is_not_received_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few microbatches on chunks in turn: a pass may read what comes of the one before, round all ranks."""
    case = ("interleaved", 3, 2, 1, range(1, 3), True)
    assert run(*case) == 0
    monkeypatch.setattr("autopar.runtime.arrivals.may_come_early", lambda turn, following: True)
    assert run(*case) > 0


def test_ranks_that_send_each_other_need_a_group_for_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one for both, each of two ranks would send before it receives."""
    case = ("interleaved", 2, 2, 4, range(1, 2), False)
    assert run(*case) == 0
    pair = {"forward": "forward", "backward": "backward"}
    name = group_name
    monkeypatch.setitem(globals(), "group_name", lambda *given: pair[name(*given).split()[0]])
    monkeypatch.setattr(Rank, "_pair", staticmethod(lambda *ends: (min(ends), max(ends))))
    assert run(*case) > 0


def test_orders_are_those_that_the_simulator_plays() -> None:
    for schedule, places, chunks, microbatches in cases():
        on = SCHEDULES[schedule].in_turn(range(places), chunks)
        stages_of = [[stage for stage, place in enumerate(on) if place == p] for p in range(places)]
        played = schedules.turns(schedule, stages_of, microbatches, trains=True)
        names = {schedules.BACKWARD_INPUT: BACKWARD}
        expected = [[Turn(t.stage, names.get(t.direction, t.direction), t.microbatch) for t in row] for row in played]
        assert orders(schedule, places, chunks, microbatches) == expected or places == 1, (schedule, places)


def test_what_may_come_early() -> None:
    turn = Turn(0, FORWARD, 3)
    assert may_come_early(turn, Turn(0, FORWARD, 4)) and may_come_early(turn, Turn(1, BACKWARD, 3))
    assert not may_come_early(turn, Turn(2, FORWARD, 3))
