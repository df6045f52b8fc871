"""Plays one stage's lowered program, one pass at a time, on the streams of one of its ranks.

Parameters that are converted once a step start at its begin, in order of use. Regathered ones start when the
unit before theirs does, one unit ahead, and again in the backward pass. A gradient bucket starts home as soon
as its last gradient is there. Compute waits for the conversions that it reads; collectives on one
link level queue. A region that is recomputed runs again before its first backward item.

A pass that begins in the same state as an earlier one of its kind is that one, later: it is played once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost import Profile
from autopar.runtime.packing import MAX_IN_FLIGHT
from autopar.simulate.engine import LAST, Carried, Change, Engine, Moment, Task
from autopar.simulate.lifetime import Changes, find_lifetimes
from autopar.simulate.orders import find_orders
from autopar.simulate.program import Bucket, Item, Program, Slot, Transmission

ROOT = 0  # the unit of parameters that belong to no block
UNDER_WAY = "gradients under way"


class PassKind(NamedTuple):
    """What a pass does: "begin" a step, "forward", "backward" or "optimizer"; of the first or the last microbatch."""

    name: str
    is_first: bool = False
    is_last: bool = False


class Journey(NamedTuple):
    """Gradients of a bucket on their way to smaller shards: its first slot, when and with what kind of task it ends,
    bytes of copies that travel, and of shards that are added to those of earlier microbatches."""

    bucket: int
    end_ns: int
    cause: str
    copied_bytes: int
    added_bytes: int = 0


class Gradients(NamedTuple):
    """What a stage has of gradients between passes; forward passes leave it as it is.

    held: stored tensors that have memory for their gradient; buffered: first slots of the buckets that have a buffer;
    whole: slots whose gradient waits to be sent; journeys: what the runtime has yet to wait for; home: when gradients
    are home, with the kind of task.
    """

    held: frozenset[str] = frozenset()
    buffered: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    journeys: tuple[Journey, ...] = ()
    home: tuple[tuple[int, str], ...] = ()

    def later(self, ns: int) -> Gradients:
        """The same, in time that counts from so much later."""
        journeys = tuple(journey._replace(end_ns=max(0, journey.end_ns - ns)) for journey in self.journeys)
        return self._replace(journeys=journeys, home=_later_pairs(self.home, ns))


class Standing(NamedTuple):
    """What a stage has under way when a pass begins, in ns after that.

    ready: values whose conversion has not ended, with the kind of task; live: units whose regathered parameters are in
    place; arriving: by unit, when packed gathers arrive and the bytes of their buffers; pinned: regathered slots that
    something outside their unit has asked for; awaited: tasks that compute has to wait for before it goes on.
    """

    ready: tuple[tuple[int, int, str], ...] = ()
    live: frozenset[int] = frozenset()
    arriving: tuple[tuple[int, int, int], ...] = ()
    pinned: frozenset[int] = frozenset()
    awaited: tuple[tuple[int, str], ...] = ()
    gradients: Gradients = Gradients()

    def later(self, ns: int) -> Standing:
        """The same, in time that counts from so much later."""
        return Standing(
            tuple((value, end - ns, kind) for value, end, kind in self.ready if end > ns),
            self.live,
            tuple((unit, max(0, end - ns), num_bytes) for unit, end, num_bytes in self.arriving),
            self.pinned,
            _later_pairs(self.awaited, ns),
            self.gradients.later(ns),
        )


def _later_pairs(pairs: tuple[tuple[int, str], ...], ns: int) -> tuple[tuple[int, str], ...]:
    return tuple((end - ns, kind) for end, kind in pairs if end > ns)


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """One pass as it ran; times in ns from its begin. `length_ns`: until the compute stream is free again.

    links, in_flight: as in `Carried`, at its end. ready_ns: by tensor that it sends, when that is there.
    """

    kind: PassKind
    tasks: list[Task]
    allocations: list[Change]
    waited: dict[str, int]
    spent: dict[str, int]  # compute's time by kind
    sent: dict[str, int]  # bytes by collective
    length_ns: int
    links: dict[str, int]
    in_flight: list[tuple[int, int]]
    standing: Standing
    ready_ns: dict[str, int]


class Player:
    """One stage's state while its program is played."""

    def __init__(self, program: Program, profile: Profile, trains: bool) -> None:
        self.program, self.trains = program, trains
        self.orders = find_orders(program, profile)
        self.lifetimes = find_lifetimes(program, trains)
        self._slowdown = profile.facts.overlap_slowdown
        self._buckets = {slot: bucket for bucket in program.reductions for slot in bucket.slots}
        self._number = {slot.value: number for number, slot in enumerate(program.slots)}
        self._known: dict[tuple[PassKind, Carried, Standing], Pass] = {}

    def play(self, kind: PassKind, carried: Carried, standing: Standing) -> Pass:
        """The pass, from what the device and the stage have under way. The `standing` of a forward pass says nothing of
        gradients, which it leaves as they are."""
        if kind.name == "forward":
            standing = standing._replace(gradients=Gradients())
        key = (kind, carried, standing)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._played(kind, carried, standing)
        return known

    def _played(self, kind: PassKind, carried: Carried, standing: Standing) -> Pass:
        self.engine = engine = Engine(self._slowdown, carried)
        self.comm_bytes: dict[str, int] = defaultdict(int)
        self._ready = {value: engine.carry(end, cause) for value, end, cause in standing.ready}
        self._live = set(standing.live)
        self._arriving: dict[int, list[tuple[int, int]]] = defaultdict(list)  # unit -> (task, bytes) of packed gathers
        for unit, end, num_bytes in standing.arriving:
            self._arriving[unit].append((engine.carry(end, ""), num_bytes))
        self._pinned = set(standing.pinned)
        self._awaited = [engine.carry(end, cause) for end, cause in standing.awaited]
        self._take_gradients(standing.gradients)
        self._gradients: dict[int, list[int]] = defaultdict(list)  # value -> the tasks that contribute to it
        gathers = self.orders.gathers.items()
        self._undone = {unit: sum(len(bucket.slots) for bucket in buckets) for unit, buckets in gathers}
        self._launched: set[int] = set()  # units whose regathered parameters this pass has asked for
        self._kind = kind
        {"begin": self._begin_step, "forward": self._forward, "backward": self._backward,
         "optimizer": self._optimize}[kind.name]()  # fmt: skip
        return self._result()

    def _take_gradients(self, gradients: Gradients) -> None:
        carry = self.engine.carry
        self._held, self._buffered, self._whole = (
            set(gradients.held), set(gradients.buffered), set(gradients.whole)
        )  # fmt: skip
        self._journeys = [(carry(journey.end_ns, journey.cause), journey) for journey in gradients.journeys]
        self._home = [carry(end, cause) for end, cause in gradients.home]

    def _result(self) -> Pass:
        engine, length = self.engine, self.engine.free_ns
        spent: dict[str, int] = defaultdict(int)
        for stream, _, start, end, kind in engine.tasks[engine.num_carried :]:
            if stream == "compute":
                spent[kind] += end - start
        return Pass(
            kind=self._kind,
            tasks=engine.tasks[engine.num_carried :],
            allocations=engine.allocations,
            waited=dict(engine.waited),
            spent=dict(spent),
            sent=dict(self.comm_bytes),
            length_ns=length,
            links=engine.links,
            in_flight=engine.in_flight,
            standing=self._standing(length),
            ready_ns=self._sent_ns(),
        )

    def _standing(self, length: int) -> Standing:
        """What is under way at the end of the pass, in its own time."""
        tasks = self.engine.tasks
        ends = ((value, tasks[task]) for value, task in self._ready.items())
        return Standing(
            tuple((value, task[3], task[4]) for value, task in ends if task[3] > length),
            frozenset(self._live),
            tuple((unit, tasks[task][3], size) for unit, rows in self._arriving.items() for task, size in rows),
            frozenset(self._pinned),
            self._ends(self._awaited, length),
            Gradients(
                frozenset(self._held),
                frozenset(self._buffered),
                frozenset(self._whole),
                tuple(journey._replace(end_ns=tasks[task][3]) for task, journey in self._journeys),
                self._ends(self._home, length),
            ),
        )

    def _ends(self, numbers: Iterable[int], length: int) -> tuple[tuple[int, str], ...]:
        """Ends and kinds of the tasks that end after the pass."""
        tasks = self.engine.tasks
        found = {(tasks[number][3], tasks[number][4]): None for number in numbers if tasks[number][3] > length}
        return tuple(found)

    def _sent_ns(self) -> dict[str, int]:
        """When what other stages wait for is there: tensors forward, gradients of what was received backward."""
        program, tasks = self.program, self.engine.tasks
        if self._kind.name == "forward":
            return {name: tasks[self._ready[value]][3] for name, value in program.sends.items()}
        if self._kind.name == "backward":
            items = ((name, self._gradients.get(value)) for name, value in program.receives.items())
            return {name: max(tasks[task][3] for task in made) for name, made in items if made}
        return {}

    # Passes ----------------------------------------

    def _begin_step(self) -> None:
        """Residents, and the parameters that are converted once a step."""
        for num_bytes, kind in self.program.residents:
            self.engine.allocate(LAST, num_bytes, kind)
        for bucket in self.program.gathers:
            if not self.program.slots[bucket.slots[0]].storage.regather:
                self._convert(bucket, ())

    def _forward(self) -> None:
        self._launch(ROOT)
        self._unpack(ROOT)
        if self.orders.visits:
            self._launch(self.orders.visits[0])
        current = ROOT
        for number, item in enumerate(self.program.items):
            if item.unit not in (current, ROOT):
                current = item.unit
                self._enter(current, +1)
            self._run(number, item, "forward", self.lifetimes.forward)
            if number == self.orders.last[item.unit] and item.unit != ROOT:
                self._release(item.unit)
        if not self.trains:
            self._end_microbatch()

    def _backward(self) -> None:
        current, recomputed = ROOT, set()
        for number in range(len(self.program.items) - 1, -1, -1):
            item = self.program.items[number]
            if not item.runs_backward:
                continue
            if item.unit not in (current, ROOT):
                current = item.unit
                self._enter(current, -1)
            if item.region >= 0 and item.region not in recomputed:
                recomputed.add(item.region)
                self._recompute(item.region)
            self._run_backward(number, item)
            if number == self.orders.first[item.unit] and item.unit != ROOT:
                self._release(item.unit)
        self._end_microbatch()

    def _end_microbatch(self) -> None:
        for unit in list(self._live):
            self._release(unit)
        self._unpin(set(self._pinned))

    def _optimize(self) -> None:
        """Waits until all gradients are home, then updates the parameters."""
        while self._journeys:
            self._finish_journey(0)
        task = self._compute("optimizer", "optimizer", self.program.optimizer_ns, self._home)
        self.engine.allocate(task, self.program.optimizer_workspace, "workspace")
        self.engine.release(task, self.program.optimizer_workspace, "workspace")
        self._home = []

    # Items ----------------------------------------

    def _run(self, number: int, item: Item, kind: str, memory: Changes) -> None:
        ready = self._ready
        self._fetch(item)
        after = [ready[value] for value in item.inputs if value in ready]
        if item.forward:
            first, last = self._transmit(item.name, "activation", item.forward, after)
        else:
            first = last = self._compute(item.name, kind, item.forward_ns, after)
        if item.inner:
            _, last = self._transmit(item.name, "operator", item.inner, [last])
        for value in item.outputs:
            ready[value] = last
        self._change(memory, number, first, last, "activations")

    def _run_backward(self, number: int, item: Item) -> None:
        after = [task for value in item.outputs for task in self._gradients[value]]
        if item.inner:
            after += [self._ready[value] for value in item.outputs if value in self._ready]
        added = self.orders.added_ns.get(number, 0)
        if not self._kind.is_first:
            added += self.orders.kept_ns.get(number, 0)
        if item.backward:
            first, last = self._transmit(item.name, "activation", item.backward, after)
        else:
            after += [self._ready[v] for v in item.inputs if self.program.values[v].slot >= 0 and v in self._ready]
            first = last = self._compute(item.name, "backward", item.backward_ns + added, after)
        if item.inner_backward:
            _, last = self._transmit(item.name, "operator", item.inner_backward, [last])
        for value in item.inputs:
            if self.program.values[value].wants_gradient:
                self._gradients[value].append(last)
        self._change(self.lifetimes.backward, number, first, last, "activations")
        self._change(self.lifetimes.gradients, number, first, last, "activation gradients")
        for slot in self.orders.begun_at.get(number, ()):
            self._begin_gradient(slot, first)
        for slot, several in self.orders.ended_at.get(number, ()):
            self._end_gradient(slot, several, first, last)
        for bucket in self.orders.complete_at.get(number, ()):
            self._send_home(bucket)

    def _recompute(self, region: int) -> None:
        for number in self.orders.regions[region]:
            self._run(number, self.program.items[number], "recompute", self.lifetimes.recompute)

    def _change(self, changes: Changes, number: int, first: int, last: int, kind: str) -> None:
        if number in changes.taken:
            self.engine.allocate(first, changes.taken[number], kind)
        if number in changes.given:
            self.engine.release(last, changes.given[number], kind)

    def _compute(self, name: str, kind: str, duration_ns: int, after: list[int]) -> int:
        if self._awaited:
            after = [*after, *self._awaited]
            self._awaited.clear()
        return self.engine.compute(name, kind, duration_ns, after)

    def _transmit(
        self, name: str, purpose: str, transmissions: Sequence[Transmission], after: Iterable[int]
    ) -> tuple[int, int]:
        """Collectives one after another; the first and the last task."""
        tasks: list[int] = []
        for sent in transmissions:
            kind = f"{purpose} {sent.collective}"
            tasks.append(self.engine.transmit(sent.level, name, kind, sent.duration_ns, tasks[-1:] or after))
            self.comm_bytes[sent.collective] += sent.num_bytes
        return tasks[0], tasks[-1]

    # Parameters ----------------------------------------

    def _enter(self, unit: int, direction: int) -> None:
        """A unit begins: its parameters must be under way, its neighbour's start now, and its own are unpacked."""
        self._launch(unit)
        neighbour = self.orders.visits.index(unit) + direction
        if 0 <= neighbour < len(self.orders.visits):
            self._launch(self.orders.visits[neighbour])
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
        copied = self._copied(bucket)
        if not bucket.transmissions:
            self.engine.allocate(self.engine.last, copied, "gathered", Moment.SEND)
            return
        name = slots[0].tensor if len(slots) == 1 else f"{slots[0].tensor} and {len(slots) - 1} more"
        _, last = self._transmit(name, "parameter", bucket.transmissions, after)
        self.engine.allocate(self.engine.last, copied, "gathered", Moment.SEND)
        for slot in slots:
            self._ready[slot.value] = last
            if slot.gather_bytes:
                self.engine.allocate(self.engine.last, slot.gather_bytes, "gathered", Moment.SEND)
                self._arriving[self._unit_of(slot)].append((last, slot.gather_bytes))

    def _fetch(self, item: Item) -> None:
        """A regathered parameter of another unit is gathered for the item, and stays until its gradient is done."""
        for value in item.inputs:
            number = self.program.values[value].slot
            if number < 0 or number in self._pinned:
                continue
            slot = self.program.slots[number]
            unit = self._unit_of(slot)
            if slot.storage.regather and not slot.is_alias and unit not in (ROOT, item.unit) and unit not in self._live:
                self._pinned.add(number)
                self.engine.allocate(self.engine.last, slot.used_bytes, "gathered", Moment.SEND)

    def _unpin(self, numbers: set[int]) -> None:
        for number in sorted(numbers & self._pinned):
            self.engine.release(self.engine.last, self.program.slots[number].used_bytes, "gathered", Moment.START)
        self._pinned -= numbers

    def _unit_of(self, slot: Slot) -> int:
        return slot.unit if slot.unit in self.orders.last else ROOT

    def _copied(self, bucket: Bucket) -> int:
        """Bytes that a bucket's slots have where they are used, without those that are there for another reason."""
        slots = {number: self.program.slots[number] for number in bucket.slots if number not in self._pinned}
        return sum(slot.used_bytes for slot in slots.values() if not slot.is_alias)

    def _release(self, unit: int) -> None:
        if unit not in self._live:
            return
        self._live.discard(unit)
        self._unpack(unit)
        for bucket in self.orders.gathers[unit]:
            self.engine.release(self.engine.last, self._copied(bucket), "gathered", Moment.START)

    # Gradients ----------------------------------------

    def _begin_gradient(self, slot: Slot, task: int) -> None:
        """The leaf's gradient is made: at home if it stays as it is, else in memory of its own."""
        if self._number[slot.value] in self._buckets or slot.tensor in self._held:
            self.engine.allocate(task, slot.gradient_bytes, UNDER_WAY)
        else:
            self._hold_gradient(slot, task)

    def _end_gradient(self, slot: Slot, several: bool, first: int, last: int) -> None:
        """The leaf's gradient is complete, and added to that of earlier microbatches, or copied into its bucket.

        Where several operators contribute, the second contribution and their sum are made beside the first.
        """
        number = self._number[slot.value]
        bucket = self._buckets.get(number)
        self._count_done(slot)
        if several:
            self.engine.allocate(first, slot.gradient_bytes, UNDER_WAY)
            self.engine.allocate(last, slot.gradient_bytes, UNDER_WAY, Moment.SUM)
            self.engine.release(last, 2 * slot.gradient_bytes, UNDER_WAY, Moment.SUMMED)
        if bucket is not None and bucket.has_buffer and bucket.slots[0] not in self._buffered:
            self._buffered.add(bucket.slots[0])
            self.engine.allocate(last, self._buffer_bytes(bucket), "gradients", Moment.COLLECT)
        if bucket is None:
            if number in self._whole:
                self.engine.release(last, slot.gradient_bytes, UNDER_WAY, Moment.COLLECTED)
            self._whole.add(number)
        elif bucket.has_buffer or number in self._whole:
            self.engine.release(last, slot.gradient_bytes, UNDER_WAY, Moment.COLLECTED)
        else:
            self._whole.add(number)

    def _count_done(self, slot: Slot) -> None:
        """Regathered parameters of a unit whose gradients are all done are of no more use."""
        unit = self._unit_of(slot)
        if slot.storage.regather and unit in self._undone:
            self._undone[unit] -= 1
            if not self._undone[unit]:
                self._release(unit)
                self._unpin({number for bucket in self.orders.gathers[unit] for number in bucket.slots})

    def _buffer_bytes(self, bucket: Bucket) -> int:
        return sum(self.program.slots[number].gradient_bytes for number in bucket.slots)

    def _hold_gradient(self, slot: Slot, task: int) -> None:
        if slot.tensor not in self._held:
            self._held.add(slot.tensor)
            self.engine.allocate(task, slot.stored_bytes, "gradients")

    def _send_home(self, bucket: Bucket) -> None:
        slots = [self.program.slots[number] for number in bucket.slots]
        if not slots[0].reduces_each and not self._kind.is_last:
            return
        shrinks = slots[0].shrinks
        self._go_on(shrinks)
        after = [task for slot in slots for task in self._gradients.pop(slot.value, ())]
        last = max(after)
        if bucket.transmissions:
            name = f"gradient of {slots[0].tensor}"
            _, last = self._transmit(name, "gradient", bucket.transmissions, after)
            self._home.append(last)
        if shrinks:
            self._begin_journey(bucket, last)

    def _go_on(self, shrinks: bool) -> None:
        """Before another bucket is sent: journeys of several steps end, and the oldest if many are left."""
        for position in reversed([n for n, (_, journey) in enumerate(self._journeys) if self._has_buffer(journey)]):
            self._finish_journey(position)
        while shrinks and len(self._journeys) >= MAX_IN_FLIGHT:
            self._finish_journey(0)

    def _has_buffer(self, journey: Journey) -> bool:
        return self._buckets[journey.bucket].has_buffer

    def _begin_journey(self, bucket: Bucket, last: int) -> None:
        """Whole gradients stay until the runtime waits for their journey's end; shards arrive in memory of their own.

        What is summed in a buffer is cut afterwards.
        """
        copies = sum(self.program.slots[number].scatter_bytes for number in bucket.slots)
        self.engine.allocate(self.engine.last, copies, UNDER_WAY, Moment.SEND)
        added = 0 if bucket.has_buffer else self._arrive(bucket, self.engine.last, Moment.SEND)
        self._journeys.append((last, Journey(bucket.slots[0], 0, self.engine.tasks[last][4], copies, added)))
        self._whole.difference_update(bucket.slots)
        self._buffered.discard(bucket.slots[0])

    def _arrive(self, bucket: Bucket, task: int, moment: Moment) -> int:
        """Memory of the shards; the bytes of those that are added to what earlier microbatches have brought."""
        added = 0
        for slot in (self.program.slots[number] for number in bucket.slots):
            kind = UNDER_WAY if slot.tensor in self._held else "gradients"
            self.engine.allocate(task, slot.stored_bytes, kind, moment)
            added += slot.stored_bytes if kind == UNDER_WAY else 0
            self._held.add(slot.tensor)
        return added

    def _finish_journey(self, position: int) -> None:
        """Compute waits for a journey; its whole gradients, and shards that are added to others, are given back."""
        task, journey = self._journeys.pop(position)
        bucket = self._buckets[journey.bucket]
        self._awaited.append(task)
        end = self.engine.later(task, self.engine.last)
        added = journey.added_bytes + (self._arrive(bucket, end, Moment.ARRIVE) if bucket.has_buffer else 0)
        kind = "gradients" if bucket.has_buffer else UNDER_WAY
        self.engine.release(end, journey.copied_bytes + added, UNDER_WAY, Moment.ARRIVED)
        self.engine.release(end, self._buffer_bytes(bucket), kind, Moment.ARRIVED)
