"""What the items of a stage do in its backward pass, or in one of the two parts of it: read off once, played often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from autopar.simulate.lifetime import Lifetimes
from autopar.simulate.orders import Orders
from autopar.simulate.program import Item, LocalProgram, Transmission


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
    innermost first: autograd asks for what they return in that order; regions: those that it recomputes;
    ends_microbatch: regathered parameters are of no more use after it."""

    steps: tuple[BackwardStep, ...]
    entered: dict[int, tuple[int, ...]]
    regions: frozenset[int]
    ends_microbatch: bool


def find_directions(program: LocalProgram, orders: Orders, lifetimes: Lifetimes) -> dict[str, Direction]:
    """The whole backward pass, or its two parts where the program has them."""
    if program.splits:
        led, own = (sorted(numbers, reverse=True) for numbers in (program.led, program.own))
        return {
            BACKWARD_INPUT: direction_of(program, orders, lifetimes, BACKWARD_INPUT, led, frozenset()),
            BACKWARD_WEIGHT: direction_of(program, orders, lifetimes, BACKWARD_WEIGHT, own, program.led),
        }
    whole = [number for number in range(len(program.items) - 1, -1, -1) if program.items[number].runs_backward]
    return {BACKWARD: direction_of(program, orders, lifetimes, BACKWARD, whole, frozenset())}


def direction_of(
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
    regions = {items[n].region for n in before if items[n].needs_saved}
    reader = _Reader(program, orders, lifetimes, name)
    return Direction(
        steps=tuple([reader.step(number) for number in numbers]),
        entered={number: units for number, units in entered.items() if units},
        regions=frozenset(items[n].region for n in numbers if items[n].region >= 0) - regions,
        ends_microbatch=bool(numbers) and not before,
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
        self._ends = {*orders.begun_at, *orders.ended_at, *orders.complete_at} if self._part else set()

    def step(self, number: int) -> BackwardStep:
        program, orders, part = self._program, self._orders, self._part
        item = program.items[number]
        own, issue = item.backward_ns, item.issue_ns[1]
        if item.split is not None:
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
