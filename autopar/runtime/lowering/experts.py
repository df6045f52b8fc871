"""Routed experts on one rank: tokens through its experts, which may be a slice of all.

Where ranks share the experts, each rank either has the tokens of all of them, and computes what its own experts make of
these; or it has its own tokens, and exchanges them: every choice of a token goes where its expert is, and what that
makes of it comes home. Tokens may be cut into chunks, of which one is under way while another is computed; into how
many, and along which axes they travel, may depend on the load that all ranks see. Each rank of a further axis may have
its own tokens and a slice of each expert (`sliced`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime.lowering import exchange
from autopar.runtime.lowering.exchange import LoadTable, RowWay, SeenLoad
from autopar.runtime.lowering.grouped import ExpertParameters, LocalExperts
from autopar.runtime.lowering.replicas import HotExperts
from autopar.runtime.lowering.sliced import SlicedExperts, SlicesByLoad
from autopar.runtime.mesh import Axis

__all__ = ["LoadTable", "SlicesByLoad", "routed_experts"]

_Experts = Callable[[Tensor, int], Tensor]
"""What experts make of consecutive rows of the chunk of that number."""


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    gated: bool,
    num_experts: int,
    axes: Sequence[Axis] = (),
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    paired: bool = False,
    exchanged: Sequence[Axis] = (),
    chunks: int = 1,
    by_load: LoadTable | None = None,
    slices: SlicesByLoad | None = None,
    replicas: int = 0,
) -> Tensor:
    """Sums, over the experts that are chosen for each token, of their weighted results.

    x (tokens, width), ids and weights (tokens, choices), up (experts, width, hidden), down (experts, hidden, width),
    biases (experts, hidden) and (experts, width); hidden may be two dims, of which one is both parts of a gate.
    `axes` split the experts. Over those of them that are `exchanged`, tokens are split, too, and every rank must call
    it, even one without tokens; over the others, the result is P, and only choices of this rank's experts are computed.
    A number from `num_experts` up is no expert, and adds nothing; one below 0 ends in an error. by_load: how they are
    exchanged, instead of along each axis in `chunks` chunks. slices: of which axis each rank has other tokens, and
    slices of the hidden values; every rank of that must call it, too. replicas: the number of experts, those with most
    rows of all ranks, that each rank computes for its own tokens; then tokens are exchanged over all axes.
    """
    torch._assert_async((ids >= 0).all(), "expected experts by numbers from 0 up, found one below 0")
    held = ExpertParameters(up, down, up_bias, down_bias, activation, gated, paired)
    hot = HotExperts(ids, num_experts, replicas, axes) if replicas else None
    beside = None if slices is None else slices.axis
    order, ways = _exchanges(ids if hot is None else hot.others, num_experts, axes, exchanged, chunks, by_load, beside)
    counts = [way.counts[: up.size(0)] for way in ways]
    experts: _Experts = LocalExperts(held, counts)
    if slices is not None:
        experts = SlicedExperts(held, counts, slices, 1 if by_load is None else by_load.chunks)
    kept = [sum(way.legs[0].sent if way.legs else way.counts) for way in ways]
    order = order[: sum(kept)]
    sent: Tensor = _ChosenRows.apply(x, order, ids.size(1))  # type: ignore[no-untyped-call]
    made = _computed(list(torch.split(sent, kept)), ways, experts)
    if hot is not None:
        own: Tensor = _ChosenRows.apply(x, hot.order, ids.size(1))  # type: ignore[no-untyped-call]
        made, order = [*made, LocalExperts(hot.of(held), [hot.counts])(own, 0)], torch.cat([order, hot.order])
    rows = torch.cat(made)
    rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
    spread = rows.new_zeros((ids.numel(), rows.size(1))).index_copy(0, order, rows)
    return spread.view(*ids.shape, rows.size(1)).sum(1)


def _computed(rows: list[Tensor], ways: list[RowWay], experts: _Experts) -> list[Tensor]:
    """What the experts make of the rows of each chunk, wherever they are."""
    levels = len(ways[0].legs)
    if not levels:
        return [experts(part, chunk) for chunk, part in enumerate(rows)]
    for level in range(levels - 1):
        begun = [exchange.begin(part, way.legs[level]) for part, way in zip(rows, ways, strict=True)]
        rows = [exchange.end(one) for one in begun]
    begun = [exchange.begin(part, way.legs[-1]) for part, way in zip(rows, ways, strict=True)]
    for chunk, way in enumerate(ways):
        arrived = exchange.reordered(exchange.end(begun[chunk]), way.order)
        made = experts(arrived, chunk)
        begun[chunk] = exchange.begin(exchange.reordered(made, way.order, is_back=True), way.legs[-1], is_back=True)
    rows = [exchange.end(one) for one in begun]
    for level in reversed(range(levels - 1)):
        begun = [exchange.begin(part, way.legs[level], is_back=True) for part, way in zip(rows, ways, strict=True)]
        rows = [exchange.end(one) for one in begun]
    return rows


# Which row goes where ----------------------------------------


class _ChosenRows(torch.autograd.Function):
    """The rows of tokens (tokens, width) for the choices in an order, of which each token has so many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = x.size(0), choices
        return x.index_select(0, order.div(choices, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, choices = ctx.shape
        spread = grad.new_zeros((tokens * choices, grad.size(1))).index_copy_(0, order, grad)
        return spread.view(tokens, choices, grad.size(1)).sum(1), None, None


def _exchanges(
    ids: Tensor, num_experts: int, axes: Sequence[Axis], exchanged: Sequence[Axis], chunks: int,
    by_load: LoadTable | None, beside: Axis | None,
) -> tuple[Tensor, list[RowWay]]:  # fmt: skip
    """The choices in the order in which they travel, and the way of each chunk of them."""
    if by_load is None:
        legs = list(reversed(exchanged))  # those inside of a node first
        going = _Destinations(ids, num_experts, axes, legs, chunks)
        return going.order, exchange.ways(going.counts, legs)
    seen = SeenLoad(_Destinations(ids, num_experts, axes, exchanged, by_load.chunks).counts, exchanged, by_load, beside)
    along = list(reversed(exchanged)) if seen.how == "two-level" else exchanged  # flat: ranks in their order
    return _Destinations(ids, num_experts, axes, along, seen.chunks).order, seen.ways()


class _Destinations:
    """Where each choice goes: by chunk, rank along some axes one after the other, and expert; those of other ranks
    last."""

    def __init__(self, ids: Tensor, num_experts: int, axes: Sequence[Axis], along: Sequence[Axis], chunks: int) -> None:
        names = [axis.name for axis in along]
        legs = [names.index(axis.name) if axis.name in names else -1 for axis in axes]
        splits = tuple(_ExpertAxis(axis.size, axis.index, leg) for axis, leg in zip(axes, legs, strict=True))
        table, tokens = _slots(num_experts, splits, ids.device), ids.size(0)
        self._sizes = [chunks, *(axis.size for axis in along), _most(num_experts, splits)]
        last = math.prod(self._sizes[1:])
        slots = table[ids.clamp(max=num_experts)]
        chunk = (torch.arange(tokens, device=ids.device) * chunks).div(max(1, tokens), rounding_mode="floor")
        self._keys = torch.where(slots < last, slots + chunk.unsqueeze(1) * last, chunks * last).reshape(-1)

    @property
    def order(self) -> Tensor:
        """The choices in this order."""
        return self._keys.argsort(stable=True)

    @property
    def counts(self) -> Tensor:
        """How many there are of each: (chunks, ranks along each axis, experts)."""
        counts = self._keys.new_zeros(math.prod(self._sizes) + 1)
        return counts.scatter_add_(0, self._keys, torch.ones_like(self._keys))[:-1].view(self._sizes)


class _ExpertAxis(NamedTuple):
    """An axis that splits the experts: its size, this rank on it, and which leg of rows goes along it, or none (-1)."""

    size: int
    own: int
    leg: int


def _most(num_experts: int, splits: Sequence[_ExpertAxis]) -> int:
    """The experts of the rank that has most of them."""
    for split in splits:
        num_experts = -(-num_experts // split.size)
    return num_experts


@cache
def _slots(num_experts: int, splits: tuple[_ExpertAxis, ...], device: torch.device) -> Tensor:
    """For each expert its number among those that choices may go to from here: by rank, then by place on the rank. The
    others, of ranks that have the same tokens, have the number after the last, and so has the table's own last, for
    numbers that are no expert's."""
    most, ways = _most(num_experts, splits), math.prod(split.size for split in splits if split.leg >= 0)
    table = [ways * most] * (num_experts + 1)
    for coordinate in itertools.product(*(range(split.size) for split in splits)):
        pairs = list(zip(splits, coordinate, strict=True))
        if all(split.leg >= 0 or index == split.own for split, index in pairs):
            rank = 0
            for split, index in sorted(pairs, key=lambda pair: pair[0].leg):
                rank = rank * split.size + index if split.leg >= 0 else rank
            begin, end = _experts_at(num_experts, pairs)
            table[begin:end] = range(rank * most, rank * most + end - begin)
    return torch.tensor(table, device=device)


def _experts_at(num_experts: int, pairs: Sequence[tuple[_ExpertAxis, int]]) -> tuple[int, int]:
    """Which experts a rank has, by its index on each axis that splits them, the outer one first."""
    begin, end = 0, num_experts
    for split, index in pairs:
        chunk = -(-(end - begin) // split.size)
        begin, end = min(begin + index * chunk, end), min(begin + (index + 1) * chunk, end)
    return begin, end
