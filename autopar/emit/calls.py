"""One local operator call as text: usually the same ATen operator on local tensors, with local sizes.

A few operators need more than their own ATen call when sharded (their rule says so): a masked lookup for split
rows, a loss or mean over the global count, statistics over shards, dropout masks by shard. Those are functions of
`autopar.runtime`.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.emit.heads import HEADS
from autopar.emit.plain import PlainCalls, tuple_of
from autopar.emit.spatial import SPATIAL
from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import Axis, Placement, S, format_placement, local_shape
from autopar.ir.statements import Operate
from autopar.ir.structure import FUNCTION, HOOK
from autopar.ops.bags import EMBEDDING_BAG
from autopar.ops.call import Call
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.writes import OVERWRITTEN


def _embedding(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    axes = writer.axes_where(statement.reads[0][1], lambda type_: type_ == S(0))
    if not axes:
        return None
    padding = call.arguments["padding_idx"]
    return f"rt.embedding({names[1]}, {names[0]}, {tuple_of(axes)}, {call.shape(0)[0]}, padding_idx={padding})"


def _embedding_bag(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
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
    bags = f"rt.embedding_bag({tensors}, {tuple_of(axes)}, {call.shape(0)[0]}, {', '.join(told)})"
    return f"{bags}, None, None, None"  # the other results serve its own backward pass


def _cross_entropy(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
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
        f"rt.cross_entropy({names[0]}, {names[1]}, reduction_axes={tuple_of(samples)}, class_axes={tuple_of(classes)}, "
        f"num_classes={call.shape(0)[1]}, ignore_index={call.arguments['ignore_index']}, reduction={reduction!r}, "
        f"label_smoothing={float(call.arguments['label_smoothing'])!r}{weight}{count})"
    )


def _mean(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
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


def _dropout(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    placement = statement.reads[0][1]
    axes = writer.axes_where(placement, lambda type_: type_.kind == "S")
    if call.arguments["train"] is False:
        return None
    real = tuple(t for t, axis in zip(placement, writer.plan.axes, strict=True) if axis.name != MICROBATCH)
    shape = local_shape(call.shape(0), *_over_microbatches(placement, writer.plan.axes))  # of one microbatch
    call_text = (
        f"rt.native_dropout({names[0]}, {call.arguments['p']!r}, {tuple_of(axes)}, shape={shape}, "
        f"placement={format_placement(real)!r})"
    )
    return call_text


def _routed_experts(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str:
    """The runtime's function always: the operator is autopar's own."""
    axes = writer.axes_where(statement.reads[3][1], lambda type_: type_ == S(0))
    options = [repr(call.arguments[key]) for key in ("activation", "gated", "num_experts")]
    return f"rt.routed_experts({', '.join([*names, *options, tuple_of(axes)])})"


def _overwritten(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str:
    """The runtime's function always: the operator is autopar's own."""
    return f"rt.overwritten({', '.join(names)})"


def _grouped_mm(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str:
    """The operator is another library's, which the program need not import."""
    return f"rt.grouped_mm({', '.join(names)})"


def _function(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str:
    """The model's own forward and backward, by the runtime's function."""
    function, _, arguments, _, draws = statement.node.args
    text = ", ".join(filter(None, (repr(function), arguments.format(*names))))
    return f"rt.draw(rt.apply, {text})" if draws else f"rt.apply({text})"


def _gradient_hook(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str:
    return f"rt.hooked({', '.join([names[0], statement.node.args[1], *names[1:]])})"


def _over_microbatches(placement: Placement, axes: tuple[Axis, ...]) -> tuple[Placement, tuple[Axis, ...]]:
    """The placement on the microbatch axis alone, and that axis."""
    kept = [(type_, axis) for type_, axis in zip(placement, axes, strict=True) if axis.name == MICROBATCH]
    return tuple(type_ for type_, _ in kept), tuple(axis for _, axis in kept)


_SPECIAL: dict[str, Callable[[PlainCalls, Operate, Call, list[str]], str | None]] = {
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


class CallWriter(PlainCalls):
    """Writes the calls of one program."""

    def write(self, statement: Operate, names: list[str]) -> str:
        """The call with `names` for its operands, in operand order."""
        call = Call(self.graph, statement.node)
        special = _SPECIAL.get(statement.node.op)
        text = special(self, statement, call, names) if special else None
        return text or self.plain(statement, names)
