"""One local operator call as text: usually the same ATen operator on local tensors, with local sizes.

A few operators need more than their own ATen call when sharded (their rule says so): a masked lookup for split
rows, a loss or mean over the global count, statistics over shards, dropout masks by shard. Those are functions of
`autopar.runtime`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from autopar.emit.heads import HEADS
from autopar.emit.names import keywords, operator
from autopar.emit.spatial import SPATIAL
from autopar.ir.graph import Atom, Graph, Ref
from autopar.ir.placement import Axis, Placement, S, are_alike, axes_along, format_placement, local_shape
from autopar.ir.plan import PlanData
from autopar.ir.statements import Operate, Value
from autopar.ir.structure import FUNCTION, HOOK, is_random
from autopar.ir.verifier import MICROBATCH
from autopar.ops.bags import EMBEDDING_BAG
from autopar.ops.call import Call
from autopar.ops.communication import is_mean_cross_entropy
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.lowering import RankLength, local_arguments
from autopar.ops.writes import OVERWRITTEN

Name = Callable[[str, int], str]  # (tensor, operand position) -> the variable that holds it


class CallWriter:
    """Writes the calls of one program."""

    def __init__(self, graph: Graph, plan: PlanData) -> None:
        self.graph, self.plan = graph, plan
        self.counts: dict[str, str] = {}  # loss node -> the variable that will hold its global count of samples

    def counted_axes(self, statement: Operate) -> list[str]:
        """Mesh axes over which a mean loss must count its samples; none for other operators."""
        is_mean = is_mean_cross_entropy(Call(self.graph, statement.node))
        return self.sample_axes(statement) if is_mean and not self.microbatched(statement.reads[0][1]) else []

    def sample_axes(self, loss: Operate) -> list[str]:
        """Mesh axes that split the samples of a cross-entropy."""
        return self.axes_where(loss.reads[0][1], lambda t: t.kind == "S" and t != S(1))

    def is_mean_over_microbatches(self, statement: Operate) -> bool:
        return statement.node.name in self.means

    @cached_property
    def means(self) -> list[str]:
        """The losses that are means over all microbatches."""
        nodes = (node for node in self.graph.nodes if is_mean_cross_entropy(Call(self.graph, node)))
        return [node.name for node in nodes if self.microbatched(self.plan.nodes[node.name].operands[0])]

    def count_of(self, loss: str) -> str:
        """Where the count of all microbatches' targets of a loss is."""
        return "self.count" if len(self.means) == 1 else f"self.whole[{loss!r}]"

    def write_count(self, statement: Operate, target: str) -> str:
        """The call that starts to count the samples of a loss."""
        ignored = Call(self.graph, statement.node).arguments["ignore_index"]
        return f"rt.start_valid_count({target}, {_axes(self.counted_axes(statement))}, ignore_index={ignored})"

    def write(self, statement: Operate, names: list[str]) -> str:
        """The call with `names` for its operands, in operand order."""
        call = Call(self.graph, statement.node)
        special = _SPECIAL.get(statement.node.op)
        text = special(self, statement, call, names) if special else None
        return text or self.plain(statement, names)

    def plain(self, statement: Operate, names: list[str]) -> str:
        """The operator itself, on local tensors."""
        node = statement.node
        shapes = tuple(local_lengths(self.graph, self.plan, value) for value in statement.makes)
        args, kwargs = local_arguments(self.graph, node, shapes)
        remaining = iter(names)
        parts = [_text(value, remaining) for value in args]
        named = {key: _text(value, remaining) for key, value in dict(kwargs).items()}
        parts += [keywords(named)] if named else []
        op = operator(node.op)
        return f"rt.draw({', '.join([op, *parts])})" if is_random(node) else f"{op}({', '.join(parts)})"

    def local_call(self, statement: Operate) -> Call:
        """The call with the arguments that it has on local tensors."""
        shapes = tuple(local_lengths(self.graph, self.plan, value) for value in statement.makes)
        args, kwargs = local_arguments(self.graph, statement.node, shapes)
        return Call(self.graph, replace(statement.node, args=args, kwargs=kwargs))

    def axes_where(self, placement: Placement, test: Callable[[Any], bool]) -> list[str]:
        """Names of the real mesh axes on which the placement's type passes the test."""
        return [
            axis.name
            for axis, type_ in zip(self.plan.axes, placement, strict=True)
            if test(type_) and axis.name != MICROBATCH
        ]

    def microbatched(self, placement: Placement) -> bool:
        pairs = zip(self.plan.axes, placement, strict=True)
        return any(axis.name == MICROBATCH and type_.kind == "S" for axis, type_ in pairs)


def local_lengths(graph: Graph, plan: PlanData, value: Value) -> tuple[int, ...]:
    """The shape that a rank holds of a value; `RankLength` where ranks differ."""
    shape, placement = graph.tensors[value[0]].shape, value[1]
    local = local_shape(shape, placement, plan.axes)
    return tuple(
        length
        if are_alike(shape, placement, dim, plan.axes)
        else RankLength(length, rank_length(whole, axes_along(placement, dim, plan.axes)))
        for dim, (whole, length) in enumerate(zip(shape, local, strict=True))
    )


def rank_length(length: int, axes: Sequence[Axis]) -> str:
    """The text of the length that a rank holds of a dim that the axes split, from the outer one to the inner."""
    names = [axis.name for axis in axes if axis.name != MICROBATCH]
    length //= math.prod(axis.size for axis in axes if axis.name == MICROBATCH)
    return f"rt.local_size({length}, {', '.join(names)})" if names else str(length)


def _text(value: Any, names: Any) -> str:
    if isinstance(value, Ref):
        return str(next(names))
    if isinstance(value, Atom):
        return {"device": "self.mesh.device"}.get(value.kind, f"torch.{value.name}")
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(item, names) for item in value) + "]"
    return repr(value) if not isinstance(value, float) or abs(value) < 1e300 else f"float({str(value)!r})"


def _axes(names: list[str]) -> str:
    return "(" + "".join(f"{name}, " for name in names).rstrip(" ") + ")" if names else "()"


def _embedding(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str | None:
    axes = writer.axes_where(statement.reads[0][1], lambda type_: type_ == S(0))
    if not axes:
        return None
    padding = call.arguments["padding_idx"]
    return f"rt.embedding({names[1]}, {names[0]}, {_axes(axes)}, {call.shape(0)[0]}, padding_idx={padding})"


def _embedding_bag(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str | None:
    """Split rows: the runtime's lookup. Split bags: they begin at the first row number of the slice."""
    axes = writer.axes_where(statement.reads[0][1], lambda type_: type_ == S(0))
    begins = names[2]
    if any(type_ == S(0) for type_ in statement.reads[2][1]):
        begins = f"{begins} - {begins}[0]"
    if not axes:
        return None if begins == names[2] else writer.plain(statement, [*names[:2], begins, *names[3:]])
    options = {"mode": ("sum", "mean")[call.arguments["mode"]]}
    options |= {key: call.arguments[key] for key in ("include_last_offset", "padding_idx")}
    told = [f"{key}={value!r}" for key, value in options.items()]
    told += [f"per_sample_weights={names[3]}"] if len(names) > 3 else []
    tensors = f"{names[0]}, {names[1]}, {begins}"
    bags = f"rt.embedding_bag({tensors}, {_axes(axes)}, {call.shape(0)[0]}, {', '.join(told)})"
    return f"{bags}, None, None, None"  # the other results serve its own backward pass


def _cross_entropy(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str | None:
    logits = statement.reads[0][1]
    classes = writer.axes_where(logits, lambda type_: type_ == S(1))
    samples = writer.axes_where(logits, lambda type_: type_.kind == "S" and type_ != S(1))
    split = writer.microbatched(logits)
    if not classes and not samples and not split:
        return None
    reduction = ("none", "mean", "sum")[int(call.arguments["reduction"])]
    count = f", count={writer.count_of(statement.node.name)}" if split and reduction == "mean" else ""
    weight = f", weight={names[2]}" if len(names) > 2 else ""
    if statement.node.name in writer.counts:
        count = f", count={writer.counts[statement.node.name]}"
    return (
        f"rt.cross_entropy({names[0]}, {names[1]}, reduction_axes={_axes(samples)}, class_axes={_axes(classes)}, "
        f"num_classes={call.shape(0)[1]}, ignore_index={call.arguments['ignore_index']}, reduction={reduction!r}, "
        f"label_smoothing={float(call.arguments['label_smoothing'])!r}{weight}{count})"
    )


def _mean(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str | None:
    rank = len(call.shape(0))
    dims = call.arguments.get("dim") or tuple(range(rank))
    dims = tuple(dim % rank for dim in dims if rank)
    split = any(type_.kind == "S" and type_.dim in dims for type_ in statement.reads[0][1])
    if not split:
        return None
    count = 1
    for dim in dims:
        count *= call.shape(0)[dim]
    return f"rt.mean({names[0]}, {list(dims)}, {bool(call.arguments.get('keepdim', False))}, {count})"


def _dropout(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str | None:
    placement = statement.reads[0][1]
    axes = writer.axes_where(placement, lambda type_: type_.kind == "S")
    if call.arguments["train"] is False:
        return None
    real = tuple(t for t, axis in zip(placement, writer.plan.axes, strict=True) if axis.name != MICROBATCH)
    shape = local_shape(call.shape(0), *_over_microbatches(placement, writer.plan.axes))  # of one microbatch
    call_text = (
        f"rt.native_dropout({names[0]}, {call.arguments['p']!r}, {_axes(axes)}, shape={shape}, "
        f"placement={format_placement(real)!r})"
    )
    return call_text


def _routed_experts(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str:
    """The runtime's function always: the operator is autopar's own."""
    axes = writer.axes_where(statement.reads[3][1], lambda type_: type_ == S(0))
    options = [repr(call.arguments[key]) for key in ("activation", "gated", "num_experts")]
    return f"rt.routed_experts({', '.join([*names, *options, _axes(axes)])})"


def _overwritten(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str:
    """The runtime's function always: the operator is autopar's own."""
    return f"rt.overwritten({', '.join(names)})"


def _grouped_mm(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str:
    """The operator is another library's, which the program need not import."""
    return f"rt.grouped_mm({', '.join(names)})"


def _function(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str:
    """The model's own forward and backward, by the runtime's function."""
    function, _, arguments, _, draws = statement.node.args
    text = ", ".join(filter(None, (repr(function), arguments.format(*names))))
    return f"rt.draw(rt.apply, {text})" if draws else f"rt.apply({text})"


def _gradient_hook(writer: CallWriter, statement: Operate, call: Call, names: list[str]) -> str:
    return f"rt.hooked({', '.join([names[0], statement.node.args[1], *names[1:]])})"


def _over_microbatches(placement: Placement, axes: tuple[Axis, ...]) -> tuple[Placement, tuple[Axis, ...]]:
    """The placement on the microbatch axis alone, and that axis."""
    kept = [(type_, axis) for type_, axis in zip(placement, axes, strict=True) if axis.name == MICROBATCH]
    return tuple(type_ for type_, _ in kept), tuple(axis for _, axis in kept)


_SPECIAL: dict[str, Callable[[CallWriter, Operate, Call, list[str]], str | None]] = {
    "aten.embedding.default": _embedding,
    EMBEDDING_BAG: _embedding_bag,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.mean.dim": _mean,
    "aten.mean.default": _mean,
    "aten.native_dropout.default": _dropout,
    ROUTED_EXPERTS: _routed_experts,
    "transformers.grouped_mm_fallback.default": _grouped_mm,
    FUNCTION: _function,
    HOOK: _gradient_hook,
    OVERWRITTEN: _overwritten,
    **HEADS,
    **SPATIAL,
}

#: operators that call a function of the runtime where their placements ask for it
LOWERED = frozenset(_SPECIAL)
