"""Plays one stage's lowered program, one pass at a time, on the streams of one of its ranks.

Parameters that are converted once a step start at its begin, in order of use. Regathered ones start when the
unit before theirs does, one unit ahead, and again in the backward pass. A gradient bucket starts home as soon
as its last gradient is there. Compute waits for the conversions that it reads; collectives on one
link level queue. A region that is recomputed runs again before the first backward item that needs something of it;
units in it are launched then, one ahead, as in the forward pass, and stay for the backward pass; with the last of them
what the region before begins with.

A backward pass may come in two parts: the first makes gradients of what earlier stages sent, with the regathered
parameters that this takes; the second those of stored tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest

from autopar.cost import Profile
from autopar.cost.compute import copy_time_ns
from autopar.cost.profile import host_of
from autopar.runtime.packing import MAX_IN_FLIGHT
from autopar.simulate.copies import CopiedCall
from autopar.simulate.engine import (
    LAST,
    NOTHING_SENT,
    Carried,
    Engine,
    Moment,
    Sent,
)
from autopar.simulate.host_copies import DOWN, UP
from autopar.simulate.orders import BackwardStep, Changes, Direction, Lifetimes, Orders
from autopar.simulate.overlap import STOPPING, Overlap, Sums, queues_of
from autopar.simulate.passes import (
    UNDER_WAY,
    Gathered,
    Journey,
    Meet,
    PassKind,
    Travelling,
    ending,
    finished,
    first_read,
)
from autopar.simulate.program import Bucket, Item, LocalProgram, Slot, Transmission
from autopar.simulate.settling import SettlingEngine
from autopar.simulate.sharing import Share

BEGUN = "begun"  # marks a bucket that another part has begun, in the name of what is sent
IN_CHUNKS = ("all_gather", "reduce_scatter")  # collectives that products can be computed beside, chunk by chunk
ROOT = 0  # the unit of parameters that belong to no block


class Player:
    """Plays a program's items and what is sent around them. shares: of buckets that gradients go home in, which
    `_complete_at` has by the item that completes them, and `_share_of` by slot; `_moved`: slots whose gradient is at
    home elsewhere than where it is made."""

    lifetimes: Lifetimes
    shares: tuple[Share, ...]
    _complete_at: Mapping[int, Sequence[int]]
    _share_of: Mapping[int, int]
    _moved: Collection[int]
    returns: int = -1  # see `Part`

    def __init__(self, program: LocalProgram, profile: Profile, orders: Orders, overlap: Overlap) -> None:
        self.program, self.orders, self.overlap = program, orders, overlap
        self._sums_itself = profile.device_type == "cpu"
        self._collective_ns = profile.host.collective_ns if profile.host else 0
        self._slowdowns, self._queues = profile.slowdowns, queues_of(profile, overlap)
        self._profile, self._copy_ns = profile, cache(lambda num_bytes: copy_time_ns(num_bytes, profile))
        self._number = {slot.value: number for number, slot in enumerate(program.slots)}

    def start(self, kind: PassKind, engine: Engine, meet: Meet | None) -> None:
        """Before a pass, with nothing under way but what the engine carries. meet: where other ranks do unlike
        work."""
        self.engine, self._kind, self._meet = engine, kind, meet
        self._returned_ns = 0  # when the module around has returned
        self._late: list[int] = []  # buckets that go home after the pass
        self.comm_bytes: dict[str, int] = defaultdict(int)
        self.along: dict[tuple[int, str], Sent] = {}
        self._ready: dict[int, int] = {}  # value -> the task that makes it
        self._live, self._pinned = set[int](), set[int]()
        self._arriving: dict[int, list[tuple[int, int]]] = defaultdict(list)  # unit or `first_read` -> (task, bytes)
        self._held, self._whole, self._buffered = set[str](), set[int](), set[int]()
        self._travelling: list[Journey] = []
        self._transient: set[int] = set()  # slots whose gradient is added to what is at home
        self._undone = {
            unit: sum(len(bucket.slots) for bucket in buckets) for unit, buckets in self.orders.gathers.items()
        }
        self._awaited: list[int] = []  # tasks that compute waits for before it goes on
        self._home: list[int] = []
        self._gradients: dict[int, list[int]] = defaultdict(list)  # value -> the tasks that contribute to it
        self._arrivals: Sequence[tuple[int, int]] = ()  # of shards of other parts in each share: new bytes, added ones
        self._arrives: tuple[int, CopiedCall] | None = None  # what is on its way to the host, and its task
        self._fetched: dict[int, int] = {}  # calls whose memory comes back -> the task
        self._launched: set[int] = set()  # units whose regathered parameters this pass has asked for

    def gather(self, carried: Carried, meet: Meet | None) -> Gathered:
        """The parameters that are converted once a step."""
        is_settled = meet is None and not any(bucket.first_is_beside for bucket in self.program.gathers)
        engine = SettlingEngine(self._slowdowns, carried) if is_settled else Engine(self._slowdowns, carried)
        self.start(PassKind("begin"), engine, meet)
        for bucket in self.program.gathers:
            self._convert(bucket, ())
        engine.settle()
        tasks, length = self.engine.tasks, self.engine.free_ns
        ends = ((value, tasks[task][3], tasks[task][4]) for value, task in self._ready.items())
        arriving = [
            (first_read(place), tasks[task][3], size) for place, found in self._arriving.items() for task, size in found
        ]  # fmt: skip
        done = finished(self.engine, dict(self.comm_bytes), self.along)
        return Gathered(done, [end for end in ends if end[1] > length], arriving)

    # Passes ----------------------------------------

    def _run_forward(self, numbers: range) -> int:
        """Runs items in order; returns the last one's last task."""
        visits, entered, last = self.orders.visits, set[int](), LAST
        leaving = {call.last: call for call in self.lifetimes.copied.values() if call.out}
        for number in numbers:
            item = self.program.items[number]
            units = self.orders.around[item.unit]
            for unit in (unit for unit in units if unit not in entered):
                entered.add(unit)
                self._enter(unit, visits[visits.index(unit) + 1 :][:1])
            last = self._run(number, item, "forward", self.lifetimes.forward)
            if number == self.returns:
                self._returned_ns = self.engine.tasks[last][3]
            if number in leaving:
                self._copy_out(leaving[number], last)
            for unit in (unit for unit in reversed(units) if number == self.orders.last[unit]):
                self._release(unit)
        return self._arrive() if self._arrives is not None else last

    def _run_steps(self, direction: Direction) -> None:
        left, again = set(direction.regions), self.orders.running_again
        calls = [call for _, call in sorted(self.lifetimes.copied.items(), reverse=True) if call.back]
        reached = {call.reached: (call, before) for call, before in zip_longest(calls, calls[1:])}
        if calls:
            self._fetch_back(calls[0])
        later = {unit for units in direction.entered.values() for unit in units}
        for step in direction.steps:
            for unit in direction.entered.get(step.number, ()):
                later.discard(unit)
                if unit not in again:
                    self._enter(unit, self._ahead_of(unit, later))
            for region in step.item.needs:
                if region in left:
                    left.discard(region)
                    self._recompute(region, later)
            if step.number in reached:
                call, before = reached[step.number]
                if before is not None:
                    self._fetch_back(before)
                self._awaited.append(self._fetched[call.last])
            self._run_backward(step)

    # Copies to the host and back ----------------------------------------

    def _copy_out(self, call: CopiedCall, after: int) -> None:
        """What a call has saved leaves for the host; what the call before has, must be there."""
        host = host_of(self._profile)
        if host.is_simulated:  # the rank itself copies, and waits until a link would have
            after = self._compute(self._name_of(call), "forward", self._copy_ns(sum(call.out)), [after])
        kind, duration_ns = f"activation {DOWN}", host.down_ns(sum(call.out))
        task = self.engine.transmit(DOWN, self._name_of(call), kind, duration_ns, [after])
        if self._arrives is not None:
            self._arrive()
        self._arrives = task, call

    def _arrive(self) -> int:
        """Compute waits until what is on its way is on the host, and gives back the device's memory; the last task."""
        assert self._arrives is not None
        task, call = self._arrives
        self._arrives = None
        waits = self._compute(self._name_of(call), "forward", 0, [task])
        self.engine.release(waits, call.freed_bytes, "activations")
        return waits

    def _fetch_back(self, call: CopiedCall) -> None:
        """What a call has on the host begins to come back."""
        host = host_of(self._profile)
        self.engine.allocate(self.engine.last, call.taken_bytes, "activations", Moment.SEND)
        if host.is_simulated:
            self._compute(self._name_of(call), "backward", self._copy_ns(sum(call.back)), ())
        self._fetched[call.last] = self.engine.transmit(
            UP, self._name_of(call), f"activation {UP}", host.up_ns(sum(call.back)), [self.engine.last]
        )

    def _name_of(self, call: CopiedCall) -> str:
        return f"saved in {self.program.units[self.program.items[call.last].unit] or 'the program'}"

    # Items ----------------------------------------

    def _run(self, number: int, item: Item, kind: str, memory: Changes) -> int:
        """Runs an item forward; returns its last task."""
        ready = self._ready
        self._fetch(item)
        if self._arriving:
            for value in item.inputs:
                self._unpack(first_read(value))
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
        own = step.own_ns + (0 if kind.is_first else self._kept_ns(step)) + (step.last_ns if kind.is_last else 0)
        if item.backward:
            handled = [self._compute(item.name, kind.name, own, after)] if own else after
            first, last = self._transmit(item.name, "activation", item.backward, handled)
        else:
            if step.slots:
                after += [ready[value] for value in step.slots if value in ready]
            first = last = self._compute(item.name, kind.name, own, after, step.issue_ns)
        if step.inner:
            _, last = self._transmit(item.name, "operator", self.overlap.inside(step.inner), [last])
        for value in step.wanting:
            gradients[value].append(last)
        engine.change(first, last, step.taken[0], step.given[0], "activations")
        engine.change(first, last, step.taken[1], step.given[1], "activation gradients")
        if step.ends:
            self._run_gradients(step.number, first, last)

    def _kept_ns(self, step: BackwardStep) -> int:
        """Adding gradients to those of earlier microbatches, where no product does."""
        slots = (self.program.slots[self._number[value]] for value in step.slots)
        return step.kept_ns if self.overlap.adds or any(slot.reduces_each for slot in slots) else 0

    def _run_gradients(self, number: int, first: int, last: int) -> None:
        """What an item's backward means for gradients of stored tensors."""
        orders = self.orders
        for slot in orders.begun_at.get(number, ()):
            self._begin_gradient(slot, first)
        for slot, several in orders.ended_at.get(number, ()):
            self._end_gradient(slot, several, first, last)
        for index in self._complete_at.get(number, ()):
            if self.overlap.sums is Sums.LATE:
                self._late.append(index)
            else:
                self._send_home(index)

    def _ahead_of(self, unit: int, later: Collection[int]) -> list[int]:
        """What is asked for ahead where the backward pass enters a unit, of those that it enters later."""
        return [before for before in self.orders.before.get(unit, ()) if before in later]

    def _recompute(self, region: int, later: Collection[int]) -> None:
        """Runs a region again. later: units that the backward pass has not reached."""
        if region in self.orders.again:
            self._call_again(region, later)
        else:
            self._run_again(region)

    def _call_again(self, region: int, later: Collection[int]) -> None:
        """A module, whose units are entered as in the forward pass."""
        units, begun = self.orders.again[region], set[int]()
        for number in self.orders.regions[region]:
            item = self.program.items[number]
            for unit in self.orders.around[item.unit]:
                if unit in units and unit not in begun:
                    begun.add(unit)
                    following = units[units.index(unit) + 1 :][:1]
                    self._enter(unit, following or self._ahead_of(units[0], later))
            self._run_item_again(number, item)

    def _run_again(self, region: int) -> None:
        """Operators by themselves."""
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
            self._run_item_again(number, item)

    def _run_item_again(self, number: int, item: Item) -> None:
        """What it sends is there before the backward pass goes on, which asked for it."""
        last = self._run(number, item, "recompute", self.lifetimes.recompute)
        if item.forward:
            self._awaited.append(last)

    def _compute(self, name: str, kind: str, duration_ns: int, after: Iterable[int], issue_ns: int = 0) -> int:
        if self._awaited:
            after, self._awaited = [*after, *self._awaited], []
        return self.engine.compute(name, kind, duration_ns, after, issue_ns)

    def _send_inside(self, item: Item, after: int) -> int:
        """What an operator sends in its forward pass; the last task. What was sent early holds up nothing."""
        for sent in self.overlap.inside(item.inner):
            if sent.is_early:
                if self._collective_ns:
                    self.engine.launch(self._collective_ns)
                self._note_sent(sent, f"operator {sent.collective}", sent.duration_ns)
            else:
                _, after = self._transmit(item.name, "operator", [sent], [after])
        return after

    def _transmit(
        self, name: str, purpose: str, transmissions: Sequence[Transmission], after: Iterable[int]
    ) -> tuple[int, int]:
        """Collectives one after another; the first and the last task. Those that the rank does not stop for take as
        long as if it computed all the while."""
        tasks: list[int] = []
        stops = purpose in STOPPING
        is_beside = not stops and (purpose != "gradient" or self.overlap.sums is not Sums.LATE)
        for sent in transmissions:
            duration_ns = sent.beside_ns if is_beside else sent.duration_ns
            if purpose == "activation" and self.overlap.cuts_activations and sent.collective in IN_CHUNKS:
                duration_ns //= sent.num_ranks
            kind = f"{purpose} {sent.collective}"
            before = tasks[-1:] or after
            link = self._queues.link(sent, purpose)
            others = None if self._meet is None else partial(self._meet, sent.axis)
            task = self.engine.transmit(
                link, name, kind, duration_ns, before, self._collective_ns, others, sent.waits if stops else None,
            )  # fmt: skip
            tasks.append(task)
            self._note_sent(sent, kind, duration_ns)
        return tasks[0], tasks[-1]

    def _note_sent(self, sent: Transmission, kind: str, duration_ns: int) -> None:
        self.comm_bytes[sent.collective] += sent.num_bytes
        known = self.along.get((sent.axis, kind), NOTHING_SENT)
        self.along[sent.axis, kind] = known.plus(Sent(1, sent.num_bytes, duration_ns))

    # Parameters ----------------------------------------

    def _enter(self, unit: int, ahead: Sequence[int]) -> None:
        """A unit begins: its parameters must be under way, its neighbour's start now, and its own are unpacked."""
        for other in (unit, *ahead):
            self._launch(other)
        self._unpack(unit)

    def _unpack(self, unit: int) -> None:
        """Waits for a unit's parameters, or a bucket's first; then the buffers that they came in are given back."""
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
        if bucket.convert_ns:
            after = [self._compute(f"{slots[0].tensor} packed", "forward", bucket.convert_ns, ())]
        if not bucket.transmissions:
            return
        name = slots[0].tensor if len(slots) == 1 else f"{slots[0].tensor} and {len(slots) - 1} more"
        if bucket.first_is_beside:
            after, (first, *rest) = [*after], bucket.transmissions
            _, copied = self._transmit(name, "parameter", [first], after)
            _, last = self._transmit(name, "parameter", rest, after)
            last = self.engine.later(copied, last)
        else:
            _, last = self._transmit(name, "parameter", bucket.transmissions, after)
        for slot in slots:
            self._ready[slot.value] = last
            if slot.gather_bytes:
                self.engine.allocate(self.engine.last, slot.gather_bytes, "gathered", Moment.SEND)
                place = self._unit_of(slot) if slot.storage.regather else first_read(slots[0].value)
                self._arriving[place].append((last, slot.gather_bytes))

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
        index = self._share_of[number] if number in self._moved else -1
        if slot.is_cast and not (index >= 0 and self.shares[index].has_buffer):  # it is there in both dtypes
            engine.allocate(first, slot.used_bytes, UNDER_WAY)
            engine.release(last, slot.used_bytes, UNDER_WAY, Moment.COLLECTED)
        if index >= 0 and not self.shares[index].has_buffer and number not in self._whole:
            self._whole.add(number)
            return
        if index >= 0 and self.shares[index].has_buffer and index not in self._buffered:
            self._buffered.add(index)
            engine.allocate(last, self.shares[index].whole_bytes, "gradients", Moment.COLLECT)
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

    def _send_home(self, index: int, after: Sequence[int] = ()) -> None:
        """The gradients of a share's bucket."""
        share = self.shares[index]
        slots = [self.program.slots[number] for number in share.slots]
        if not slots[0].reduces_each and not self._kind.is_last:
            return
        if self.overlap.sums is not Sums.BUFFERED:
            self._go_on(slots[0].is_resized)
        after = [*after, *(task for slot in slots for task in self._gradients.pop(slot.value, ()))]
        last, cut = max(after), -1
        if share.transmissions:
            name = f"{BEGUN}:{share.way}" if share.comes else slots[0].tensor  # `Renames` knows who began it
            first, last = self._transmit(f"gradient of {name}", "gradient", share.transmissions, after)
            self._home.append(last)
            if slots[0].by_levels:
                self._begin_levels(share.transmissions, last)
            self._begin_served(sum(sent.room_bytes for sent in share.transmissions), last)
            cut = first if len(share.transmissions) == 2 and slots[0].storage.on_host and not share.has_buffer else -1
        if self.overlap.sums is Sums.BUFFERED:
            self._whole.difference_update(share.slots)
            self._buffered.discard(index)
        elif slots[0].is_resized:
            self._begin_journey(index, last, cut)

    def _go_on(self, is_resized: bool) -> None:
        """Before another bucket is sent: journeys of several steps end, and the oldest if many are left."""
        for journey in [*self._travelling]:
            if journey.one.has_buffer and not journey.one.is_downward:
                self._end_travelling(journey)
            elif journey.cut >= 0:
                self._cut_travelling(journey)
        while is_resized and len(going := [j for j in self._travelling if not j.one.stays]) >= MAX_IN_FLIGHT:
            self._end_travelling(going[0])

    def _begin_levels(self, transmissions: Sequence[Transmission], task: int) -> None:
        """Parts of a sum by levels, and where the runtime makes reduce-scatters of all-to-alls, what these receive: no
        longer there than until the step ends."""
        scattered = [sent for sent in transmissions if sent.collective == "reduce_scatter"]
        size = sum(sent.num_bytes // sent.num_ranks + sent.num_bytes * self._sums_itself for sent in scattered)
        self.engine.allocate(self.engine.last, size, UNDER_WAY, Moment.SEND)
        self._travelling.append(Journey(task, Travelling(0, "", size, 0, 0, 0, False, stays=True), -1))

    def _begin_served(self, size: int, task: int) -> None:
        """Pieces that this rank sums for the others beside servers, until the step ends."""
        if size:
            self.engine.allocate(self.engine.last, size, UNDER_WAY, Moment.SEND)
            self._travelling.append(Journey(task, Travelling(0, "", size, 0, 0, 0, False, stays=True), -1))

    def _begin_journey(self, index: int, task: int, cut: int) -> None:
        """Whole gradients stay until the runtime waits for their journey's end; shards arrive in memory of their own.

        What is summed in a buffer is cut afterwards. cut: the task after which only shards are on their way, where they
        go on to the host.
        """
        share, engine = self.shares[index], self.engine
        copied, whole = share.scatter_bytes, share.whole_bytes
        new, added = self._arrivals[index]
        slots = [self.program.slots[number] for number in share.slots]
        is_downward = slots[0].storage.on_host
        if is_downward:  # shards come and go; nothing stays
            new, added = 0, new + added + sum(slot.stored_bytes for slot in slots)
            added *= any(step.before.kind == "S" for step in slots[0].steps[1:])
        for slot in slots if not is_downward else ():
            if slot.tensor in self._held:
                added += slot.stored_bytes
            else:
                new += slot.stored_bytes
            self._held.add(slot.tensor)
        engine.allocate(engine.last, copied, UNDER_WAY, Moment.SEND)
        if not share.has_buffer:
            engine.allocate(engine.last, new, "gradients", Moment.SEND)
            engine.allocate(engine.last, added, UNDER_WAY, Moment.SEND)
        one = Travelling(0, "", copied, added, new, whole, share.has_buffer, is_downward)
        self._travelling.append(Journey(task, one, cut))
        self._whole.difference_update(share.slots)
        self._buffered.discard(index)
        if slots[0].stops_for_home:
            self._end_travelling(self._travelling[-1])

    def _cut_travelling(self, journey: Journey) -> None:
        """Compute waits until gradients are cut that go on to the host; the whole ones are given back."""
        self._awaited.append(journey.cut)
        one, end = journey.one, self.engine.tasks[self.engine.later(journey.cut, self.engine.last)][3]
        self.engine.allocations += ending(one._replace(added_bytes=0, new_bytes=0), end, Moment.ARRIVE, Moment.ARRIVED)
        left = one._replace(copied_bytes=0, whole_bytes=0, cut_ns=None)
        self._travelling[self._travelling.index(journey)] = Journey(journey.task, left, -1)

    def _end_travelling(self, journey: Journey) -> None:
        """Compute waits for a journey; its whole gradients are given back."""
        task, one, _ = journey
        self._travelling.remove(journey)
        self._awaited.append(task)
        end = self.engine.tasks[self.engine.later(task, self.engine.last)][3]
        self.engine.allocations += ending(one, end, Moment.ARRIVE, Moment.ARRIVED)

    def _still_travelling(self) -> tuple[Travelling, ...]:
        """What is on its way when the pass ends, and when it is there."""
        tasks = self.engine.tasks
        return tuple([
            one._replace(end_ns=tasks[task][3], kind=tasks[task][4], cut_ns=tasks[cut][3] if cut >= 0 else None)
            for task, one, cut in self._travelling
        ])  # fmt: skip


def meets(item: Item) -> bool:
    """Whether ranks wait for each other in it, forward or backward."""
    sent = (*item.forward, *item.inner, *item.backward, *item.inner_backward)
    return any(one.waits is not None for one in sent)
