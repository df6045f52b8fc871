"""Where a model's tensor lies in files: a part of it is a slice of a file's, perhaps with rows in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Region = tuple[slice, ...]
"""Of a tensor: a range of each dim."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The elements at `target` of the model's tensor are those at `source` of the file's tensor `key`.

    shape: of the file's tensor. One of the two may have further dims in front, of which it takes one index each, as
    experts are stacked in one of them alone. paired: the length of a head whose rows the file has in interleaved pairs
    and the model in two halves (> 0), or the other way round (< 0); see `reorder`.
    """

    key: str
    shape: tuple[int, ...]
    source: Region
    target: Region
    paired: int = 0

    def file_region(self, region: Region) -> Region:
        """Where a region of the model's tensor, inside `target`, lies in the file's."""
        count = min(len(self.source), len(self.target))
        trailing = [
            slice(here.start - own.start + there.start, here.stop - own.start + there.start)
            for here, own, there in zip(
                _last(region, count), _last(self.target, count), _last(self.source, count), strict=True
            )
        ]
        return (*self.source[: len(self.source) - count], *trailing)

    @property
    def head(self) -> int:
        """The number of rows that change places among themselves; 1 where rows are in their order."""
        return abs(self.paired) or 1


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return tuple(slice(0, size) for size in shape)


def same(name: str, shape: tuple[int, ...], paired: int = 0) -> FilePart:
    """A tensor that is in the file as it is in the model, but for its rows' order."""
    return FilePart(name, shape, whole(shape), whole(shape), paired)


def overlap(one: Region, other: Region) -> Region | None:
    """What two regions share; None for nothing."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return both if all(s.start < s.stop for s in both) else None


def region_at(offset: Sequence[int], shape: Sequence[int]) -> Region:
    """The region of a slice by where it begins."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def inside(region: Region, outer: Region) -> Region:
    """The region, from where the outer one begins."""
    return tuple(slice(r.start - o.start, r.stop - o.start) for r, o in zip(region, outer, strict=True))


def row_order(paired: int) -> Tensor:
    """For each row of a head, in the model's order, the row of the file.

    Rotary embeddings turn pairs of a head's features: neighbours (0 1)(2 3)… in Meta's models, a feature of the first
    half with one of the second in Hugging Face's. The same model in the other's rows computes the same scores, as
    queries and keys have theirs in the same order.
    """
    interleaved = torch.arange(abs(paired)).view(-1, 2).t().reshape(-1)  # 0 2 4 … 1 3 5 …
    return interleaved if paired > 0 else torch.argsort(interleaved)


def _last(region: Region, count: int) -> Region:
    return region[len(region) - count :]
