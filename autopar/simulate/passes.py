"""Passes as they ran: what was under way when each began, what it did, what it leaves to the next.

A pass that begins in the same state as an earlier one of its kind is that one, later: it is played once
(`simulate.player`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from autopar.ir.schedule import BACKWARD_INPUT, FORWARD
from autopar.simulate.engine import COMPUTE, Carried, Change, Engine, Flight, Moment, Moved, Sent, Task

UNDER_WAY = "gradients under way"
LEAVE_GRADIENTS = (FORWARD, BACKWARD_INPUT)  # passes that make no gradients of stored tensors

Rename = Callable[[str], str]
Meet = Callable[[int, int], int]
"""From a collective's axis, and when this rank could start it: when all of its ranks can."""


class PassKind(NamedTuple):
    """What a pass does: "begin" a step, a turn's direction, or "optimizer"; of the first or the last microbatch."""

    name: str
    is_first: bool = False
    is_last: bool = False


class Travelling(NamedTuple):
    """A bucket's gradients on their way to smaller shards: when they are there, and what kind of task that ends.

    copied_bytes: of copies; added_bytes: of shards that are added to those of earlier microbatches; new_bytes: of those
    that take the place of no others, which are there at the end where they were summed in a buffer before. stays: to
    the end of the step.
    """

    end_ns: int
    kind: str
    copied_bytes: int
    added_bytes: int
    new_bytes: int
    whole_bytes: int
    has_buffer: bool
    is_downward: bool = False  # to the host, which no other bucket waits for
    cut_ns: int | None = None  # of those that are cut on their way to the host, when they are, if not given back yet
    stays: bool = False

    @property
    def freed_bytes(self) -> int:
        """What is given back at its end, less what comes then."""
        return -sum(change[1] for change in ending(self, self.end_ns, Moment.ARRIVE, Moment.ARRIVED))

    def after(self, ns: int) -> Travelling:
        """The same, so much later."""
        cut = None if self.cut_ns is None else max(0, self.cut_ns - ns)
        return self._replace(end_ns=max(0, self.end_ns - ns), kind="gradient", cut_ns=cut)

    def moved(self, ns: int) -> Travelling:
        """The same, where times count from so much earlier."""
        return self._replace(end_ns=self.end_ns + ns, cut_ns=None if self.cut_ns is None else self.cut_ns + ns)


class Journey(NamedTuple):
    """A bucket's gradients on their way, with the task that brings them home, and the one after which those that go on
    to the host are cut, −1 for none."""

    task: int
    one: Travelling
    cut: int


class Standing(NamedTuple):
    """What a stage has under way when a pass begins, in ns after that. Of a stage in parts, each number of a value,
    unit or slot goes with its part's.

    ready: values whose conversion has not ended, with the kind of task; arrived: the same of what its parts hand to
    each other; live: units whose regathered parameters are in place; pinned: regathered slots that something outside
    their unit has asked for; lent: what of these several parts use, with its bytes; root: of parameters of no block,
    how many gradients are missing, -1 where they are not in place; arriving: (unit or `first_read`, ns, bytes) of
    packed gathers.
    Of gradients, held: stored tensors that have memory for theirs; whole: slots whose gradient waits to be sent;
    home: what is on its way home.
    """

    ready: tuple[tuple[Any, int, str], ...] = ()
    live: frozenset[Any] = frozenset()
    pinned: frozenset[Any] = frozenset()
    arriving: tuple[tuple[Any, int, int], ...] = ()
    arrived: tuple[tuple[Any, int, str], ...] = ()
    lent: tuple[tuple[Any, int], ...] = ()
    root: int = -1
    held: frozenset[str] = frozenset()
    whole: frozenset[Any] = frozenset()
    journeys: tuple[Travelling, ...] = ()
    home: tuple[tuple[int, str], ...] = ()

    def without_gradients(self) -> Standing:
        """What a pass depends on that makes no gradients of stored tensors."""
        if not (self.held or self.whole or self.journeys or self.home):
            return self
        return self._replace(held=frozenset(), whole=frozenset(), journeys=(), home=())

    def with_gradients(self, other: Standing) -> Standing:
        """The same, with another's gradients."""
        return self._replace(held=other.held, whole=other.whole, journeys=other.journeys, home=other.home)

    def after(self, ns: int) -> Standing:
        """What is left of it so much later."""
        if not (self.ready or self.arriving or self.arrived or self.journeys or self.home):
            return self
        return self._replace(
            ready=tuple([(value, end - ns, kind) for value, end, kind in self.ready if end > ns]),
            arriving=tuple([(unit, max(0, end - ns), size) for unit, end, size in self.arriving]),
            arrived=tuple([(value, end - ns, kind) for value, end, kind in self.arrived if end > ns]),
            journeys=tuple([one.after(ns) for one in self.journeys]),
            home=tuple([(end - ns, kind) for end, kind in self.home if end > ns]),
        )


class _Unmet:
    """What its ranks have computed since they met: `unmet_ns`, or if they have not, this and what it was before."""

    __slots__ = ()
    unmet_ns: int
    has_met: bool

    def unmet_after(self, before_ns: int) -> int:
        """At its end, where it was so long at its begin."""
        return self.unmet_ns if self.has_met else before_ns + self.unmet_ns


@dataclass(frozen=True, eq=False)
class Played(_Unmet):
    """What an engine has played of a pass; times in ns from its begin. `length_ns`: until the compute stream is free
    again.

    along: what was sent, by axis (its position) and kind. links, in_flight, last_ns, unmet_ns: as in `Carried`, at its
    end, but unmet_ns of one in which the ranks have not met is what was computed in it.
    """

    tasks: list[Task]
    allocations: list[Change]
    waited: dict[str, int]
    spent: dict[str, int]  # compute's time by kind
    sent: dict[str, int]  # bytes by collective
    along: dict[tuple[int, str], Sent]
    length_ns: int
    links: dict[str, int]
    in_flight: list[Flight]
    last_ns: int
    unmet_ns: int
    has_met: bool
    moved: Moved = field(default_factory=dict)  # of what was under way when it began

    @cached_property
    def sent_until(self) -> frozenset[int]:
        """When what was sent has arrived."""
        return frozenset([end for name, _, _, end, _ in self.tasks if name != COMPUTE])

    @cached_property
    def rise_bytes(self) -> int:
        """The most that it adds to what was there when it began. In order: when, at which moment of that, and what
        gives back before what takes (as in `Memory`)."""
        changes = sorted(self.allocations, key=lambda change: (change[0], change[3], change[1]))
        return max(0, *itertools.accumulate(size for _, size, _, _ in changes)) if changes else 0


@dataclass(frozen=True, eq=False, slots=True)
class Pass(_Unmet):
    """One pass as it ran; times in ns from its begin. pieces: what was played of it, when each of them began, and what
    renames their tasks (as in `TimelinePiece`); changes: of memory, beside theirs; the rest as in `Played`."""

    kind: PassKind
    pieces: tuple[tuple[int, Played, Rename | None], ...]
    changes: list[Change]
    length_ns: int
    links: dict[str, int]
    in_flight: list[Flight]
    last_ns: int
    unmet_ns: int
    has_met: bool
    standing: Standing

    @property
    def tasks(self) -> list[Task]:
        """Of all pieces."""
        return [
            (stream, name, begin + start, begin + end, kind)
            for begin, played, _ in self.pieces for stream, name, start, end, kind in played.tasks
        ]  # fmt: skip

    @property
    def allocations(self) -> list[Change]:
        """Of all pieces, and its own."""
        if len(self.pieces) == 1 and not self.changes:
            return self.pieces[0][1].allocations
        found = [
            (begin + time, size, kind, moment)
            for begin, played, _ in self.pieces for time, size, kind, moment in played.allocations
        ]  # fmt: skip
        return found + self.changes


def finished(engine: Engine, sent: dict[str, int], along: dict[tuple[int, str], Sent]) -> Played:
    """What an engine has played. sent: bytes by collective; along: the same by axis and kind."""
    tasks, length = engine.tasks, engine.free_ns
    spent: dict[str, int] = defaultdict(int)
    for stream, _, start, end, cause in tasks[engine.num_carried :]:
        if stream == COMPUTE:
            spent[cause] += end - start
    return Played(
        tasks[engine.num_carried :], engine.allocations, dict(engine.waited), dict(spent), sent, along, length,
        engine.links, [span for span in engine.in_flight if span[1] > length],
        tasks[engine.last][3] - tasks[engine.last][2], engine.unmet_ns, engine.has_met,
        engine.moved,
    )  # fmt: skip


def first_read(value: int) -> int:
    """Where a bucket that is gathered once a step is unpacked, in place of a unit: where this value, the first of it,
    is first read."""
    return ~value


class Gathered(NamedTuple):
    """The begin of a step: what was played, which values come later, with the kind of task, and what arrives packed, by
    the value whose first reader unpacks it."""

    done: Played
    ready: list[tuple[int, int, str]]
    arriving: list[tuple[int, int, int]]


class Bound(NamedTuple):
    """How long a step may take: until_ns; beside_ns: when the pass at hand begins, and what must be computed after
    it."""

    until_ns: float
    beside_ns: int


class Beyond(Exception):
    """The step takes longer than asked for: at least so many nanoseconds."""

    def __init__(self, least_ns: int) -> None:
        super().__init__(f"at least {least_ns} ns")
        self.least_ns = least_ns


def ending(one: Travelling, end_ns: int, arrive: int, arrived: int) -> list[Change]:
    """What a journey's end does to memory."""
    shards = [(end_ns, one.new_bytes, "gradients", arrive), (end_ns, one.added_bytes, UNDER_WAY, arrive)]
    kind = "gradients" if one.has_buffer else UNDER_WAY
    changes = [
        *(shards if one.has_buffer else ()),
        (end_ns, -one.copied_bytes - one.added_bytes, UNDER_WAY, arrived),
        (end_ns, -one.whole_bytes, kind, arrived),
    ]
    return [change for change in changes if change[1]]


def optimizer_pass(
    slowdowns: Mapping[str, float], carried: Carried, standing: Standing, duration_ns: int, workspace: int
) -> Pass:  # fmt: skip
    """Waits until all gradients are home, then updates the parameters. workspace: bytes taken for that."""
    engine = Engine(slowdowns, carried)
    after = [engine.carry(end, kind) for end, kind in standing.home]
    for one in standing.journeys:
        after.append(engine.carry(one.end_ns, one.kind))
        engine.allocations += ending(one, one.end_ns, Moment.ALL_ARRIVE, Moment.ALL_ARRIVED)
    task = engine.compute("optimizer", "optimizer", duration_ns, after)
    engine.allocate(task, workspace, "workspace")
    engine.release(task, workspace, "workspace")
    return whole_pass(PassKind("optimizer"), finished(engine, {}, {}), Standing(held=standing.held))


def whole_pass(kind: PassKind, played: Played, standing: Standing, rename: Rename | None = None) -> Pass:
    """A pass that was played in one piece."""
    return Pass(
        kind, ((0, played, rename),), [], played.length_ns, played.links, played.in_flight, played.last_ns,
        played.unmet_ns, played.has_met, standing,
    )  # fmt: skip
