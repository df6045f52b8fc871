"""One segment's part of a program, lowered by itself: what it does depends on little of what is around it.

Four walks over the segments carry that little from one to the next; each of their steps is known by what goes into it:

| walk                | carries                                                                                     |
|---------------------|---------------------------------------------------------------------------------------------|
| `lower`, forward    | tensors' placements, what they have been converted to, which of them share memory           |
| `mark`, backward    | which values later parts want the gradient of, how often; what they read, and keep          |
| `keep`, forward     | what earlier parts keep for the backward pass                                               |
| `finish`, backward  | buffers that gradients are in when the backward pass comes                                  |

In a part's program, an item stands for what is before and makes what comes in, a second for earlier readers; those at
the end for later ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.clock import worked
from autopar.cost import Profile
from autopar.ir.branches import Coordinates, in_order
from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Placement
from autopar.ir.plan import NodePlan, StagePlan
from autopar.ir.redistribution import Step
from autopar.ir.schedule import FORWARD
from autopar.simulate.facts import Call, GraphFacts
from autopar.simulate.gathers import gathers_by_unit
from autopar.simulate.lowering import Lowering
from autopar.simulate.operator_prices import OperatorPrice, PriceTable
from autopar.simulate.orders import (
    IN_LATER_PART,
    Buffers,
    Direction,
    Lifetimes,
    Orders,
    Unsupported,
    find_directions,
    find_lifetimes,
    find_orders,
)
from autopar.simulate.program import (
    Bucket,
    Item,
    LocalMemory,
    LocalProgram,
    Slot,
    Transmission,
    Value,
    mark_gradients,
    mark_parts,
)
from autopar.simulate.segments import Segment
from autopar.simulate.sending import OtherLane
from autopar.simulate.sharing import Moving, OnWay, Ways
from autopar.tunables import FINISH_ITEM_S, LOWER_NODE_S

BEFORE, EARLIER = 0, 1  # the items that stand for what is before
NUM_BEFORE = 2
AROUND = 1  # the unit of the module that a segment is cut inside of


class CrossingValue(NamedTuple):
    """A value that comes into a part: of which tensor, by its place among those that do; as what; in what memory.

    is_made: by an operator that runs in each microbatch, or a conversion. steps: of a stored tensor, from where it is
    kept. num_bytes: of the value.
    """

    tensor: int
    placement: Placement
    storage: int
    is_made: bool
    num_bytes: int
    steps: tuple[Step, ...] | None


class Arriving(NamedTuple):
    """What comes into a part: where each tensor was made, values, and memory: its bytes and whether an item made it."""

    bases: tuple[Placement, ...] = ()
    values: tuple[CrossingValue, ...] = ()
    memory: tuple[tuple[int, bool], ...] = ()


class Wanted(NamedTuple):
    """What later parts do with each value: whether they want its gradient, how many read it in the backward pass,
    whether any does forward; and of each piece of memory, whether one keeps it."""

    gradients: tuple[bool, ...] = ()
    readers: tuple[int, ...] = ()
    reads: tuple[bool, ...] = ()
    kept: tuple[bool, ...] = ()


class KeptBefore(NamedTuple):
    """What earlier parts do: of each piece of memory, whether one keeps it for the backward pass; of each value,
    whether one reads it there."""

    memory: tuple[bool, ...] = ()
    read: tuple[bool, ...] = ()


class Gradients(NamedTuple):
    """Gradients that later parts have made: by value the buffer, −1 for none; of each buffer its bytes, readers,
    whether the second part of the backward pass has read it, and whether it is a view of what a product made. is_asked:
    whether they have items of that second part."""

    buffer_of: tuple[int, ...] = ()
    buffers: tuple[tuple[int, int, bool, bool], ...] = ()
    left_bytes: int = 0  # see `Lifetimes`
    is_asked: bool = False


@dataclass(eq=False, slots=True)
class Lowered:
    """A part as lowered. leaving: by value that the next begins with, its number here; storages: by piece of memory
    that does, its number here; constants: bytes of what is computed once and read here."""

    program: LocalProgram
    calls: list[tuple[int, Call | None]]
    before: Arriving
    leaving: tuple[int, ...]
    storages: tuple[int, ...]
    after: Arriving
    loss: int  # the value, −1 for none
    constants: dict[int, int]
    answered: tuple[int, ...]  # what it sends to later stages whose gradient comes back
    keeps: tuple[str, ...]  # the stored tensors that it reads
    origin: Segment  # that it was made of
    is_all: bool  # there is no other segment
    is_marked: bool = False

    @property
    def num_entering(self) -> int:
        return len(self.before.values)

    @property
    def num_memory(self) -> int:
        return len(self.before.memory)


@dataclass(eq=False, slots=True)
class Marked:
    """A part with gradients marked. kept: the memory that its own items keep."""

    lowered: Lowered
    program: LocalProgram
    wanted: Wanted
    before: Wanted
    kept: frozenset[int]
    read: tuple[int, ...]  # entering values that the backward pass reads
    after: dict[int, int] = field(default_factory=dict)  # what is kept, by number


@dataclass(eq=False, slots=True)
class Part:
    """A part as it is played. freed_bytes: given back where the forward pass ends; returned_bytes: where the module
    around it returns; returns: the last item of that, if it does in this part, else −1; end: one past its last item;
    work_ns: of the compute stream in each direction, without what is computed again; received_bytes: in each direction,
    of gradients that other stages send, which are kept until the pass has ended."""

    program: LocalProgram
    orders: Orders
    lifetimes: Lifetimes
    directions: Mapping[str, Direction]
    marked: Marked
    end: int
    freed_bytes: int
    received_bytes: Mapping[str, int]
    before: Gradients
    returned_bytes: int = 0
    returns: int = -1
    ways: tuple[OnWay, ...] | None = None
    first_form: int = -1  # see `variants`
    work_ns: dict[str, int] = field(init=False)
    regathers: bool = field(init=False)
    unhoused: tuple[int, ...] = field(init=False)  # regathered slots of no unit
    saved: frozenset[int] = field(init=False)  # memory that its items save
    first: tuple[int, ...] = field(init=False)  # slots that are converted when the step begins
    first_played: tuple[int, ...] = field(init=False)  # those that something is sent or cast for
    first_bytes: int = field(init=False)
    first_played_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        slots, count = self.program.slots, self.lowered.num_entering
        self.work_ns = {FORWARD: sum([item.forward_ns for item in self.program.items[NUM_BEFORE : self.end]])}
        for name, direction in self.directions.items():
            self.work_ns[name] = sum([step.own_ns for step in direction.steps])
        saving = (item for item in self.program.items[NUM_BEFORE : self.end] if item.runs_backward)
        self.saved = frozenset([storage for item in saving for storage in item.saved])
        held = {n for buckets in self.orders.gathers.values() for bucket in buckets for n in bucket.slots}
        moved = [n for n, slot in enumerate(slots) if slot.converts and slot.value >= count]
        self.unhoused = tuple([n for n in moved if slots[n].storage.regather and n not in held])
        self.first = tuple([n for n in moved if not slots[n].storage.regather])
        self.regathers = any(slot.storage.regather for slot in slots)
        self.first_played = tuple([n for n in self.first if _takes_time(slots[n])])
        self.first_bytes, self.first_played_bytes = (
            sum(slots[n].used_bytes for n in numbers if not slots[n].is_alias)
            for numbers in (self.first, self.first_played)
        )  # fmt: skip

    @property
    def lowered(self) -> Lowered:
        return self.marked.lowered


def _takes_time(slot: Slot) -> bool:
    return slot.cast_bytes[0] > 0 or any(step.transfers[0].collective for step in slot.steps)


class PartLowering(Lowering):
    """Lowers segments of a graph one by one; what it knows of one plan it keeps for the next."""

    def __init__(
        self, graph: Graph, plan: StagePlan, profile: Profile, per_node: int, facts: GraphFacts,
        batched: Mapping[str, int], prices: PriceTable | None = None, may_split: bool = False,
        coordinates: Coordinates | None = None, others: Sequence[OtherLane] = (), casts: bool = True,
    ) -> None:  # fmt: skip
        """may_split: the backward pass may come in two parts; coordinates, others, casts: as in `Lowering`."""
        prices = PriceTable() if prices is None else prices
        super().__init__(graph, plan, profile, per_node, facts, prices, batched, may_split, coordinates, others, casts)

    def lower(
        self, segment: Segment, plan: StagePlan, steps: dict[tuple[str, Placement], tuple[Step, ...]], before: Arriving,
        sent: Mapping[tuple[str, Placement], bool],
    ) -> Lowered:  # fmt: skip
        """The segment's part. steps: of the plan's conversions by tensor and target; sent: what it sends to later
        stages, and whether the gradient comes back."""
        worked(LOWER_NODE_S * len(segment.nodes))
        self.plan, self.steps = plan, steps
        self._fuse()
        self.program = program = LocalProgram()
        self.layouts.begin()
        self.known, self.placements, self.units, self.places = {}, {}, {}, {}
        self.constants, self.calls, self.copied_calls = {}, [], []
        self._unit("")
        if segment.wrapper:
            self._unit(segment.wrapper)
        self._enter_values(segment, before)
        program.items += [
            Item("before", (), tuple(n for n, value in enumerate(before.values) if value.is_made)),
            Item("earlier", (), ()),
        ]
        for name in self.graph.received if segment.number == 0 else ():
            self._receive(name)
        for node in in_order(self.graph, plan) if self.homes else segment.nodes:
            self._node(node)
        for value in sent:
            self._send(*value)
        self._mark_copied()
        leaving, storages, after = self._leave(segment, before)
        loss = self.graph.loss
        made = loss is not None and loss in segment.made
        assert loss is not None or not made
        return Lowered(
            program, self.calls, before, leaving, storages, after,
            self.known[loss, self.placements[loss]] if made and loss is not None else -1, self.constants,
            tuple([program.sends[value] for value, is_answered in sent.items() if is_answered]), segment.keeps,
            segment, len(segment.nodes) == len(self.graph.nodes),
        )  # fmt: skip

    def _enter_values(self, segment: Segment, before: Arriving) -> None:
        storages = [self._memory(*((0, BEFORE) if is_made else (size, -1))) for size, is_made in before.memory]
        self.placements.update(zip(segment.enters, before.bases, strict=True))
        for tensor in segment.keeps:
            self.placements[tensor] = self.plan.storage[tensor].placement
        for value in before.values:
            name = segment.enters[value.tensor]
            if value.steps is not None:
                self.steps[name, value.placement] = value.steps
                self._slot(name, value.placement)
            else:
                local = self.shapes.local(name, value.placement)[0], value.num_bytes
                item = BEFORE if value.is_made else -1
                self._value(name, value.placement, local, storages[value.storage], item)

    def _leave(self, segment: Segment, before: Arriving) -> tuple[tuple[int, ...], tuple[int, ...], Arriving]:
        """What the next segment begins with."""
        names = [(segment.made if leaf.is_made else segment.enters)[leaf.place] for leaf in segment.leaves]
        places, program = {name: place for place, name in enumerate(names)}, self.program
        leaving = tuple(n for n, value in enumerate(program.values) if value.tensor in places)
        storages = tuple(dict.fromkeys(program.values[n].storage for n in leaving))
        number_of = {storage: number for number, storage in enumerate(storages)}
        memory = tuple(
            before.memory[s] if s < len(before.memory) else (program.memory[s].num_bytes, program.memory[s].owner >= 0)
            for s in storages
        )
        values = []
        for n in leaving:
            value = program.values[n]
            placement = before.values[n].placement if n < len(before.values) else self._placement_of(n)
            steps = program.slots[value.slot].steps if value.slot >= 0 else None
            values.append(
                CrossingValue(
                    places[value.tensor], placement, number_of[value.storage], value.item >= 0, value.num_bytes, steps
                )
            )
        bases = tuple(
            self.plan.storage[name].placement if name in self.plan.storage else self.placements[name] for name in names
        )
        return leaving, storages, Arriving(bases, tuple(values), memory)

    def _placement_of(self, number: int) -> Placement:
        return next(placement for (_, placement), known in self.known.items() if known == number)

    def _own_gathers(self, program: LocalProgram, num_entering: int) -> list[Bucket]:
        """Regathered slots of the part's units."""
        around = program.around()
        units = {unit for item in program.items for unit in around[item.unit]}
        blocks = units - {0}

        def is_own(slot: Slot) -> bool:
            return slot.storage.regather and slot.value >= num_entering and slot.unit in blocks

        return gathers_by_unit(program.slots, self.sending, is_own)

    def price(self, node: Node, placed: NodePlan) -> OperatorPrice:
        """What an operator costs with some placements."""
        known = self.operators.known(node, placed)
        if known is not None:
            return known
        self.program, self.known = LocalProgram(), {}
        constants, producers = self.facts.constants, self.graph.producers
        inputs = []
        for name, placement in zip(node.operands, placed.operands, strict=True):
            item = BEFORE if name in producers and name not in constants else -1
            inputs.append(self._value(name, placement, self.shapes.local(name, placement), 0, item))
        item = -1 if constants.issuperset(node.results) else BEFORE
        outputs = [
            self._value(name, placement, self.shapes.local(name, placement), 0, item)
            for name, placement in zip(node.results, placed.results, strict=True)
        ]
        self.plan = replace(self.plan, nodes={node.name: placed})
        values = self.program.values
        return self.operators.price(
            self.plan, node, [values[value] for value in inputs], [values[value] for value in outputs]
        )

    def route(self, tensor: str, target: Placement) -> tuple[Step, ...]:
        """The steps of a conversion. Raises PlanError where the plan has none."""
        return self._route(tensor, target)

    def bytes_of_steps(self, tensor: str, steps: tuple[Step, ...]) -> tuple[tuple[int, int], ...]:
        """Bytes of each step, forward and backward."""
        return self._step_bytes(tensor, steps)

    def conversion_work(
        self, tensor: str, steps: tuple[Step, ...], direction: int
    ) -> tuple[int, tuple[Transmission, ...]]:
        """What a conversion of an activation takes of the compute stream, and sends, forward (0) or backward."""
        sizes = self._step_bytes(tensor, steps)
        sent = self.sending.of_steps(steps, sizes, direction)
        views = self.profile.facts.view_ns
        return self._handling_ns(steps, sizes, direction) if sent else views[direction], sent

    # Gradients ----------------------------------------

    def mark(self, lowered: Lowered, wanted: Wanted, splits: bool) -> Marked:
        """The part with what later ones want of it. splits: the backward pass comes in two parts."""
        program = self.program = copy.copy(lowered.program)
        program.splits = splits
        if lowered.is_marked:
            program.values, program.items = _unmarked(program)
        lowered.is_marked = True
        if self.trains:
            ends = [n for n, wants in zip(lowered.leaving, wanted.gradients, strict=True) if wants]
            ends += lowered.answered
            mark_gradients(program, ends if lowered.loss < 0 else [lowered.loss, *ends])
            program.items[BEFORE].runs_backward = False
            self.calls = lowered.calls
            self._mark_regions()
            mark_parts(program)
        kept = _kept(program, self.trains)
        read = tuple(n for n, count in enumerate(_backward_reads(program, lowered.num_entering)) if count)
        return Marked(lowered, program, wanted, _before(program, lowered, wanted, kept), kept, read)

    def finish(self, marked: Marked, kept: KeptBefore, gradients: Gradients) -> Part:
        """The part with all that is derived of it."""
        lowered, program = marked.lowered, copy.copy(marked.program)
        end = len(program.items)
        worked(FINISH_ITEM_S * end)
        earlier = Item("earlier", tuple(n for n, read in enumerate(kept.read) if read), (), runs_backward=True)
        later = _later(lowered, marked.wanted)
        program.items = [program.items[BEFORE], earlier, *program.items[NUM_BEFORE:], *later]
        program.memory = [
            LocalMemory(size if is_made and storage in marked.kept and not kept.memory[storage] else 0, memory.owner)
            for storage, ((size, is_made), memory) in enumerate(
                zip(lowered.before.memory, program.memory, strict=False)
            )
        ] + program.memory[lowered.num_memory :]
        self.program = program
        program.end, program.begins, program.is_all = end, lowered.origin.number == 0, lowered.is_all
        program.gathers = self._own_gathers(program, len(lowered.before.values))
        orders = find_orders(program, self.profile)
        buffers = _buffers(lowered, gradients)
        own = range(NUM_BEFORE, end)
        lifetimes = find_lifetimes(program, self.trains, buffers, own, gradients.left_bytes, gradients.is_asked)
        directions = find_directions(program, orders, lifetimes, own) if self.trains else {}
        given, origin = lifetimes.forward.given, lowered.origin
        behind = len(program.items) - 1 if _goes_on(origin) else end
        freed = sum(size for number, size in given.items() if number >= behind)
        returned = sum(size for number, size in given.items() if end <= number < behind)
        returns = orders.last[AROUND] if origin.returns else -1
        is_asked = gradients.is_asked or not program.own.isdisjoint(own)
        before = _gradients(lowered, buffers)._replace(left_bytes=lifetimes.left_bytes, is_asked=is_asked)
        return Part(
            program, orders, lifetimes, directions, marked, end, freed, lifetimes.received, before, returned, returns
        )  # fmt: skip


def _unmarked(program: LocalProgram) -> tuple[list[Value], list[Item]]:
    """Values and items as they were lowered; the first to mark them takes the originals."""
    values = [copy.copy(value) for value in program.values]
    items = [copy.copy(item) for item in program.items]
    for value in values:
        value.wants_gradient = False
    for item in items:
        item.runs_backward, item.region, item.needs = False, -1, ()
    return values, items


def _goes_on(segment: Segment) -> bool:
    """Whether the module that a segment is cut inside of returns in a later one."""
    return bool(segment.wrapper) and not segment.returns


def _behind(lowered: Lowered) -> Item:
    """An item that stands for what is behind the module around a part, and reads what outlives that."""
    segment, values = lowered.origin, lowered.program.values
    names = {segment.made[place] for place in segment.outlives}
    held = [n for n in lowered.leaving if values[n].tensor in names]
    if len({values[n].tensor for n in held}) < len(held):
        raise Unsupported("what outlives a module has several placements")
    return Item("behind", tuple(held), ())


def _later(lowered: Lowered, wanted: Wanted) -> list[Item]:
    """Items that stand for later readers: as many in the backward pass as there are, the first of which saves. Those
    of a module that goes on are inside of it, and another one is behind it."""
    saved = tuple(storage for storage, kept in zip(lowered.storages, wanted.kept, strict=True) if kept)
    counts = dict(zip(lowered.leaving, wanted.readers, strict=True))
    read = tuple(n for n, is_read in zip(lowered.leaving, wanted.reads, strict=True) if is_read)
    inside = AROUND if _goes_on(lowered.origin) else 0
    items = [Item("later", read, (), unit=inside)]
    for place in range(max([*counts.values(), int(bool(saved))], default=0)):
        readers = tuple(n for n, count in counts.items() if count > place)
        kept = saved if place == 0 else ()
        items.append(Item("later", readers, (), saved=kept, runs_backward=True, unit=inside))
    return [*items, _behind(lowered)] if inside else items


def _backward_reads(program: LocalProgram, num_entering: int) -> list[int]:
    counts = [0] * num_entering
    for item in program.items:
        if item.runs_backward:
            for value in item.inputs:
                if value < num_entering and program.values[value].wants_gradient:
                    counts[value] += 1
    return counts


def _kept(program: LocalProgram, trains: bool) -> frozenset[int]:
    """Memory that is kept from the forward pass, as far as the part's own items keep it (see `Lifetimes`)."""
    entries = {region for item in program.items for region in item.needs}
    found = set[int]()
    for item in program.items[NUM_BEFORE:]:
        if trains and item.runs_backward:
            found.update(s for s in item.saved if item.region < 0 or _region_of(program, s) != item.region)
        if item.region >= 0 and item.region in entries:
            storages = {program.values[value].storage for value in (*item.inputs, *item.outputs)}
            found.update(storage for storage in storages if _region_of(program, storage) != item.region)
    return frozenset(s for s in found if _region_of(program, s) not in program.by_itself)


def _region_of(program: LocalProgram, storage: int) -> int:
    owner = program.memory[storage].owner
    return program.items[owner].region if owner >= 0 else -1


def _before(program: LocalProgram, lowered: Lowered, wanted: Wanted, kept: frozenset[int]) -> Wanted:
    """What this part and later ones do with what comes in."""
    count, local = lowered.num_entering, _backward_reads(program, lowered.num_entering)
    place_of = {n: place for place, n in enumerate(lowered.leaving)}
    memory_of = {storage: place for place, storage in enumerate(lowered.storages)}
    read = {value for item in program.items[NUM_BEFORE:] for value in item.inputs}
    places = [place_of.get(n, -1) for n in range(count)]
    return Wanted(
        tuple([value.wants_gradient for value in program.values[:count]]),
        tuple([local[n] + (wanted.readers[place] if place >= 0 else 0) for n, place in enumerate(places)]),
        tuple([n in read or (place >= 0 and wanted.reads[place]) for n, place in enumerate(places)]),
        tuple([
            storage in kept or (storage in memory_of and wanted.kept[memory_of[storage]])
            for storage in range(lowered.num_memory)
        ]),
    )  # fmt: skip


def kept_after(marked: Marked, before: KeptBefore) -> KeptBefore:
    """What this part and earlier ones do with what leaves it."""
    lowered, readers = marked.lowered, set(marked.read)
    memory = tuple([
        storage in marked.kept or (storage < lowered.num_memory and before.memory[storage])
        for storage in lowered.storages
    ])  # fmt: skip
    if not any(before.read) and not readers and not any(n >= lowered.num_entering for n in lowered.leaving):
        return KeptBefore(memory, (False,) * len(lowered.leaving))
    own = {
        value for item in marked.program.items[NUM_BEFORE:] if item.runs_backward for value in item.inputs
        if marked.program.values[value].wants_gradient
    }  # fmt: skip
    return KeptBefore(
        memory, tuple([n in own or (n < lowered.num_entering and before.read[n]) for n in lowered.leaving])
    )


def _buffers(lowered: Lowered, gradients: Gradients) -> Buffers:
    made = [
        [size, readers, IN_LATER_PART if is_read else -1, is_view]
        for size, readers, is_read, is_view in gradients.buffers
    ]
    pairs = zip(lowered.leaving, gradients.buffer_of, strict=True)
    return {n: made[number] for n, number in pairs if number >= 0}


def _gradients(lowered: Lowered, buffers: Buffers) -> Gradients:
    numbers: dict[int, int] = {}
    found, buffer_of = list[tuple[int, int, bool, bool]](), list[int]()
    for n in range(lowered.num_entering):
        buffer = buffers.get(n)
        if buffer is None:
            buffer_of.append(-1)
            continue
        if id(buffer) not in numbers:
            numbers[id(buffer)] = len(found)
            found.append((buffer[0], buffer[1], buffer[2] >= 0, buffer[3]))
        buffer_of.append(numbers[id(buffer)])
    return Gradients(tuple(buffer_of), tuple(found))


# What goes home ----------------------------------------


def _moving_slots(part: Part, ways: Ways) -> tuple[Moving, ...]:
    """A part's slots whose gradients go home, in the order in which they are used."""
    number_of = {slot.value: number for number, slot in enumerate(part.program.slots)}
    ended = {
        number_of[slot.value]: item
        for item, done in part.orders.ended_at.items() if NUM_BEFORE <= item < part.end for slot, _ in done
    }  # fmt: skip
    return tuple([
        Moving(n, slot, ways.of(slot), not slot.storage.regather or slot.unit == 0, ended.get(n, -1))
        for n, slot in enumerate(part.program.slots)
        if slot.steps and slot.requires_grad and slot.value >= part.lowered.num_entering
    ])  # fmt: skip


def ways_of(part: Part, ways: Ways) -> tuple[OnWay, ...]:
    """A part's gradients way by way."""
    found: dict[int, list[Moving]] = {}
    for moving in reversed(_moving_slots(part, ways)):
        found.setdefault(moving.way, []).append(moving)
    return tuple([OnWay(way, moved, ways.limits) for way, moved in found.items()])
