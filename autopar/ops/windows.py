"""Convolutions and poolings: their windows along each spatial dim, their rules, and what a split dim exchanges.

An output row covers the input rows under its window, so that a rank may need rows that its neighbours hold: a halo.
The runtime sends each of those straight to whoever needs it (`runtime.lowering.halo`), which works for any stride,
dilation, padding and uneven slices; what is sent is computed here, from its ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from autopar.ir.placement import Axis, P, Placement, R, S, chunk_length, num_shards
from autopar.ops.call import Call
from autopar.ops.notation import AxisRule, einsum_rules
from autopar.runtime.lowering.halo import Window, overlap, ranges

_GENERAL = "aten.convolution.default"  # with any number of spatial dims, transposed or not
_CONVOLUTIONS = {_GENERAL, *(f"aten.conv{n}d.default" for n in (1, 2, 3))}
_POOLS = {f"aten.{kind}_pool{n}d.default" for kind in ("max", "avg") for n in (1, 2, 3)}


def has_windows(op: str) -> bool:
    """Whether an operator's spatial dims may be split with halos."""
    return op in _CONVOLUTIONS or op in _POOLS


@lru_cache(maxsize=1 << 12)
def windows(call: Call) -> list[Window]:
    """The window of each spatial dim, in order."""
    arguments = call.arguments
    is_pool = call.node.op in _POOLS
    count = int(call.node.op.split(".")[1][-2]) if is_pool else len(call.shape(1)) - 2
    kernel = _each(arguments["kernel_size"], count) if is_pool else call.shape(1)[2:]
    stride = _each(arguments.get("stride") or kernel, count)
    padding, dilation = _each(arguments["padding"], count), _each(arguments.get("dilation", 1), count)
    return [Window(*sizes) for sizes in zip(kernel, stride, padding, dilation, strict=True)]


def _each(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    sizes = value if isinstance(value, tuple) else (value,)
    return sizes if len(sizes) == count else sizes * count


def spatial_dims(call: Call) -> list[int]:
    """The dims of the first operand (and of the result) along which windows move."""
    rank = len(call.shape(0))
    return list(range(rank - len(windows(call)), rank))


def spatial_rules(call: Call) -> list[AxisRule]:
    """Each spatial dim split in operand and result, everything else replicated; not for what rounds sizes up."""
    arguments, others = call.arguments, len(call.node.operands) - 1
    if arguments.get("ceil_mode") or arguments.get("divisor_override") is not None:
        return []
    if "float" not in call.tensor(0).dtype:
        return []
    before, after = call.shape(0), call.result_shapes[0]
    dims = [dim for dim in spatial_dims(call) if before[dim] > 1 and after[dim] > 1]
    return [AxisRule((S(dim),) + (R,) * others, (S(dim),)) for dim in dims]


def convolution(call: Call) -> list[AxisRule]:
    """Samples, output and input channels (groups of both), and spatial dims; a split sum adds its bias once."""
    if call.arguments.get("transposed"):
        return transposed_convolution(call)
    return [*_channel_rules(call, transposed=False), *spatial_rules(call)]


def transposed_convolution(call: Call) -> list[AxisRule]:
    """As convolution, with the kernel's first two dims exchanged; spatial dims stay whole."""
    return _channel_rules(call, transposed=True)


def _channel_rules(call: Call, transposed: bool) -> list[AxisRule]:
    num_spatial, groups = len(call.shape(1)) - 2, call.arguments["groups"]
    inside, kernel, after = (" ".join(f"{letter}{i}" for i in range(num_spatial)) for letter in "XKY")
    batch = "n " if len(call.shape(0)) == num_spatial + 2 else ""
    c, o = ("c", "o") if groups == 1 else ("C", "O")
    first, second = (c, o) if transposed else (o, c)
    text = f"{batch}{c} {inside}, {first} {second if groups == 1 else 'G'} {kernel}, {o} -> {batch}{o} {after}"
    rules = einsum_rules(text, call.operand_shapes, call.result_shapes, "PRP RPP", additive=(2,))
    return [*rules, *_group_rules(call, len(batch) // 2)]


def _group_rules(call: Call, channel: int) -> list[AxisRule]:
    """Whole groups: their input channels, output channels and weights, of which dim 0 is ordered by groups."""
    if call.arguments["groups"] == 1:
        return []
    return [AxisRule((S(channel),) + (S(0),) * (len(call.node.operands) - 1), (S(channel),))]


def groups_error(call: Call, operand: Placement, axes: tuple[Axis, ...], groups: int, channel: int) -> str | None:
    """Why channels cannot be split so, or None: each slice must hold whole groups."""
    shards = num_shards(operand, channel, axes)
    if shards > 1 and groups % shards and (groups > 1 or call.node.op == "aten.group_norm.default"):
        return f"{groups} groups of channels do not split in {shards}"
    return None


def window_error(call: Call, operand: Placement, axes: tuple[Axis, ...]) -> str | None:
    """Why spatial dims cannot be split so, or None: one axis a dim, and every rank makes some of the result."""
    for dim in spatial_dims(call):
        shards = [axis.size for axis, type_ in zip(axes, operand, strict=True) if type_ == S(dim) and axis.size > 1]
        if len(shards) > 1:
            return f"spatial dim {dim} is split by {len(shards)} axes; halos are exchanged over one"
        after = call.result_shapes[0][dim]
        if shards and not chunk_length(after, shards[0], shards[0] - 1):
            return f"spatial dim {dim} of the result, {after} long, leaves one of {shards[0]} ranks without a row"
    return None


def upsample_nearest(call: Call) -> list[AxisRule]:
    """Leading dims, and spatial ones whose elements are each repeated as often as the scale says."""
    rank, num_spatial = len(call.shape(0)), len(call.shape(0)) - 2
    dims = list(range(rank - num_spatial))
    factors = call.arguments["scale_factors"]
    if call.arguments["output_size"] is None and all(factor == int(factor) for factor in factors):
        dims += [dim for dim in range(rank - num_spatial, rank) if call.shape(0)[dim] > 1]
    return [*(AxisRule((S(dim),), (S(dim),)) for dim in dims), AxisRule((P,), (P,))]


def upsample_error(call: Call, operand: Placement, axes: tuple[Axis, ...]) -> str | None:
    """Why spatial dims cannot be split so, or None: slices of the result must come from the same ranks' slices."""
    for dim in range(2, len(call.shape(0))):
        shards = num_shards(operand, dim, axes)
        if call.shape(0)[dim] % shards:
            return f"spatial dim {dim} of {list(call.shape(0))} does not split evenly in {shards}"
    return None


class Halo(NamedTuple):
    """The exchange along one dim over a mesh axis: rows that each of its ranks sends and receives."""

    axis: int
    dim: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    extended: int  # rows that the first rank has afterwards


def halos(call: Call, operand: Placement, axes: tuple[Axis, ...]) -> list[Halo]:
    """The exchanges, in order; none for dims whose windows stay on their rank."""
    found = []
    for dim, window in zip(spatial_dims(call), windows(call), strict=True):
        for position, (axis, type_) in enumerate(zip(axes, operand, strict=True)):
            if type_ == S(dim) and axis.size > 1:
                halo = _halo(window, position, dim, call.shape(0)[dim], axis.size)
                found += [halo] if halo else []
    return found


def pads_split_dim(call: Call, operand: Placement, axes: tuple[Axis, ...]) -> bool:
    """Whether a split dim has padding, which only the outer ranks add."""
    pairs = zip(spatial_dims(call), windows(call), strict=True)
    return any(window.padding and num_shards(operand, dim, axes) > 1 for dim, window in pairs)


def _halo(window: Window, axis: int, dim: int, size: int, parts: int) -> Halo | None:
    held, needed = ranges(size, window, parts)
    if held == needed:
        return None

    def moved(own: int, other: int) -> int:
        begin, end = overlap(held[own], needed[other])
        return end - begin if own != other else 0

    parties = range(parts)
    sent = tuple(sum(moved(own, other) for other in parties) for own in parties)
    received = tuple(sum(moved(other, own) for other in parties) for own in parties)
    return Halo(axis, dim, sent, received, needed[0][1] - needed[0][0])


def with_row_lengths(local: tuple[int, ...], found: list[Halo]) -> Iterator[tuple[Halo, int]]:
    """Each exchange with the elements of a row at rank 0: a later one carries the rows that earlier ones brought."""
    sizes = list(local)
    for halo in found:
        yield halo, math.prod(size for dim, size in enumerate(sizes) if dim != halo.dim)
        sizes[halo.dim] = halo.extended
