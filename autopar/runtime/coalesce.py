"""One collective for many tensors. Each function starts it and returns one that waits for the results.

A tensor of LONE_BYTES or more travels alone: where its layout allows, straight from and into place, with no
copy. Smaller ones are copied into one flat buffer, since a collective has a cost of its own however small
it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from autopar.runtime import comm, pieces
from autopar.runtime.mesh import Axis
from autopar.runtime.packing import LONE_BYTES
from autopar.runtime.placement import local_size, longest_part

Results = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class CutTensor:
    """A tensor that an axis cuts: the dim, and the dim's length before the axis cuts it."""

    tensor: Tensor
    dim: int
    size: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the whole along the dim."""
        shape = self.tensor.shape
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


def all_reduce(tensors: Sequence[Tensor], axis: Axis, *, owned: bool = False) -> Results:
    """Sums each tensor over the axis; in a copy, unless the tensors are `owned`.

    A gradient that autograd hands out is not: it may share memory with another one that is still to be read.
    """
    lone = [t.nbytes >= LONE_BYTES for t in tensors]
    tensors = [
        t if not alone or (owned and t.is_contiguous()) else t.clone(memory_format=torch.contiguous_format)
        for t, alone in zip(tensors, lone, strict=True)
    ]
    waits = [comm.start_all_reduce(t, axis) for t, alone in zip(tensors, lone, strict=True) if alone]
    flat, parts = pack([t for t, alone in zip(tensors, lone, strict=True) if not alone])
    if flat is not None:
        waits.append(comm.start_all_reduce(flat, axis))

    def results() -> list[Tensor]:
        _call(waits)
        small = iter(parts)
        return [t if alone else next(small) for t, alone in zip(tensors, lone, strict=True)]

    return results


def all_gather(pieces_: Sequence[CutTensor], outputs: Sequence[Tensor], axis: Axis) -> Results:
    """Gathers each piece into its output, a contiguous tensor that is the whole along the piece's dim."""
    lone = [_is_direct(piece, output, axis) for piece, output in zip(pieces_, outputs, strict=True)]
    waits = [
        comm.start_all_gather(output, piece.tensor.contiguous(), axis)
        for piece, output, alone in zip(pieces_, outputs, lone, strict=True)
        if alone
    ]
    packed = [(p, o) for p, o, alone in zip(pieces_, outputs, lone, strict=True) if not alone]
    shards = [pieces.pad(p.tensor, p.dim, longest_part(p.size, axis)) for p, _ in packed]
    flat, _ = pack(shards)
    gathered = flat.new_empty((axis.size, flat.numel())) if flat is not None else None
    if flat is not None and gathered is not None:
        waits.append(comm.start_all_gather(gathered, flat, axis))

    def results() -> list[Tensor]:
        _call(waits)
        columns = _columns(gathered, [shard.shape for shard in shards])
        for (piece, output), column in zip(packed, columns, strict=True):
            pieces.join_into(output, column, piece.dim, axis)
        return list(outputs)

    return results


def reduce_scatter(tensors: Sequence[Tensor], dims: Sequence[int], axis: Axis) -> Results:
    """Sums each tensor over the axis and hands out this rank's part along its dim."""
    split = [pieces.split(t, dim, axis) for t, dim in zip(tensors, dims, strict=True)]
    lone = [t.nbytes >= LONE_BYTES for t in split]
    shards = [t.new_empty(t.shape[1:]) if alone else None for t, alone in zip(split, lone, strict=True)]
    waits = [
        comm.start_reduce_scatter(shard, t, axis) for t, shard in zip(split, shards, strict=True) if shard is not None
    ]
    packed = [t.view(axis.size, -1) for t, alone in zip(split, lone, strict=True) if not alone]
    reduced: Tensor | None = None
    if packed:
        flat = torch.cat(packed, dim=1)
        reduced = flat.new_empty(flat.size(1))
        waits.append(comm.start_reduce_scatter(reduced, flat, axis))
    shapes = [t.shape[1:] for t, alone in zip(split, lone, strict=True) if not alone]
    sizes = [local_size(t.size(dim), axis) for t, dim in zip(tensors, dims, strict=True)]

    def results() -> list[Tensor]:
        _call(waits)
        small = iter(_columns(reduced.view(1, -1) if reduced is not None else None, shapes))
        whole = [next(small)[0] if shard is None else shard for shard in shards]
        return [t.narrow(dim, 0, size).contiguous() for t, dim, size in zip(whole, dims, sizes, strict=True)]

    return results


def sum_by_levels(buffer: Tensor, axes: Sequence[Axis]) -> list[Callable[[], comm.Wait]]:
    """The functions that start a sum over several axes in place, each to be waited for before the next.

    Reduce-scatter along each axis but the last, all-reduce of the part that is left along that, all-gather back. The
    buffer is flat, and the ranks of all axes but the last cut it in equal parts.
    """
    if not axes:
        return []
    *inner, last = axes
    parts = [buffer]
    for axis in inner:
        parts.append(buffer.new_empty(parts[-1].numel() // axis.size))
    levels = list(zip(inner, parts, parts[1:], strict=False))
    down = [partial(comm.start_reduce_scatter, part, whole, axis) for axis, whole, part in levels]
    up = [partial(comm.start_all_gather, whole, part, axis) for axis, whole, part in reversed(levels)]
    return [*down, partial(comm.start_all_reduce, parts[-1], last), *up]


def pack(tensors: Sequence[Tensor], parts: int = 1) -> tuple[Tensor | None, list[Tensor]]:
    """Copies the tensors into one flat buffer, which so many parts divide; returns it and the views that correspond to
    them."""
    if not tensors:
        return None, []
    shapes, rest = [t.shape for t in tensors], -sum(t.numel() for t in tensors) % parts
    flat = torch.cat([*(t.reshape(-1) for t in tensors), *([tensors[0].new_zeros(rest)] if rest else [])])
    return flat, views_of(flat[: flat.numel() - rest], shapes)


def views_of(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of a flat buffer, one after the other."""
    lengths = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(torch.split(flat, lengths), shapes, strict=True)]


def _columns(matrix: Tensor | None, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cuts (n, total) into one (n, *shape) for each shape."""
    if matrix is None:
        return []
    lengths = [math.prod(shape) for shape in shapes]
    return [
        part.reshape(matrix.size(0), *shape)
        for part, shape in zip(torch.split(matrix, lengths, dim=1), shapes, strict=True)
    ]


def _is_direct(piece: CutTensor, output: Tensor, axis: Axis) -> bool:
    """Whether the shards lie in `output` one after the other, and are worth a collective of their own."""
    leading = math.prod(output.shape[: piece.dim])
    return leading == 1 and piece.size % axis.size == 0 and output.nbytes >= LONE_BYTES


def _call(waits: Sequence[comm.Wait]) -> None:
    for wait in waits:
        wait()
