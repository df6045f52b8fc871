"""What attention sees of a sequence, by counting: a mask as, for each query, the keys from one to another.

A mask of long sequences is too large to be computed where plans are made: T queries see T keys, of each of B samples.
But it is made of what is not, of positions and numbers of documents, and what it says of a query is mostly an interval:

    cⱼ ≤ rᵢ,  cⱼ = rᵢ, …  with c sorted        → an interval of j for each i         two binary searches a query
    rᵢ + cⱼ ≤ s,  |rᵢ + cⱼ| < s                → the same
    a and b,  a or b,  not a                   → what both have in common, what they have together, what is left, where
                                                 that is an interval
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TURNED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}
"""Of a comparison, what it is with its sides exchanged."""


@dataclass(frozen=True, eq=False)
class Intervals:
    """Matrices, all alike, of so many columns: in row i the columns from `first[i]` up to `after[i]` are `inside`, all
    others `outside`; both are tensors of no dims."""

    first: Tensor
    after: Tensor
    columns: int
    inside: Tensor
    outside: Tensor

    @property
    def is_causal(self) -> bool:
        """Whether query i sees the keys up to itself, and what is added to scores hides all others: that is exactly
        nothing after the softmax, from half of the dtype's least number on."""
        numbers = torch.arange(len(self.first))
        if len(numbers) != self.columns:
            return False
        is_begin = bool((self.first == 0).all() and (self.after == numbers + 1).all())
        is_rest = bool((self.first == numbers + 1).all() and (self.after == self.columns).all())
        seen, hidden = (self.inside, self.outside) if is_begin else (self.outside, self.inside)
        if not is_begin and not is_rest:
            return False
        if seen.dtype == torch.bool:
            return bool(seen) and not bool(hidden)
        is_number = seen.dtype.is_floating_point
        return is_number and bool(seen == 0) and bool(hidden <= torch.finfo(hidden.dtype).min / 2)

    @property
    def matrix(self) -> Tensor:
        """One of them."""
        places = torch.arange(self.columns)
        is_inside = (places >= self.first[:, None]) & (places < self.after[:, None])
        return torch.where(is_inside, self.inside, self.outside)


@dataclass(frozen=True, eq=False)
class Outer:
    """Matrices, all alike, of whole numbers: rows[i] + columns[j], or how far that is from 0."""

    rows: Tensor
    columns: Tensor
    is_distance: bool = False

    @property
    def matrix(self) -> Tensor:
        """One of them."""
        found = self.rows[:, None] + self.columns
        return found.abs() if self.is_distance else found

    def compared(self, number: Tensor, way: str) -> Intervals | None:
        """In which columns that compares so with a number."""
        if number.dtype.is_floating_point:
            return None
        if not self.is_distance:
            return compared(self.columns, number - self.rows, way)
        if way not in ("le", "lt"):
            return None
        upper = compared(self.columns, number - self.rows, way)
        lower = compared(self.columns, -number - self.rows, TURNED[way])
        return None if upper is None or lower is None else common(upper, lower)


def compared(columns: Tensor, rows: Tensor, way: str) -> Intervals | None:
    """In which columns j of row i a comparison of columns[j] with rows[i] is true: an interval, where columns are
    sorted."""
    if columns.dtype == torch.bool or rows.dtype == torch.bool:
        columns, rows = columns.long(), rows.long()
    kind = torch.promote_types(columns.dtype, rows.dtype)
    columns, rows = columns.to(kind).contiguous(), rows.to(kind).contiguous()
    count, is_falling = len(columns), False
    if not bool((columns[1:] >= columns[:-1]).all()):
        columns, is_falling = columns.flip(0), True
        if not bool((columns[1:] >= columns[:-1]).all()):
            return None
    below, up_to = (torch.searchsorted(columns, rows, right=right) for right in (False, True))
    nothing, everything = torch.zeros_like(below), torch.full_like(below, count)
    first, after = {
        "le": (nothing, up_to), "lt": (nothing, below), "ge": (below, everything), "gt": (up_to, everything),
    }.get(way, (below, up_to))  # fmt: skip
    if is_falling:
        first, after = count - after, count - first
    is_equal = torch.tensor(way != "ne")
    return Intervals(first, after, count, is_equal, ~is_equal)


def true_in(mask: Intervals) -> Intervals | None:
    """A mask by what is true in it, where that is one interval in each row."""
    if bool(mask.inside) and not bool(mask.outside):
        return mask
    is_begin, is_end = mask.first == 0, mask.after == mask.columns
    is_nothing = mask.first >= mask.after
    if bool(mask.inside) == bool(mask.outside) or not bool((is_begin | is_end | is_nothing).all()):
        return None
    first = torch.where(is_nothing | ~is_begin, 0, mask.after)
    after = torch.where(is_nothing | is_begin, mask.columns, mask.first)
    return _masking(first, after, mask.columns)


def common(one: Intervals, other: Intervals) -> Intervals:
    """Of two masks by what is true in them, what is so in both."""
    first = torch.maximum(one.first, other.first)
    return replace(one, first=first, after=torch.maximum(first, torch.minimum(one.after, other.after)))


def together(one: Intervals, other: Intervals) -> Intervals | None:
    """Of two masks by what is true in them, what is so in one of them at least, where that is one interval in each
    row."""
    is_nothing, is_other_nothing = one.first >= one.after, other.first >= other.after
    meets = (one.first <= other.after) & (other.first <= one.after)
    if not bool((meets | is_nothing | is_other_nothing).all()):
        return None
    first, after = torch.minimum(one.first, other.first), torch.maximum(one.after, other.after)
    first = torch.where(is_nothing, other.first, torch.where(is_other_nothing, one.first, first))
    after = torch.where(is_nothing, other.after, torch.where(is_other_nothing, one.after, after))
    return replace(one, first=first, after=after)


def parted_alike(one: Intervals, other: Intervals) -> bool:
    """Whether the same is inside."""
    return one.columns == other.columns and torch.equal(one.first, other.first) and torch.equal(one.after, other.after)


def of_rows(is_seen: Tensor, times: int = 1) -> Intervals | None:
    """A matrix of what is seen, where that is one interval in each row. times: each column stands for so many."""
    count, columns = is_seen.sum(-1), is_seen.shape[-1]
    first = torch.where(count > 0, is_seen.int().argmax(-1), 0)
    after = torch.where(count > 0, columns - is_seen.flip(-1).int().argmax(-1), 0)
    return _masking(times * first, times * after, times * columns) if bool((after - first == count).all()) else None


def _masking(first: Tensor, after: Tensor, columns: int) -> Intervals:
    true = torch.tensor(True)
    return Intervals(first, after, columns, true, ~true)
