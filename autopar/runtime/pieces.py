"""Cuts, joins and moves local tensors along one axis of the mesh: plain tensors in and out, no autograd.

Every function returns a contiguous tensor, but for `cut`, which keeps the order of the dims in memory. `size` is the
length of the dim before this axis cuts it.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_offset, local_size, longest_part, part_of


class _OwnMemory(threading.local):
    """Whether summands that one rank keeps have memory of their own on that rank, too: where operators run again once
    something that lies in their results' memory is asked for, all ranks must ask for it at the same time."""

    is_wanted = False


own_memory = _OwnMemory()


def cut(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's part of a tensor that every rank of the axis holds whole.

    It lies in memory as the whole does, so that what is a view of that is a view of the part.
    """
    size = x.size(dim)
    part = x.narrow(dim, local_offset(size, axis), local_size(size, axis))
    return part if part.is_contiguous() else part.clone()


def place(x: Tensor, dim: int, axis: Axis, size: int | None = None) -> Tensor:
    """A tensor that is zero but for this rank's part: the transpose of `cut` for a sum over the ranks."""
    size = x.size(dim) * axis.size if size is None else size
    whole = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    whole.narrow(dim, local_offset(size, axis), x.size(dim)).copy_(x)
    return whole


def gather(x: Tensor, dim: int, axis: Axis, size: int | None = None) -> Tensor:
    """The whole tensor out of its shards along `dim`."""
    size = x.size(dim) * axis.size if size is None else size
    shard = pad(x, dim, longest_part(size, axis)).contiguous()
    parts = shard.new_empty((axis.size, *shard.shape))
    comm.all_gather(parts, shard, axis)
    return join(parts, dim, size, axis)


def reduce_scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's shard along `dim` of the sum of the ranks' tensors."""
    size = x.size(dim)
    parts = split(x, dim, axis)
    output = parts.new_empty(parts.shape[1:])
    comm.reduce_scatter(output, parts, axis)
    return output.narrow(dim, 0, local_size(size, axis)).contiguous()


def all_to_all(x: Tensor, source: int, target: int, axis: Axis, size: int | None = None) -> Tensor:
    """The shard along `target` out of shards along `source` (of length `size` over the axis)."""
    size = x.size(source) * axis.size if size is None else size
    target_size = x.size(target)
    parts = split(pad(x, source, longest_part(size, axis)), target, axis)
    received = torch.empty_like(parts)
    comm.all_to_all(received, parts, axis)
    del parts
    whole = join(received, source, size, axis)
    return whole.narrow(target, 0, local_size(target_size, axis)).contiguous()


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """Appends zeros along `dim` up to `length`; returns `x` itself where none are needed."""
    if x.size(dim) == length:
        return x
    padded = x.new_zeros((*x.shape[:dim], length, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, x.size(dim)).copy_(x)
    return padded


def split(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Reshapes (…, count × c, …) into (count, …, c, …), padding first; copies unless `dim` is the first."""
    count, chunk = axis.size, longest_part(x.size(dim), axis)
    if axis.shares:
        bounds = [part_of(x.size(dim), axis, index) for index in range(count)]
        return torch.stack([pad(x.narrow(dim, start, end - start), dim, chunk) for start, end in bounds])
    padded = pad(x, dim, chunk * count)
    return padded.reshape((*x.shape[:dim], count, chunk, *x.shape[dim + 1 :])).movedim(dim, 0).contiguous()


def join(parts: Tensor, dim: int, size: int, axis: Axis) -> Tensor:
    """Reshapes (count, …, c, …) into (…, count × c, …) and drops padding, up to `size` in all: undoes `split`."""
    if axis.shares:
        bounds = [part_of(size, axis, index) for index in range(axis.size)]
        pairs = zip(parts.unbind(0), bounds, strict=True)
        return torch.cat([part.narrow(dim, 0, end - start) for part, (start, end) in pairs], dim)
    count, chunk = parts.size(0), parts.size(dim + 1)
    shape = (*parts.shape[1 : dim + 1], count * chunk, *parts.shape[dim + 2 :])
    return parts.movedim(0, dim).reshape(shape).narrow(dim, 0, size).contiguous()


def join_into(output: Tensor, parts: Tensor, dim: int, axis: Axis) -> None:
    """As `join`, into memory that is there."""
    for index, part in enumerate(parts.unbind(0)):
        start, end = part_of(output.size(dim), axis, index)
        output.narrow(dim, start, end - start).copy_(part.narrow(dim, 0, end - start))


def keep_on_first(x: Tensor, axis: Axis) -> Tensor:
    """The tensor on the first rank of the axis and zeros elsewhere: equal values become summands."""
    if axis.index:
        return torch.zeros_like(x)
    return x.clone() if own_memory.is_wanted else x


def sum_over(x: Tensor, axis: Axis, *, wait: bool = True) -> Tensor:
    """The sum of the ranks' tensors, on every rank; if not `wait`, not to be read before the end of the step."""
    total = x.clone(memory_format=torch.contiguous_format)
    if wait:
        comm.all_reduce(total, axis)
        return total
    comm.add_late(comm.start_all_reduce(total, axis), axis)
    return total.detach()  # what is under way would keep the whole graph of the microbatch that leads to it
