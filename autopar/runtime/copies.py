"""Copies of the parameters that meet otherwise than by the sum of their gradients: local SGD and Adasum.

Ranks along the axis of copies each have a gradient of their own part of the batch when a step's passes have ended:
n times their summand, for n copies, so that its mean over equal copies is the gradient of the whole batch.

    local_sgd   it is the copy's gradient. After every `period` updates, the parameters become the mean of all copies,
                when the next step begins, or when whoever reads the weights needs those of the model
    adasum      gradients a and b of two copies become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, tensor by tensor:
                the sum of what is orthogonal, the mean of what is equal; then two of these, until all have one
    backup      the gradients of those that are there first become those of all (`backup`)

Or summands are added up after all, in fewer bits (`compressing`). Updates are seen by the parameters that they change,
whatever optimizer makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import coalesce, comm
from autopar.runtime.backup import FirstArrivals
from autopar.runtime.compressing import CompressedSum
from autopar.runtime.declare import Algorithm, Program
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.packing import BUCKET_BYTES, SAMPLED
from autopar.runtime.placement import AxisType
from autopar.runtime.state import ProgramState
from autopar.runtime.stored import StoredParameter, local_part

COMPRESSED = ("int8", "topk", "powersgd")
CHECKED_STEPS = 3
"""Steps before which a few values are looked at: of updates that nothing else tells of."""


def apart_of(program: type[Program]) -> str:
    """The axis of copies that meet otherwise than by the sum of their gradients, if there is one."""
    return program.ALGORITHM.axis if program.ALGORITHM is not None else ""


class ParameterCopies:
    """What a rank's parameters do with those of the other copies, beside each step."""

    def __init__(self, algorithm: Algorithm, state: ProgramState) -> None:
        self._algorithm, self._state = algorithm, state
        state.has_copies = algorithm.name == "local_sgd"
        is_compressed = algorithm.name in COMPRESSED
        self._fewer_bits = CompressedSum(algorithm.name, algorithm.amount) if is_compressed else None
        self._trained = [item for item in state.parameters.values() if item.declared.requires_grad]
        self._axes = {id(item): self._axis(item) for item in self._trained}
        self.first: FirstArrivals | None = None  # under backup, from the first step on
        self._updates = self._steps = 0
        self._apart = 0  # updates since all copies were equal
        self._seen, self._sample = self._marks(), self._some()

    def _axis(self, item: StoredParameter) -> Axis:
        return next(axis for axis in item.mesh.axes if axis.name == self._algorithm.axis)

    def _marks(self) -> list[int]:
        """What changes with an update: steps of optimizers, and what else is done in place to a parameter."""
        versions = [version for item in self._trained for version in (item.tensor._version, item.local._version)]
        return [self._state.num_updates, *versions]

    def _some(self) -> list[Tensor]:
        if not self._state.has_copies:
            return []
        return [item.local.flatten()[:SAMPLED].detach().clone() for item in self._trained[:SAMPLED]]

    def begin_step(self) -> None:
        """Before a step's first pass: all take the mean, where it is due. Raises ProgramError in the first steps for
        updates that are seen by their values alone."""
        self._steps += 1
        if not self._state.has_copies:
            return
        if 1 < self._steps <= CHECKED_STEPS and self._marks() == self._seen:
            self._check_unseen()
        self._notice()
        if self._apart >= self._algorithm.period:
            self.unite()
        self._sample = self._some() if self._steps < CHECKED_STEPS else []

    def step(self, passes: Callable[[], Tensor]) -> Tensor:
        """Makes a step's passes, and leaves the gradients that these copies take. Returns the loss of the batch.
        passes: returns that as the ranks of this copy make it."""
        if self._algorithm.name == "backup":
            if self.first is None:
                axis = self._axis(self._trained[0])
                self.first = FirstArrivals(axis, int(self._algorithm.amount), self._trained)
            return self.first.step(passes)
        loss = passes()
        self.meet()
        return loss

    def _check_unseen(self) -> None:
        if not all(map(torch.equal, self._some(), self._sample)):
            raise ProgramError(
                f"expected updates of parameters by an optimizer of rank.parameters(), or in place under "
                f"torch.no_grad(), since {self._algorithm.name} counts them, found values that have changed otherwise, "
                "such as through parameter.data; use parameter.add_(…) under torch.no_grad()"
            )

    def _notice(self) -> None:
        """An update since the last look, if there was one."""
        now = self._marks()
        if now != self._seen:
            self._updates += 1
            self._apart += self._updates > self._algorithm.after and self._algorithm.name == "local_sgd"
            self._seen = now

    def loaded(self) -> None:
        """After weights were set on all copies alike."""
        self._apart, self._seen = 0, self._marks()
        self._sample = self._some() if self._steps < CHECKED_STEPS else []

    @torch.no_grad()
    def meet(self) -> None:
        """When a step's passes have ended: the gradients that these copies take."""
        own = [item for item in self._trained if item.gradient is not None]
        if self._fewer_bits is not None:
            for axis, items in self._by_axis(own):
                self._fewer_bits.sum_([_gradient(item) for item in items], axis, tuple(map(id, items)))
            return
        if self._algorithm.name == "local_sgd" and self._updates < self._algorithm.after:
            for axis, items in self._by_axis(own):
                _sum([_gradient(item) for item in items], axis)
            return
        for item in own:
            _gradient(item).mul_(self._axes[id(item)].size)
        if self._algorithm.name == "adasum":
            self._combine(own)

    @torch.no_grad()
    def unite(self, others: Iterable[Tensor] = ()) -> None:
        """All copies take the mean of their parameters, where they may differ, and of other tensors that each has."""
        if self.first is not None:
            self.first.drain()
        self._notice()
        if not self._apart:
            return
        for axis, items in self._by_axis(self._trained):
            _mean([item.local for item in items], axis)
        others = [*others]
        if others:
            _mean(others, self._axes[id(self._trained[0])])
        self._apart, self._seen = 0, self._marks()

    def _by_axis(self, items: Sequence[StoredParameter]) -> Iterator[tuple[Axis, list[StoredParameter]]]:
        """Stages of one rank have the same copies."""
        groups: dict[Hashable, list[StoredParameter]] = {}
        for item in items:
            groups.setdefault(self._axes[id(item)].group, []).append(item)
        for found in groups.values():
            yield self._axes[id(found[0])], found

    def _combine(self, items: Sequence[StoredParameter]) -> None:
        for axis, found in self._by_axis(items):
            for group in _in_parts(found, lambda item: (_gradient(item).dtype, _cut_axes(item)), _gradient):
                _adasum([_gradient(item) for item in group], axis, _cut_axes(group[0]))


def _gradient(item: StoredParameter) -> Tensor:
    assert item.gradient is not None, "asked for of those that have one"
    return item.gradient


def _cut_axes(item: StoredParameter) -> tuple[Axis, ...]:
    """The axes over which a parameter's parts make up the whole."""
    pairs: Iterable[tuple[AxisType, Axis]] = zip(item.types, item.mesh.axes, strict=True)
    return tuple(axis for kind, axis in pairs if kind.is_shard and axis.size > 1)


def _in_parts(
    items: Iterable[StoredParameter], kind: Callable[[StoredParameter], Hashable],
    tensor: Callable[[StoredParameter], Tensor],
) -> Iterator[list[StoredParameter]]:  # fmt: skip
    """Those of a kind, in groups of at most `BUCKET_BYTES`, or of one that is larger."""
    groups: dict[Hashable, list[StoredParameter]] = {}
    for item in items:
        group = groups.setdefault(kind(item), [])
        if group and sum(tensor(one).nbytes for one in group) + tensor(item).nbytes > BUCKET_BYTES:
            yield group
            groups[kind(item)] = group = []
        group.append(item)
    yield from groups.values()


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, of one dtype each: as much as is worth one buffer."""
    group: list[Tensor] = []
    for tensor in tensors:
        full = sum(one.nbytes for one in group) + tensor.nbytes > BUCKET_BYTES
        if group and (full or tensor.dtype != group[0].dtype):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _sum(tensors: Sequence[Tensor], axis: Axis) -> None:
    """In place, over the axis; in the order that all ranks of it have them in."""
    for group in _chunks(tensors):
        for tensor, total in zip(group, coalesce.all_reduce(group, axis, owned=True)(), strict=True):
            if total is not tensor:
                tensor.copy_(total)


def _mean(tensors: Sequence[Tensor], axis: Axis) -> None:
    """In place; of integers, which all copies have alike, nothing is done."""
    moving = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    _sum(moving, axis)
    for tensor in moving:
        tensor.div_(axis.size)


def _adasum(gradients: Sequence[Tensor], axis: Axis, cut: Sequence[Axis]) -> None:
    """Combines each gradient with those of all other copies, in place. cut: the axes over which parts make it up."""
    flat, views = coalesce.pack(gradients)
    assert flat is not None, "groups are of at least one"
    other, distance = torch.empty_like(flat), 1
    theirs = coalesce.views_of(other, [view.shape for view in views])
    while distance < axis.size:
        sizes = [flat.numel() if index == axis.index ^ distance else 0 for index in range(axis.size)]
        comm.exchange(other, sizes, flat, sizes, axis)
        dots = [[_dot(own, its), _dot(own, own), _dot(its, its)] for own, its in zip(views, theirs, strict=True)]
        products = torch.stack([torch.stack(row) for row in dots])
        for inner in cut:
            comm.all_reduce(products, inner)
        for own, its, (both, squared, other_squared) in zip(views, theirs, products.tolist(), strict=True):
            own.mul_(1 - _part(both, squared)).add_(its.mul_(1 - _part(both, other_squared)))  # in either order, equal
        distance *= 2
    for gradient, view in zip(gradients, views, strict=True):
        gradient.copy_(view)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)


def _part(product: float, square: float) -> float:
    """The share of a gradient that the other one has as well, halved; none of one that is zero."""
    return product / (2 * square) if square else 0.0


def floats_of(optimizer: Any) -> list[Tensor]:
    """What an optimizer keeps of each parameter in floating point, in an order that all copies have: this rank's parts,
    but for counts of steps."""
    kept = [
        local_part(value)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda pair: str(pair[0]))
        if isinstance(value, Tensor) and value.dim()
    ]
    return [tensor for tensor in kept if tensor.is_floating_point()]
