"""Where the state of a training lies under a plan: which slice of which tensor each rank keeps between steps.

State is what a checkpoint holds that has elements: parameters, what an elementwise optimizer keeps of each element, and
buffers. It is named as the model names it, so that layouts of plans of one model can be held against each other: of
packed parameters (`ir.packed`), each rank has its slices of the model's. What an optimizer keeps otherwise, such as
factored moments, is shared out over the elements of its parameter.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.cost.memory import optimizer_state_bytes
from autopar.errors import PlanError
from autopar.ir.graph import Graph, Stored, Tensor
from autopar.ir.mesh import MICROBATCH, LogicalMesh, coordinates
from autopar.ir.placement import Axis, Placement, evenly
from autopar.ir.plan import Plan

Span = tuple[int, int]
Box = tuple[Span, ...]
"""The elements of a slice: from and to of each dim."""


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the state, with all that is kept of each of its elements, in the model's form.

    owners: the ranks that keep each slice, all of it; slices do not overlap. num_bytes: of the whole.
    """

    shape: tuple[int, ...]
    num_bytes: int
    owners: Mapping[Box, tuple[int, ...]]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal only for tensors that are alike in all but their names; those of equal blocks share their owners."""
        return self.shape, self.num_bytes, id(self.owners)

    def bytes_of(self, box: Box) -> int:
        """Of a slice."""
        return self.num_bytes * volume(box) // max(1, math.prod(self.shape))


@dataclass(frozen=True)
class StateLayout:
    """Of all tensors of the state, by name, on so many ranks."""

    ranks: int
    tensors: Mapping[str, StateTensor]

    @property
    def num_bytes(self) -> int:
        """Of all, each element once."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def bytes_by_rank(self) -> list[int]:
        """What each rank keeps."""
        found = [0] * self.ranks
        for tensor, count in self.alike:
            for box, ranks in tensor.owners.items():
                own = count * tensor.bytes_of(box)
                for rank in ranks:
                    found[rank] += own
        return found

    @cached_property
    def alike(self) -> list[tuple[StateTensor, int]]:
        """One of the tensors that are alike, and how many these are."""
        count = Counter(tensor.key for tensor in self.tensors.values())
        return [(tensor, count[key]) for key, tensor in {t.key: t for t in self.tensors.values()}.items()]


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(end - start for start, end in box)


def overlap(one: Box, other: Box) -> Box | None:
    """What two slices of one tensor have in common; None where that is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < end for start, end in both) else None


def layout_of(graph: Graph, plan: Plan) -> StateLayout:
    """The layout of a plan for this graph. A tensor that several stages keep is where the first keeps it, and where
    others keep the same slices."""
    found: dict[str, list[Owners]] = {}
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    known: dict[Any, Owners] = {}
    for item in graph.stored:
        if item.kind == "constant" or (item.kind == "buffer" and not item.persistent):
            continue
        stages = [stage for stage in plan.stages if item.tensor in stage.storage]
        for name, shape, num_bytes, pieces in _pieces(graph, item, plan.optimizer):
            shapes[name] = shape, num_bytes
            where = tuple((stage.first_rank, stage.axes, stage.storage[item.tensor].placement) for stage in stages)
            whole = graph.kept(item.tensor).shape
            key = where, tuple(pieces), whole
            if key not in known:
                known[key] = _joined([_owners(*one, pieces, whole) for one in where])
            found.setdefault(name, []).append(known[key])
    tensors = {
        name: StateTensor(
            *shapes[name], parts[0] if len(parts) == 1 else {k: v for part in parts for k, v in part.items()}
        )
        for name, parts in found.items()
    }
    return StateLayout(plan.mesh.num_devices, tensors)


Owners = dict[Box, tuple[int, ...]]
"""By slice: the ranks that keep it."""


Pieces = list[tuple[Box, Box, bool]]
"""Of a stored tensor: a slice of it, the slice of the model's tensor that is there, and whether it is transposed."""


def _pieces(
    graph: Graph, item: Stored, optimizer: str | None
) -> Iterator[tuple[str, tuple[int, ...], int, Pieces]]:  # fmt: skip
    """The model's tensors that a stored one has parts of: name, shape, bytes with the optimizer's, and where."""
    packing = graph.packed.get(item.name)
    kept = graph.kept(item.tensor)
    if packing is None:
        whole: Box = tuple((0, length) for length in kept.shape)
        yield item.name, kept.shape, _bytes(kept.shape, kept.dtype, item, optimizer), [(whole, whole, False)]
        return
    parts: dict[str, Pieces] = {}
    start = 0
    for piece in packing.pieces:
        own = graph.unpacked[piece.name].shape
        source = [(0, length) for length in own]
        if piece.length is not None:
            source[piece.dim] = (piece.start, piece.start + piece.length)
        turned = source[::-1] if piece.transposed else source
        target = [(0, end - begin) for begin, end in turned]
        length = target[packing.dim][1]
        target[packing.dim] = (start, start + length)
        start += length
        parts.setdefault(piece.name, []).append((tuple(target), tuple(source), piece.transposed))
    for name, pieces in parts.items():
        shape = graph.unpacked[name].shape
        yield name, shape, _bytes(shape, kept.dtype, item, optimizer), pieces


def _bytes(shape: tuple[int, ...], dtype: str, item: Stored, optimizer: str | None) -> int:
    own = Tensor("", shape, dtype).num_bytes
    return own + (optimizer_state_bytes(optimizer, shape, dtype) if item.requires_grad else 0)


def _owners(
    first_rank: int, logical: LogicalMesh, placement: Placement, pieces: Pieces, shape: tuple[int, ...]
) -> dict[Box, list[int]]:  # fmt: skip
    """The slices of the model's tensor that the ranks of a stage keep. shape: of what is stored."""
    found: dict[Box, list[int]] = {}
    real = [(axis, type_) for axis, type_ in zip(evenly(logical), placement, strict=True) if axis.name != MICROBATCH]
    axes, types = tuple(axis for axis, _ in real), tuple(type_ for _, type_ in real)
    for number, coordinate in enumerate(coordinates(axes)):
        own = slice_of_rank(shape, types, axes, coordinate)
        for target, source, transposed in pieces:
            inside = overlap(own, target) if shape else own
            if inside is None or not volume(inside):
                continue
            offsets = [(a - t, b - t) for (a, b), (t, _) in zip(inside, target, strict=True)]
            turned = offsets[::-1] if transposed else offsets
            box = tuple((s + a, s + b) for (a, b), (s, _) in zip(turned, source, strict=True))
            found.setdefault(box, []).append(first_rank + number)
    return found


def slice_of_rank(
    shape: Sequence[int], placement: Placement, axes: Sequence[Axis], coordinate: Sequence[int]
) -> Box:  # fmt: skip
    """What a rank keeps: each axis in turn cuts as `torch.chunk` does what those before it have left."""
    spans = [(0, length) for length in shape]
    for type_, axis, index in zip(placement, axes, coordinate, strict=True):
        if type_.kind == "S":
            start, end = spans[type_.dim]
            chunk = -(-(end - start) // axis.size)
            spans[type_.dim] = (min(end, start + index * chunk), min(end, start + (index + 1) * chunk))
    return tuple(spans)


def _joined(owners: Sequence[dict[Box, list[int]]]) -> Owners:
    """Of several stages: the first's slices, with the ranks of others that keep the same."""
    if not owners:
        return {}
    return {
        box: tuple(sorted(set(itertools.chain.from_iterable(other.get(box, ()) for other in owners))))
        for box in sorted(owners[0])
    }


def check_comparable(old: StateLayout, new: StateLayout) -> None:
    """Raises PlanError where two layouts are not of one model's state."""
    for name in sorted({*old.tensors, *new.tensors}):
        one, other = old.tensors.get(name), new.tensors.get(name)
        if one is None or other is None or (one.shape, one.num_bytes) != (other.shape, other.num_bytes):
            raise PlanError(
                f"expected two plans of one model and optimizer, found {name} as {_shown(one)} in one and as "
                f"{_shown(other)} in the other; plan both of the same model"
            )


def _shown(tensor: StateTensor | None) -> str:
    return "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.num_bytes:,} bytes with its state"
