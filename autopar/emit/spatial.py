"""Calls of operators over images whose rows, or whose statistics, are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.emit.plain import PlainCalls
from autopar.ir.placement import S
from autopar.ir.statements import Operate
from autopar.ops.call import Call
from autopar.ops.windows import halos, pads_split_dim, spatial_dims, windows


def _operand(call: Call, names: list[str], key: str) -> str:
    """The variable of an optional tensor argument."""
    return names[call.positions[key][0]] if key in call.positions else "None"


def _tuple(parts: list[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _batch_norm(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    """In training, statistics are those of all samples and of whole images."""
    axes = writer.axes_where(statement.reads[0][1], lambda type_: type_.kind == "S" and type_ != S(1))
    if not axes or not call.arguments["training"]:
        return None
    keys = ("input", "weight", "bias", "running_mean", "running_var")
    tensors = ", ".join(_operand(call, names, key) for key in keys)
    count = math.prod(call.shape(0)) // call.shape(0)[1]
    arguments = call.arguments
    results = "" if "functional" in call.node.op else "[:3]"  # there are no running statistics
    tail = f"{arguments['momentum']!r}, {arguments['eps']!r}, {_tuple(axes)}, {count}"
    return f"rt.batch_norm({tensors}, {tail}){results}"


def _group_norm(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    axes = writer.axes_where(statement.reads[0][1], lambda type_: type_.kind == "S" and type_.dim > 1)
    if not axes:
        return None
    groups = writer.local_call(statement).arguments["num_groups"]
    tensors = f"{names[0]}, {groups}, {_operand(call, names, 'weight')}, {_operand(call, names, 'bias')}"
    count = math.prod(call.shape(0)[1:]) // call.arguments["num_groups"]
    return f"rt.group_norm({tensors}, {call.arguments['eps']!r}, {_tuple(axes)}, {count})"


def _splits(writer: PlainCalls, statement: Operate, call: Call) -> str | None:
    """The split spatial dims with their axes and whole lengths; None where the operator itself runs on the shards."""
    placement, axes = statement.reads[0][1], writer.plan.axes
    if not halos(call, placement, axes) and not pads_split_dim(call, placement, axes):
        return None
    found = []
    for dim in spatial_dims(call):
        names = writer.axes_where(placement, S(dim).__eq__)
        found += [f"({dim}, {name}, {call.shape(0)[dim]})" for name in names]
    return _tuple(found)


def _sizes(call: Call, *fields: str) -> str:
    return ", ".join(str([getattr(window, field) for window in windows(call)]) for field in fields)


def _convolution(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    splits = None if call.arguments.get("transposed") else _splits(writer, statement, call)
    if splits is None:
        return None
    groups = writer.local_call(statement).arguments["groups"]
    tensors = f"{names[0]}, {names[1]}, {_operand(call, names, 'bias')}"
    return f"rt.convolution({tensors}, {_sizes(call, 'stride', 'padding', 'dilation')}, {groups}, {splits})"


def _max_pool(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    splits = _splits(writer, statement, call)
    if splits is None:
        return None
    return f"rt.max_pool({names[0]}, {_sizes(call, 'kernel', 'stride', 'padding', 'dilation')}, {splits})"


def _avg_pool(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    splits = _splits(writer, statement, call)
    if splits is None:
        return None
    counts = bool(call.arguments["count_include_pad"])
    return f"rt.avg_pool({names[0]}, {_sizes(call, 'kernel', 'stride', 'padding')}, {counts}, {splits})"


def _adaptive_avg_pool(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    rank, num_spatial = len(call.shape(0)), len(call.arguments["output_size"])
    dims = list(range(rank - num_spatial, rank))
    if not any(type_.kind == "S" and type_.dim in dims for type_ in statement.reads[0][1]):
        return None
    return f"rt.mean({names[0]}, {dims}, True, {math.prod(call.shape(0)[-num_spatial:])})"


SPATIAL: dict[str, Callable[[PlainCalls, Operate, Call, list[str]], str | None]] = {
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten.group_norm.default": _group_norm,
    "aten.convolution.default": _convolution,
    **{f"aten.conv{n}d.default": _convolution for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d.default": _max_pool for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": _avg_pool for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": _adaptive_avg_pool for n in (1, 2, 3)},
}
