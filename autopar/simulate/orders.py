"""Orders that follow from a program alone: when units are entered, when gradients are complete."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

from autopar.cost import Profile
from autopar.cost.compute import copy_time_ns, pointwise_time_ns
from autopar.ir.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT
from autopar.simulate.program import Bucket, LocalProgram, Slot


@dataclass(slots=True)
class Orders:
    """Items are meant by their number in forward order; the backward pass visits them in reverse.

    `begun_at`: slots whose gradient the backward pass begins there; `ended_at`: those whose gradient is there after
    it, and whether several items have contributed; `complete_at`: buckets complete after it;
    `home_each_ns`, `home_last_ns`: hooks of complete gradients and their copies into buckets;
    `added_ns`: adding up the gradients of a value with several readers, `led_ns`: of those that lead back to an earlier
    stage; `kept_ns`: adding to a leaf's gradient of earlier microbatches.
    """

    around: list[tuple[int, ...]] = field(default_factory=list)  # of each unit: units that convert, outermost first
    visits: list[int] = field(default_factory=list)  # those in the order in which they begin, without the program's own
    last: dict[int, int] = field(default_factory=dict)  # unit -> the last item in it, and in those inside of it
    gathers: dict[int, list[Bucket]] = field(default_factory=lambda: defaultdict(list))  # regathered, by unit
    regions: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    begun_at: dict[int, list[Slot]] = field(default_factory=lambda: defaultdict(list))
    ended_at: dict[int, list[tuple[Slot, bool]]] = field(default_factory=lambda: defaultdict(list))
    complete_at: dict[int, list[Bucket]] = field(default_factory=lambda: defaultdict(list))
    added_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    led_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    kept_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    home_each_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    home_last_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def hooks_ns(self, number: int, direction: str) -> tuple[int, int, int]:
        """What hooks add to an item's backward: gradients added up and complete ones taken into their buckets, in each
        microbatch; added to those of earlier microbatches; taken into their buckets in the last one only."""
        led = self.led_ns.get(number, 0) if direction != BACKWARD_WEIGHT else 0
        if direction == BACKWARD_INPUT:
            return led, 0, 0
        each = led + self.added_ns.get(number, 0) + self.home_each_ns.get(number, 0)
        return each, self.kept_ns.get(number, 0), self.home_last_ns.get(number, 0)


def find_orders(program: LocalProgram, profile: Profile) -> Orders:
    """Reads the orders off a lowered program."""
    around, converting = program.around(), {slot.unit for slot in program.slots if not slot.is_alias} - {0}
    orders = Orders([tuple([unit for unit in units if unit in converting]) for units in around])
    orders.visits = list(dict.fromkeys(unit for item in program.items for unit in orders.around[item.unit]))
    for number, item in enumerate(program.items):
        orders.last.update(dict.fromkeys(around[item.unit], number))
        if item.region >= 0:
            orders.regions[item.region].append(number)
    for bucket in program.gathers:
        slot = program.slots[bucket.slots[0]]
        if slot.storage.regather:
            orders.gathers[slot.unit if slot.unit in orders.last else 0].append(bucket)
    _order_gradients(program, profile, orders)
    return orders


def _order_gradients(program: LocalProgram, profile: Profile, orders: Orders) -> None:
    readers = _backward_readers(program)
    adding_ns = cache(lambda num_bytes: pointwise_time_ns(3 * num_bytes, profile))
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
            orders.kept_ns[first] += adding_ns(slot.stored_bytes if slot.reduces_each else slot.gradient_bytes)
            if slot.steps and profile.runtime:
                home = orders.home_each_ns if slot.reduces_each else orders.home_last_ns
                copied = copy_time_ns(slot.gradient_bytes, profile)
                home[first] += profile.runtime.parameter_ns + copied
    for bucket in program.reductions:
        complete = [
            program.first_of.get(readers[v][0], readers[v][0])
            for v in (program.slots[n].value for n in bucket.slots)
            if v in readers
        ]
        if complete:
            orders.complete_at[min(complete)].append(bucket)
    for number, buckets in orders.complete_at.items():
        if number in program.first_of:  # a branch hands out all gradients in one order on all ranks
            continue
        buckets.sort(key=lambda bucket: -first_operand(program, number, bucket))


def first_operand(program: LocalProgram, number: int, bucket: Bucket) -> int:
    """The place among an item's operands of the last slot of a bucket that has its gradient there: a bias, the last
    operand, has it before the weight, whose gradient autograd still transposes."""
    inputs = program.items[number].inputs
    places = [inputs.index(value) for value in (program.slots[n].value for n in bucket.slots) if value in inputs]
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
