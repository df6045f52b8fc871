"""Plays one part of a pass on from where the parts before have left the device's streams.

All times count from the part's begin. What a part depends on is its `PartEntry`; equal parts with equal entries do the
same, which makes of a model of many equal layers a few that are played.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.clock import worked
from autopar.cost import Profile
from autopar.ir.schedule import BACKWARD, BACKWARD_WEIGHT, FORWARD
from autopar.runtime.packing import LONE_BYTES, pack_gradients
from autopar.simulate.engine import COMPUTE, LAST, Carried, Engine, Flight
from autopar.simulate.orders import Direction, Orders, Unsupported, first_operand
from autopar.simulate.overlap import Overlap
from autopar.simulate.parts import NUM_BEFORE, Part
from autopar.simulate.passes import Journey, Meet, PassKind, Played, Travelling, finished
from autopar.simulate.player import ROOT, Player, meets
from autopar.simulate.program import Bucket, LocalProgram, Slot, Transmission, is_summed_first, way_of_slot
from autopar.simulate.sharing import Share
from autopar.tunables import PLAY_ITEM_S

Ends = tuple[tuple[int, str], ...]
"""Of tasks: when they end, and their kinds."""


class LooksBack(Exception):
    """A collective waits for nothing that the part itself does: it begins when its link is free, which may be before
    the part does, and asks for all of the links' past."""


class Ahead(NamedTuple):
    """Units of another part that this one asks for ahead."""

    part: Part
    units: tuple[int, ...]


class RootBucket(NamedTuple):
    """Slots that are gathered together: of each its part, by place among those of a `Root`, and number."""

    slots: tuple[tuple[int, int], ...]
    transmissions: tuple[Transmission, ...]
    convert_ns: int


class Root(NamedTuple):
    """Regathered slots that belong to no unit."""

    parts: tuple[Part, ...]
    buckets: tuple[RootBucket, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes where they are used."""
        slots = (self.parts[place].program.slots[n] for bucket in self.buckets for place, n in bucket.slots)
        return sum(slot.used_bytes for slot in slots if not slot.is_alias)

    @property
    def num_slots(self) -> int:
        """Slots of all buckets."""
        return sum(len(bucket.slots) for bucket in self.buckets)


LENT = -1  # the unit of slots that belong to those of other parts
FOLLOWING, PRECEDING = -1, -2  # whose a slot is: of the unit ahead forward, or backward


class PartEntry(NamedTuple):
    """All that a part of a pass depends on.

    last_ns: when the compute stream's latest task ended; host_ns: until when the host is busy; waiting: the kind of
    compute that waits for it. links, in_flight, unmet_ns: as in `Carried`. ready: of values that come in, by number, of
    slots, and of what was sent inside an operator; gradients: of values that leave, contributions that are under way;
    others: of each share, when the last gradient of other parts was there. live, arriving, pinned, whole, journeys: as
    in `Standing`; root: how many gradients are missing of what belongs to no unit. awaited: what compute waits for.
    held: stored tensors, by place, that have memory for their gradients; transient: of slots that leave, whose
    gradients wait to be added to that. arrivals: bytes of other parts' shards in each share, those that are new and
    those added.
    """

    kind: PassKind
    last_ns: int = 0
    host_ns: int = 0
    waiting: str = ""
    links: tuple[tuple[str, int], ...] = ()
    in_flight: tuple[Flight, ...] = ()
    ready: tuple[tuple[int, int, str], ...] = ()
    gradients: tuple[tuple[int, Ends], ...] = ()
    others: tuple[int, ...] = ()
    held: frozenset[int] = frozenset()
    transient: frozenset[int] = frozenset()
    live: frozenset[int] = frozenset()
    arriving: tuple[tuple[int, int, int], ...] = ()
    pinned: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    root: int = -1
    awaited: Ends = ()
    journeys: tuple[Travelling, ...] = ()
    arrivals: tuple[tuple[int, int], ...] = ()
    unmet_ns: int = 0


class Exit(NamedTuple):
    """What a part of a pass leaves. latest_ns: when its last item ended; the times of streams count from where its
    compute does. made: by place, of values of its own that later parts read, when they are there; ready: of slots, and
    of results of operators that send inside. gradients: contributions to values that came in; home: of gradients on
    their way; own: of each share, when the last gradient of this part was there, −1 for none. live, pinned, whole:
    of its own; ahead: whether the unit of another part is on its way; arriving: what of its units, and of that one,
    arrives packed. returned_ns: when the module around has returned, if it does in this part."""

    done: Played
    last_ns: int
    host_ns: int
    waiting: str
    latest_ns: int
    made: tuple[tuple[int, int, str], ...]
    ready: tuple[tuple[int, int, str], ...]
    gradients: tuple[tuple[int, Ends], ...]
    home: Ends
    own: tuple[int, ...]
    sent: tuple[int, ...]  # shares that went home
    held: frozenset[int]
    transient: frozenset[int]
    live: frozenset[int]
    left_bytes: int  # of units that stay gathered to the end of the pass
    pinned: frozenset[int]
    whole: frozenset[int]
    ahead: frozenset[int]
    arriving: tuple[tuple[int, int, int], ...]
    root: int
    awaited: Ends
    journeys: tuple[Travelling, ...]
    is_calm: bool  # nothing is under way when it ends
    returned_ns: int


class Forward:
    """What is known of a part's forward pass, whatever buckets its gradients travel in. calm: of one that begins when
    nothing is under way, by how long its ranks have computed since they met."""

    def __init__(self) -> None:
        self.known: dict[Any, Exit] = {}
        self.calm: dict[int, Exit] = {}


class PartPlayer(Player):
    """One part's state while it is played, with its shares of the buckets that gradients go home in."""

    def __init__(
        self, part: Part, forward: Forward, profile: Profile, is_alone: bool, overlap: Overlap,
        shares: tuple[Share, ...], following: Ahead | None = None, preceding: Ahead | None = None,
        root: Root | None = None, is_first: bool = False, begins_back: bool = False,
        lent: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """forward: what is known with the same around it; is_alone: it is all that is played; overlap: when buckets go
        home; following, preceding: what is asked for ahead, forward and backward; lent: slots of other parts' units."""
        self.lent, self.begins_back = lent, begins_back
        self.part, self.forward, self.returns = part, forward, part.returns
        self.is_first, self.shares = is_first, shares
        self.program = copy.copy(part.program)
        self.orders, self.lifetimes, self.directions = part.orders, part.lifetimes, part.directions
        self.foreign: dict[int, tuple[int, int]] = {}  # values of other parts' slots -> whose, and their numbers there
        self.following: tuple[int, ...] = ()  # the numbers here of their units
        self.preceding: tuple[int, ...] = ()
        self.has_root = root is not None
        if following or preceding or root:
            self._look_around(following, preceding, root)
        super().__init__(self.program, profile, self.orders, overlap)
        slots = self.program.slots
        self._share_of = {slot: number for number, share in enumerate(shares) for slot in share.slots}
        self._moved = {
            number for number, slot in enumerate(slots)
            if slot.requires_grad and slot.steps and (slot.is_resized or is_summed_first(slot))
        }  # fmt: skip
        if not self._moved.isdisjoint(self._ended_here().difference(self._share_of)):
            raise Unsupported  # the parameter is read first where no gradient flows, and its bucket is there
        self._complete_at = self._completing()
        self.known: dict[Any, Exit] = {}
        self.waits = tuple(
            (index, share.way) for index, share in enumerate(shares) if share.completed_at >= 0 and share.comes
        )
        lowered, items = part.lowered, part.program.items
        self.is_resized_with_others = tuple([
            (index, way) for index, way in self.waits if slots[shares[index].slots[0]].is_resized
        ])  # fmt: skip
        self.joins_others = tuple([(index, share) for index, share in enumerate(shares) if share.comes or share.goes])
        self.reads = tuple(sorted({
            value for item in items[NUM_BEFORE : part.end] for value in item.inputs if value < lowered.num_entering
        }))  # fmt: skip
        self.recomputes = any(item.region >= 0 for item in items[NUM_BEFORE : part.end])
        self.links = self._links()
        self.meets = any(map(meets, items[NUM_BEFORE : part.end]))
        # whether collectives may begin before the part does
        self.looks_back = dict.fromkeys((FORWARD, *part.directions), is_alone)

    def _ended_here(self) -> set[int]:
        """Slots whose gradients this part completes."""
        done = (done for item, done in self.orders.ended_at.items() if NUM_BEFORE <= item < self.part.end)
        return {self._number[slot.value] for ended in done for slot, _ in ended}

    def _look_around(self, following: Ahead | None, preceding: Ahead | None, root: Root | None) -> None:
        """Adds what this part gathers of others."""
        program = self.program
        program.slots, orders = [*program.slots], copy.copy(self.orders)
        orders.gathers, orders.last = defaultdict(list, orders.gathers), dict(orders.last)
        orders.visits = [*orders.visits]
        count = len(program.units)
        if following is not None:
            self.following = self._add_units(orders, following, count, FOLLOWING)
            orders.visits += self.following
        if preceding is not None and BACKWARD in self.directions:
            self.preceding = self._add_units(orders, preceding, count + len(self.following), PRECEDING)
            orders.before = orders.before | dict.fromkeys(self.orders.visits[:1], self.preceding)
            direction = self.directions[BACKWARD]
            entered = direction.entered | {-1: self.preceding}
            self.directions = {BACKWARD: replace(direction, entered=entered)}
        if root is not None:
            orders.gathers[ROOT] = [self._own_bucket(bucket, root) for bucket in root.buckets]
        self.orders = orders

    def _add_units(self, orders: Orders, ahead: Ahead, first: int, whose: int) -> tuple[int, ...]:
        for unit, own in enumerate(ahead.units, first):
            orders.last[unit] = -1
            for bucket in ahead.part.orders.gathers[own]:
                numbers = [self._add_slot(ahead.part, number, unit, whose) for number in bucket.slots]
                orders.gathers[unit].append(replace(bucket, slots=numbers))
        return tuple(range(first, first + len(ahead.units)))

    def _add_slot(self, part: Part, number: int, unit: int, whose: int) -> int:
        slots, value = self.program.slots, len(self.program.values) + len(self.foreign)
        self.foreign[value] = whose, part.program.slots[number].value
        slots.append(part.program.slots[number].at(value, unit, f"{whose}:{number}"))
        return len(slots) - 1

    def _own_bucket(self, bucket: RootBucket, root: Root) -> Bucket:
        numbers = [
            n if root.parts[place] is self.part else self._add_slot(root.parts[place], n, ROOT, place)
            for place, n in bucket.slots
        ]  # fmt: skip
        return Bucket(numbers, bucket.transmissions, bucket.convert_ns)

    def _links(self) -> tuple[str, ...]:
        """The queues of links that something is sent on."""
        items = self.program.items[NUM_BEFORE : self.part.end]
        sent = [one for item in items for one in (*item.forward, *item.backward, *item.inner, *item.inner_backward)]
        sent += [one for share in self.shares for one in share.transmissions]
        sent += [one for buckets in self.orders.gathers.values() for bucket in buckets for one in bucket.transmissions]
        return tuple(sorted({link for one in sent for link in self._queues.links(one)}))

    def _completing(self) -> dict[int, list[int]]:
        """By item, the shares that it completes, in the order in which they go home: a branch hands out all gradients
        in one order on all ranks."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, share in enumerate(self.shares):
            if share.completed_at >= 0:
                found[share.completed_at].append(index)
        packed = _order_of_packing(self.program) if self.program.first_of else {}
        for number, indices in found.items():
            if number in self.program.first_of:
                indices.sort(key=lambda index: packed[self.shares[index].slots[0]])
            else:
                indices.sort(key=lambda index: -first_operand(self.program, number, self.shares[index].slots))
        return found

    def play_part(self, entry: PartEntry, meet: Meet | None = None) -> Exit:
        """The part of the pass that begins so. meet: where other ranks do unlike work."""
        worked(PLAY_ITEM_S * self.part.end)
        self._begin(entry, meet)
        latest = LAST
        if entry.kind.name == FORWARD:
            if self.is_first:
                self._launch(ROOT)
                self._unpack(ROOT)
                if self.orders.visits:
                    self._launch(self.orders.visits[0])
            latest = self._run_forward(range(NUM_BEFORE, self.part.end))
        elif entry.kind.name in self.directions:
            self._play_back(self.directions[entry.kind.name])
        return self._exit(latest)

    def _play_back(self, direction: Direction) -> None:
        if self._kind.name == BACKWARD_WEIGHT and self.program.led:
            for unit in sorted(self.orders.gathers, key=self._place_of_gather):
                self._launch(unit)
        elif self.begins_back:
            self._launch(ROOT)
            self._unpack(ROOT)
        self._run_steps(direction)
        for index in self._late:
            self._send_home(index, [self.engine.last])

    def _place_of_gather(self, unit: int) -> tuple[bool, int]:
        """Large slots are gathered before those that travel together."""
        bucket = self.orders.gathers[unit][0]
        return self.program.slots[bucket.slots[0]].used_bytes < LONE_BYTES, bucket.slots[0]

    def _begin(self, entry: PartEntry, meet: Meet | None) -> None:
        kind, num_shares = entry.kind, len(self.shares)
        engine = Engine(
            self._slowdowns,
            Carried(entry.links, entry.in_flight, unmet_ns=entry.unmet_ns),
            entry.host_ns,
            entry.waiting,
        )
        engine.tasks[LAST] = (COMPUTE, "", entry.last_ns, entry.last_ns, "")
        self.start(kind, engine, meet)
        self._ready = {value: engine.carry(end, cause) for value, end, cause in entry.ready}
        self._live, self._launched, self._pinned = set(entry.live), set(entry.live), set(entry.pinned)
        for unit, end, num_bytes in entry.arriving:
            self._arriving[unit].append((engine.carry(end, "parameter"), num_bytes))
        if self.has_root:
            self._undone[ROOT] = entry.root
        self._awaited = [engine.carry(end, cause) for end, cause in entry.awaited]
        self._travelling = [
            Journey(
                engine.carry(one.end_ns, one.kind), one,
                -1 if one.cut_ns is None else engine.carry(one.cut_ns, one.kind),
            )
            for one in entry.journeys
        ]  # fmt: skip
        for value, ends in entry.gradients:
            self._gradients[value] = [engine.carry(end, cause) for end, cause in ends]
        self._held = {self.part.lowered.keeps[place] for place in entry.held}
        self._transient = {self._number[value] for value in entry.transient}
        self._whole = set(entry.whole)
        is_later = kind.name in (BACKWARD, BACKWARD_WEIGHT) and not kind.is_first
        self._buffered = {n for n, share in enumerate(self.shares) if self._is_buffered(share, is_later)}
        self._others = [engine.carry(end, "gradient") if end > 0 else LAST for end in entry.others or (0,) * num_shares]
        self._arrivals = entry.arrivals or ((0, 0),) * num_shares
        self._sent: list[int] = []

    def _is_buffered(self, share: Share, is_later: bool) -> bool:
        slot = self.program.slots[share.slots[0]]
        return share.is_begun or (is_later and not (slot.is_resized and slot.reduces_each))

    def _exit(self, latest: int) -> Exit:
        engine, lowered = self.engine, self.part.lowered
        tasks, length, is_forward = engine.tasks, engine.free_ns, self._kind.name == FORWARD
        done = finished(engine, dict(self.comm_bytes), self.along)
        entering = range(lowered.num_entering)
        ahead = {*self.following, *self.preceding} & self._live
        own_live = self._live - ahead - {ROOT}
        return Exit(
            done=done,
            last_ns=tasks[engine.last][3] - length,
            host_ns=engine.host_ns - length,
            waiting=engine.kind,
            latest_ns=tasks[latest][3],
            made=tuple([
                (place, *self._end(self._ready[value]))
                for place, value in enumerate(lowered.leaving)
                if value >= lowered.num_entering and value in self._ready
            ]) if is_forward else (),
            ready=self._still_coming(length),
            gradients=tuple([
                (value, tuple([self._end(task) for task in self._gradients[value] if task >= engine.num_carried]))
                for value in entering if value in self._gradients
            ]),
            home=tuple([self._end(task) for task in self._home]),
            own=tuple([self._last_gradient(share) for share in self.shares]),
            sent=tuple(self._sent),
            held=frozenset(place for place, name in enumerate(lowered.keeps) if name in self._held),
            transient=frozenset(value for value in entering if self._number.get(value, -1) in self._transient),
            live=frozenset(own_live),
            left_bytes=sum(
                self._copied_bytes(bucket) for unit in own_live for bucket in self.orders.gathers[unit]
            ),
            pinned=frozenset(self._pinned),
            whole=frozenset(self._whole),
            ahead=frozenset(ahead),
            arriving=tuple([
                (unit, tasks[task][3], num_bytes)
                for unit in sorted(self._live) for task, num_bytes in self._arriving.get(unit, ())
            ]),
            root=self._undone.get(ROOT, -1) if self.has_root and ROOT in self._live else -1,
            awaited=tuple([self._end(task) for task in self._awaited]),
            is_calm=self._is_calm(length),
            journeys=self._still_travelling(),
            returned_ns=self._returned_ns,
        )  # fmt: skip

    def _is_calm(self, length: int) -> bool:
        engine = self.engine
        return (
            engine.tasks[engine.last][3] == length
            and all(end <= length for end in engine.links.values())
            and all(engine.tasks[task][3] <= length for task in self._ready.values())
            and not (self._live or self._pinned or self._awaited or self._travelling or self._whole or self.has_root)
            and self._kind.name == FORWARD
        )

    def _end(self, task: int) -> tuple[int, str]:
        _, _, _, end, kind = self.engine.tasks[task]
        return end, kind

    def _still_coming(self, length: int) -> tuple[tuple[int, int, str], ...]:
        """Slots, and results of operators that send inside, which arrive after the part has ended."""
        tasks, ready = self.engine.tasks, self._ready
        late = {value for value, task in ready.items() if task >= self.engine.num_carried and tasks[task][3] > length}
        if not late:
            return ()
        if not self.recomputes:
            sent = {value for item in self.program.items if item.inner for value in item.outputs}
            late &= sent | self._number.keys()
        return tuple([(value, *self._end(ready[value])) for value in sorted(late)])

    def _last_gradient(self, share: Share) -> int:
        values = (self.program.slots[number].value for number in share.slots)
        tasks = (task for value in values for task in self._gradients.get(value, ()))
        return max((self.engine.tasks[task][3] for task in tasks), default=-1)

    def _transmit(
        self, name: str, purpose: str, transmissions: Sequence[Transmission], after: Iterable[int]
    ) -> tuple[int, int]:
        after, tasks = [*after], self.engine.tasks
        if not self.looks_back[self._kind.name] and all(tasks[task][3] < 0 for task in after):
            self.looks_back[self._kind.name] = True
            raise LooksBack
        return super()._transmit(name, purpose, transmissions, after)

    def _unit_of(self, slot: Slot) -> int:
        return LENT if self._number.get(slot.value, -1) in self.lent else super()._unit_of(slot)

    def _send_home(self, index: int, after: Sequence[int] = ()) -> None:
        slot = self.program.slots[self.shares[index].slots[0]]
        if slot.reduces_each or self._kind.is_last:
            self._sent.append(index)
        super()._send_home(index, [*after, self._others[index]])


def _order_of_packing(program: LocalProgram) -> dict[int, int]:
    """By slot, the place of its bucket among all of a program, as the runtime packs them."""
    slots = program.slots
    buckets = pack_gradients(
        (n for n in reversed(range(len(slots))) if slots[n].steps and slots[n].requires_grad),
        lambda n: way_of_slot(slots[n], slots[n].storage.regather),
        lambda n: slots[n].gradient_bytes,
        lambda n: is_summed_first(slots[n]),
    )
    return {n: place for place, bucket in enumerate(buckets) for n in bucket}
