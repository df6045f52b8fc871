"""Which gradients travel home together, part by part: `runtime.packing` as two walks over the parts.

The first walk goes with the backward pass and fills buckets; the second goes the other way and tells each part what
the parts after it, in the order of the backward pass, add to the buckets that it has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from autopar.ir.redistribution import Step
from autopar.runtime.packing import BUCKET_BYTES, FIRST_BUCKET_BYTES, LONE_BYTES
from autopar.simulate.parts import NUM_BEFORE, Part
from autopar.simulate.program import Slot, Transmission, is_summed_first

Sizes = tuple[tuple[int, int], ...]


class Share(NamedTuple):
    """A bucket as one part sees it: slots of its own that are in it, in the bucket's order; the item that completes it
    and what is sent then, −1 and nothing if another part has it. whole_bytes: of all its gradients, where that is asked
    for; scatter_bytes: of copies while they are scattered. is_begun: a later part has some of the gradients. comes, goes: whether later parts
    and earlier ones have slots in it. lacks: an earlier part has slots in it that get no gradient."""

    slots: tuple[int, ...]
    completed_at: int
    transmissions: tuple[Transmission, ...]
    whole_bytes: int
    scatter_bytes: int
    has_buffer: bool
    is_begun: bool
    way: int
    comes: bool
    goes: bool
    lacks: bool


class Load(NamedTuple):
    """What some slots of a bucket come to."""

    whole_bytes: int
    scatter_bytes: int
    sizes: Sizes
    has_gradient: bool

    def plus(self, other: Load) -> Load:
        """Both together."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return Load(
            self.whole_bytes + other.whole_bytes,
            self.scatter_bytes + other.scatter_bytes,
            tuple([(a + c, b + d) for (a, b), (c, d) in pairs]),
            self.has_gradient or other.has_gradient,
        )


class Open(NamedTuple):
    """The bucket of a way that takes more, and whether one of the way is full already."""

    way: int
    load: Load
    is_later: bool


class Group(NamedTuple):
    """A part's slots in one bucket. before: what later parts have in it; own: what these are."""

    way: int
    slots: tuple[int, ...]
    before: Load | None
    own: Load
    stays_open: bool


class Filled(NamedTuple):
    """A part's groups, and the buckets that it leaves open; ways: those on which it has filled any."""

    groups: tuple[Group, ...]
    after: tuple[Open, ...]
    ways: frozenset[int]


class Added(NamedTuple):
    """What earlier parts add to the open bucket of a way."""

    way: int
    load: Load


class Moving(NamedTuple):
    """A slot whose gradient goes home, and the item after which it is complete, −1 for none."""

    number: int
    slot: Slot
    way: int
    crosses: bool  # other parts' slots may take the same way
    ended_at: int


class Ways:
    """Numbers of ways home: slots of one may travel together."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.steps: list[tuple[Step, ...]] = []

    def of(self, slot: Slot) -> int:
        """The way of a slot; regathered ones go unit by unit."""
        unit = slot.unit if slot.storage.regather else None
        key = slot.steps, slot.reduces_each, slot.storage.regather, unit
        if key not in self._numbers:
            self._numbers[key] = len(self.steps)
            self.steps.append(slot.steps)
        return self._numbers[key]


def moving_slots(part: Part, ways: Ways) -> tuple[Moving, ...]:
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


def _load(moving: Moving) -> Load:
    slot = moving.slot
    return Load(slot.gradient_bytes, slot.scatter_bytes, slot.sizes, moving.ended_at >= 0)


def fill(moved: Sequence[Moving], before: Sequence[Open]) -> Filled:
    """Packs a part's gradients, last slots first, into buckets that later parts have left open and new ones."""
    opened = {one.way: one for one in before}
    current: dict[int, list[Moving]] = {}
    groups: list[Group] = []

    def close(way: int, stays_open: bool) -> None:
        own = current.pop(way, [])
        if own:
            load = _load(own[0])
            for moving in own[1:]:
                load = load.plus(_load(moving))
            begun = opened.get(way)
            groups.append(Group(way, tuple([m.number for m in own]), begun and begun.load, load, stays_open))

    filled = {one.way: one.load.whole_bytes for one in before}
    later = {one.way for one in before if one.is_later}
    crossing, touched = {one.way for one in before}, set[int]()
    for moving in reversed(moved):
        slot, way = moving.slot, moving.way
        if slot.gradient_bytes >= LONE_BYTES and not is_summed_first(slot):
            groups.append(Group(way, (moving.number,), None, _load(moving), False))
            continue
        touched.add(way)
        limit = BUCKET_BYTES if way in later else FIRST_BUCKET_BYTES
        if way in filled and filled[way] + slot.gradient_bytes > limit:
            close(way, False)
            opened.pop(way, None)
            del filled[way]
            later.add(way)
        current.setdefault(way, []).append(moving)
        filled[way] = filled.get(way, 0) + slot.gradient_bytes
        if moving.crosses:
            crossing.add(way)
    left = [*current]
    for way in left:
        close(way, way in crossing)
    loads = {group.way: group for group in groups if group.stays_open}
    after = [
        Open(way, _together(loads[way]) if way in loads else opened[way].load, way in later)
        for way in filled if way in crossing
    ]  # fmt: skip
    return Filled(tuple(groups), tuple(sorted(after)), frozenset(touched))


def _together(group: Group) -> Load:
    return group.own if group.before is None else group.before.plus(group.own)


Send = Callable[[tuple[Step, ...], Sizes], tuple[Transmission, ...]]


def share(
    moved: Sequence[Moving], filled: Filled, before: Sequence[Added], ways: Ways, send: Send
) -> tuple[tuple[Share, ...], tuple[Added, ...]]:
    """A part's shares, and what it and earlier ones add to buckets of later parts. send: a bucket's collectives."""
    added = {one.way: one.load for one in before}
    ended = {moving.number: moving.ended_at for moving in moved}
    slots = {moving.number: moving.slot for moving in moved}
    after = dict(added)
    shares = []
    for way in filled.ways:
        after.pop(way, None)
    for group in filled.groups:
        rest = added.get(group.way) if group.stays_open else None
        total = _together(group) if rest is None else _together(group).plus(rest)
        items = [ended[n] for n in group.slots if ended[n] >= 0]
        completes = bool(items) and not (rest is not None and rest.has_gradient)
        slot, is_begun = slots[group.slots[0]], group.before is not None and group.before.has_gradient
        asks = completes or (is_summed_first(slot) and not is_begun)
        shares.append(
            Share(
                group.slots, min(items) if completes else -1, send(ways.steps[group.way], total.sizes) if completes else (),
                total.whole_bytes if asks else 0, total.scatter_bytes if completes else 0, is_summed_first(slot),
                is_begun, group.way, group.before is not None,
                group.stays_open, completes and rest is not None,
            )
        )  # fmt: skip
        if group.before is not None:
            after[group.way] = group.own if rest is None else group.own.plus(rest)
    return tuple(shares), tuple(sorted(Added(way, load) for way, load in after.items()))
