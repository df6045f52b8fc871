"""What is read off a program once, before it is played: orders, lifetimes of memory, and each item's share of a pass.

Orders: when units are entered, when gradients are complete.

Lifetimes: when an activation's memory is taken and given back within a microbatch, forward and backward. The forward
pass takes an item's memory when it runs and gives it back when the function returns in which it has a name, unless
autograd saved it: then after the backward of the first item (in forward order) that saved it. In a recomputed region
nothing but what enters it is kept; when the backward pass first needs something of it, its items run again and their
memory lives as without recomputation. Of operators that run again by themselves nothing is kept for others either.
Gradients of activations live from the first reader's backward to that of the maker. A backward pass in two parts keeps
what is saved for the second, since autograd gives back nothing of a graph that is still asked for, and the gradients of
what operators with a gradient of their own make. The second begins at these operators: what is saved behind the last of
them, as by a loss, is given back when the first has ended and drops the results that it began at.

Directions: what the items of a stage do in its backward pass, or in one of the two parts of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from autopar.cost import Profile
from autopar.cost.compute import copy_time_ns, pointwise_time_ns
from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from autopar.runtime.copying import LEAST_COPIED_BYTES
from autopar.simulate.copies import MOST_PIECES, CopiedCall, CopiedMemory, copied_calls, copied_memory, next_call
from autopar.simulate.program import Bucket, Item, LocalProgram, Slot, Transmission


@dataclass(slots=True)
class Orders:
    """Items are meant by their number in forward order; the backward pass visits them in reverse.

    `begun_at`: slots whose gradient the backward pass begins there; `ended_at`: those whose gradient is there after
    it, and whether several items have contributed;
    `home_each_ns`, `home_last_ns`: hooks of complete gradients and their copies into buckets;
    `added_ns`: adding up the gradients of a value with several readers, and casting those of stored tensors;
    `led_ns`: of values that lead back to an earlier stage; `kept_ns`: adding to a leaf's gradient of earlier
    microbatches.
    """

    around: list[tuple[int, ...]] = field(default_factory=list)  # of each unit: units that convert, outermost first
    visits: list[int] = field(default_factory=list)  # those in the order in which they begin, without the program's own
    last: dict[int, int] = field(default_factory=dict)  # unit -> the last item in it, and in those inside of it
    gathers: dict[int, list[Bucket]] = field(default_factory=lambda: defaultdict(list))  # regathered, by unit
    regions: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    again: dict[int, tuple[int, ...]] = field(default_factory=dict)  # units of calls that run again, by region
    before: dict[int, tuple[int, ...]] = field(default_factory=dict)  # what is asked for ahead where a unit is entered
    begun_at: dict[int, list[Slot]] = field(default_factory=lambda: defaultdict(list))
    ended_at: dict[int, list[tuple[Slot, bool]]] = field(default_factory=lambda: defaultdict(list))
    added_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    led_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    kept_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    home_each_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    home_last_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def begun_with(self, unit: int) -> tuple[int, ...]:
        """What the backward pass comes to first of a unit that it reaches: itself, or of a call that runs again, the
        first unit, and those inside of it that begin with it."""
        units = next((units for units in self.again.values() if unit in units), (unit,))
        count = 1
        while count < len(units) and units[count - 1] in self.around[units[count]]:
            count += 1
        return units[:count]

    @property
    def running_again(self) -> frozenset[int]:
        """Units of calls that run again."""
        return frozenset(unit for units in self.again.values() for unit in units)

    def hooks_ns(self, number: int, direction: str) -> tuple[int, int, int]:
        """What hooks add to an item's backward: gradients added up and complete ones taken into their buckets, in each
        microbatch; added to those of earlier microbatches; taken into their buckets in the last one only."""
        led = self.led_ns.get(number, 0) if direction != BACKWARD_WEIGHT else 0
        if direction == BACKWARD_INPUT:
            return led, 0, 0
        each = led + self.added_ns.get(number, 0) + self.home_each_ns.get(number, 0)
        return each, self.kept_ns.get(number, 0), self.home_last_ns.get(number, 0)


def is_inside(path: str, module: str) -> bool:
    """Whether a module is another one, or inside of it."""
    return path == module or path.startswith(f"{module}.")


def find_orders(program: LocalProgram, profile: Profile) -> Orders:
    """Reads the orders off a lowered program."""
    around, converting = program.around(), {slot.unit for slot in program.slots if not slot.is_alias} - {0}
    orders = Orders([tuple([unit for unit in units if unit in converting]) for units in around])
    orders.visits = list(dict.fromkeys(unit for item in program.items for unit in orders.around[item.unit]))
    for number, item in enumerate(program.items):
        orders.last.update(dict.fromkeys(around[item.unit], number))
        if item.region >= 0:
            orders.regions[item.region].append(number)
    for region, path in program.calls_again.items():
        units = dict.fromkeys(u for n in orders.regions[region] for u in orders.around[program.items[n].unit])
        orders.again[region] = tuple([unit for unit in units if is_inside(program.units[unit], path)])
    orders.before = {unit: orders.begun_with(before) for before, unit in pairwise(orders.visits)}
    for bucket in program.gathers:
        slot = program.slots[bucket.slots[0]]
        if slot.storage.regather:
            orders.gathers[slot.unit if slot.unit in orders.last else 0].append(bucket)
    _order_gradients(program, profile, orders)
    return orders


def _order_gradients(program: LocalProgram, profile: Profile, orders: Orders) -> None:
    readers = _backward_readers(program)
    adding_ns = cache(lambda num_bytes: pointwise_time_ns(3 * num_bytes, profile))
    casting_ns = cache(lambda num_bytes: pointwise_time_ns(num_bytes, profile))
    for value, items in readers.items():
        made = program.values[value]
        place = made.item if made.item >= 0 else items[0]
        if len(items) > 1:
            added = orders.led_ns if made.leads_back else orders.added_ns
            added[place] += (len(items) - 1) * adding_ns(made.num_bytes)
    for slot in program.slots:
        if slot.requires_grad and slot.value in readers:
            items = readers[slot.value]
            first = program.first_of.get(items[0], items[0])  # a branch hands out its gradients at its end
            orders.begun_at[items[-1]].append(slot)
            orders.ended_at[first].append((slot, len(items) > 1))
            orders.added_ns[first] += casting_ns(slot.cast_bytes[1])
            orders.kept_ns[first] += _kept_ns(slot, adding_ns, casting_ns)
            if slot.steps and profile.runtime:
                home = orders.home_each_ns if slot.reduces_each else orders.home_last_ns
                copied = copy_time_ns(slot.gradient_bytes, profile)
                home[first] += profile.runtime.parameter_ns + copied


def _kept_ns(slot: Slot, adding_ns: Callable[[int], int], casting_ns: Callable[[int], int]) -> int:
    """Adding a gradient to that of earlier microbatches; in a bucket this casts it, too, in the same kernel."""
    if slot.reduces_each:
        return adding_ns(slot.stored_bytes)
    cast = slot.cast_bytes[1]
    if slot.steps and cast:
        return max(0, casting_ns(cast + slot.gradient_bytes) - casting_ns(cast))
    return adding_ns(slot.gradient_bytes)


def first_operand(program: LocalProgram, number: int, slots: Sequence[int]) -> int:
    """The place among an item's operands of the last slot of a bucket that has its gradient there: a bias, the last
    operand, has it before the weight, whose gradient autograd still transposes."""
    inputs = program.items[number].inputs
    places = [inputs.index(value) for value in (program.slots[n].value for n in slots) if value in inputs]
    return min(places, default=0)


def _backward_readers(program: LocalProgram) -> dict[int, list[int]]:
    """For each value with a gradient, the items that contribute to it, in forward order."""
    readers: dict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(program.items):
        if item.runs_backward:
            for value in item.inputs:
                if program.values[value].wants_gradient:
                    readers[value].append(number)
    return readers


# Lifetimes of activations ----------------------------------------


@dataclass(slots=True)
class Changes:
    """Bytes taken at the start and given back at the end of each item, for one pass over the items."""

    taken: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    given: dict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(slots=True)
class Lifetimes:
    """Memory of activations forward, recomputed and backward; that of their gradients apart.

    backward, gradients: by direction, the whole pass and its two parts. received: bytes of the gradients that come from
    other stages, which are kept until the pass has ended; left_bytes: of a part, given back in an earlier one, with the
    next item that runs in the second part of the backward pass; dropped_bytes: what is given back when the first part
    of the backward pass has ended, since the second asks for nothing that is behind it; copied: calls of which memory
    waits on the host.
    """

    forward: Changes = field(default_factory=Changes)
    recompute: Changes = field(default_factory=Changes)
    backward: dict[str, Changes] = field(default_factory=lambda: defaultdict(Changes))
    gradients: dict[str, Changes] = field(default_factory=lambda: defaultdict(Changes))
    received: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    left_bytes: int = 0
    dropped_bytes: int = 0
    copied: dict[int, CopiedCall] = field(default_factory=dict)


Buffers = dict[int, list[Any]]
"""By value, the buffer of its gradient: bytes, readers, the first item that reads it in the second part, or −1, and
whether it is a view of what a product made, which autograd adds nothing to in place."""

IN_LATER_PART = 1 << 60  # instead of the item's number


class Unsupported(Exception):
    """The parts of a stage depend on each other in a way that is not followed: it is played in one."""


def find_lifetimes(
    program: LocalProgram, trains: bool, buffers: Buffers, own: Collection[int], left_bytes: int = 0,
    is_asked: bool = False,
) -> Lifetimes:  # fmt: skip
    """Plans the memory of one microbatch. own: the part's items, whose others stand for what is outside of it; buffers:
    of gradients when its backward pass begins, and after the call when it has ended; left_bytes: as in `Lifetimes`, of
    later parts; is_asked: a later part has items of the second part of the backward pass."""
    lifetimes = Lifetimes()
    if left_bytes and program.own_in_order:
        lifetimes.backward[BACKWARD_WEIGHT].given[program.own_in_order[-1]] += left_bytes
    elif left_bytes and program.begins:
        raise Unsupported("what a part saves is given back by none before it")
    else:
        lifetimes.left_bytes = left_bytes
    readers, savers = _uses(program, trains)
    entries = _entries(program)
    lifetimes.copied = copied_calls(program) if trains else {}
    ends = {item.region: number for number, item in enumerate(program.items)}
    frames = Frames(program)
    for storage, memory in enumerate(program.memory):
        if memory.owner >= 0 and memory.num_bytes:
            uses = readers[storage], savers[storage], frames.end(memory.owner, readers[storage])
            way = _copied_way(program, storage, uses[0], uses[1], entries) if lifetimes.copied else None
            _place(lifetimes, program, entries, memory.owner, memory.num_bytes, *uses, is_asked, way)
    for number, item in enumerate(program.items):
        if trains and item.runs_backward and item.extra_bytes:
            stays = item.extra_bytes
            if item.copied_call >= 0 and lifetimes.copied:
                stays -= _copy_extras(lifetimes, item, number)
            if stays:
                _place(lifetimes, program, entries, number, stays, [number], [number], number, is_asked)
        if trains and item.runs_backward and item.number_bytes:
            _place_number(lifetimes, program, number, item.number_bytes, ends, is_asked)
    if trains and program.splits:  # each gradient is made in one of the two
        for name, numbers in ((BACKWARD_INPUT, program.led), (BACKWARD_WEIGHT, program.own)):
            made = {
                n: buffer for n, buffer in buffers.items() if program.values[n].leads_back == (numbers is program.led)
            }
            _place_gradients(program, numbers, lifetimes, name, made)
            buffers.update(made)
    elif trains:
        whole = [number for number in own if program.items[number].runs_backward]
        _place_gradients(program, whole, lifetimes, BACKWARD, buffers)
    _place_workspace(program, lifetimes)
    return lifetimes


class Frames:
    """When the functions of an emitted program return, each the forward of a unit: until then they keep variables."""

    def __init__(self, program: LocalProgram) -> None:
        self._unit_of = [item.unit for item in program.items]
        self._enclosing = program.around()
        self._returns = [0] * len(program.units)  # the last item in a unit, and in those inside of it
        last = {unit: number for number, unit in enumerate(self._unit_of)}
        for unit, number in last.items():
            for around in self._enclosing[unit]:
                self._returns[around] = max(self._returns[around], number)
        self._ends: dict[frozenset[int], int] = {}
        self._first_of = program.first_of
        self._last_of = {first: number for number, first in sorted(program.first_of.items())}  # a branch is a function

    def end(self, owner: int, readers: list[int]) -> int:
        """The item after which no function holds a value: the innermost that calls all who make and read it returns."""
        branch = self._first_of.get(owner)
        if branch is not None and all(self._first_of.get(reader) == branch for reader in readers):
            return self._last_of[branch]
        units = frozenset([self._unit_of[owner], *(self._unit_of[reader] for reader in readers)])
        if units not in self._ends:
            shared = [set(self._enclosing[unit]) for unit in units]
            innermost = max(set.intersection(*shared), key=lambda unit: len(self._enclosing[unit]))
            self._ends[units] = self._returns[innermost]
        return self._ends[units]


def _entries(program: LocalProgram) -> dict[int, int]:
    """For each recomputed region, the first item whose backward pass needs something of it, which is the last to."""
    found: dict[int, int] = {}
    for number, item in enumerate(program.items):
        for region in item.needs:
            found.setdefault(region, number)
    return found


def _place_workspace(program: LocalProgram, lifetimes: Lifetimes) -> None:
    """What an item takes and gives back itself."""
    directions = (BACKWARD_INPUT, BACKWARD_WEIGHT) if program.splits else (BACKWARD,)
    places = (lifetimes.forward, lifetimes.recompute), tuple(lifetimes.gradients[name] for name in directions)
    for number, item in enumerate(program.items):
        for size, several in zip(item.workspace, places, strict=True):
            for changes in several if size else ():
                changes.taken[number] += size
                changes.given[number] += size


def _uses(program: LocalProgram, trains: bool) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """By storage: the items that read or make it, and those whose backward pass needs it."""
    readers: dict[int, list[int]] = defaultdict(list)
    savers: dict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(program.items):
        for value in (*item.inputs, *item.outputs):
            readers[program.values[value].storage].append(number)
        if trains and item.runs_backward:
            for storage in item.saved:
                savers[storage].append(number)
    return readers, savers


def _copied_way(
    program: LocalProgram, storage: int, readers: list[int], savers: list[int], entries: dict[int, int]
) -> CopiedMemory | None:
    """What becomes of a piece of memory where calls are copied out. What enters a region that runs again is kept by
    that."""
    own = program.items[program.memory[storage].owner].region
    entered = [n for n in readers if program.items[n].region in entries and program.items[n].region != own]
    return copied_memory(program, storage, savers, entered)


def _copy_extras(lifetimes: Lifetimes, item: Item, number: int) -> int:
    """Bytes of an item's extras that leave the device for a while. Smaller ones travel as well, as far as is known, but
    are not counted on to leave."""
    call, left = lifetimes.copied[item.copied_call], 0
    for size in item.extras:
        if size < LEAST_COPIED_BYTES:
            continue
        call.out.append(size)
        call.back.append(size)
        call.reached = max(call.reached, number)
        if size >= MOST_PIECES * LEAST_COPIED_BYTES:
            left += size
    if left:
        lifetimes.forward.taken[number] += left
        call.freed_bytes += left
        call.taken_bytes += left
        lifetimes.backward[BACKWARD].given[number] += left
    return left


def _copy(
    lifetimes: Lifetimes, way: CopiedMemory, size: int, savers: list[int], held: int, items: Sequence[Item]
) -> None:
    """A piece of memory that waits on the host. held: the last item after which something forward holds it."""
    calls = lifetimes.copied
    after = next_call(calls, way.out)
    calls[way.out].out.append(size)
    if after is None or held <= after.last:
        calls[way.out].freed_bytes += size
    else:
        lifetimes.forward.given[held] += size
    call = calls[way.back]
    call.back.append(size)
    call.taken_bytes += size
    call.reached = max(call.reached, *(n for n in savers if items[n].copied_call == way.back))
    lifetimes.backward[BACKWARD].given[min(savers)] += size


def _place(
    lifetimes: Lifetimes, program: LocalProgram, entries: dict[int, int], owner: int, size: int, readers: list[int],
    savers: list[int], returned: int, is_asked: bool, way: CopiedMemory | None = None,
) -> None:  # fmt: skip
    """One piece of memory: kept from the forward pass, or made again in its region, or both.

    returned: the item after which no function holds it; way: to the host and back.
    """
    items = program.items
    region = items[owner].region
    inside = [number for number in savers if region >= 0 and items[number].region == region]
    kept = [number for number in savers if region < 0 or items[number].region != region]
    # What enters another region stays for its second run, until the backward pass needs nothing of that any more.
    others = {items[number].region for number in readers} - {-1, region}
    kept += [entries[other] for other in others if other in entries]
    if region in program.by_itself:
        inside, kept = inside + kept, []
    lifetimes.forward.taken[owner] += size
    if way is not None and way.back >= 0:
        _copy(lifetimes, way, size, savers, max(*readers, returned), items)
    elif kept:
        _give_back(lifetimes, program, size, kept, is_asked)
    else:
        lifetimes.forward.given[max(*readers, returned)] += size
    if way is not None and way.back < 0:  # it travels in vain
        lifetimes.copied[way.out].out.append(size)
    if region < 0:
        return
    lifetimes.recompute.taken[owner] += size
    if inside:
        _give_back(lifetimes, program, size, inside, is_asked)
    else:
        held = [n for n in (*readers, returned) if items[n].region == region]
        lifetimes.recompute.given[max(held)] += size


def _place_number(
    lifetimes: Lifetimes, program: LocalProgram, number: int, size: int, ends: Mapping[int, int], is_asked: bool
) -> None:
    """A saved number is kept from the forward pass, and in a region once more while that runs again.

    ends: the last item of each region.
    """
    lifetimes.forward.taken[number] += size
    _give_back(lifetimes, program, size, [number], is_asked)
    region = program.items[number].region
    if region >= 0:
        lifetimes.recompute.taken[number] += size
        lifetimes.recompute.given[ends[region]] += size


def _give_back(lifetimes: Lifetimes, program: LocalProgram, size: int, needing: list[int], is_asked: bool) -> None:
    """After the backward of all items that need it. Of a pass in two parts, autograd keeps for the second what it can
    come to from where that begins: then with the next item from there on that runs in it."""
    first, own = min(needing), program.own_in_order
    if not program.splits:
        lifetimes.backward[BACKWARD].given[first] += size
    elif first < program.end:  # else a later part does
        place = bisect_right(own, first) - 1
        if first in program.led and place == len(own) - 1 and first not in program.own and not is_asked:
            lifetimes.dropped_bytes += size
        elif place < 0 and program.begins and not (own or program.is_all):
            raise Unsupported("what a part saves is given back in a later one")
        elif place < 0 and not program.begins:
            lifetimes.left_bytes += size
        else:
            lifetimes.backward[BACKWARD_WEIGHT].given[own[max(0, place)] if own else first] += size


def _place_gradients(
    program: LocalProgram, numbers: Collection[int], lifetimes: Lifetimes, direction: str, buffer: Buffers
) -> None:
    """Gradients of activations: one buffer a value; what passes a gradient on passes its buffer on.

    numbers: the items of this direction. Buffers that the second part reads, too, are given back there. Gradients that
    come from other stages are in memory of their own, which is kept until a whole pass ends.
    """
    changes, kept = lifetimes.gradients[direction], program.own if direction == BACKWARD_INPUT else ()
    for number in sorted(numbers, reverse=True):
        item = program.items[number]
        if item.is_send:
            stays = direction == BACKWARD_INPUT
            lifetimes.received[direction] += _receive(program, item, number, buffer, changes, stays)
            continue
        held = [buffer.pop(value) for value in item.outputs if value in buffer]
        for value in item.inputs:
            if direction == BACKWARD or program.values[value].leads_back == (direction == BACKWARD_INPUT):
                old = _contribute(program, item, number, value, held, buffer, changes)
                if old is not None:
                    _release(old, number, lifetimes, changes)
        for shared in held:
            shared[2] = number if number in kept else shared[2]
            _release(shared, number, lifetimes, changes)


def _release(shared: list[Any], number: int, lifetimes: Lifetimes, changes: Changes) -> None:
    """One reader less of a buffer. The last one gives it back, unless the second part reads it, too."""
    shared[1] -= 1
    if shared[1] == 0 and shared[2] == IN_LATER_PART:
        raise Unsupported("a gradient that a later part reads is given back there")
    if shared[1] == 0 and shared[2] >= 0:
        lifetimes.gradients[BACKWARD_WEIGHT].given[shared[2]] += shared[0]
    elif shared[1] == 0:
        changes.given[number] += shared[0]


def _receive(
    program: LocalProgram, item: Item, number: int, buffer: Buffers, changes: Changes, stays: bool
) -> int:  # fmt: skip
    """The gradient of what was sent, which takes nothing but what has come. Returns its bytes, if the pass's end gives
    them back, and not, as those of what the second part may read (`stays`), its last reader."""
    (value,) = item.inputs
    made = program.values[value]
    if not made.wants_gradient or made.slot >= 0 or made.item < 0:
        return 0
    changes.taken[number] += made.num_bytes
    buffer.setdefault(value, [made.num_bytes if stays else 0, 1, -1, False])
    return 0 if stays else made.num_bytes


def _contribute(
    program: LocalProgram,
    item: Item,
    number: int,
    value: int,
    held: list[list[Any]],
    buffer: Buffers,
    changes: Changes,
) -> list[Any] | None:
    """What an item adds to the gradient of a value. Returns a buffer that it is no more in, since others read that."""
    made = program.values[value]
    if not made.wants_gradient or made.slot >= 0 or made.item < 0:
        return None
    size = item.gradient_bytes or made.num_bytes
    if value in buffer and buffer[value][0] == 0:  # added to what has come from another stage, in new memory
        changes.taken[number] += size
        buffer[value] = [size, 1, -1, False]
    elif value in buffer and (buffer[value][1] > 1 or buffer[value][2] >= 0):
        old, buffer[value] = buffer[value], [size, 1, -1, False]
        changes.taken[number] += size
        return old
    elif value in buffer:  # added to what is there, or in new memory, from memory that is given back at once
        passing = (0 if value in item.passing else size) + (size if buffer[value][3] else 0)
        changes.taken[number] += passing
        changes.given[number] += passing
        buffer[value][3] = False
    elif value in item.passing and held:
        held[0][1] += 1
        buffer[value] = held[0]
    else:
        changes.taken[number] += size
        buffer[value] = [size, 1, -1, value in item.viewed]
    return None


# Directions of the backward pass ----------------------------------------


class BackwardStep(NamedTuple):
    """One item's share of a direction.

    own_ns: of each pass; kept_ns: of all but the first microbatch; last_ns: of the last one; slots: its inputs that
    are stored tensors; wanting: those whose gradients it makes; taken and given: bytes of activations, and of their
    gradients; ends: whether gradients of stored tensors begin, end or go home with it.
    """

    number: int
    item: Item
    own_ns: int
    kept_ns: int
    last_ns: int
    issue_ns: int
    slots: tuple[int, ...]
    wanting: tuple[int, ...]
    inner: tuple[Transmission, ...]
    taken: tuple[int, int]
    given: tuple[int, int]
    ends: bool


@dataclass(frozen=True, eq=False, slots=True)
class Direction:
    """Steps in the order of the pass. entered: units with regathered parameters that it enters, at each item the
    innermost first: autograd asks for what they return in that order; regions: those that it recomputes."""

    steps: tuple[BackwardStep, ...]
    entered: dict[int, tuple[int, ...]]
    regions: frozenset[int]


def find_directions(
    program: LocalProgram, orders: Orders, lifetimes: Lifetimes, numbers: range
) -> dict[str, Direction]:  # fmt: skip
    """The whole backward pass of these items, or its two parts where the program has them."""
    if program.splits:
        led, own = (sorted(numbers, reverse=True) for numbers in (program.led, program.own))
        return {
            BACKWARD_INPUT: _direction_of(program, orders, lifetimes, BACKWARD_INPUT, led, frozenset()),
            BACKWARD_WEIGHT: _direction_of(program, orders, lifetimes, BACKWARD_WEIGHT, own, program.led),
        }
    whole = [number for number in reversed(numbers) if program.items[number].runs_backward]
    return {BACKWARD: _direction_of(program, orders, lifetimes, BACKWARD, whole, frozenset())}


def _direction_of(
    program: LocalProgram, orders: Orders, lifetimes: Lifetimes, name: str, numbers: list[int], before: frozenset[int]
) -> Direction:
    """What these items do, in the order of the pass. Units and regions are for the first part to enter, if it
    has anything in them (`before`: its items)."""
    items, entered = program.items, dict[int, tuple[int, ...]]()
    known = {unit for n in before for unit in orders.around[items[n].unit]}
    for n in numbers:
        units = (unit for unit in reversed(orders.around[items[n].unit]) if unit in orders.gathers)
        entered[n] = tuple([unit for unit in units if unit not in known])
        known.update(entered[n])
    regions = {region for n in before for region in items[n].needs}
    reader = _Reader(program, orders, lifetimes, name)
    return Direction(
        steps=tuple([reader.step(number) for number in numbers]),
        entered={number: units for number, units in entered.items() if units},
        regions=frozenset(region for n in numbers for region in items[n].needs) - regions,
    )


class _Reader:
    """Reads the steps of one direction."""

    def __init__(self, program: LocalProgram, orders: Orders, lifetimes: Lifetimes, name: str) -> None:
        self._program, self._orders, self._name = program, orders, name
        self._activations, self._gradients = lifetimes.backward[name], lifetimes.gradients[name]
        self._part = {BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: 1}[name]
        values = [(number, value) for number, value in enumerate(program.values) if value.wants_gradient]
        self._wanting = {n for n, value in values if self._part < 0 or value.leads_back == (self._part == 0)}
        self._slots = {slot.value for slot in program.slots}
        self._ends = {*orders.begun_at, *orders.ended_at} if self._part else set()

    def step(self, number: int) -> BackwardStep:
        program, orders, part = self._program, self._orders, self._part
        item = program.items[number]
        own, issue = item.backward_ns, item.issue_ns[1]
        if item.split is not None and part >= 0:  # known where the pass may come in two parts, though here it is one
            own, issue = item.split.backward_ns[part], item.split.issue_ns[part]
        each, kept, last = orders.hooks_ns(number, self._name)
        activations, gradients = self._activations, self._gradients
        return BackwardStep(
            number,
            item,
            own + each,
            kept,
            last,
            issue,
            tuple([value for value in item.inputs if value in self._slots]),
            tuple([value for value in item.inputs if value in self._wanting]),
            item.inner_backward if part < 1 or number not in program.led else (),
            (activations.taken.get(number, 0), gradients.taken.get(number, 0)),
            (activations.given.get(number, 0), gradients.given.get(number, 0)),
            number in self._ends,
        )
