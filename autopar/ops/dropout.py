"""Dropout: ranks that split a tensor draw masks of their own for their slices."""

from __future__ import annotations

from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import S, format_placement, local_shape
from autopar.ops import saved, work, workspace
from autopar.ops.call import Call
from autopar.ops.in_bits import dropout_in_bits
from autopar.ops.local import LocalCall, tuple_of
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator


def dropout(call: Call) -> list[AxisRule]:
    """Any dim; ranks draw independent masks for their slices."""
    count = len(call.node.results)
    return [AxisRule((S(dim),), (S(dim),) * count) for dim in range(len(call.shape(0)))]


def _local(local: LocalCall) -> str | None:
    """The runtime draws masks by shard, or slices of the whole one: it is told a microbatch's shape and placement."""
    arguments, pairs = local.call.arguments, list(zip(local.placements[0], local.axes, strict=True))
    if arguments["train"] is False:
        return None
    cuts = [(type_, axis) for type_, axis in pairs if axis.name == MICROBATCH]
    shape = local_shape(local.call.shape(0), tuple(type_ for type_, _ in cuts), tuple(axis for _, axis in cuts))
    placement = format_placement(tuple(type_ for type_, axis in pairs if axis.name != MICROBATCH))
    axes = tuple_of(local.axes_where(0, lambda type_: type_.kind == "S"))
    return f"rt.native_dropout({local.names[0]}, {arguments['p']!r}, {axes}, shape={shape}, placement={placement!r})"


_RANDOM = Operator(work=work.DROPOUT)

RANDOMNESS: dict[str, Operator] = {
    "aten.native_dropout.default": _RANDOM.by(
        dropout,
        saved=saved.dropout,
        workspace=workspace.scaled_mask,
        local=_local,
        needs_elements=True,
        in_bits=dropout_in_bits(_local),
    ),
    "dropout": _RANDOM.by(saved=saved.dropout),
    "rand": _RANDOM.by(size="size"),
    "randn": _RANDOM.by(size="size"),
    **dict.fromkeys(["bernoulli", "rand_like", "randn_like"], _RANDOM),
}
