"""Experts of which each rank of an axis has a slice of the hidden values, and rows of its own.

There are two ways to the same result over the same storage, and the ranks of the axis take one of them together, by the
load that all of them see:

    tensor   rows go to all ranks, each of which computes what its slices add to them; the sums go home
    data     slices go to all ranks, each of which computes its own rows; gradients of slices go home

What few rows weigh is less than what experts do, and each rank does as much of them, whoever has most; of many rows it
is the other way round. Nothing that is stored moves (Tutel's switch of parallelism, MLSys'23).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.lowering import exchange
from autopar.runtime.lowering.exchange import RowLeg
from autopar.runtime.lowering.grouped import ExpertParameters, LocalExperts, added_biases
from autopar.runtime.mesh import Axis
from autopar.runtime.redistributing import redistribute

__all__ = ["SlicesByLoad"]


class SlicesByLoad(NamedTuple):
    """What travels along an axis, by the rows of its rank that has most of them: from so many on, rows ("tensor") or
    slices of experts ("data")."""

    ways: Sequence[tuple[int, str]]
    axis: Axis

    def at(self, most: int) -> str:
        """What is done where the busiest rank has so many rows."""
        return next(how for start, how in reversed(self.ways) if start <= most)


class SlicedExperts:
    """What all slices of experts make of the rows of this rank, chunk by chunk. Every rank of the axis must make it,
    and call it for each chunk; the host reads the counts of all ranks once."""

    def __init__(
        self, held: ExpertParameters, counts: Sequence[Sequence[int]], table: SlicesByLoad, chunks: int = 1
    ) -> None:
        """counts: of this rank, by chunk and expert; in as many chunks on all ranks. chunks: of which counts are told
        at least, so that what is told is as much whichever way rows are exchanged."""
        self._axis, self._counts = table.axis, counts
        own = torch.zeros(max(chunks, len(counts)), held.up.size(0), dtype=torch.int64, device=held.up.device)
        own[: len(counts)] = torch.tensor(counts, device=held.up.device).view(len(counts), -1)
        self._everyone = own.new_empty((table.axis.size, *own.shape))
        comm.all_gather(self._everyone, own, table.axis)
        self._read: list[list[list[int]]] = self._everyone.tolist()
        self.how = table.at(max(sum(map(sum, chunks)) for chunks in self._read))
        if self.how == "data":
            self._down_bias, self._experts = None, LocalExperts(whole(held, table.axis), counts)
        else:  # of each row added once
            of_all = [[sum(own) for own in zip(*ranks, strict=True)] for ranks in zip(*self._read, strict=True)]
            self._down_bias, self._experts = held.down_bias, LocalExperts(held._replace(down_bias=None), of_all)

    def __call__(self, rows: Tensor, chunk: int) -> Tensor:
        """What they make of consecutive rows of a chunk."""
        if self.how == "data":
            return self._experts(rows, chunk)
        return added_biases(self._summed(rows, chunk), self._down_bias, self._counts[chunk])

    def _summed(self, rows: Tensor, chunk: int) -> Tensor:
        """Rows of all ranks, one rank after the other, become those of each expert, and go back as they came."""
        ranks, received = self._axis.size, [sum(own[chunk]) for own in self._read]
        leg = RowLeg(self._axis, None, [rows.size(0)] * ranks, received)
        order = exchange.order_by(self._everyone[:, chunk], 1, sum(received))
        arrived = exchange.end(exchange.begin(rows.repeat(ranks, 1), leg))
        made = self._experts(exchange.reordered(arrived, order), chunk)
        home = exchange.end(exchange.begin(exchange.reordered(made, order, is_back=True), leg, is_back=True))
        return home.view(ranks, rows.size(0), home.size(1)).sum(0)


def whole(held: ExpertParameters, axis: Axis) -> ExpertParameters:
    """The experts with all hidden values, out of slices of them; gradients of these come home summed."""
    up, down = held.hidden_dim, 1
    bias = held.up_bias if held.up_bias is None else redistribute(held.up_bias, axis, f"S({up - 1})->R")
    return held._replace(
        up=redistribute(held.up, axis, f"S({up})->R"), down=redistribute(held.down, axis, f"S({down})->R"), up_bias=bias
    )
