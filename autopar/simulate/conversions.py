"""What bringing an activation to another placement does to memory, as runtime/pieces.py does it step by step.

A tensor cut along a dim that is the outermost in memory is a slice of the same memory, and travels from and into place;
along another dim its parts are copied first, or joined after. Parts that are not equally long travel padded. Gloo has
no reduce-scatter: there, parts are exchanged and summed, which takes the whole once more. Between two steps the tensor
is in memory of its own, which lasts until the second has ended. The gradient takes the same way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.ir.placement import Axis, P, Placement, R, Shape, Type, longest_part
from autopar.ir.redistribution import Step, apply

Local = Callable[[Placement], Shape]
"""From a placement to the first rank's slice."""


class Way(NamedTuple):
    """own_bytes: of the memory that the result lies in, None where it lies in the operand's; workspace_bytes: taken for
    a while beside the operand and the result."""

    own_bytes: int | None
    workspace_bytes: int


class _Slice(NamedTuple):
    """A slice: its shape, bytes of an element, and whether its dims lie in memory in another order than theirs."""

    shape: Shape
    itemsize: int
    is_permuted: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def like(self, shape: Shape) -> _Slice:
        """Another, of dims in their order."""
        return _Slice(shape, self.itemsize, False)

    def is_outermost(self, dim: int) -> bool:
        """Whether slices along the dim lie one after the other."""
        return math.prod(self.shape[:dim]) == 1 and not self.is_permuted


class Moves:
    """The ways of one plan's activations. sums_parts: gloo does."""

    def __init__(self, axes: Sequence[Axis], sums_parts: bool) -> None:
        self._axes, self._sums_parts = axes, sums_parts

    def forward(
        self, local: Local, itemsize: int, source: Placement, steps: Sequence[Step], is_permuted: bool
    ) -> Way:  # fmt: skip
        """Of the tensor. is_permuted: whether its dims lie in memory in another order than theirs."""
        changes = []
        for step in steps:
            after = apply(step, source)
            changes.append((step, step.before, step.after, local(source), local(after)))
            source = after
        return self._walk(changes, itemsize, is_permuted)

    def backward(self, local: Local, itemsize: int, source: Placement, steps: Sequence[Step]) -> Way:
        """Of its gradient."""
        changes = []
        for step in steps:
            after = apply(step, source)
            changes.append((step, _of_gradient(step.after), _of_gradient(step.before), local(after), local(source)))
            source = after
        return self._walk(changes[::-1], itemsize, False)

    def _walk(
        self, changes: Sequence[tuple[Step, Type, Type, Shape, Shape]], itemsize: int, is_permuted: bool
    ) -> Way:  # fmt: skip
        held: int | None = None
        most = 0
        for step, before, after, shape, made in changes:
            axis = self._axes[step.axis]
            if axis.size == 1:
                continue
            one = self._step(before, after, _Slice(shape, itemsize, is_permuted), made, axis)
            most = max(most, (held or 0) + one.workspace_bytes + (one.own_bytes or 0))
            held = held if one.own_bytes is None else one.own_bytes
            is_permuted = is_permuted and after.kind == "S" and before.kind in "IR"
        return Way(held, most - (held or 0))

    def _step(self, before: Type, after: Type, x: _Slice, made: Shape, axis: Axis) -> Way:
        kinds, size = before.kind + after.kind, math.prod(made) * x.itemsize
        if kinds in ("IR", "RI"):
            return Way(None, 0)
        if kinds in ("IS", "RS"):
            return Way(None if x.is_outermost(after.dim) else size, 0)
        if kinds in ("SR", "SI"):
            return _gathered(x, before.dim, made, axis)
        if kinds == "PS":
            return self._scattered(x, after.dim, axis)
        if kinds == "SS":
            return _exchanged(x, before.dim, after.dim, made, axis)
        return Way(size, 0)

    def _scattered(self, x: _Slice, dim: int, axis: Axis) -> Way:
        """One part of the sum of all ranks' tensors."""
        padded = _padded(x, dim, axis)
        is_padded, is_outermost = padded != x.num_bytes, x.is_outermost(dim) and not axis.shares
        part, copied = padded // axis.size, 0 if is_outermost and not is_padded else padded
        before = padded * (is_padded + (not is_outermost)) - part
        return Way(part, max(before, copied + max(padded * self._sums_parts, part * is_padded)))


def _of_gradient(type_: Type) -> Type:
    """Of a tensor's type, its gradient's."""
    return {R: P, P: R}.get(type_, type_)


def _gathered(x: _Slice, dim: int, made: Shape, axis: Axis) -> Way:
    """The parts of all ranks, one after the other, and joined where they do not lie so in the whole."""
    whole = x.like(made)
    padded = _padded(whole, dim, axis)
    sent = padded // axis.size if padded != whole.num_bytes or x.is_permuted else 0
    if whole.is_outermost(dim) and not axis.shares:
        return Way(padded, sent)
    cut_to_size = padded if padded != whole.num_bytes and not axis.shares else 0
    return Way(whole.num_bytes, sent + padded + cut_to_size)


def _exchanged(x: _Slice, dim: int, target: int, made: Shape, axis: Axis) -> Way:
    """Parts along one dim against parts along another."""
    whole, longest = x.like(made), x.like(_with(x.shape, dim, longest_part(made[dim], axis)))
    sent, is_padded = _padded(longest, target, axis), made[dim] % axis.units
    is_cut_in_place = sent == longest.num_bytes and x.is_outermost(target) and not axis.shares
    copied = 0 if is_cut_in_place else sent
    before = longest.num_bytes * bool(is_padded) + sent * (sent != longest.num_bytes) + copied
    shorter = whole.num_bytes if sent != longest.num_bytes else 0  # of ranks whose parts are cut to size
    if whole.is_outermost(dim) and not axis.shares:
        return Way(sent, max(copied, shorter, before - sent))
    joined = sent * (1 if not is_padded or axis.shares else 2)
    return Way(whole.num_bytes, max(joined + shorter, max(copied + sent, before) - whole.num_bytes))


def _padded(whole: _Slice, dim: int, axis: Axis) -> int:
    """Bytes of a tensor of whose parts along the dim each is as long as the longest."""
    length = max(1, whole.shape[dim])
    return whole.num_bytes // length * longest_part(length, axis) * axis.size


def _with(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])
