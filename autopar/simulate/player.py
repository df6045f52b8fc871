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
from autopar.simulate.engine import LAST, Carried, Engine, Task
from autopar.simulate.lifetime import Changes, find_lifetimes
from autopar.simulate.orders import find_orders
from autopar.simulate.program import Bucket, Item, Program, Slot, Transmission

ROOT = 0  # the unit of parameters that belong to no block


class PassKind(NamedTuple):
    """What a pass does: "begin" a step, "forward", "backward" or "optimizer"; of the first or the last microbatch."""

    name: str
    is_first: bool = False
    is_last: bool = False


class Standing(NamedTuple):
    """What a stage has under way when a pass begins, in ns after that.

    ready: values whose conversion has not ended, with the kind of task; live: units whose regathered parameters are in
    place; held: stored tensors that have memory for their gradient; home: gradients that are on their way home.
    """

    ready: tuple[tuple[int, int, str], ...] = ()
    live: frozenset[int] = frozenset()
    held: frozenset[str] = frozenset()
    home: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """One pass as it ran; times in ns from its begin. `length_ns`: until the compute stream is free again.

    links, in_flight, last_ns: as in `Carried`, at its end. ready_ns: by tensor that it sends, when that is there.
    """

    kind: PassKind
    tasks: list[Task]
    allocations: list[tuple[int, int, str]]
    waited: dict[str, int]
    spent: dict[str, int]  # compute's time by kind
    sent: dict[str, int]  # bytes by collective
    length_ns: int
    links: dict[str, int]
    in_flight: list[tuple[int, int]]
    last_ns: int
    standing: Standing
    ready_ns: dict[str, int]


class Player:
    """One stage's state while its program is played."""

    def __init__(self, program: Program, profile: Profile, trains: bool, sums_early: bool = True) -> None:
        self.program, self.trains, self.sums_early = program, trains, sums_early
        self._pass_ns = profile.host.pass_ns if profile.host else 0
        self._collective_ns = profile.host.collective_ns if profile.host else 0
        self.orders = find_orders(program, profile)
        self.lifetimes = find_lifetimes(program, trains)
        self._slowdown = profile.facts.overlap_slowdown
        self._copies = any(not bucket.transmissions for unit in self.orders.gathers.values() for bucket in unit)
        self._known: dict[tuple[PassKind, Carried, Standing], Pass] = {}

    def play(self, kind: PassKind, carried: Carried, standing: Standing) -> Pass:
        """The pass, from what the device and the stage have under way. A forward pass leaves gradients as they are:
        its `standing` says nothing of them."""
        if kind.name == "forward":
            standing = standing._replace(held=frozenset(), home=())
        if not self._copies:
            carried = carried._replace(last_ns=0)
        key = (kind, carried, standing)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._played(kind, carried, standing)
        return known

    def _played(self, kind: PassKind, carried: Carried, standing: Standing) -> Pass:
        busy_ns = self._pass_ns if kind.name in ("forward", "backward") else 0
        waiting = "forward" if kind.name == "begin" else kind.name
        self.engine = engine = Engine(self._slowdown, carried, busy_ns, waiting)
        self._late: list[Bucket] = []  # buckets that go home after the pass
        self.comm_bytes: dict[str, int] = defaultdict(int)
        self._ready = {value: engine.carry(end, cause) for value, end, cause in standing.ready}
        self._live, self._held = set(standing.live), set(standing.held)
        self._home = [engine.carry(end, cause) for end, cause in standing.home]
        self._gradients: dict[int, list[int]] = defaultdict(list)  # value -> the tasks that contribute to it
        self._launched: set[int] = set()  # units whose regathered parameters this pass has asked for
        self._kind = kind
        {"begin": self._begin_step, "forward": self._forward, "backward": self._backward,
         "optimizer": self._optimize}[kind.name]()  # fmt: skip
        return self._result()

    def _result(self) -> Pass:
        engine, length = self.engine, self.engine.free_ns
        spent: dict[str, int] = defaultdict(int)
        for stream, _, start, end, kind in engine.tasks[engine.num_carried :]:
            if stream == "compute":
                spent[kind] += end - start
        last = engine.tasks[engine.last]
        ends = ((value, engine.tasks[task]) for value, task in self._ready.items())
        home = {(engine.tasks[task][3], engine.tasks[task][4]): None for task in self._home}
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
            last_ns=last[3] - last[2],
            standing=Standing(
                tuple((value, task[3], task[4]) for value, task in ends if task[3] > length),
                frozenset(self._live),
                frozenset(self._held),
                tuple(pair for pair in home if pair[0] > length),
            ),
            ready_ns=self._sent_ns(),
        )

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
        for bucket in self._late:
            self._send_home(bucket, [self.engine.last])
        self._end_microbatch()

    def _end_microbatch(self) -> None:
        for unit in list(self._live):
            self._release(unit)

    def _optimize(self) -> None:
        """Waits until all gradients are home, then updates the parameters."""
        self.engine.compute("optimizer", "optimizer", self.program.optimizer_ns, self._home)
        self._home = []

    # Items ----------------------------------------

    def _run(self, number: int, item: Item, kind: str, memory: Changes) -> None:
        ready = self._ready
        after = [ready[value] for value in item.inputs if value in ready]
        if item.forward:
            first, last = self._transmit(item.name, "activation", item.forward, after)
        else:
            first = last = self.engine.compute(item.name, kind, item.forward_ns, after, item.issue_ns[0])
        if item.inner:
            _, last = self._transmit(item.name, "operator", item.inner, [last])
        for value in item.outputs:
            ready[value] = last
        self._change(memory, number, first, last, "activations")

    def _run_backward(self, number: int, item: Item) -> None:
        after = [task for value in item.outputs for task in self._gradients[value]]
        added = self.orders.added_ns.get(number, 0)
        if not self._kind.is_first:
            added += self.orders.kept_ns.get(number, 0)
        if item.backward:
            first, last = self._transmit(item.name, "activation", item.backward, after)
        else:
            after += [self._ready[v] for v in item.inputs if self.program.values[v].slot >= 0 and v in self._ready]
            duration = item.backward_ns + added
            first = last = self.engine.compute(item.name, "backward", duration, after, item.issue_ns[1])
        if item.inner_backward:
            _, last = self._transmit(item.name, "operator", item.inner_backward, [last])
        for value in item.inputs:
            if self.program.values[value].wants_gradient:
                self._gradients[value].append(last)
        self._change(self.lifetimes.backward, number, first, last, "activations")
        self._change(self.lifetimes.gradients, number, first, last, "activation gradients")
        for slot in self.orders.begun_at.get(number, ()):
            self._begin_gradient(slot, first)
        for bucket in self.orders.complete_at.get(number, ()):
            if self.sums_early:
                self._send_home(bucket)
            else:
                self._late.append(bucket)

    def _recompute(self, region: int) -> None:
        for number in self.orders.regions[region]:
            self._run(number, self.program.items[number], "recompute", self.lifetimes.recompute)

    def _change(self, changes: Changes, number: int, first: int, last: int, kind: str) -> None:
        if number in changes.taken:
            self.engine.allocate(first, changes.taken[number], kind)
        if number in changes.given:
            self.engine.release(last, changes.given[number], kind)

    def _transmit(
        self, name: str, purpose: str, transmissions: Sequence[Transmission], after: Iterable[int]
    ) -> tuple[int, int]:
        """Collectives one after another; the first and the last task."""
        tasks: list[int] = []
        for sent in transmissions:
            kind = f"{purpose} {sent.collective}"
            waits = tasks[-1:] or after
            tasks.append(self.engine.transmit(sent.level, name, kind, sent.duration_ns, waits, self._collective_ns))
            self.comm_bytes[sent.collective] += sent.num_bytes
        return tasks[0], tasks[-1]

    # Parameters ----------------------------------------

    def _enter(self, unit: int, direction: int) -> None:
        """A unit begins: its parameters must be under way, and its neighbour's start now."""
        self._launch(unit)
        neighbour = self.orders.visits.index(unit) + direction
        if 0 <= neighbour < len(self.orders.visits):
            self._launch(self.orders.visits[neighbour])

    def _launch(self, unit: int) -> None:
        if unit not in self._launched and unit not in self._live and self.orders.gathers.get(unit):
            self._launched.add(unit)
            self._live.add(unit)
            for bucket in self.orders.gathers[unit]:
                self._convert(bucket, [self.engine.last])

    def _convert(self, bucket: Bucket, after: Iterable[int]) -> None:
        """Brings a bucket's slots from the stored placement to the used one."""
        slots = [self.program.slots[number] for number in bucket.slots]
        copied = sum(slot.used_bytes for slot in slots if not slot.is_alias)
        if not bucket.transmissions:
            self.engine.allocate(self.engine.last, copied, "gathered")
            return
        name = slots[0].tensor if len(slots) == 1 else f"{slots[0].tensor} and {len(slots) - 1} more"
        first, last = self._transmit(name, "parameter", bucket.transmissions, after)
        self.engine.allocate(first, copied, "gathered")
        for slot in slots:
            self._ready[slot.value] = last

    def _release(self, unit: int) -> None:
        if unit not in self._live:
            return
        self._live.discard(unit)
        for bucket in self.orders.gathers[unit]:
            slots = [self.program.slots[number] for number in bucket.slots]
            copied = sum(slot.used_bytes for slot in slots if not slot.is_alias)
            self.engine.release(self.engine.last, copied, "gathered")

    # Gradients ----------------------------------------

    def _is_transient(self, slot: Slot) -> bool:
        """Whether a slot's gradient is made in memory of its own, to be sent or added from there."""
        return slot.shrinks or (slot.reduces_each and not self._kind.is_first)

    def _begin_gradient(self, slot: Slot, task: int) -> None:
        if self._is_transient(slot):
            if self._kind.is_first or slot.reduces_each:
                self.engine.allocate(task, slot.gradient_bytes, "gradients under way")
        else:
            self._hold_gradient(slot, task)

    def _hold_gradient(self, slot: Slot, task: int) -> None:
        if slot.tensor not in self._held:
            self._held.add(slot.tensor)
            self.engine.allocate(task, slot.stored_bytes, "gradients")

    def _send_home(self, bucket: Bucket, after: Sequence[int] = ()) -> None:
        slots = [self.program.slots[number] for number in bucket.slots]
        if not slots[0].reduces_each and not self._kind.is_last:
            return
        after = [*after, *(task for slot in slots for task in self._gradients.pop(slot.value, ()))]
        first = last = max(after)
        if bucket.transmissions:
            name = f"gradient of {slots[0].tensor}"
            first, last = self._transmit(name, "gradient", bucket.transmissions, after)
            self._home.append(last)
        for slot in slots:
            self._hold_gradient(slot, first)
            if self._is_transient(slot):
                self.engine.release(last, slot.gradient_bytes, "gradients under way")
