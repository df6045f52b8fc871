"""Plays one stage's lowered program, one pass at a time, on the streams of one of its ranks.

Parameters that are converted once a step start at its begin, in order of use. Regathered ones start when the
unit before theirs does, one unit ahead, and again in the backward pass. A gradient bucket starts home as soon
as its last gradient is there. Compute waits for the conversions that it reads; collectives on one
link level queue. A region that is recomputed runs again before the first backward item that needs something of it;
units in it are launched then, one ahead, as in the forward pass, and stay for the backward pass; with the last of them
what the region before begins with.

A backward pass may come in two parts: the first makes gradients of what earlier stages sent, with the regathered
parameters that this takes; the second those of stored tensors.

A pass that begins in the same state as an earlier one of its kind is that one, later: it is played once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

from autopar.cost import Profile
from autopar.cost.compute import copy_time_ns
from autopar.cost.profile import host_of
from autopar.ir.schedule import BACKWARD_INPUT, FORWARD
from autopar.runtime.packing import BUCKET_SIZES, MAX_IN_FLIGHT, BucketSizes
from autopar.simulate.copies import CopiedCall
from autopar.simulate.engine import (
    COMPUTE,
    LAST,
    NOTHING_SENT,
    Carried,
    Change,
    Engine,
    Flight,
    Moment,
    Moved,
    Sent,
    Task,
)
from autopar.simulate.host_copies import DOWN, UP
from autopar.simulate.orders import BackwardStep, Changes, Direction, Lifetimes, Orders
from autopar.simulate.program import Bucket, Item, LocalProgram, Slot, Transmission
from autopar.simulate.sharing import Share

BEGUN = "begun"  # marks a bucket that another part has begun, in the name of what is sent
UNDER_WAY = "gradients under way"
IN_CHUNKS = ("all_gather", "reduce_scatter")  # collectives that products can be computed beside, chunk by chunk
STOPPING = ("activation", "operator")  # purposes of collectives that the rank does not go on beside
STOPS, APART = "for activations", "for weights"  # in the names of a link's queues
ROOT = 0  # the unit of parameters that belong to no block
LEAVE_GRADIENTS = (FORWARD, BACKWARD_INPUT)  # passes that make no gradients of stored tensors


Rename = Callable[[str], str]
Meet = Callable[[int, int], int]
"""From a collective's axis, and when this rank could start it: when all of its ranks can."""


class Sums(Enum):
    """When gradients are summed over ranks, and where.

    EARLY: while the backward pass goes on, from memory that a bucket takes for it: the backward pass waits for earlier
    buckets where too many hold theirs (`MAX_IN_FLIGHT`), as emitted programs do. BUFFERED: the same, from memory that
    is there all the time, for which nothing waits, as in Megatron-LM. LATE: after the backward pass, as DeepSpeed's
    pipeline engine does.
    """

    EARLY = "early"
    BUFFERED = "buffered"
    LATE = "late"


class Overlap(NamedTuple):
    """How a software hides what it sends behind what it computes.

    sums: of gradients. cuts_activations: gathers before products and reductions behind them come in as many chunks as
    there are ranks, each beside the product of another (Wang et al., ASPLOS'23; Transformer Engine's user buffers), so
    that one chunk is left in which nothing is computed. Of products that take as long, as large models' do. casts: the
    master weights are cast where they are used, and each gradient where it is made, as emitted programs do; others keep
    weights in 16 bits, which their optimizer writes. adds: gradients are added to those of earlier microbatches by
    kernels of their own, as emitted programs do; else the products that make them add them up in float32, at the pace
    at which tables of a profile have gradients of weights (gradient accumulation fusion of Megatron-LM). balances:
    attention in a ring first exchanges halves of sequences, so that all ranks have as much of the causal part, as
    emitted programs do; else sequences come so from the input on, as Megatron-LM cuts them. queues_apart: gradients and
    parameters queue by themselves on a level of links, as communicators of their own do, so that what stops a rank does
    not wait behind them; the time in which both are under way is not told. bucket_bytes: of gradients or parameters
    that travel together at most, the large ones too (Megatron-LM's flat buffers); 0 packs as emitted programs do.
    """

    sums: Sums = Sums.EARLY
    cuts_activations: bool = False
    casts: bool = True
    adds: bool = True
    balances: bool = True
    queues_apart: bool = False
    bucket_bytes: int = 0

    @property
    def packing(self) -> BucketSizes:
        """What travels together."""
        return BucketSizes(1 << 62, self.bucket_bytes, self.bucket_bytes) if self.bucket_bytes else BUCKET_SIZES

    def inside(self, sent: Sequence[Transmission]) -> Sequence[Transmission]:
        """Of what an operator sends, what is left."""
        if self.balances or all(one.collective != "ring" for one in sent):
            return sent
        return [one for one in sent if one.collective != "all_to_all"]


AS_EMITTED = Overlap()


class Queues(Enum):
    """What queues behind each other on a level of links; queues of one level share it (`engine.shared`).

    LEVEL: all that is sent. PURPOSE: what stops a rank, and gradients with parameters. AXIS: what is sent along one
    mesh axis: torch's ProcessGroupNCCL has a communicator and a stream for each process group, and the runtime a group
    for each axis; on that stream a collective waits for what the rank has launched before, not for other groups'.
    Gloo's groups have threads of their own, too, but these share the rank's cores, by which CPUs' links are measured.
    """

    LEVEL = "level"
    PURPOSE = "purpose"
    AXIS = "axis"

    def link(self, sent: Transmission, purpose: str) -> str:
        """The queue of what is sent."""
        if self is Queues.AXIS and sent.is_shared:
            return f"{sent.level} axis {sent.axis}"
        if self is Queues.PURPOSE:
            return f"{sent.level} {STOPS if purpose in STOPPING else APART}"
        return sent.level

    def links(self, sent: Transmission) -> tuple[str, ...]:
        """The queues that it may be in."""
        return tuple([self.link(sent, purpose) for purpose in ("activation", "parameter")])


def queues_of(profile: Profile, overlap: Overlap) -> Queues:
    """What queues behind each other where a software runs on a device."""
    if overlap.queues_apart:
        return Queues.PURPOSE
    return Queues.AXIS if profile.device_type == "cuda" else Queues.LEVEL


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
        return -sum(change[1] for change in _ending(self, self.end_ns, Moment.ARRIVE, Moment.ARRIVED))

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
        return self._replace(held=frozenset(), whole=frozenset(), journeys=(), home=())

    def with_gradients(self, other: Standing) -> Standing:
        """The same, with another's gradients."""
        return self._replace(held=other.held, whole=other.whole, journeys=other.journeys, home=other.home)

    def after(self, ns: int) -> Standing:
        """What is left of it so much later."""
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


class Player:
    """Plays a program's items and what is sent around them. shares: of buckets that gradients go home in, which
    `_complete_at` has by the item that completes them, and `_share_of` by slot; `_moved`: slots whose gradient is at
    home elsewhere than where it is made."""

    lifetimes: Lifetimes
    shares: tuple[Share, ...]
    _complete_at: Mapping[int, Sequence[int]]
    _share_of: Mapping[int, int]
    _moved: Collection[int]

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
        self.start(PassKind("begin"), Engine(self._slowdowns, carried), meet)
        for bucket in self.program.gathers:
            self._convert(bucket, ())
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
        self.engine.allocations += _ending(one._replace(added_bytes=0, new_bytes=0), end, Moment.ARRIVE, Moment.ARRIVED)
        left = one._replace(copied_bytes=0, whole_bytes=0, cut_ns=None)
        self._travelling[self._travelling.index(journey)] = Journey(journey.task, left, -1)

    def _end_travelling(self, journey: Journey) -> None:
        """Compute waits for a journey; its whole gradients are given back."""
        task, one, _ = journey
        self._travelling.remove(journey)
        self._awaited.append(task)
        end = self.engine.tasks[self.engine.later(task, self.engine.last)][3]
        self.engine.allocations += _ending(one, end, Moment.ARRIVE, Moment.ARRIVED)

    def _still_travelling(self) -> tuple[Travelling, ...]:
        """What is on its way when the pass ends, and when it is there."""
        tasks = self.engine.tasks
        return tuple([
            one._replace(end_ns=tasks[task][3], kind=tasks[task][4], cut_ns=tasks[cut][3] if cut >= 0 else None)
            for task, one, cut in self._travelling
        ])  # fmt: skip


def _ending(one: Travelling, end_ns: int, arrive: int, arrived: int) -> list[Change]:
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
        engine.allocations += _ending(one, one.end_ns, Moment.ALL_ARRIVE, Moment.ALL_ARRIVED)
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


def meets(item: Item) -> bool:
    """Whether ranks wait for each other in it, forward or backward."""
    sent = (*item.forward, *item.inner, *item.backward, *item.inner_backward)
    return any(one.waits is not None for one in sent)
