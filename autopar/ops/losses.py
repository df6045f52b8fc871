"""Cross-entropy: split samples share the count of their targets, split classes are reduced inside."""

from __future__ import annotations

import math

from autopar.ir.placement import Axis, I, P, Placement, R, S, local_shape
from autopar.ops import saved, work, workspace
from autopar.ops.call import Call
from autopar.ops.inner import Inner, Sent, split_by
from autopar.ops.local import LocalCall, tuple_of
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator


def cross_entropy(call: Call) -> list[AxisRule]:
    """Split samples give summands of the mean over the global count; split classes are reduced inside, giving I.

    Weights of classes are whole.
    """
    logits = call.shape(0)
    weight = (R,) if call.has_tensor("weight") else ()
    if len(logits) < 2 or "float" in call.tensor(1).dtype or (weight and call.tensor(2).differentiable):
        return []
    spread = call.arguments["reduction"] == 0
    sample_dims = [0, *range(2, len(logits))]
    rules = []
    for position, dim in enumerate(sample_dims):
        rules.append(AxisRule((S(dim), S(position), *weight), (S(position) if spread else P,)))
    if not spread and not weight and float(call.arguments["label_smoothing"]) == 0.0:
        rules.append(AxisRule((S(1), R), (I,)))  # of any further dims, too
    return rules


def _inside(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Split classes: the maximum, then two sums a sample. (The count of split samples is `count_of_targets`.)"""
    local = local_shape(call.shape(0), operands[0], axes)
    size = math.prod(local) // local[1] * max(4, call.tensor(0).itemsize) if len(local) > 1 else 0
    classes = split_by(operands[0], lambda type_: type_ == S(1))
    return [Inner("all_reduce", axis, size * count) for axis in classes for count in (1, 2)], []


def _is_mean(call: Call) -> bool:
    return bool(call.arguments["reduction"] == 1)


def _local(local: LocalCall) -> str | None:
    classes = local.axes_where(0, lambda type_: type_ == S(1))
    samples = local.axes_where(0, lambda type_: type_.kind == "S" and type_ != S(1))
    if not classes and not samples and not local.is_cut(0):
        return None
    arguments, (logits, targets, *weights) = local.call.arguments, local.names
    reduction = ("none", "mean", "sum")[int(arguments["reduction"])]
    return (
        f"rt.cross_entropy({logits}, {targets}, reduction_axes={tuple_of(samples)}, class_axes={tuple_of(classes)}, "
        f"num_classes={local.call.shape(0)[1]}, ignore_index={arguments['ignore_index']}, reduction={reduction!r}, "
        f"label_smoothing={float(arguments['label_smoothing'])!r}"
        f"{f', weight={weights[0]}' if weights else ''}{f', count={local.counted}' if local.counted else ''})"
    )


LOSSES: dict[str, Operator] = {
    "aten.cross_entropy_loss.default": Operator(
        cross_entropy, work=work.CROSS_ENTROPY, saved=saved.cross_entropy, workspace=workspace.cross_entropy,
        lowered=workspace.split_cross_entropy, inside=_inside, local=_local, counts_samples=_is_mean,
        needs_elements=True,
    ),
}  # fmt: skip
