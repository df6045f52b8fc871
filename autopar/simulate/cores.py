"""Ranks that share cores: those that are busy have the cores of those that wait.

The profile of ranks that share cores has each of them as slow as if all were busy all the time
(`Profile.shared_by`). In a pipeline some wait for others. A system shares its cores out evenly (processor sharing), so
at each moment all that are busy are faster by one and the same factor, and everything keeps its order. Time alone
passes faster:

    dt' = dt · max(cores, busy(t)) / ranks

busy: ranks of a node that compute, call a pass, hand over messages, or take part in a collective, at t; and while a
message travels, cores of the sender's node that the network's threads take. Of several nodes, in the fullest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.cost import Profile
from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, DIRECTIONS, FORWARD, SCHEDULES, Turn, turns
from autopar.simulate.engine import COMPUTE, Sent, Task
from autopar.simulate.timeline import Lane, Numbers, TimelinePiece

SEND = "send"
Spans = Sequence[tuple[int, int]]

_LENGTHS = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}
"""Of passes, relative to each other: each of a matrix's two gradients is as much work as its product."""


class Sharing(NamedTuple):
    """How many ranks of a node share how many cores."""

    ranks: int
    cores: int


def sharing_of(profiles: Iterable[Profile]) -> Sharing | None:
    """What devices share, if they share cores: of several kinds, those of which most do."""
    found = [
        Sharing(one.ranks_sharing, one.facts.cores) for one in profiles if one.ranks_sharing > 1 and one.facts.cores
    ]
    return max(found, key=lambda one: one.ranks / one.cores, default=None)


class SharedCoreClock:
    """From the time in which all ranks are always slowed, to that which passes."""

    def __init__(self, sharing: Sharing, busy: Sequence[tuple[Spans, Mapping[int, float]]]) -> None:
        """busy: when some ranks are busy, or the network for them, and how many cores of each node that takes."""
        nodes = sorted({node for _, count in busy for node in count})
        marks = np.unique([0, *(edge for spans, _ in busy for span in spans for edge in span)])
        loads = np.zeros((len(nodes), len(marks)))
        for spans, count in busy:
            is_busy = _covered(spans, marks)
            for row, node in enumerate(nodes):
                loads[row] += is_busy * count.get(node, 0)
        load = loads.max(axis=0) if nodes else np.zeros(len(marks))
        rate = np.maximum(sharing.cores, load) / sharing.ranks
        self._marks = marks
        self._passed = np.concatenate([[0.0], np.cumsum(np.diff(marks) * rate[:-1])])
        self._rest = sharing.cores / sharing.ranks  # after all: nobody is busy

    def __call__(self, times_ns: Sequence[int] | Numbers) -> Numbers:
        """What the time is then."""
        times = np.asarray(times_ns, np.int64)
        after = np.maximum(0, times - self._marks[-1]) * self._rest
        found: Numbers = np.rint(np.interp(times, self._marks, self._passed) + after).astype(np.int64)
        return found

    def at(self, time_ns: int) -> int:
        """Of one time."""
        return int(self([time_ns])[0])


def _covered(spans: Spans, marks: Numbers) -> Numbers:
    """Whether any span covers what follows each mark: 1 or 0."""
    steps = np.zeros(len(marks) + 1, np.int64)
    if spans:
        begins, ends = np.array(spans, np.int64).T
        np.add.at(steps, np.searchsorted(marks, begins), 1)
        np.add.at(steps, np.searchsorted(marks, ends), -1)
    covered: Numbers = (np.cumsum(steps)[:-1] > 0).astype(np.int64)
    return covered


# A step ----------------------------------------


class Beside(NamedTuple):
    """What takes cores beside a lane's tasks: when its ranks' threads call passes and hand over messages, and, in all,
    what the network's threads take of a core for what one of its ranks sends."""

    spans: Spans
    carrying_ns: int


def clock_of(
    lanes: Sequence[Lane], beside: Sequence[Beside], sharing: Sharing, devices_per_node: int
) -> SharedCoreClock:
    """Of a step in which each lane stands for all of its ranks."""
    busy: list[tuple[Spans, Mapping[int, float]]] = []
    for lane, more in zip(lanes, beside, strict=True):
        count: dict[int, int] = defaultdict(int)
        for rank in lane.ranks:
            count[rank // devices_per_node] += 1
        spans, sends = list(more.spans), list[tuple[int, int]]()
        for piece in lane.played:
            for _, _, start, end, kind in piece.tasks:
                if end > start:
                    (sends if kind == SEND else spans).append((piece.begin_ns + start, piece.begin_ns + end))
        busy.append((spans, count))
        travelling_ns = sum(end - start for start, end in sends)
        if travelling_ns:
            share = more.carrying_ns / travelling_ns
            busy.append((sends, {node: share * ranks for node, ranks in count.items()}))
    return SharedCoreClock(sharing, busy)


def in_time(lane: Lane, clock: SharedCoreClock, step_time_ns: int) -> Lane:
    """The lane as time passes. step_time_ns: of the whole step, as it passes.

    What compute's tasks take is looked at one by one; what it stands still is divided as before: each kind of waiting
    is as many times shorter as all of it is.
    """
    pieces = tuple([_piece_in_time(piece, clock) for piece in lane.played])
    spent, took, takes = defaultdict[str, int](int), defaultdict[str, int](int), defaultdict[str, int](int)
    for before, after in zip(lane.played, pieces, strict=True):
        for (_, _, began, ended, _), (stream, _, start, end, kind) in zip(before.tasks, after.tasks, strict=True):
            spent[kind] += end - start if stream == COMPUTE else 0
            took[kind] += ended - began
            takes[kind] += end - start
    own, still = lane.breakdown, step_time_ns - sum(spent.values())
    stood = own.bubble_ns + own.exposed_communication_ns
    exposed = {kind: amount * still // stood for kind, amount in lane.exposed.items()} if stood else {}
    along = {
        way: Sent(sent.times, sent.num_bytes, sent.duration_ns * takes[way[1]] // (took[way[1]] or 1))
        for way, sent in lane.along.items()
    }  # fmt: skip
    breakdown = replace(
        own, compute_ns=sum(spent[kind] for kind in DIRECTIONS), recompute_ns=spent["recompute"],
        optimizer_ns=spent["optimizer"], exposed_communication_ns=sum(exposed.values()),
        bubble_ns=still - sum(exposed.values()),
    )  # fmt: skip
    return replace(lane, played=pieces, breakdown=breakdown, exposed=exposed, along=along)


def _piece_in_time(piece: TimelinePiece, clock: SharedCoreClock) -> TimelinePiece:
    begin, tasks, changes = piece.begin_ns, piece.tasks, piece.changes
    now = clock.at(begin)
    times = clock([begin + time for task in tasks for time in task[2:4]]) - now
    moments = clock([begin + change[0] for change in changes]) - now
    moved: list[Task] = [
        (task[0], task[1], start, end, task[4])
        for task, (start, end) in zip(tasks, times.reshape(-1, 2).tolist(), strict=True)
    ]
    changed = [(time, *change[1:]) for time, change in zip(moments.tolist(), changes, strict=True)]
    return TimelinePiece(now, piece.label, moved, changed, piece.rename)


# An estimate ----------------------------------------


@lru_cache(maxsize=1 << 12)
def part_of_step(
    sharing: Sharing, schedule: str, submeshes: int, microbatches: int, trains: bool, times: tuple[int, ...]
) -> float:
    """How much of its step a pipeline takes when waiting ranks leave their cores to others.

    Of the step that it takes when all are as slow as if nobody waited. times: of a pass through each stage, relative to
    each other; stages are on the submeshes in turn.
    """
    on = SCHEDULES[schedule].in_turn(range(submeshes), len(times) // submeshes)
    rows = [[stage for stage, place in enumerate(on) if place == submesh] for submesh in range(submeshes)]
    orders = turns(schedule, rows, microbatches, trains)
    spans = _played(orders, times)
    each = {0: max(1, sharing.ranks // submeshes)}
    clock, end = SharedCoreClock(sharing, [(one, each) for one in spans]), max(end for one in spans for _, end in one)
    return clock.at(end) / end


def _played(orders: Sequence[Sequence[Turn]], times: Sequence[int]) -> list[list[tuple[int, int]]]:
    """When each submesh makes its passes, if sending takes no time. times: of a pass forward, by stage."""
    ends: dict[Turn, int] = {}  # of passes backward that others wait for, as if they were whole
    free, heads = [0] * len(orders), [0] * len(orders)
    spans: list[list[tuple[int, int]]] = [[] for _ in orders]
    while any(head < len(order) for head, order in zip(heads, orders, strict=True)):
        for number, order in enumerate(orders):
            while heads[number] < len(order):
                turn = order[heads[number]]
                awaited = _awaited(turn, len(times), ends)
                if awaited is None:
                    break
                begin = max(free[number], awaited)
                free[number] = ends[_as_awaited(turn)] = begin + _LENGTHS[turn.direction] * times[turn.stage]
                spans[number].append((begin, free[number]))
                heads[number] += 1
    return spans


def _awaited(turn: Turn, count: int, ends: Mapping[Turn, int]) -> int | None:
    """When a pass may begin as far as other stages go; None where that is not known yet."""
    if turn.direction == BACKWARD_WEIGHT:
        return 0
    before = turn.stage - 1 if turn.direction == FORWARD else turn.stage + 1
    return ends.get(_as_awaited(turn)._replace(stage=before)) if 0 <= before < count else 0


def _as_awaited(turn: Turn) -> Turn:
    """Earlier stages wait for the first part of a backward pass as for a whole one."""
    return turn._replace(direction=BACKWARD) if turn.direction == BACKWARD_INPUT else turn
