"""What one rank does in a microbatch, as flat lists: values, operators, conversions, parameter slots.

A *value* is a tensor in one placement. A *slot* is a stored tensor in the placement that operators use it in,
converted once a step or around each use. *Storage* is memory: views and free conversions share their base's.
`simulate.lowering` makes it, segment by segment.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cost.profile import Waits
from autopar.ir.placement import Placement
from autopar.ir.plan import Storage
from autopar.ir.redistribution import Step


class Transmission(NamedTuple):
    """One collective: its name, the link level that it is on, its bytes and nanoseconds. waits: how long its ranks wait
    for each other besides where it stops them, if that is known. is_early: it was sent long before, and has arrived.
    beside_ns: its nanoseconds while its ranks compute. num_ranks: that take part. is_shared: whether other axes of the
    stage have links of that level, too. room_bytes: of pieces that a rank holds while it sums some for the others."""

    collective: str
    level: str
    axis: int
    num_bytes: int
    duration_ns: int
    waits: Waits | None = None
    is_early: bool = False
    beside_ns: int = 0
    num_ranks: int = 1
    is_shared: bool = False
    room_bytes: int = 0


@dataclass(slots=True)
class Value:
    """A tensor in one placement: its local form, the storage that holds it, what makes it."""

    tensor: str
    shape: tuple[int, ...]
    num_bytes: int
    storage: int
    item: int = -1
    slot: int = -1
    differentiable: bool = False
    wants_gradient: bool = False
    leads_back: bool = False  # its gradient is made in the first part of a backward pass in two (`tensors_on_the_way`)


@dataclass(slots=True)
class LocalMemory:
    """A piece of local memory. `owner` is the item that allocates it, −1 for none."""

    num_bytes: int
    owner: int


class Split(NamedTuple):
    """An operator's backward pass in two parts: to values that lead back, and to the others. Nanoseconds, and those of
    the host to launch them."""

    backward_ns: tuple[int, int]
    issue_ns: tuple[int, int]


@dataclass(slots=True)
class Item:
    """An operator or a conversion between placements, in forward order."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward_ns: int = 0
    backward_ns: int = 0
    issue_ns: tuple[int, int] = (0, 0)  # of the host, to launch it forward and backward
    forward: tuple[Transmission, ...] = ()
    backward: tuple[Transmission, ...] = ()
    inner: tuple[Transmission, ...] = ()  # what an operator sends inside its forward pass
    inner_backward: tuple[Transmission, ...] = ()
    passing: frozenset[int] = frozenset()  # inputs whose gradient is the result's own, in the same memory
    viewed: frozenset[int] = frozenset()  # inputs whose gradient is a view of what the operator makes
    workspace: tuple[int, int] = (0, 0)  # bytes taken for a while, forward and backward
    gradient_bytes: int = 0  # of the memory that its operand's gradient lies in; 0: as many as the gradient has
    saved: tuple[int, ...] = ()  # storages
    extra_bytes: int = 0  # saved, but no tensor of the graph
    extras: tuple[int, ...] = ()  # bytes of each of these, where something is copied to the host
    number_bytes: int = 0  # of plain numbers that are saved, which stay even where all else is computed again
    unit: int = 0
    region: int = -1  # what the backward pass runs again together, −1 for nothing
    copied_call: int = -1  # the call of a module that is copied out, −1 for none
    needs: tuple[int, ...] = ()  # the regions that run again before its backward pass, in their order
    runs_backward: bool = False
    split: Split | None = None  # where the schedule asks for it, of operators

    @property
    def is_send(self) -> bool:
        """Whether it leaves a tensor for other stages."""
        return self.name.startswith("send ")

    @property
    def needs_saved(self) -> bool:
        """Whether its backward pass reads what was saved."""
        return self.runs_backward and bool(self.saved or self.extra_bytes)


BESIDE_COMPUTE = frozenset({("I", "R"), ("S", "R"), ("I", "S")})
"""Conversions of a parameter whose transposed ones, of its gradient, the runtime starts and awaits later."""


@dataclass(slots=True)
class Slot:
    """A parameter, buffer or constant as operators use it."""

    tensor: str
    value: int
    storage: Storage
    steps: tuple[Step, ...]
    stored_bytes: int
    used_bytes: int
    gradient_bytes: int  # of the gradient on its way home
    unit: int
    is_alias: bool
    requires_grad: bool
    sizes: tuple[tuple[int, int], ...] = ()  # bytes of each step, forward and backward
    gather_bytes: int = 0  # of copies while it is gathered: what travels packed, or does not lie as it is used
    scatter_bytes: int = 0  # of copies while its gradient is scattered
    cast_bytes: tuple[int, int] = (0, 0)  # read and written to cast what is stored, and its gradient back
    is_cast: bool = False  # it is used in another dtype than it is stored in
    is_resized: bool = field(init=False)  # its gradient has another size at home than where it is made
    stops_for_home: bool = field(init=False)  # the rank stops until its gradient is home: no step runs beside compute
    reduces_each: bool = field(init=False)  # its gradient goes home in each microbatch
    converts: bool = field(init=False)  # operators use something else than what is stored
    by_levels: bool = field(init=False)  # its gradient is summed by levels

    def __post_init__(self) -> None:
        kinds = [(step.before.kind, step.after.kind) for step in self.steps]
        self.is_resized = any("S" in pair for pair in kinds)
        self.stops_for_home = not self.storage.on_host and BESIDE_COMPUTE.isdisjoint(kinds)
        self.reduces_each = self.storage.regather or self.storage.reduce_each_microbatch
        self.converts = self.is_cast or bool(self.steps)
        self.by_levels = any(step.parts > 1 for step in self.steps)

    def at(self, value: int, unit: int, tensor: str) -> Slot:
        """The slot in another program, where its tensor has a name that tells it apart from that program's own."""
        other = object.__new__(Slot)
        for name in _SLOT_FIELDS:  # a third of the time that `copy.copy` takes
            setattr(other, name, getattr(self, name))
        other.value, other.unit, other.tensor = value, unit, tensor
        return other


_SLOT_FIELDS = tuple(Slot.__slots__)


@dataclass(slots=True)
class Bucket:
    """Slots that are converted by the same collectives at the same time."""

    slots: list[int]
    transmissions: tuple[Transmission, ...]
    convert_ns: int = 0  # packing, joining and casting on the rank itself
    first_is_beside: bool = False  # what comes after the first transmission, a copy from the host, runs beside it


@dataclass(slots=True)
class LocalProgram:
    """Everything that is played of a segment."""

    values: list[Value] = field(default_factory=list)
    memory: list[LocalMemory] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    gathers: list[Bucket] = field(default_factory=list)
    receives: dict[str, int] = field(default_factory=dict)  # tensors of earlier stages -> value
    sends: dict[tuple[str, Placement], int] = field(default_factory=dict)  # tensors that later stages read -> value
    splits: bool = False  # the backward pass is made in two parts
    first_of: dict[int, int] = field(default_factory=dict)  # items of branches -> the branch's first: autograd sees one
    led: frozenset[int] = frozenset()  # items of the first part: a gradient that leads back comes from them
    own: frozenset[int] = frozenset()  # items of the second part: another gradient does
    own_in_order: tuple[int, ...] = ()  # the same
    by_itself: frozenset[int] = frozenset()  # regions of operators: what others save of them is made again, too
    calls_again: dict[int, str] = field(default_factory=dict)  # of the other regions, the module that is called
    end: int = 0  # one past the last item that is no other part's
    begins: bool = True  # no part is before it
    is_all: bool = True  # there is no other part

    def around(self) -> list[tuple[int, ...]]:
        """Of each unit, those whose modules are around its own, outermost first, and itself."""
        number = {path: index for index, path in enumerate(self.units)}
        found = []
        for path in self.units:
            parts = path.split(".") if path else []
            prefixes = (".".join(parts[:count]) for count in range(len(parts) + 1))
            found.append(tuple([number[prefix] for prefix in prefixes if prefix in number]))
        return found


def way_of_slot(slot: Slot, by_unit: bool) -> Hashable:
    """Slots of one way may travel together. by_unit: no others than those of its unit."""
    return slot.steps, slot.reduces_each, slot.storage.regather, slot.unit if by_unit else None


def is_summed_first(slot: Slot) -> bool:
    """Whether the gradient's first step home is a sum over an axis that leaves its shape."""
    step = slot.steps[-1]
    return (step.before.kind, step.after.kind) == ("I", "R")


def mark_gradients(program: LocalProgram, ends: list[int]) -> None:
    """Which values have a gradient: those that an end (the loss, what is sent) depends on and that lead to a parameter
    or input. A branch's first item hands out gradients where any of its items has some."""
    called: set[int] = set()
    for value in ends:
        program.values[value].wants_gradient = True
    for number, item in reversed([*enumerate(program.items)]):
        wanted = any(program.values[v].wants_gradient for v in item.outputs or item.inputs)
        if not wanted and number not in called:
            continue
        item.runs_backward = item.runs_backward or number in called or not item.inputs or not item.outputs
        for value in item.inputs:
            if program.values[value].differentiable:
                program.values[value].wants_gradient = item.runs_backward = True
        if item.runs_backward and number in program.first_of:
            called.add(program.first_of[number])


def mark_parts(program: LocalProgram) -> None:
    """Which items run in which part of a backward pass in two, by the gradients that come from them."""
    if not program.splits:
        return
    led: set[int] = set()
    own: set[int] = set()
    for number, item in enumerate(program.items):
        if item.runs_backward:
            wanted = [v for v in item.inputs if program.values[v].wants_gradient] or item.outputs
            for value in wanted:
                (led if program.values[value].leads_back else own).add(number)
    program.led, program.own, program.own_in_order = frozenset(led), frozenset(own), tuple(sorted(own))
