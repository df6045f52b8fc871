"""What a stage's microbatch copies to the host's memory and back, as `runtime.copying` does.

A *call* of a module that is copied out is a run of items. What its items save is copied when the last of them has run,
and has arrived when the next call's last one has, or the forward pass has ended; then the device's is given back.
The last call's comes back when the backward pass begins, each other one when that reaches the call after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.runtime.copying import LEAST_COPIED_BYTES, aligned
from autopar.simulate.program import Item, LocalProgram

MOST_PIECES = 4
"""Of how many tensors one `Extra` of an operator may be: of one with fewer bytes than so many copied pieces, some may
stay."""


@dataclass(slots=True, eq=False)
class CopiedCall:
    """last: its last item; reached: the first item, in the order of the backward pass, that needs something of what it
    brings back, −1 where that is nothing. out, back: bytes of each piece that it copies out, and brings back; freed:
    bytes of these that are given back when they have arrived; taken: that are taken when they begin to come back."""

    last: int
    reached: int = -1
    out: list[int] = None  # type: ignore[assignment]
    back: list[int] = None  # type: ignore[assignment]
    freed_bytes: int = 0
    taken_bytes: int = 0

    def __post_init__(self) -> None:
        self.out, self.back = [], []

    @property
    def host_bytes(self) -> int:
        """Of the host's memory."""
        return sum(map(aligned, self.out))


@dataclass(frozen=True, slots=True)
class CopiedMemory:
    """Where a piece of memory goes: the call that copies it out and the one that brings it back, −1 if it stays."""

    out: int
    back: int


def copied_calls(program: LocalProgram) -> dict[int, CopiedCall]:
    """The calls of which something is copied out, in order, by their numbers."""
    found: dict[int, CopiedCall] = {}
    for number, item in enumerate(program.items):
        if item.copied_call >= 0:
            found.setdefault(item.copied_call, CopiedCall(number)).last = number
    return found


def copied_memory(
    program: LocalProgram, storage: int, savers: Sequence[int], entered: Sequence[int]
) -> CopiedMemory | None:
    """What becomes of a piece of memory; None where it is not copied.

    savers: the items whose backward pass needs it; entered: the first items that read it in calls which run again, and
    keep what enters them.
    """
    memory = program.memory[storage]
    if memory.num_bytes < LEAST_COPIED_BYTES or memory.owner < 0 or not _is_made(program.items[memory.owner]):
        return None
    calls = [program.items[number].copied_call for number in savers]
    outside = [number for number, call in zip(savers, calls, strict=True) if call < 0] + [*entered]
    inside = [number for number, call in zip(savers, calls, strict=True) if call >= 0]
    if not inside or min(outside, default=inside[0]) < inside[0]:
        return None
    first, last = (program.items[number].copied_call for number in (inside[0], inside[-1]))
    return CopiedMemory(first, -1 if outside else last)


def _is_made(item: Item) -> bool:
    """Whether a pass makes it: neither what came from another stage, nor what is there before."""
    return not item.name.startswith("receive ") and item.name not in ("before", "earlier")


def next_call(calls: Mapping[int, CopiedCall], number: int) -> CopiedCall | None:
    """The call after one whose end waits for what that one has copied out."""
    return next((call for other, call in calls.items() if other > number), None)
