"""Plays one stage's lowered program, one pass at a time, on the streams of one of its ranks.

Parameters that are converted once a step start at its begin, in order of use. Regathered ones start when the
unit before theirs does, one unit ahead, and again in the backward pass. A gradient bucket starts home as soon
as its last gradient is there. Compute waits for the conversions that it reads; collectives on one
link level queue. A region that is recomputed runs again before the first backward item that needs something of it;
units in it are launched one ahead, as in the forward pass, and stay for the backward pass.

A backward pass may come in two parts: the first makes gradients of what earlier stages sent, with the regathered
parameters that this takes; the second those of stored tensors.

A pass that begins in the same state as an earlier one of its kind is that one, later: it is played once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from autopar.cost import Profile
from autopar.ir.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from autopar.runtime.packing import MAX_IN_FLIGHT
from autopar.simulate.engine import COMPUTE, LAST, NOTHING_SENT, Carried, Change, Engine, Moment, Sent, Task
from autopar.simulate.orders import BackwardStep, Changes, Direction, find_directions, find_lifetimes, find_orders
from autopar.simulate.program import Bucket, Item, LocalProgram, Slot, Transmission

UNDER_WAY = "gradients under way"
STOPPING = ("activation", "operator")  # purposes of collectives that the rank does not go on beside
ROOT = 0  # the unit of parameters that belong to no block
LEAVE_GRADIENTS = (FORWARD, BACKWARD_INPUT)  # passes that make no gradients of stored tensors


Rename = Callable[[str], str]
Meet = Callable[[int, int], int]
"""From a collective's axis, and when this rank could start it: when all of its ranks can."""


class PassKind(NamedTuple):
    """What a pass does: "begin" a step, a turn's direction, or "optimizer"; of the first or the last microbatch."""

    name: str
    is_first: bool = False
    is_last: bool = False


class Journey(NamedTuple):
    """A bucket's gradients on their way to smaller shards: the bucket, the task that ends it (in a `Standing`, when it
    does), bytes of copies.

    added_bytes: of shards that are added to those of earlier microbatches.
    """

    bucket: int
    task: int
    copied_bytes: int
    added_bytes: int

    def after(self, ns: int) -> Journey:
        """The same, so much later."""
        return self._replace(task=max(0, self.task - ns))


class Travelling(NamedTuple):
    """Gradients on their way to smaller shards (as `Journey`). new_bytes: of shards that take the place of no others,
    which are there at the end where they were summed in a buffer before."""

    end_ns: int
    kind: str
    copied_bytes: int
    added_bytes: int
    new_bytes: int
    whole_bytes: int
    has_buffer: bool

    def after(self, ns: int) -> Travelling:
        """The same, so much later."""
        return self._replace(end_ns=max(0, self.end_ns - ns), kind="gradient")


class Standing(NamedTuple):
    """What a stage has under way when a pass begins, in ns after that. Of a stage in parts, each number of a value,
    unit or slot goes with its part's.

    ready: values whose conversion has not ended, with the kind of task; arrived: the same of what its parts hand to
    each other; live: units whose regathered parameters are in place; pinned: regathered slots that something outside
    their unit has asked for; lent: what of these several parts use, with its bytes; root: of parameters of no block,
    how many gradients are missing, -1 where they are not in place; arriving: (unit, ns, bytes) of packed gathers.
    Of gradients, held: stored tensors that have memory for theirs; whole: slots whose gradient waits to be sent;
    buffered: buckets that have a buffer; journeys, with ns instead of tasks; home: what is on its way home.
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
    buffered: frozenset[int] = frozenset()
    journeys: tuple[Journey, ...] | tuple[Travelling, ...] = ()
    home: tuple[tuple[int, str], ...] = ()

    def without_gradients(self) -> Standing:
        """What a pass depends on that makes no gradients of stored tensors."""
        return self._replace(held=frozenset(), whole=frozenset(), buffered=frozenset(), journeys=(), home=())

    def with_gradients(self, other: Standing) -> Standing:
        """The same, with another's gradients."""
        return self._replace(
            held=other.held, whole=other.whole, buffered=other.buffered, journeys=other.journeys, home=other.home
        )

    def after(self, ns: int) -> Standing:
        """What is left of it so much later."""
        return self._replace(
            ready=tuple([(value, end - ns, kind) for value, end, kind in self.ready if end > ns]),
            arriving=tuple([(unit, max(0, end - ns), size) for unit, end, size in self.arriving]),
            arrived=tuple([(value, end - ns, kind) for value, end, kind in self.arrived if end > ns]),
            journeys=tuple([one.after(ns) for one in self.journeys]),  # type: ignore[arg-type] # of one kind each
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
    in_flight: list[tuple[int, int]]
    last_ns: int
    unmet_ns: int
    has_met: bool

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
    in_flight: list[tuple[int, int]]
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
    )  # fmt: skip


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


class StagePlayer(Protocol):
    """Plays the passes of one stage. receives: tensors of earlier stages; kept: what it sends of those that autograd
    keeps anyway, or that are stored; residents: bytes that are held through the step, and of what kind."""

    @property
    def receives(self) -> Collection[str]: ...
    @property
    def kept(self) -> Collection[str]: ...
    @property
    def residents(self) -> list[tuple[int, str]]: ...
    def work_ns(self, name: str) -> int:
        """What a pass of that name must compute."""

    def play(self, kind: PassKind, carried: Carried, standing: Standing, bound: Bound | None = None) -> Pass:
        """The pass, from what the device and the stage have under way. Raises Beyond where that breaks the bound."""


class Player:
    """One stage's state while its program is played."""

    def __init__(
        self, program: LocalProgram, profile: Profile, trains: bool, sums_early: bool = True
    ) -> None:  # fmt: skip
        self.program, self.trains, self.sums_early = program, trains, sums_early
        self._pass_ns = profile.host.pass_ns if profile.host else 0
        self._collective_ns = profile.host.collective_ns if profile.host else 0
        self.orders = find_orders(program, profile)
        self.lifetimes = find_lifetimes(program, trains)
        self._number = {slot.value: number for number, slot in enumerate(program.slots)}
        self._bucket_of = {slot: number for number, bucket in enumerate(program.reductions) for slot in bucket.slots}
        self._moved = {  # slots whose gradient is at home elsewhere than where it is made
            slot for slot, number in self._bucket_of.items()
            if program.reductions[number].has_buffer or program.slots[slot].shrinks
        }  # fmt: skip
        self._directions = find_directions(program, self.orders, self.lifetimes) if trains else {}
        self._complete_at = self.orders.complete_at
        self._slowdown = profile.facts.overlap_slowdown
        self._copies = any(not bucket.transmissions for unit in self.orders.gathers.values() for bucket in unit)
        self._meets = any(map(meets, program.items))
        self._known: dict[tuple[PassKind, Carried, Standing], Pass] = {}

    @property
    def residents(self) -> list[tuple[int, str]]:
        """As in `StagePlayer`."""
        return self.program.residents

    @property
    def receives(self) -> Collection[str]:
        """As in `StagePlayer`."""
        return self.program.receives.keys()

    @property
    def kept(self) -> Collection[str]:
        """As in `StagePlayer`."""
        program = self.program
        saved = {storage for item in program.items if item.runs_backward for storage in item.saved}
        sent = ((name, program.values[value].storage) for (name, _), value in program.sends.items())
        return {name for name, storage in sent if storage in saved or program.memory[storage].owner < 0}

    def work_ns(self, name: str) -> int:
        """What a pass cannot take less than: nothing, since nobody asks for it where a program is played whole."""
        return 0

    def play(self, kind: PassKind, carried: Carried, standing: Standing, bound: Bound | None = None) -> Pass:
        """The pass, from what the device and the stage have under way. One that leaves gradients as they are says
        nothing of them in its `standing`."""
        key = self.state(kind, carried, standing)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.played(*key)
        return known

    def state(self, kind: PassKind, carried: Carried, standing: Standing) -> tuple[PassKind, Carried, Standing]:
        """All that a pass depends on."""
        if kind.name in LEAVE_GRADIENTS:
            standing = standing.without_gradients()
        if not self._copies:
            carried = carried._replace(last_ns=0)
        if not self._meets:
            carried = carried._replace(unmet_ns=0)
        return kind, carried, standing

    def played(self, kind: PassKind, carried: Carried, standing: Standing, meet: Meet | None = None) -> Pass:
        """Plays a pass. meet: where other ranks do unlike work."""
        self._meet = meet
        busy_ns = self._pass_ns if self._has_work(kind.name) else 0
        waiting = "forward" if kind.name == "begin" else kind.name
        self.engine = engine = Engine(self._slowdown, carried, busy_ns, waiting)
        self._late: list[Bucket] = []  # buckets that go home after the pass
        self.comm_bytes: dict[str, int] = defaultdict(int)
        self.along: dict[tuple[int, str], Sent] = {}
        self._ready = {value: engine.carry(end, cause) for value, end, cause in standing.ready}
        self._live, self._pinned = set(standing.live), set(standing.pinned)
        self._arriving: dict[int, list[tuple[int, int]]] = defaultdict(list)  # unit -> (task, bytes)
        for unit, end, num_bytes in standing.arriving:
            self._arriving[unit].append((engine.carry(end, "parameter"), num_bytes))
        self._held, self._whole, self._buffered = set(standing.held), set(standing.whole), set(standing.buffered)
        self._journeys = [
            j._replace(task=engine.carry(j.task, "gradient")) for j in standing.journeys if isinstance(j, Journey)
        ]
        self._transient: set[int] = set()  # slots whose gradient is added to what is at home
        self._undone = {
            unit: sum(len(bucket.slots) for bucket in buckets) for unit, buckets in self.orders.gathers.items()
        }
        self._awaited: list[int] = []  # tasks that compute waits for before it goes on
        self._home = [engine.carry(end, cause) for end, cause in standing.home]
        self._gradients: dict[int, list[int]] = defaultdict(list)  # value -> the tasks that contribute to it
        self._launched: set[int] = set()  # units whose regathered parameters this pass has asked for
        self._kind = kind
        if kind.name in self._directions:
            self._backward(self._directions[kind.name])
        else:
            {"begin": self._begin_step, "forward": self._forward, "optimizer": self._optimize}[kind.name]()
        return self._result()

    def _has_work(self, direction: str) -> bool:
        return direction == FORWARD or (direction in self._directions and bool(self._directions[direction].steps))

    def _result(self) -> Pass:
        length, tasks = self.engine.free_ns, self.engine.tasks
        played = finished(self.engine, dict(self.comm_bytes), self.along)
        ends = ((value, tasks[task]) for value, task in self._ready.items())
        home = {(tasks[task][3], tasks[task][4]): None for task in self._home}
        standing = Standing(
            ready=tuple([(value, task[3], task[4]) for value, task in ends if task[3] > length]),
            live=frozenset(self._live),
            pinned=frozenset(self._pinned),
            arriving=tuple([
                (unit, tasks[task][3], num_bytes) for unit, found in self._arriving.items() for task, num_bytes in found
            ]),
            held=frozenset(self._held),
            whole=frozenset(self._whole),
            buffered=frozenset(self._buffered),
            journeys=tuple([j._replace(task=tasks[j.task][3]) for j in self._journeys]),
            home=tuple([pair for pair in home if pair[0] > length]),
        )  # fmt: skip
        return Pass(
            self._kind, ((0, played, None),), [], length, played.links, played.in_flight, played.last_ns,
            played.unmet_ns, played.has_met, standing,
        )  # fmt: skip

    # Passes ----------------------------------------

    def _begin_step(self) -> None:
        """The parameters that are converted once a step."""
        for bucket in self.program.gathers:
            if not self.program.slots[bucket.slots[0]].storage.regather:
                self._convert(bucket, ())

    def _forward(self) -> None:
        self._launch(ROOT)
        self._unpack(ROOT)
        if self.orders.visits:
            self._launch(self.orders.visits[0])
        self._run_forward(range(len(self.program.items)))
        if not self.trains or self.program.is_stage:
            self._end_microbatch()

    def _run_forward(self, numbers: range) -> int:
        """Runs items in order; returns the last one's last task."""
        visits, entered, last = self.orders.visits, set[int](), LAST
        for number in numbers:
            item = self.program.items[number]
            units = self.orders.around[item.unit]
            for unit in (unit for unit in units if unit not in entered):
                entered.add(unit)
                self._enter(unit, visits[visits.index(unit) + 1 :][:1])
            last = self._run(number, item, "forward", self.lifetimes.forward)
            for unit in (unit for unit in reversed(units) if number == self.orders.last[unit]):
                self._release(unit)
        return last

    def _backward(self, direction: Direction) -> None:
        if self._kind.name == BACKWARD_WEIGHT and self.program.led:
            for unit in self.orders.gathers:
                self._launch(unit)
        elif self.program.is_stage:
            self._launch(ROOT)
            self._unpack(ROOT)
        self._run_steps(direction)
        for bucket in self._late:
            self._send_home(bucket, [self.engine.last])
        if direction.ends_microbatch or self.program.is_stage:
            self._end_microbatch()
        received = self.lifetimes.received.get(self._kind.name, 0)
        self.engine.release(self.engine.last, received, "activation gradients", Moment.START)

    def _run_steps(self, direction: Direction) -> None:
        left, visits = set(direction.regions), self.orders.visits
        later = {unit for units in direction.entered.values() for unit in units}
        for step in direction.steps:
            region = step.item.region
            for unit in direction.entered.get(step.number, ()):
                later.discard(unit)
                before = visits[max(0, visits.index(unit) - 1) : visits.index(unit)]
                self._enter(unit, [unit for unit in before if unit in later])
            if region in left and step.item.needs_saved:
                left.discard(region)
                self._recompute(region)
            self._run_backward(step)

    def _end_microbatch(self) -> None:
        for unit in list(self._live):
            self._release(unit)
        self._unpin(set(self._pinned))

    def _optimize(self) -> None:
        """Waits until all gradients are home, then updates the parameters."""
        while self._journeys:
            self._finish_journey(self._journeys[0], Moment.ALL_ARRIVE, Moment.ALL_ARRIVED)
        task = self._compute("optimizer", "optimizer", self.program.optimizer_ns, self._home)
        self.engine.allocate(task, self.program.optimizer_workspace, "workspace")
        self.engine.release(task, self.program.optimizer_workspace, "workspace")
        self._home = []

    # Items ----------------------------------------

    def _run(self, number: int, item: Item, kind: str, memory: Changes) -> int:
        """Runs an item forward; returns its last task."""
        ready = self._ready
        self._fetch(item)
        after = [ready[value] for value in item.inputs if value in ready]
        if item.forward:
            handled = [self._compute(item.name, kind, item.forward_ns, after)] if item.forward_ns else after
            first, last = self._transmit(item.name, "activation", item.forward, handled)
        else:
            first = last = self._compute(item.name, kind, item.forward_ns, after, item.issue_ns[0])
        if item.inner:
            last = self._send_inside(item, last)
        for value in item.outputs:
            ready[value] = last
        self.engine.change(first, last, memory.taken.get(number, 0), memory.given.get(number, 0), "activations")
        return last

    def _run_backward(self, step: BackwardStep) -> None:
        gradients, ready, engine, kind, item = self._gradients, self._ready, self.engine, self._kind, step.item
        after = [task for value in item.outputs if value in gradients for task in gradients[value]]
        if item.inner:  # what it sent in the forward pass may be under way still
            after += [ready[value] for value in item.outputs if value in ready]
        own = step.own_ns if kind.is_first else step.own_ns + step.kept_ns
        if kind.is_last:
            own += step.last_ns
        if item.backward:
            handled = [self._compute(item.name, kind.name, own, after)] if own else after
            first, last = self._transmit(item.name, "activation", item.backward, handled)
        else:
            if step.slots:
                after += [ready[value] for value in step.slots if value in ready]
            first = last = self._compute(item.name, kind.name, own, after, step.issue_ns)
        if step.inner:
            _, last = self._transmit(item.name, "operator", step.inner, [last])
        for value in step.wanting:
            gradients[value].append(last)
        engine.change(first, last, step.taken[0], step.given[0], "activations")
        engine.change(first, last, step.taken[1], step.given[1], "activation gradients")
        if step.ends:
            self._run_gradients(step.number, first, last)

    def _run_gradients(self, number: int, first: int, last: int) -> None:
        """What an item's backward means for gradients of stored tensors."""
        orders = self.orders
        for slot in orders.begun_at.get(number, ()):
            self._begin_gradient(slot, first)
        for slot, several in orders.ended_at.get(number, ()):
            self._end_gradient(slot, several, first, last)
        for bucket in self._complete_at.get(number, ()):
            if self.sums_early:
                self._send_home(bucket)
            else:
                self._late.append(bucket)

    def _recompute(self, region: int) -> None:
        numbers = self.orders.regions[region]
        units = list(dict.fromkeys(self.program.items[number].unit for number in numbers))
        current = ROOT
        for number in numbers:
            item = self.program.items[number]
            if item.unit not in (current, ROOT):
                current = item.unit
                for unit in units[units.index(current) :][:2]:
                    self._launch(unit)
                self._unpack(current)
            self._run(number, item, "recompute", self.lifetimes.recompute)

    def _compute(self, name: str, kind: str, duration_ns: int, after: Iterable[int], issue_ns: int = 0) -> int:
        if self._awaited:
            after, self._awaited = [*after, *self._awaited], []
        return self.engine.compute(name, kind, duration_ns, after, issue_ns)

    def _send_inside(self, item: Item, after: int) -> int:
        """What an operator sends in its forward pass; the last task. What was sent early holds up nothing."""
        for sent in item.inner:
            if sent.is_early:
                if self._collective_ns:
                    self.engine.launch(self._collective_ns)
                self._note_sent(sent, f"operator {sent.collective}")
            else:
                _, after = self._transmit(item.name, "operator", [sent], [after])
        return after

    def _transmit(
        self, name: str, purpose: str, transmissions: Sequence[Transmission], after: Iterable[int]
    ) -> tuple[int, int]:
        """Collectives one after another; the first and the last task."""
        tasks: list[int] = []
        stops = purpose in STOPPING
        for sent in transmissions:
            kind = f"{purpose} {sent.collective}"
            before = tasks[-1:] or after
            others = None if self._meet is None else partial(self._meet, sent.axis)
            task = self.engine.transmit(
                sent.level, name, kind, sent.duration_ns, before, self._collective_ns, others,
                sent.waits if stops else None,
            )  # fmt: skip
            tasks.append(task)
            self._note_sent(sent, kind)
        return tasks[0], tasks[-1]

    def _note_sent(self, sent: Transmission, kind: str) -> None:
        self.comm_bytes[sent.collective] += sent.num_bytes
        known = self.along.get((sent.axis, kind), NOTHING_SENT)
        self.along[sent.axis, kind] = known.plus(Sent(1, sent.num_bytes, sent.duration_ns))

    # Parameters ----------------------------------------

    def _enter(self, unit: int, ahead: Sequence[int]) -> None:
        """A unit begins: its parameters must be under way, its neighbour's start now, and its own are unpacked."""
        for other in (unit, *ahead):
            self._launch(other)
        self._unpack(unit)

    def _unpack(self, unit: int) -> None:
        """Waits for a unit's parameters; then the buffers that they came in are given back."""
        for task, num_bytes in self._arriving.pop(unit, ()):
            self.engine.release(self.engine.later(task, self.engine.last), num_bytes, "gathered", Moment.START)

    def _launch(self, unit: int) -> None:
        if unit not in self._launched and unit not in self._live and self.orders.gathers.get(unit):
            self._launched.add(unit)
            self._live.add(unit)
            for bucket in self.orders.gathers[unit]:
                self._convert(bucket, [self.engine.last])

    def _convert(self, bucket: Bucket, after: Iterable[int]) -> None:
        """Brings a bucket's slots from the stored placement to the used one."""
        slots = [self.program.slots[number] for number in bucket.slots]
        self.engine.allocate(self.engine.last, self._copied_bytes(bucket), "gathered", Moment.SEND)
        if not bucket.transmissions:
            return
        if bucket.convert_ns:
            after = [self._compute(f"{slots[0].tensor} packed", "forward", bucket.convert_ns, ())]
        name = slots[0].tensor if len(slots) == 1 else f"{slots[0].tensor} and {len(slots) - 1} more"
        _, last = self._transmit(name, "parameter", bucket.transmissions, after)
        for slot in slots:
            self._ready[slot.value] = last
            if slot.gather_bytes:
                self.engine.allocate(self.engine.last, slot.gather_bytes, "gathered", Moment.SEND)
                self._arriving[self._unit_of(slot)].append((last, slot.gather_bytes))

    def _fetch(self, item: Item) -> None:
        """A regathered parameter of another unit is gathered for the item, and stays until its gradient is done."""
        for value in item.inputs:
            number = self.program.values[value].slot
            if number < 0 or number in self._pinned or not self.program.slots[number].storage.regather:
                continue
            slot = self.program.slots[number]
            unit = self._unit_of(slot)
            if not slot.is_alias and unit not in (ROOT, item.unit) and unit not in self._live:
                self._pinned.add(number)
                self.engine.allocate(self.engine.last, slot.used_bytes, "gathered", Moment.SEND)

    def _unpin(self, numbers: set[int]) -> None:
        for number in numbers & self._pinned:
            self.engine.release(self.engine.last, self.program.slots[number].used_bytes, "gathered", Moment.START)
        self._pinned -= numbers

    def _unit_of(self, slot: Slot) -> int:
        return slot.unit if slot.unit in self.orders.last else ROOT

    def _copied_bytes(self, bucket: Bucket) -> int:
        """Bytes of a bucket's slots where they are used, without those that are there for another reason."""
        slots = (self.program.slots[number] for number in bucket.slots if number not in self._pinned)
        return sum(slot.used_bytes for slot in slots if not slot.is_alias)

    def _release(self, unit: int) -> None:
        if unit not in self._live:
            return
        self._live.discard(unit)
        self._unpack(unit)
        for bucket in self.orders.gathers[unit]:
            self.engine.release(self.engine.last, self._copied_bytes(bucket), "gathered", Moment.START)

    # Gradients ----------------------------------------

    def _begin_gradient(self, slot: Slot, task: int) -> None:
        """The leaf's gradient is made: at home if it stays as it is, else in memory of its own."""
        number = self._number[slot.value]
        if number in self._moved or slot.tensor in self._held:
            self._transient.add(number)
            self.engine.allocate(task, slot.gradient_bytes, UNDER_WAY)
        else:
            self._held.add(slot.tensor)
            self.engine.allocate(task, slot.stored_bytes, "gradients")

    def _end_gradient(self, slot: Slot, several: bool, first: int, last: int) -> None:
        """The leaf's gradient is complete, and added to that of earlier microbatches, or copied into its bucket.

        Where several operators contribute, another contribution and their sum are made beside the first.
        """
        number, engine, size = self._number[slot.value], self.engine, slot.gradient_bytes
        if several:
            engine.allocate(first, size, UNDER_WAY)
            engine.allocate(last, size, UNDER_WAY, Moment.SUM)
            engine.release(last, 2 * size, UNDER_WAY, Moment.SUMMED)
        self._count_done(slot)
        index = self._bucket_of[number] if number in self._moved else -1
        if index >= 0 and not self.program.reductions[index].has_buffer and number not in self._whole:
            self._whole.add(number)
            return
        if index >= 0 and self.program.reductions[index].has_buffer and index not in self._buffered:
            self._buffered.add(index)
            engine.allocate(last, self._whole_bytes(index), "gradients", Moment.COLLECT)
        if number in self._transient:
            engine.release(last, size, UNDER_WAY, Moment.COLLECTED)

    def _count_done(self, slot: Slot) -> None:
        """Regathered parameters of a unit whose gradients are all done are of no more use."""
        unit = self._unit_of(slot)
        if slot.storage.regather and unit in self._undone:
            self._undone[unit] -= 1
            if not self._undone[unit]:
                self._release(unit)
                self._unpin({number for bucket in self.orders.gathers[unit] for number in bucket.slots})

    def _whole_bytes(self, index: int) -> int:
        return sum(self.program.slots[number].gradient_bytes for number in self.program.reductions[index].slots)

    def _send_home(self, bucket: Bucket, after: Sequence[int] = ()) -> None:
        slots = [self.program.slots[number] for number in bucket.slots]
        if not slots[0].reduces_each and not self._kind.is_last:
            return
        self._go_on(slots[0].shrinks)
        after = [*after, *(task for slot in slots for task in self._gradients.pop(slot.value, ()))]
        last = max(after)
        if bucket.transmissions:
            name = f"gradient of {self._first_tensor(bucket)}"
            _, last = self._transmit(name, "gradient", bucket.transmissions, after)
            self._home.append(last)
        if slots[0].shrinks:
            self._begin_journey(self._bucket_of[bucket.slots[0]], last)

    def _first_tensor(self, bucket: Bucket) -> str:
        """What a bucket is called by."""
        return self.program.slots[bucket.slots[0]].tensor

    def _go_on(self, shrinks: bool) -> None:
        """Before another bucket is sent: journeys of several steps end, and the oldest if many are left."""
        for journey in [j for j in self._journeys if self.program.reductions[j.bucket].has_buffer]:
            self._finish_journey(journey)
        while shrinks and len(self._journeys) >= MAX_IN_FLIGHT:
            self._finish_journey(self._journeys[0])

    def _begin_journey(self, index: int, task: int) -> None:
        """Whole gradients stay until the runtime waits for their journey's end; shards arrive in memory of their own.

        What is summed in a buffer is cut afterwards.
        """
        bucket = self.program.reductions[index]
        copied = sum(self.program.slots[number].scatter_bytes for number in bucket.slots)
        self.engine.allocate(self.engine.last, copied, UNDER_WAY, Moment.SEND)
        added = 0 if bucket.has_buffer else self._arrive(bucket, self.engine.last, Moment.SEND)
        self._journeys.append(Journey(index, task, copied, added))
        self._whole.difference_update(bucket.slots)
        self._buffered.discard(index)

    def _arrive(self, bucket: Bucket, task: int, moment: int) -> int:
        """Takes memory for the shards; returns how much of it is for those added to what is at home."""
        added = 0
        for slot in (self.program.slots[number] for number in bucket.slots):
            is_added = slot.tensor in self._held
            self._held.add(slot.tensor)
            self.engine.allocate(task, slot.stored_bytes, UNDER_WAY if is_added else "gradients", moment)
            added += slot.stored_bytes if is_added else 0
        return added

    def _finish_journey(self, journey: Journey, arrive: int = Moment.ARRIVE, arrived: int = Moment.ARRIVED) -> None:
        """Compute waits for a journey; its whole gradients are given back."""
        self._journeys.remove(journey)
        self._awaited.append(journey.task)
        bucket, engine = self.program.reductions[journey.bucket], self.engine
        end, added = engine.later(journey.task, engine.last), journey.added_bytes
        if bucket.has_buffer:
            added = self._arrive(bucket, end, arrive)
        engine.release(end, journey.copied_bytes + added, UNDER_WAY, arrived)
        kind = "gradients" if bucket.has_buffer else UNDER_WAY
        engine.release(end, self._whole_bytes(journey.bucket), kind, arrived)


def meets(item: Item) -> bool:
    """Whether ranks wait for each other in it, forward or backward."""
    sent = (*item.forward, *item.inner, *item.backward, *item.inner_backward)
    return any(one.waits is not None for one in sent)
