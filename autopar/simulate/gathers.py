"""Which slots are converted together: buckets of the first gathers of a step, and of the gathers of a unit.

Large slots are gathered alone. Small ones of one way go together: when the step begins as `runtime.packing` packs them,
later those of a unit. What a rank does around a bucket's collectives itself (packing, joining, casting) is its
`convert_ns`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from autopar.cost import Profile
from autopar.cost.compute import copy_time_ns, pointwise_time_ns
from autopar.cost.profile import host_of
from autopar.runtime.packing import BUCKET_SIZES, LONE_BYTES, BucketSizes, pack_gathers
from autopar.simulate.host_copies import COPY, is_copy
from autopar.simulate.program import Bucket, Slot, way_of_slot
from autopar.simulate.sending import SendPrices


def first_gathers(slots: Sequence[Slot], sending: SendPrices, limits: BucketSizes = BUCKET_SIZES) -> list[Bucket]:
    """The buckets that slots are gathered in when the step begins, which come in the order of their first use."""
    moved = (number for number, slot in enumerate(slots) if slot.converts)
    packed = pack_gathers(moved, lambda n: slots[n].steps, lambda n: slots[n].used_bytes, limits)
    return [bucket(slots, group, sending) for group in packed]


def gathers_by_unit(
    slots: Sequence[Slot], sending: SendPrices, is_moved: Callable[[Slot], bool] = lambda slot: True
) -> list[Bucket]:
    """The buckets that a program's slots are gathered in, of those that are moved."""
    moved = [number for number, slot in enumerate(slots) if slot.converts and is_moved(slot)]
    return [bucket(slots, group, sending) for group in _by_unit(slots, moved)]


def _by_unit(slots: Sequence[Slot], moved: Iterable[int]) -> list[list[int]]:
    lone, small = list[list[int]](), dict[Hashable, list[int]]()
    for number in moved:
        if slots[number].used_bytes >= LONE_BYTES:
            lone.append([number])
        else:
            small.setdefault(way_of_slot(slots[number], True), []).append(number)
    return [*lone, *small.values()]


def bucket(slots: Sequence[Slot], together: list[int], sending: SendPrices) -> Bucket:
    """Of slots of one way."""
    first, profile = slots[together[0]], sending.profile
    rows = [slots[number].sizes for number in together]
    columns = zip(*rows, strict=True) if len(rows) > 1 else ()
    sizes = [(sum(a for a, _ in column), sum(b for _, b in column)) for column in columns] or rows[0]
    sent = sending.of_steps(first.steps, sizes, 0)
    is_beside = COPY in first.steps and len(sent) > 1 and host_of(profile).is_simulated
    own = [slots[number] for number in together]
    return Bucket(together, sent, (_convert_ns(own, profile) if sent else 0) + _cast_ns(own, profile), is_beside)


def _cast_ns(slots: Sequence[Slot], profile: Profile) -> int:
    """A kernel for each."""
    return sum(pointwise_time_ns(slot.cast_bytes[0], profile) for slot in slots)


def _convert_ns(slots: Sequence[Slot], profile: Profile) -> int:
    """Small and inner-dim shards are packed, joined and copied into place; others land there."""
    if profile.runtime is None:
        return 0
    copied = 0
    for slot in slots:
        is_direct = slot.used_bytes >= LONE_BYTES and slot.steps[-1].before.dim == 0
        copied += 0 if is_direct or is_copy(slot.steps[-1]) else slot.stored_bytes + 2 * slot.used_bytes
        if COPY in slot.steps and host_of(profile).is_simulated:  # by the rank itself
            copied += slot.stored_bytes
    return len(slots) * profile.runtime.convert_ns + copy_time_ns(copied, profile)
