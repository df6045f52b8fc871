"""Which gradients travel home together, part by part: `runtime.packing` as two walks over the parts.

The first walk goes with the backward pass and fills buckets; the second goes the other way and tells each part what
the parts after it, in the order of the backward pass, add to the buckets that it has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from autopar.ir.redistribution import Step
from autopar.runtime.packing import BUCKET_SIZES, BucketSizes
from autopar.simulate.program import Slot, Transmission, is_summed_first

Sizes = tuple[tuple[int, int], ...]


Send = Callable[[tuple[Step, ...], Sizes], tuple[Transmission, ...]]


class Share(NamedTuple):
    """A bucket as one part sees it: slots of its own that are in it, in the bucket's order; the item that completes it
    and what is sent then, −1 and nothing if another part has it. whole_bytes: of all its gradients, where that is asked
    for; scatter_bytes: of copies while they are scattered. is_begun: a later part has some of the gradients. comes,
    goes: whether later parts and earlier ones have slots in it. lacks: an earlier one has some that get no gradient."""

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

    load: Load
    is_later: bool


class BucketSlots(NamedTuple):
    """A part's slots in one bucket. before: what later parts have in it; own: what these are."""

    slots: tuple[int, ...]
    before: Load | None
    own: Load
    stays_open: bool


class Moving(NamedTuple):
    """A slot whose gradient goes home, and the item after which it is complete, −1 for none."""

    number: int
    slot: Slot
    way: int
    crosses: bool  # other parts' slots may take the same way
    ended_at: int


class Ways:
    """Numbers of ways home: slots of one may travel together, as many as `limits` let."""

    def __init__(self, limits: BucketSizes = BUCKET_SIZES) -> None:
        self.limits = limits
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


def _load(moving: Moving) -> Load:
    slot = moving.slot
    return Load(slot.gradient_bytes, slot.scatter_bytes, slot.sizes, moving.ended_at >= 0)


class OnWay:
    """A part's gradients that take one way, last ones first."""

    def __init__(self, way: int, moved: Sequence[Moving], limits: BucketSizes = BUCKET_SIZES) -> None:
        self.way, self.moved, self.crosses, self.limits = way, moved, moved[0].crosses, limits
        self.has_buffer = is_summed_first(moved[0].slot)
        self.ended_at = {moving.number: moving.ended_at for moving in moved}
        self.slots = tuple([moving.number for moving in moved])
        self.own = _together([_load(moving) for moving in moved])
        self.is_packed = self.crosses and all(self._is_packed(moving) for moving in moved)
        self._is_touched = any(self._is_packed(moving) for moving in moved)
        self._passing: tuple[Share, ...] = ()
        self._known: dict[Open | None, tuple[tuple[BucketSlots, ...], Open | None]] = {}
        self._shared: dict[tuple[int, Load | None], tuple[tuple[Share, ...], Load | None]] = {}  # by identity of groups
        self._kept: set[int] = set()  # identities of groups that are kept in `_known`

    def _is_packed(self, moving: Moving) -> bool:
        return self.has_buffer or moving.slot.gradient_bytes < self.limits.lone_bytes

    def _limit(self, is_later: bool) -> int:
        return self.limits.bucket_bytes if is_later else self.limits.first_bytes

    def fill(self, before: Open | None) -> tuple[tuple[BucketSlots, ...], Open | None]:
        """Packs them into the bucket that later parts have left open, and new ones; and which is left open."""
        if before is not None and self.is_packed:
            limit = self._limit(before.is_later)
            if before.load.whole_bytes + self.own.whole_bytes <= limit:
                group = BucketSlots(self.slots, before.load, self.own, True)
                return (group,), Open(before.load.plus(self.own), before.is_later)
        known = self._known.get(before)
        if known is None:
            known = self._known[before] = self._filled(before)
            self._kept.add(id(known[0]))
        return known

    def _filled(self, before: Open | None) -> tuple[tuple[BucketSlots, ...], Open | None]:
        groups, current = list[BucketSlots](), list[Moving]()
        load, is_later = (before.load, before.is_later) if before is not None else (None, False)
        filled = load.whole_bytes if load is not None else 0
        for moving in self.moved:
            size = moving.slot.gradient_bytes
            if not self._is_packed(moving):
                groups.append(BucketSlots((moving.number,), None, _load(moving), False))
                continue
            if filled and filled + size > self._limit(is_later):
                groups += _closed(current, load, False)
                current, load, filled, is_later = [], None, 0, True
            current.append(moving)
            filled += size
        groups += _closed(current, load, self.crosses)
        if not self.crosses or (load is None and not current):
            return tuple(groups), None
        own = [_load(moving) for moving in current]
        return tuple(groups), Open(_together([load, *own] if load is not None else own), is_later)

    def share(
        self, groups: Sequence[BucketSlots], rest: Load | None, ways: Ways, send: Send
    ) -> tuple[tuple[Share, ...], Load | None]:
        """The part's shares, and what it and earlier ones, which add `rest`, add to the bucket of later parts. send: a
        bucket's collectives."""
        if len(groups) == 1 and self._only_passes(groups[0], rest):
            if not self._passing:
                self._passing = (self._share(groups[0], rest, ways, send),)
            return self._passing, self.own if rest is None else self.own.plus(rest)
        if id(groups) not in self._kept:
            return self._shares(groups, rest, ways, send)
        known = self._shared.get((id(groups), rest))
        if known is None:
            known = self._shared[id(groups), rest] = self._shares(groups, rest, ways, send)
        return known

    def _shares(
        self, groups: Sequence[BucketSlots], rest: Load | None, ways: Ways, send: Send
    ) -> tuple[tuple[Share, ...], Load | None]:
        shares, added = list[Share](), None if self._is_touched else rest
        for group in groups:
            more = rest if group.stays_open else None
            shares.append(self._share(group, more, ways, send))
            if group.before is not None:
                added = group.own if more is None else group.own.plus(more)
        return tuple(shares), added

    def _only_passes(self, group: BucketSlots, rest: Load | None) -> bool:
        """Whether other parts begin and complete the bucket that all of this part's gradients are in."""
        begun = group.before is not None and group.before.has_gradient
        return begun and rest is not None and rest.has_gradient and group.stays_open and self.own.has_gradient

    def _share(self, group: BucketSlots, rest: Load | None, ways: Ways, send: Send) -> Share:
        before = group.own if group.before is None else group.before.plus(group.own)
        total = before if rest is None else before.plus(rest)
        items = [self.ended_at[n] for n in group.slots if self.ended_at[n] >= 0]
        completes = bool(items) and not (rest is not None and rest.has_gradient)
        is_begun = group.before is not None and group.before.has_gradient
        asks = completes or (self.has_buffer and not is_begun)
        return Share(
            group.slots, min(items) if completes else -1,
            send(ways.steps[self.way], total.sizes) if completes else (),
            total.whole_bytes if asks else 0, total.scatter_bytes if completes else 0, self.has_buffer,
            is_begun, self.way, group.before is not None, group.stays_open, completes and rest is not None,
        )  # fmt: skip


def _closed(current: Sequence[Moving], before: Load | None, stays_open: bool) -> list[BucketSlots]:
    if not current:
        return []
    own = _together([_load(moving) for moving in current])
    return [BucketSlots(tuple([moving.number for moving in current]), before, own, stays_open)]


def _together(loads: Sequence[Load]) -> Load:
    total = loads[0]
    for load in loads[1:]:
        total = total.plus(load)
    return total
