"""The count by which a mean loss over several microbatches divides: that of the whole batch, found before the first.

loss = Σ_microbatches Σ_samples loss_i / count        count = targets of all microbatches that are not ignored
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.emit.classes import INDENT, ClassWriter
from autopar.emit.early import chain, makers
from autopar.emit.names import Names
from autopar.errors import PlanError
from autopar.ir.statements import Flat, Operate, Value
from autopar.ops.call import Call


def counting_lines(flat: Flat, writer: ClassWriter, inputs: Sequence[Value]) -> list[str]:
    """The methods `prepare` and `targets` of a program whose loss is a mean over microbatches; else nothing.

    Raises PlanError where there are several such losses, or where the targets do not follow from the inputs.
    """
    losses = [s for s in flat.statements if isinstance(s, Operate) and writer.calls.is_mean_over_microbatches(s)]
    if not losses:
        return []
    if len(losses) > 1:
        where = ", ".join(f"{loss.node.name} at {loss.node.source}" for loss in losses)
        raise PlanError(f"expected one mean cross-entropy in a model of several microbatches, found {where}")
    loss = losses[0]
    found = chain(loss.reads[1], set(inputs), makers([*flat.constants, *flat.statements]))
    if found is None:
        raise PlanError(
            f"expected the targets of {loss.node.name} at {loss.node.source} to follow from the inputs alone, since "
            "they are counted over all microbatches; use microbatches=1"
        )
    inside = next((statement.home for statement in found if statement.home is not None), None)
    if inside is not None:
        raise PlanError(
            f"expected the targets of {loss.node.name} at {loss.node.source}, which all ranks count, to come from no "
            f"branch, found them to come from one on axis {inside.axis}; use microbatches=1"
        )
    needed = {id(statement) for statement in found}
    names = Names({axis.name for axis in writer.plan.axes})
    for value in inputs:
        names.make(value, value[0])
    body = writer.body([s for s in (*flat.constants, *flat.statements) if id(s) in needed], "", names)
    axes, ignored = writer.calls.sample_axes(loss), Call(writer.graph, loss.node).arguments["ignore_index"]
    reduced = "(" + "".join(f'self.mesh["{axis}"], ' for axis in axes).rstrip(" ") + ")"
    every = [axis.name for axis in writer.plan.axes]
    return [
        "",
        f"{INDENT}def prepare(self, microbatches):",
        f'{INDENT * 2}"""Counts the targets of all microbatches: the mean over the batch divides by that."""',
        f"{INDENT * 2}targets = torch.cat([self.targets(*inputs).flatten() for inputs in microbatches])",
        f"{INDENT * 2}self.count = rt.valid_count(targets, {reduced}, ignore_index={ignored})",
        "",
        f"{INDENT}def targets({', '.join(['self', *(names[value] for value in inputs)])}):",
        *writer.axis_lines(body, every),
        *body,
        f"{INDENT * 2}return {names[loss.reads[1]]}",
    ]
