"""Convolutions, poolings and interpolation: windows along spatial dims, rules, and what a split dim exchanges.

An output row covers the input rows under its window, so that a rank may need rows that its neighbours hold: a halo.
The runtime sends each of those straight to whoever needs it (`runtime.lowering.halo`), which works for any stride,
dilation, padding and uneven slices; what is sent is computed here, from its ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Axis, P, Placement, R, S, chunk_length, local_shape, num_shards
from autopar.ops import saved, work, workspace
from autopar.ops.call import Call, argument
from autopar.ops.in_bits import pool_in_bits
from autopar.ops.inner import Inner, Sent
from autopar.ops.local import LocalCall, items
from autopar.ops.notation import AxisRule, einsum_rules
from autopar.ops.operator import Groups, Operator
from autopar.ops.patterns import linear_leading_dims, passes_leading_dims
from autopar.ops.workspace import RuntimeMemory, Sizes
from autopar.runtime.lowering.halo import Window, overlap, ranges

_GENERAL = "aten.convolution.default"  # with any number of spatial dims, transposed or not
_CONVOLUTIONS = {_GENERAL, *(f"aten.conv{n}d.default" for n in (1, 2, 3))}
_INDEXED_POOL = "aten.max_pool2d_with_indices.default"
_POOLS = {f"aten.{kind}_pool{n}d.default" for kind in ("max", "avg") for n in (1, 2, 3)}


def has_windows(op: str) -> bool:
    """Whether an operator's spatial dims may be split with halos."""
    return op in _CONVOLUTIONS or op in _POOLS


@lru_cache(maxsize=1 << 12)
def windows(call: Call) -> list[Window]:
    """The window of each spatial dim, in order."""
    arguments = call.arguments
    is_pool = call.node.op in _POOLS or call.node.op == _INDEXED_POOL
    name = call.node.op.split(".")[1].removesuffix("_with_indices")
    count = int(name[-2]) if is_pool else len(call.shape(1)) - 2
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


def _channel(call: Call) -> int:
    return len(call.shape(0)) - len(call.shape(1)) + 1


def _groups_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Each slice of the channels must hold whole groups."""
    groups, shards = call.arguments["groups"], num_shards(operands[0], _channel(call), axes)
    return f"{groups} groups of channels do not split in {shards}" if groups > 1 and groups % shards else None


def _windows_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """One axis splits a spatial dim, and every rank makes some of the result."""
    for dim in spatial_dims(call):
        shards = [axis.size for axis, type_ in zip(axes, operands[0], strict=True) if type_ == S(dim) and axis.size > 1]
        if len(shards) > 1:
            return f"spatial dim {dim} is split by {len(shards)} axes; halos are exchanged over one"
        after = call.result_shapes[0][dim]
        if shards and not chunk_length(after, shards[0], shards[0] - 1):
            return f"spatial dim {dim} of the result, {after} long, leaves one of {shards[0]} ranks without a row"
    return None


def max_pool(call: Call) -> list[AxisRule]:
    """All dims before the image's; rows and columns exchange their borders."""
    return [*passes_leading_dims(len(windows(call)))(call), *spatial_rules(call)]


def avg_pool(call: Call) -> list[AxisRule]:
    """All dims before the image's, and linear; rows and columns exchange their borders."""
    return [*linear_leading_dims(len(windows(call)))(call), *spatial_rules(call)]


def adaptive_avg_pool(call: Call) -> list[AxisRule]:
    """A mean over all of the image is a local sum, as any mean; smaller windows need their dims whole."""
    size = call.arguments["output_size"]
    leading = len(call.shape(0)) - len(size)
    whole = [dim for dim in range(leading, len(call.shape(0))) if set(size) == {1} and call.shape(0)[dim] > 1]
    return [*linear_leading_dims(len(size))(call), *(AxisRule((S(dim),), (P,)) for dim in whole)]


def upsample_nearest(call: Call) -> list[AxisRule]:
    """Leading dims, and spatial ones whose elements are each repeated as often as the scale says."""
    rank, num_spatial = len(call.shape(0)), len(call.shape(0)) - 2
    dims = list(range(rank - num_spatial))
    factors = call.arguments["scale_factors"]
    if call.arguments["output_size"] is None and all(factor == int(factor) for factor in factors):
        dims += [dim for dim in range(rank - num_spatial, rank) if call.shape(0)[dim] > 1]
    return [*(AxisRule((S(dim),), (S(dim),)) for dim in dims), AxisRule((P,), (P,))]


def _upsample_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Slices of the result must come from the same ranks' slices."""
    for dim in range(2, len(call.shape(0))):
        shards = num_shards(operands[0], dim, axes)
        if call.shape(0)[dim] % shards:
            return f"spatial dim {dim} of {list(call.shape(0))} does not split evenly in {shards}"
    return None


# Halos ----------------------------------------


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


def _pads_split_dim(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> bool:
    """Whether a split dim has padding, which only the outer ranks add."""
    pairs = zip(spatial_dims(call), windows(call), strict=True)
    return any(window.padding and num_shards(operands[0], dim, axes) > 1 for dim, window in pairs)


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


def _with_row_lengths(local: tuple[int, ...], found: list[Halo]) -> Iterator[tuple[Halo, int]]:
    """Each exchange with the elements of a row at rank 0: a later one carries the rows that earlier ones brought."""
    sizes = list(local)
    for halo in found:
        yield halo, math.prod(size for dim, size in enumerate(sizes) if dim != halo.dim)
        sizes[halo.dim] = halo.extended


def _exchange(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Forward each rank sends the rows that others need, backward the gradients of those that it got."""
    local, itemsize = local_shape(call.shape(0), operands[0], axes), call.tensor(0).itemsize
    forward: list[Inner] = []
    backward: list[Inner] = []
    for halo, row in _with_row_lengths(local, halos(call, operands[0], axes)):
        sent, received = ([count * row * itemsize for count in counts] for counts in (halo.sent, halo.received))
        forward.append(Inner("all_to_all", halo.axis, sent[0], max(sent)))
        backward.insert(0, Inner("all_to_all", halo.axis, received[0], max(received)))
    return forward, backward


# On one rank ----------------------------------------


def _splits(local: LocalCall) -> str | None:
    """The split spatial dims with their axes and whole lengths; None where the operator itself runs on the shards."""
    call, placement = local.call, local.placements[0]
    if not halos(call, placement, local.axes) and not _pads_split_dim(call, local.placements, local.axes):
        return None
    found = []
    for dim in spatial_dims(call):
        found += [f"({dim}, {name}, {call.shape(0)[dim]})" for name in local.axes_where(0, S(dim).__eq__)]
    return items(found)


def _sizes(call: Call, *fields: str) -> str:
    return ", ".join(str([getattr(window, field) for window in windows(call)]) for field in fields)


def _convolution_local(local: LocalCall) -> str | None:
    splits = None if local.call.arguments.get("transposed") else _splits(local)
    if splits is None:
        return None
    tensors = f"{local.names[0]}, {local.names[1]}, {local.variable('bias')}"
    sizes, groups = _sizes(local.call, "stride", "padding", "dilation"), local.on_rank().arguments["groups"]
    return f"rt.convolution({tensors}, {sizes}, {groups}, {splits})"


def _max_pool_local(local: LocalCall) -> str | None:
    splits, sizes = _splits(local), _sizes(local.call, "kernel", "stride", "padding", "dilation")
    return None if splits is None else f"rt.max_pool({local.names[0]}, {sizes}, {splits})"


def _max_pool_in_bits(local: LocalCall) -> str:
    sizes, splits = _sizes(local.call, "kernel", "stride", "padding", "dilation"), _splits(local)
    rounded = ", ceil_mode=True" if local.call.arguments["ceil_mode"] else ""
    return f"rt.max_pool_in_bits({local.names[0]}, {sizes}{rounded}{f', splits={splits}' if splits else ''})"


def _indexed_pool_in_bits(local: LocalCall) -> str:
    """Beside the result nobody reads indices."""
    rounded = ", ceil_mode=True" if local.call.arguments["ceil_mode"] else ""
    sizes = _sizes(local.call, "kernel", "stride", "padding", "dilation")
    return f"(rt.max_pool_in_bits({local.names[0]}, {sizes}{rounded}), None)"


def _avg_pool_local(local: LocalCall) -> str | None:
    splits, sizes = _splits(local), _sizes(local.call, "kernel", "stride", "padding")
    counts = bool(local.call.arguments["count_include_pad"])
    return None if splits is None else f"rt.avg_pool({local.names[0]}, {sizes}, {counts}, {splits})"


def _adaptive_avg_pool_local(local: LocalCall) -> str | None:
    shape, num_spatial = local.call.shape(0), len(local.call.arguments["output_size"])
    dims = list(range(len(shape) - num_spatial, len(shape)))
    if not any(type_.kind == "S" and type_.dim in dims for type_ in local.placements[0]):
        return None
    return f"rt.mean({local.names[0]}, {dims}, True, {math.prod(shape[-num_spatial:])})"


# Memory ----------------------------------------


def _with_borders(node: Node, sizes: Sizes, operand: Placement) -> tuple[int, ...] | None:
    """The rank's part of the first operand with the rows of others and of padding that its windows cover, which the
    runtime copies; None where the operator runs on the part as it is."""
    is_convolution = node.op in _CONVOLUTIONS
    local, after = sizes.operands[0], sizes.results[0]
    first = len(local) - (len(sizes.operands[1]) - 2 if is_convolution else int(node.op.split(".")[1][-2]))
    count = len(local) - first
    kernel = sizes.operands[1][2:] if is_convolution else _each(argument(node, 1, "kernel_size", 1), count)
    own_stride = argument(node, 3 if is_convolution else 2, "stride", 1 if is_convolution else ())
    stride = _each(own_stride or kernel, count)
    has_dilation = is_convolution or "max_pool" in node.op
    dilation = _each(argument(node, 5 if is_convolution else 4, "dilation", 1) if has_dilation else 1, count)
    split = {type_.dim for type_, axis in zip(operand, sizes.axis_sizes, strict=True) if type_.kind == "S" and axis > 1}
    extended = list(local)
    for place, dim in enumerate(range(first, len(local))):
        if dim in split:
            extended[dim] = (after[dim] - 1) * stride[place] + dilation[place] * (kernel[place] - 1) + 1
    return tuple(extended) if tuple(extended) != local else None


def _borders_memory(own: workspace.WorkspaceRule | None, index_bytes: int = 0) -> workspace.LoweredRule:
    """Of an operator by windows: autograd keeps the copy with borders, not the rank's part; and what the operator keeps
    of its result. Backward, the copy's gradient and the part's that is cut out of it."""

    def memory(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
        extended = _with_borders(node, sizes, operands[0])
        if extended is None:
            return None
        copy = math.prod(extended) * sizes.itemsize
        wide = sizes._replace(operands=(extended, *sizes.operands[1:]))
        forward, backward = own(wide) if own is not None else (0, 0)
        saved_bytes = copy + index_bytes * math.prod(sizes.results[0])
        keeps = (1,) if len(sizes.operands) > 1 else ()
        return RuntimeMemory(saved_bytes, (max(forward, copy), backward + 2 * copy), keeps)

    return memory


def _adapted(node: Node, graph: Graph) -> list[saved.Saved]:
    """Of adaptive average pooling: the input, for its shape; nothing of a mean over all, which torch takes instead."""
    windows = argument(node, 1, "output_size", ())
    return [] if set(windows if isinstance(windows, tuple) else (windows,)) == {1} else saved.operand(node, graph)


_OF_IMAGES = Operator(needs_elements=True, cuts_samples_alone=True)
_PRODUCT = _OF_IMAGES.by(saved=saved.windows, limits=(_groups_error,), groups=Groups("groups", _channel))
_CONVOLUTION = _PRODUCT.by(
    convolution, work=work.CONVOLUTION, workspace=workspace.convolution, inside=_exchange, local=_convolution_local,
    limits=(_groups_error, _windows_error), mixes_samples=_pads_split_dim,
    lowered=_borders_memory(workspace.convolution),
)  # fmt: skip
_TRANSPOSED = _PRODUCT.by(
    transposed_convolution, work=work.TRANSPOSED_CONVOLUTION, workspace=workspace.transposed_convolution
)
_MAX = _OF_IMAGES.by(work=work.MAX_POOL, saved=saved.pooled)
_MAX_POOL = _MAX.by(
    max_pool, inside=_exchange, local=_max_pool_local, limits=(_windows_error,), mixes_samples=_pads_split_dim,
    lowered=_borders_memory(None, workspace.INDEX_BYTES),
)  # fmt: skip
_MEAN = _OF_IMAGES.by(work=work.AVG_POOL, saved=saved.operand)
_AVG_POOL = _MEAN.by(
    avg_pool, inside=_exchange, local=_avg_pool_local, limits=(_windows_error,), mixes_samples=_pads_split_dim,
    lowered=_borders_memory(None),
)  # fmt: skip
_ADAPTIVE_AVG_POOL = _MEAN.by(
    adaptive_avg_pool, work=work.ADAPTIVE_AVG_POOL, local=_adaptive_avg_pool_local, saved=_adapted
)
_OTHER_POOLS = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d fractional_max_pool2d fractional_max_pool3d max_pool1d_with_indices
    max_pool3d_with_indices max_pool2d_with_indices_backward max_unpool2d max_unpool3d _upsample_bilinear2d_aa
"""

IMAGES: dict[str, Operator] = {
    "aten.conv1d.default": _CONVOLUTION,
    "aten.conv2d.default": _CONVOLUTION,
    "aten.conv3d.default": _CONVOLUTION,
    "aten.convolution.default": _CONVOLUTION,
    "_convolution": Operator(work=work.CONVOLUTION),
    "aten.conv_transpose1d.default": _TRANSPOSED,
    "aten.conv_transpose2d.input": _TRANSPOSED,
    "aten.conv_transpose3d.input": _TRANSPOSED,
    **{f"aten.max_pool{n}d.default": _MAX_POOL for n in (1, 3)},
    "aten.max_pool2d.default": replace(_MAX_POOL, in_bits=pool_in_bits(_max_pool_in_bits)),
    **{f"aten.avg_pool{n}d.default": _AVG_POOL for n in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": _MAX.by(passes_leading_dims(n), work=work.ADAPTIVE_MAX_POOL)
       for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": _ADAPTIVE_AVG_POOL for n in (1, 2, 3)},
    _INDEXED_POOL: _MAX.by(in_bits=pool_in_bits(_indexed_pool_in_bits)),
    "max_pool2d_with_indices": _MAX,
    **dict.fromkeys(_OTHER_POOLS.split(), _OF_IMAGES),
    **{f"aten.upsample_nearest{n}d.vec": _OF_IMAGES.by(upsample_nearest, limits=(_upsample_error,))
       for n in (1, 2, 3)},
    "aten.upsample_linear1d.vec": _OF_IMAGES.by(linear_leading_dims(1)),
    "aten.upsample_bilinear2d.vec": _OF_IMAGES.by(linear_leading_dims(2)),
    "aten.upsample_bicubic2d.vec": _OF_IMAGES.by(linear_leading_dims(2)),
    "aten.upsample_trilinear3d.vec": _OF_IMAGES.by(linear_leading_dims(3)),
}  # fmt: skip
