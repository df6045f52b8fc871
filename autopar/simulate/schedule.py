"""Plays a lowered program over the microbatches of a step on one rank's streams.

Parameters that are converted once a step start at its begin, in order of use. Regathered ones start when the
unit before theirs does, one unit ahead, and again in the backward pass. A gradient bucket starts home as soon
as its last gradient is there. Compute waits for the conversions that it reads; collectives on one
link level queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Breakdown, Plan
from autopar.runtime.packing import MAX_IN_FLIGHT
from autopar.simulate.engine import COMPUTE, Engine, Moment
from autopar.simulate.lifetime import Changes, find_lifetimes
from autopar.simulate.orders import find_orders
from autopar.simulate.program import Bucket, Item, Slot, Transmission, lower
from autopar.simulate.timeline import Timeline

ROOT = 0  # the unit of parameters that belong to no block
UNDER_WAY = "gradients under way"
WORK = ("forward", "backward", "recompute")


def simulate(graph: Graph, plan: Plan, profile: Profile) -> Timeline:
    """One step of the plan: what runs when, what it sends, what memory it takes. Deterministic.

    In a plan of one stage every rank does the same; simulated is rank 0, which has the longest slices.
    Raises PlanError for a plan that lacks a redistribution.
    """
    player = Player(graph, plan, profile.shared_by(plan.mesh.devices_per_node))
    player.begin_step()
    for microbatch in range(plan.microbatches):
        player.forward()
        if player.trains:
            player.backward(microbatch)
        player.end_microbatch()
    if player.trains:
        player.optimize()
    return player.timeline()


class Journey(NamedTuple):
    """Gradients on their way to smaller shards: the last task, and bytes of copies that travel."""

    bucket: Bucket
    task: int
    copied_bytes: int


class Player:
    """One rank's state while its program is played."""

    def __init__(self, graph: Graph, plan: Plan, profile: Profile, rank: int = 0) -> None:
        self.trains = plan.mode == "train" and graph.loss is not None
        self.rank, self.plan = rank, plan
        self.program = lower(graph, plan, profile)
        self.orders = find_orders(self.program, profile)
        self.lifetimes = find_lifetimes(self.program, self.trains)
        self.engine = Engine(profile.facts.overlap_slowdown)
        self.comm_bytes: dict[str, int] = defaultdict(int)
        self._compute = (rank, COMPUTE)
        self._last = -1  # the latest task on the compute stream
        self._ready: dict[int, int] = {}  # value -> the task after which it is there
        self._gradients: dict[int, list[int]] = defaultdict(list)  # value -> the tasks that contribute to it
        self._live: set[int] = set()  # units whose regathered parameters are in place or under way
        self._launched: set[int] = set()  # units whose regathered parameters this pass has asked for
        self._buckets = {slot: bucket for bucket in self.program.reductions for slot in bucket.slots}
        self._number = {slot.value: number for number, slot in enumerate(self.program.slots)}
        self._undone: dict[int, int] = {}  # unit -> its regathered slots whose gradient is still to come
        self._pinned: set[int] = set()  # regathered slots that something outside their unit has asked for
        self._held: set[str] = set()  # stored tensors that have memory for their gradient
        self._buffered: set[int] = set()  # first slots of the buckets that have a buffer
        self._whole: set[int] = set()  # slots whose gradient waits to be sent
        self._in_flight: list[Journey] = []
        self._added: list[tuple[Bucket, int]] = []  # shards that are added to those of earlier microbatches
        self._arriving: dict[int, list[tuple[int, int]]] = defaultdict(list)  # unit -> (task, bytes) of packed gathers
        self._awaited: list[int] = []  # tasks that compute has to wait for before it goes on
        self._home: list[int] = []  # the tasks that bring gradients home

    # Passes ----------------------------------------

    def begin_step(self) -> None:
        """Residents, and the parameters that are converted once a step."""
        for num_bytes, kind in self.program.residents:
            self.engine.allocate(-1, num_bytes, kind)
        for bucket in self.program.gathers:
            if not self.program.slots[bucket.slots[0]].storage.regather:
                self._convert(bucket, ())

    def forward(self) -> None:
        """One microbatch forward."""
        self._launched.clear()
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

    def backward(self, microbatch: int) -> None:
        """One microbatch backward, from the loss."""
        self._launched.clear()
        self._undone = {
            unit: sum(len(bucket.slots) for bucket in buckets) for unit, buckets in self.orders.gathers.items()
        }
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
            self._run_backward(number, item, microbatch)
            if number == self.orders.first[item.unit] and item.unit != ROOT:
                self._release(item.unit)

    def end_microbatch(self) -> None:
        """Forgets the microbatch's values."""
        for unit in list(self._live):
            self._release(unit)
        self._unpin(set(self._pinned))
        slots = {slot.value for slot in self.program.slots}
        self._gradients = defaultdict(list, {v: t for v, t in self._gradients.items() if v in slots})

    def optimize(self) -> None:
        """Waits until all gradients are home, then updates the parameters."""
        while self._in_flight:
            self._finish_journey(self._in_flight[0])
        task = self._submit("optimizer", "optimizer", self.program.optimizer_ns, self._home)
        self.engine.allocate(task, self.program.optimizer_workspace, "workspace")
        self.engine.release(task, self.program.optimizer_workspace, "workspace")

    # Items ----------------------------------------

    def _run(self, number: int, item: Item, kind: str, memory: Changes) -> None:
        ready = self._ready
        self._fetch(item)
        after = [ready[value] for value in item.inputs if value in ready]
        if item.forward:
            first, last = self._transmit(item.name, "activation", item.forward, after)
        else:
            first = last = self._submit(item.name, kind, item.forward_ns, after)
        if item.inner:
            _, last = self._transmit(item.name, "operator", item.inner, [last])
        for value in item.outputs:
            ready[value] = last
        self._change(memory, number, first, last, "activations")

    def _run_backward(self, number: int, item: Item, microbatch: int) -> None:
        after = [task for value in item.outputs for task in self._gradients[value]]
        if item.inner:
            after += [self._ready[value] for value in item.outputs]
        added = self.orders.added_ns.get(number, 0)
        if microbatch:
            added += self.orders.kept_ns.get(number, 0)
        if item.backward:
            first, last = self._transmit(item.name, "activation", item.backward, after)
        else:
            after += [self._ready[v] for v in item.inputs if self.program.values[v].slot >= 0 and v in self._ready]
            first = last = self._submit(item.name, "backward", item.backward_ns + added, after)
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
            self._send_home(bucket, microbatch)

    def _recompute(self, region: int) -> None:
        for number in self.orders.regions[region]:
            self._run(number, self.program.items[number], "recompute", self.lifetimes.recompute)

    def _change(self, changes: Changes, number: int, first: int, last: int, kind: str) -> None:
        self.engine.allocate(first, changes.taken.get(number, 0), kind)
        self.engine.release(last, changes.given.get(number, 0), kind)

    def _submit(self, name: str, kind: str, duration_ns: int, after: Iterable[int]) -> int:
        self._last = self.engine.submit(self._compute, name, kind, duration_ns, (*after, *self._awaited))
        self._awaited.clear()
        return self._last

    def _transmit(
        self, name: str, purpose: str, transmissions: Sequence[Transmission], after: Iterable[int]
    ) -> tuple[int, int]:
        """Collectives one after another; the first and the last task."""
        tasks: list[int] = []
        for sent in transmissions:
            stream = (self.rank, sent.level)
            kind = f"{purpose} {sent.collective}"
            tasks.append(self.engine.submit(stream, name, kind, sent.duration_ns, tasks[-1:] or after))
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
            self.engine.release(self.engine.later(task, self._last), num_bytes, "gathered", Moment.START)

    def _launch(self, unit: int) -> None:
        if unit not in self._launched and unit not in self._live and self.orders.gathers.get(unit):
            self._launched.add(unit)
            self._live.add(unit)
            for bucket in self.orders.gathers[unit]:
                self._convert(bucket, [self._last] if self._last >= 0 else ())

    def _convert(self, bucket: Bucket, after: Iterable[int]) -> None:
        """Brings a bucket's slots from the stored placement to the used one."""
        slots = [self.program.slots[number] for number in bucket.slots]
        copied = self._copied(bucket)
        if not bucket.transmissions:
            self.engine.allocate(self._last, copied, "gathered", Moment.SEND)
            return
        name = slots[0].tensor if len(slots) == 1 else f"{slots[0].tensor} and {len(slots) - 1} more"
        _, last = self._transmit(name, "parameter", bucket.transmissions, after)
        self.engine.allocate(self._last, copied, "gathered", Moment.SEND)
        for slot in slots:
            self._ready[slot.value] = last
            if slot.gather_bytes:
                self.engine.allocate(self._last, slot.gather_bytes, "gathered", Moment.SEND)
                self._arriving[self._unit_of(slot)].append((last, slot.gather_bytes))

    def _fetch(self, item: Item) -> None:
        """A regathered parameter of another unit is gathered for the item, and stays until the microbatch ends."""
        for value in item.inputs:
            number = self.program.values[value].slot
            if number < 0 or number in self._pinned:
                continue
            slot = self.program.slots[number]
            unit = self._unit_of(slot)
            if slot.storage.regather and not slot.is_alias and unit not in (ROOT, item.unit) and unit not in self._live:
                self._pinned.add(number)
                self.engine.allocate(self._last, slot.used_bytes, "gathered", Moment.SEND)

    def _unpin(self, numbers: set[int]) -> None:
        for number in numbers & self._pinned:
            self.engine.release(self._last, self.program.slots[number].used_bytes, "gathered", Moment.START)
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
            self.engine.release(self._last, self._copied(bucket), "gathered", Moment.START)

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
        self._count_done(self._unit_of(slot), slot)
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

    def _count_done(self, unit: int, slot: Slot) -> None:
        """Regathered parameters whose gradients are all done are of no more use."""
        if slot.storage.regather:
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

    def _send_home(self, bucket: Bucket, microbatch: int) -> None:
        slots = [self.program.slots[number] for number in bucket.slots]
        if not slots[0].reduces_each and microbatch < self.plan.microbatches - 1:
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
        waiting = [journey for journey in self._in_flight if journey.bucket.has_buffer]
        for journey in waiting:
            self._finish_journey(journey)
        while shrinks and len(self._in_flight) >= MAX_IN_FLIGHT:
            self._finish_journey(self._in_flight[0])

    def _begin_journey(self, bucket: Bucket, last: int) -> None:
        """Whole gradients stay until the runtime waits for their journey's end; shards arrive in memory of their own.

        What is summed in a buffer is cut afterwards.
        """
        copies = sum(self.program.slots[number].scatter_bytes for number in bucket.slots)
        self.engine.allocate(self._last, copies, UNDER_WAY, Moment.SEND)
        self._in_flight.append(Journey(bucket, last, copies))
        if not bucket.has_buffer:
            self._arrive(bucket, self._last)
        self._whole.difference_update(bucket.slots)
        self._buffered.discard(bucket.slots[0])

    def _arrive(self, bucket: Bucket, task: int) -> None:
        """Memory of the shards; those added to what earlier microbatches have brought stay for a while."""
        for slot in (self.program.slots[number] for number in bucket.slots):
            kind = UNDER_WAY if slot.tensor in self._held else "gradients"
            self.engine.allocate(task, slot.stored_bytes, kind, Moment.ARRIVE)
            if kind == UNDER_WAY:
                self._added.append((bucket, slot.stored_bytes))
            self._held.add(slot.tensor)

    def _finish_journey(self, journey: Journey) -> None:
        """Compute waits for a journey; its whole gradients are given back."""
        self._in_flight.remove(journey)
        self._awaited.append(journey.task)
        end = self.engine.later(journey.task, self._last)
        if journey.bucket.has_buffer:
            self._arrive(journey.bucket, end)
        self.engine.release(end, journey.copied_bytes, UNDER_WAY, Moment.ARRIVED)
        kind = "gradients" if journey.bucket.has_buffer else UNDER_WAY
        self.engine.release(end, self._buffer_bytes(journey.bucket), kind, Moment.ARRIVED)
        for added in [added for added in self._added if added[0] is journey.bucket]:
            self._added.remove(added)
            self.engine.release(end, added[1], UNDER_WAY, Moment.ARRIVED)

    # Result ----------------------------------------

    def timeline(self) -> Timeline:
        """Everything that was played."""
        engine = self.engine
        spent: dict[str, int] = defaultdict(int)
        for event in engine.events:
            if event.stream[1] == COMPUTE:
                spent[event.kind] += event.end_ns - event.start_ns
        compute = sum(spent[kind] for kind in WORK)
        idle = engine.makespan_ns - compute - spent["optimizer"]
        series, peak, at_peak = engine.memory()
        return Timeline(
            events=tuple(engine.events),
            step_time_ns=engine.makespan_ns,
            breakdown=Breakdown(compute, idle, spent["optimizer"], 0),
            exposed=self._exposed(idle),
            memory=tuple(series),
            peak_bytes=peak,
            memory_at_peak=at_peak,
            comm_bytes=dict(sorted(self.comm_bytes.items())),
        )

    def _exposed(self, idle: int) -> dict[str, int]:
        """Compute's idle time by the kind of communication that it waited for; the rest ended the step."""
        waited = dict(self.engine.waited)
        rest = idle - sum(waited.values())
        if rest:
            last = max(self.engine.events, key=lambda event: event.end_ns)
            waited[last.kind] = waited.get(last.kind, 0) + rest
        return {kind: spent for kind, spent in sorted(waited.items()) if spent}
