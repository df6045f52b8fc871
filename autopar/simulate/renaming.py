"""What the tasks of a part are called, which were played for an equal part of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from autopar.simulate.part_player import FOLLOWING, PRECEDING, PartPlayer
from autopar.simulate.passes import Rename
from autopar.simulate.player import BEGUN
from autopar.simulate.segments import Segment

Place = tuple[int, int]
"""Of a slot or unit: its part, and its number there."""


class Renames:
    """Of the parts of a stage in order. They know nothing of passes, which keep them."""

    def __init__(
        self, segments: Sequence[Segment], players: Sequence[PartPlayer], following: Sequence[tuple[int, object]],
        preceding: Sequence[tuple[int, object]], root_parts: Sequence[int],
        named: dict[tuple[Segment, int], dict[str, str]],
    ) -> None:  # fmt: skip
        """following, preceding, root_parts: as in `Joined`. named: of a segment and the number of an equal one, what
        that calls the same, as far as it was asked for."""
        self.segments, self.parts, self._named = segments, [player.part for player in players], named
        self._shares = [player.shares for player in players]
        self._around = {FOLLOWING: following, PRECEDING: preceding}
        self._root_parts = root_parts

    def of(self, number: int) -> Rename:
        """What renames the tasks of a part; of the step's begin for -1."""
        return partial(self._renamed, number)

    def in_last(self, tensor: str) -> str:
        """What a tensor is called here that the last part calls so."""
        last = len(self.parts) - 1
        return self._names(self.parts[last].lowered.origin, last).get(tensor, tensor)

    def _renamed(self, number: int, name: str) -> str:
        """Word by word. A word like "2:3" means a slot of another part (`Slot.at`), or the bucket of a way that others
        began."""
        words = []
        for word in name.split(" "):
            whose, mark, which = word.rpartition(":")
            at, tensor = number, word
            if mark:
                at, n = self._slot_meant(number, whose, int(which))
                tensor = self.parts[at].program.slots[n].tensor
            words.append(tensor if at < 0 else self._names(self.parts[at].lowered.origin, at).get(tensor, tensor))
        return " ".join(words)

    def _slot_meant(self, number: int, whose: str, which: int) -> Place:
        if whose == BEGUN:
            return self._begun(number, which)
        if number < 0:
            return int(whose), which
        if int(whose) in self._around:
            return self._around[int(whose)][number][0], which
        return self._root_parts[int(whose)], which

    def _begun(self, number: int, way: int) -> Place:
        """The first slot of a bucket of this way that a part goes on with, in the part that began it."""
        for at in range(number + 1, len(self._shares)):
            for share in self._shares[at]:
                if share.way == way and share.goes and not share.comes:
                    return at, share.slots[0]
        raise AssertionError(f"expected a part after {number} that begins a bucket of way {way}")

    def _names(self, origin: Segment, number: int) -> Mapping[str, str]:
        """What is called so in a segment, of this stage or another, as it is called in an equal one."""
        if origin is self.segments[number]:
            return {}
        known = self._named.get((origin, number))
        if known is None:
            pairs = zip(_names_in(origin), _names_in(self.segments[number]), strict=True)
            known = self._named[origin, number] = dict(pairs)
        return known


def _names_in(segment: Segment) -> list[str]:
    """Of its operators and tensors, in an order that equal segments have them in, too."""
    return [*(node.name for node in segment.nodes), *segment.enters, *segment.made, *segment.stored, *segment.keeps]
