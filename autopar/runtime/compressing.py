"""Sums of gradients over an axis in fewer bits, with error feedback.

Each rank adds to its gradient what earlier steps left out, sends that in fewer bits, and keeps what these leave out:

    int8          blocks of 256 values in 8 bits, with a scale each: parts go to the rank that sums them, and sums,
                  again in 8 bits, to all. Who sums keeps what its part leaves out, too.
    topk(0.01)    the largest values by magnitude, one in a hundred, and where they are; where all ranks' together would
                  be no fewer than all values, the sum is exact (SparCML's switch from sparse to dense)
    powersgd(4)   a matrix M as P·Qᵀ of rank 4: one step of subspace iteration that begins with the last Q; what is no
                  matrix, or no smaller so, is summed as it is

Over steps, what is applied and what is kept on all ranks add up to the exact sums: nothing is lost, some of it comes
later. All ranks apply the same values, to the bit. Sources: Seide et al. 2014 (error feedback in few bits), Renggli et
al. 2019, arXiv:1802.08021 (SparCML), Vogels et al. 2019, arXiv:1905.13727 (PowerSGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import coalesce, comm
from autopar.runtime.mesh import Axis
from autopar.runtime.packing import BLOCK, BUCKET_BYTES, compressed_matrix, num_kept, padded_length

_LEVELS = 127.0


class CompressedSum:
    """Of the same tensors in each step, by their places. kind: "int8", "topk" or "powersgd"; amount: the share of the
    values, or the rank. through: what has the collectives, those between ranks as a rule."""

    def __init__(self, kind: str, amount: float, through: Any = comm) -> None:
        self._kind, self._amount, self._comm = kind, amount, through
        self._left: dict[object, Tensor] = {}  # what was left out so far
        self._bases: dict[object, Tensor] = {}  # of powersgd: the last Q

    def sum_(self, tensors: Sequence[Tensor], axis: Axis, key: object = None) -> None:
        """Each tensor becomes the sum over the axis, in place. key: of these tensors in all steps."""
        for number, group in enumerate(_groups(tensors, self._kind)):
            self._sum_group(group, axis, (key, number))

    def _sum_group(self, group: list[Tensor], axis: Axis, key: object) -> None:
        if self._kind == "powersgd" and (cut := compressed_matrix(tuple(group[0].shape), int(self._amount))):
            self._sum_matrix(group[0], cut, axis, key)
            return
        flat, views = coalesce.pack(group)
        assert flat is not None, "a group has a tensor"
        if self._kind == "int8":
            self._sum_in_bytes(flat, axis, key)
        elif self._kind == "topk" and 2 * axis.size * num_kept(flat.numel(), self._amount) < flat.numel():
            self._sum_largest(flat, axis, key)
        else:
            self._comm.all_reduce(flat, axis)
        for tensor, view in zip(group, views, strict=True):
            tensor.copy_(view)

    def _with_left(self, value: Tensor, key: object) -> Tensor:
        """The value, in float32, with what was left out of it."""
        left = self._left.get(key)
        return value.float() if left is None else left.add_(value)

    def _sum_in_bytes(self, flat: Tensor, axis: Axis, key: object) -> None:
        length = padded_length(flat.numel(), axis.size)
        whole = torch.zeros(length, device=flat.device)
        whole[: flat.numel()] = flat
        whole = self._with_left(whole, (key, "own"))
        coded, left = _coded(whole.view(axis.size, -1))
        self._left[key, "own"] = left.view(-1)
        received = torch.empty_like(coded)
        self._comm.all_to_all(received, coded, axis)
        own = self._with_left(_decoded(received).sum(0), (key, "sum"))
        coded, left = _coded(own.view(1, -1))
        self._left[key, "sum"] = left.view(-1)
        every = coded.new_empty((axis.size, coded.size(1)))
        self._comm.all_gather(every, coded, axis)
        flat.copy_(_decoded(every).view(-1)[: flat.numel()])

    def _sum_largest(self, flat: Tensor, axis: Axis, key: object) -> None:
        whole = self._with_left(flat, key)
        places = whole.abs().topk(num_kept(flat.numel(), self._amount), sorted=False).indices
        values = whole[places]
        left = whole.clone() if whole is flat else whole
        left[places] = 0
        self._left[key] = left
        sent = torch.stack([places.to(torch.int32), values.view(torch.int32)])
        every = sent.new_empty((axis.size, *sent.shape))
        self._comm.all_gather(every, sent, axis)
        total = torch.zeros_like(left)
        for there, found in every:  # in the order of ranks, on all of them
            total.index_add_(0, there.long(), found.contiguous().view(torch.float32))
        flat.copy_(total)

    def _sum_matrix(self, tensor: Tensor, rank: int, axis: Axis, key: object) -> None:
        matrix = self._with_left(tensor.reshape(tensor.size(0), -1), key)
        basis = self._bases.get(key)
        if basis is None:
            drawn = torch.Generator().manual_seed(0)
            basis = torch.randn(matrix.size(1), rank, generator=drawn).to(matrix.device)
        left = matrix @ basis
        self._comm.all_reduce(left, axis)
        left = torch.linalg.qr(left).Q.contiguous()
        right = matrix.mT @ left
        own = left @ right.mT
        self._comm.all_reduce(right, axis)
        self._left[key] = matrix - own
        self._bases[key] = right
        tensor.copy_((left @ right.mT).view(tensor.shape))


def _groups(tensors: Sequence[Tensor], kind: str) -> list[list[Tensor]]:
    """What is summed together, in order: of one dtype, as much as is worth one buffer; matrices of powersgd alone."""
    groups: list[list[Tensor]] = []
    for tensor in tensors:
        size = sum(one.nbytes for one in groups[-1]) if groups else 0
        alone = kind == "powersgd"
        if alone or not groups or size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != groups[-1][0].dtype:
            groups.append([])
        groups[-1].append(tensor)
    return groups


def _coded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of blocks in bytes, those of a row's scales after its values; and what they leave out."""
    blocks = rows.view(rows.size(0), -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True).div_(_LEVELS)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)  # what has no inverse is left out
    steps = torch.where(scales > 0, 1 / scales, 0.0)
    values = (blocks * steps).round_().clamp_(-_LEVELS, _LEVELS)
    left = blocks - values * scales
    told = [values.to(torch.int8).flatten(1), scales.flatten(1).contiguous().view(torch.int8)]
    return torch.cat(told, 1), left


def _decoded(rows: Tensor) -> Tensor:
    """The values of coded rows, in float32."""
    count = rows.size(1) * BLOCK // (BLOCK + 4)
    scales = rows[:, count:].contiguous().view(torch.float32)
    return (rows[:, :count].reshape(rows.size(0), -1, BLOCK) * scales.unsqueeze(-1)).flatten(1)
