"""Means and normalisations: statistics over dims that ranks share are reduced inside.

layer norm, RMS norm      of the last dims, which are whole
batch norm, group norm    of samples and spatial dims, of spatial dims and groups of channels: these may be split
weight norm               of all dims of a weight but one: these may be split
"""

from __future__ import annotations

import math

from autopar.ir.graph import Graph, Node, references
from autopar.ir.placement import Axis, P, Placement, R, S, local_shape, num_shards
from autopar.ops import saved, work, workspace
from autopar.ops.call import Call, argument
from autopar.ops.inner import Inner, Sent, split_by, sums_of_statistics
from autopar.ops.local import LocalCall, items
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Groups, Operator
from autopar.ops.patterns import Entry
from autopar.ops.saved import Extra, Saved
from autopar.ops.workspace import RuntimeMemory, Sizes


def mean_over_ranks(local: LocalCall) -> str | None:
    """A mean of a dim that is split: a local sum over the global length."""
    call, rank = local.call, len(local.call.shape(0))
    dims = call.arguments.get("dim") or tuple(range(rank))
    dims = tuple(dim % rank for dim in dims if rank)
    if not any(type_.kind == "S" and type_.dim in dims for type_ in local.placements[0]):
        return None
    count = math.prod(call.shape(0)[dim] for dim in dims)
    return f"rt.mean({local.names[0]}, {list(dims)}, {bool(call.arguments.get('keepdim', False))}, {count})"


def layer_norm(call: Call) -> list[AxisRule]:
    """All dims but those that are normalized."""
    width = len(call.arguments["normalized_shape"])
    own = " ".join(f"H{i}" for i in range(width))
    operands = ", ".join([f"... {own}"] + [own] * (len(call.node.operands) - 1))
    return Entry(f"{operands} -> ... {own}")(call)


# Batch norm ----------------------------------------


def batch_norm(call: Call) -> list[AxisRule]:
    """Channels split with their statistics; split samples and spatial dims reduce the statistics inside."""
    names = ["weight", "bias", "running_mean", "running_var"]
    others = [position for name in names for position in call.positions.get(name, ())]
    outputs, shape = call.result_positions(), call.shape(0)
    rules = []
    for dim in [dim for dim, size in enumerate(shape) if size > 1]:
        channel = S(0) if dim == 1 else R
        rules.append(AxisRule((S(dim),) + (channel,) * len(others), tuple(channel if p else S(dim) for p in outputs)))
    return rules


def _uses_batch(call: Call) -> bool:
    """In evaluation there are no statistics of the batch."""
    return bool(call.arguments.get("training", True))


def _batch_norm_inside(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Means and variances of the channels."""
    if not _uses_batch(call):
        return [], []
    channels = local_shape(call.shape(0), operands[0], axes)[1]
    return sums_of_statistics(call, channels, split_by(operands[0], lambda type_: type_ != S(1)))


def _batch_norm_local(local: LocalCall) -> str | None:
    """In training, statistics are those of all samples and of whole images."""
    call, axes = local.call, local.axes_where(0, lambda type_: type_.kind == "S" and type_ != S(1))
    if not axes or not _uses_batch(call):
        return None
    tensors = ", ".join(map(local.variable, ("input", "weight", "bias", "running_mean", "running_var")))
    count = math.prod(call.shape(0)) // call.shape(0)[1]
    results = "" if "functional" in call.node.op else "[:3]"  # there are no running statistics
    tail = f"{call.arguments['momentum']!r}, {call.arguments['eps']!r}, {items(axes)}, {count}"
    return f"rt.batch_norm({tensors}, {tail}){results}"


# Group norm ----------------------------------------


def group_norm(call: Call) -> list[AxisRule]:
    """Samples; channels by whole groups, with their weights; spatial dims reduce the statistics inside."""
    others, shape = len(call.node.operands) - 1, call.shape(0)
    rules = []
    for dim in [dim for dim, size in enumerate(shape) if size > 1]:
        rules.append(AxisRule((S(dim),) + (S(0) if dim == 1 else R,) * others, (S(dim),)))
    return rules


def _group_norm_inside(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Means and variances of the samples' groups."""
    local = local_shape(call.shape(0), operands[0], axes)
    groups = call.arguments["num_groups"] * local[1] // call.shape(0)[1]
    return sums_of_statistics(call, local[0] * groups, split_by(operands[0], lambda type_: type_.dim > 1))


def _groups_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    groups, shards = call.arguments["num_groups"], num_shards(operands[0], 1, axes)
    return f"{groups} groups of channels do not split in {shards}" if groups % shards else None


def _group_norm_saved(node: Node, graph: Graph) -> list[Saved]:
    """Input, weight, and the mean and deviation of each sample's groups; not the result."""
    x, groups, weight = node.operands[0], argument(node, 1, "num_groups", 1), argument(node, 2, "weight", None)
    return [x, *references(weight), Extra(x, (0,), 2 * groups * max(4, graph.tensors[x].itemsize))]


def _group_norm_memory(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """`rt.group_norm`, made of torch's own operators: what is centred, and normal where a weight multiplies it, in
    float32 at least, and some numbers of each group; not the input. Squares, and in half precision the input widened,
    come and go; backward three gradients of what is centred."""
    pairs = zip(operands[0], sizes.axis_sizes, strict=True)
    if not any(type_.kind == "S" and type_.dim > 1 and axis > 1 for type_, axis in pairs):
        return None
    width = max(4, sizes.itemsize)
    wide = math.prod(sizes.operands[0]) * width
    groups = sizes.operands[0][0] * int(argument(node, 1, "num_groups", 1))
    kept = (1 + (len(sizes.operands) > 1)) * wide + 4 * groups * width
    keeps = tuple(range(1, min(2, len(sizes.operands))))
    return RuntimeMemory(kept, ((1 + (width != sizes.itemsize)) * wide, 3 * wide), keeps)


def _group_norm_local(local: LocalCall) -> str | None:
    call, axes = local.call, local.axes_where(0, lambda type_: type_.kind == "S" and type_.dim > 1)
    if not axes:
        return None
    groups = local.on_rank().arguments["num_groups"]
    tensors = f"{local.names[0]}, {groups}, {local.variable('weight')}, {local.variable('bias')}"
    count = math.prod(call.shape(0)[1:]) // call.arguments["num_groups"]
    return f"rt.group_norm({tensors}, {call.arguments['eps']!r}, {items(axes)}, {count})"


# Weight norm ----------------------------------------


def weight_norm(call: Call) -> list[AxisRule]:
    """v · g / ‖v‖, a norm for each slice along one dim. All dims split; those under a norm sum its squares inside."""
    own, outputs, shape = _own_dim(call), call.result_positions(), call.shape(0)
    rules = [AxisRule((R, P), tuple(R if position else P for position in outputs))]  # linear in g
    for dim in [dim for dim, size in enumerate(shape) if size > 1]:
        norm = S(dim) if dim == own else R
        rules.append(AxisRule((S(dim), norm), tuple(norm if position else S(dim) for position in outputs)))
    return rules


def _own_dim(call: Call) -> int:
    return call.dim("dim", len(call.shape(0)))


def _weight_norm_inside(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """The norms' sums of squares forward, the gradients of the norms backward."""
    own = _own_dim(call)
    size = local_shape(call.shape(0), operands[0], axes)[own] * max(4, call.tensor(0).itemsize)
    sums = [Inner("all_reduce", axis, size) for axis in split_by(operands[0], lambda type_: type_ != S(own))]
    return sums, sums


def _weight_norm_saved(node: Node, graph: Graph) -> list[Saved]:
    """Both operands, and the norms."""
    v = graph.tensors[node.operands[0]]
    own = argument(node, 2, "dim", 0) % len(v.shape)
    return [*node.operands, Extra(v.name, (own,), max(4, v.itemsize))]


def _weight_norm_local(local: LocalCall) -> str | None:
    own = _own_dim(local.call)
    axes = local.axes_where(0, lambda type_: type_.kind == "S" and type_ != S(own))
    return f"rt.weight_norm({local.names[0]}, {local.names[1]}, {own}, {items(axes)})" if axes else None


_LAYER_NORM = Operator(work=work.NORMALIZATION, saved=saved.row_normalization)
_GROUP_NORM = Operator(work=work.NORMALIZATION, needs_elements=True, cuts_samples_alone=True)
_BATCH_NORM = Operator(
    work=work.BATCH_NORM, saved=saved.batch_normalization, workspace=workspace.batch_norm, needs_elements=True
)
_IN_TRAINING = _BATCH_NORM.by(batch_norm, inside=_batch_norm_inside, local=_batch_norm_local, passes_when_split=(6, 8))

STATISTICS: dict[str, Operator] = {
    "aten.layer_norm.default": _LAYER_NORM.by(layer_norm),
    "native_layer_norm": _LAYER_NORM,
    "aten.rms_norm.default": Operator(
        layer_norm, work=work.RMS_NORM, saved=saved.rms_normalization, saved_on_cpu=saved.composed_rms_norm,
        workspace=workspace.rms_norm,
    ),
    "aten.group_norm.default": _GROUP_NORM.by(
        group_norm, saved=_group_norm_saved, inside=_group_norm_inside, local=_group_norm_local,
        limits=(_groups_error,), groups=Groups("num_groups", lambda call: 1), lowered=_group_norm_memory,
    ),
    "native_group_norm": _GROUP_NORM,
    "aten._native_batch_norm_legit_functional.default": _IN_TRAINING,
    "aten._native_batch_norm_legit.no_stats": _IN_TRAINING,
    "aten._native_batch_norm_legit_no_training.default": Operator(
        batch_norm, work=work.BATCH_NORM_INFERENCE, needs_elements=True
    ),
    "batch_norm": _BATCH_NORM,
    "native_batch_norm": _BATCH_NORM,
    "_batch_norm_with_update_functional": _BATCH_NORM.by(workspace=None),
    "instance_norm": Operator(work=work.BATCH_NORM, needs_elements=True),
    "aten._weight_norm_interface.default": Operator(
        weight_norm, work=work.NORMALIZATION, saved=_weight_norm_saved, inside=_weight_norm_inside,
        passes_when_split=(3, 7), local=_weight_norm_local, needs_elements=True,
    ),
}  # fmt: skip
