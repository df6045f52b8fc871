"""One local operator call as text: usually the same ATen operator on local tensors, with local sizes.

A few operators need more than their own ATen call when sharded (their rule says so): their rows name a function of
`autopar.runtime` (`ops.local`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from autopar.cost.memory import packed_in_eight_bits
from autopar.emit.names import keywords, operator_text
from autopar.ir.graph import Atom, Graph, Node, Ref
from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import Axis, S, are_alike, axes_along, local_shape
from autopar.ir.plan import StagePlan
from autopar.ir.statements import Operate, Value
from autopar.ir.structure import is_random
from autopar.ops.call import Call
from autopar.ops.communication import is_mean_over_samples
from autopar.ops.eight_bits import eight_bits_call
from autopar.ops.local import LocalCall, axes_where, is_microbatched, tuple_of
from autopar.ops.lowering import RankLength, local_arguments
from autopar.ops.table import operator


class CallWriter:
    """Writes the calls of one program."""

    def __init__(self, graph: Graph, stage: StagePlan) -> None:
        self.graph, self.stage = graph, stage
        self.counts: dict[str, str] = {}  # loss node -> the variable that will hold its global count of samples

    def write(self, statement: Operate, names: list[str]) -> str:
        """The call with `names` for its operands, in operand order."""
        row = operator(statement.node.op)
        lowering, in_bits = row.local, row.in_bits
        if in_bits is not None and self.stage.nodes[statement.node.name].in_bits:
            return in_bits.call(self._local(statement, names))
        text = lowering(self._local(statement, names)) if lowering else None
        text = text or self.plain(statement, names)
        if self.stage.nodes[statement.node.name].in_eight_bits:
            return eight_bits_call(packed_in_eight_bits(statement.node, self.graph), names, text)
        return text

    def _local(self, statement: Operate, names: list[str]) -> LocalCall:
        return LocalCall(
            call=Call(self.graph, statement.node),
            names=names,
            placements=tuple(placement for _, placement in statement.reads),
            axes=self.stage.axes,
            counted=self._counted(statement),
            on_rank=partial(self._call_on_rank, statement),
            plain=partial(self.plain, statement),
        )

    def counted_axes(self, statement: Operate) -> list[str]:
        """Mesh axes over which a mean loss must count its samples; none for other operators."""
        is_mean = is_mean_over_samples(Call(self.graph, statement.node))
        return self.sample_axes(statement) if is_mean and not self._is_microbatched(statement) else []

    def sample_axes(self, loss: Operate) -> list[str]:
        """Mesh axes that split the samples of a cross-entropy."""
        return axes_where(self.stage.axes, loss.reads[0][1], lambda t: t.kind == "S" and t != S(1))

    def is_mean_over_microbatches(self, statement: Operate) -> bool:
        return statement.node.name in self.means

    @cached_property
    def means(self) -> list[str]:
        """The losses that are means over all microbatches."""
        nodes = (node for node in self.graph.nodes if is_mean_over_samples(Call(self.graph, node)))
        axes, plans = self.stage.axes, self.stage.nodes
        return [node.name for node in nodes if is_microbatched(axes, plans[node.name].operands[0])]

    def _is_microbatched(self, statement: Operate) -> bool:
        return is_microbatched(self.stage.axes, statement.reads[0][1])

    def _counted(self, statement: Operate) -> str:
        """The variable that holds a loss's count of samples; none where its call counts them."""
        name = statement.node.name
        if name in self.counts:
            return self.counts[name]
        is_mean = is_mean_over_samples(Call(self.graph, statement.node))
        return self.count_of(name) if is_mean and self._is_microbatched(statement) else ""

    def count_of(self, loss: str) -> str:
        """Where the count of all microbatches' targets of a loss is."""
        return "self.count" if len(self.means) == 1 else f"self.whole[{loss!r}]"

    def write_count(self, statement: Operate, target: str) -> str:
        """The call that starts to count the samples of a loss."""
        ignored = Call(self.graph, statement.node).arguments["ignore_index"]
        return f"rt.start_valid_count({target}, {tuple_of(self.counted_axes(statement))}, ignore_index={ignored})"

    def plain(self, statement: Operate, names: Sequence[str], node: Node | None = None) -> str:
        """The operator itself, on local tensors; `node`: the call with other arguments than the graph's."""
        node = node or statement.node
        args, kwargs = local_arguments(self.graph, node, self._made_lengths(statement))
        remaining = iter(names)
        parts = [_text(value, remaining) for value in args]
        named = {key: _text(value, remaining) for key, value in dict(kwargs).items()}
        parts += [keywords(named)] if named else []
        op = operator_text(node.op)
        return f"rt.draw({', '.join([op, *parts])})" if is_random(node) else f"{op}({', '.join(parts)})"

    def _made_lengths(self, statement: Operate) -> tuple[tuple[int, ...], ...]:
        return tuple(local_lengths(self.graph, self.stage, value) for value in statement.makes)

    def _call_on_rank(self, statement: Operate) -> Call:
        """The call with the arguments that it has on local tensors."""
        args, kwargs = local_arguments(self.graph, statement.node, self._made_lengths(statement))
        return Call(self.graph, replace(statement.node, args=args, kwargs=kwargs))


def local_lengths(graph: Graph, stage: StagePlan, value: Value) -> tuple[int, ...]:
    """The shape that a rank holds of a value; `RankLength` where ranks differ."""
    shape, placement = graph.tensors[value[0]].shape, value[1]
    local = local_shape(shape, placement, stage.axes)
    return tuple(
        length
        if are_alike(shape, placement, dim, stage.axes)
        else RankLength(length, rank_length(whole, axes_along(placement, dim, stage.axes)))
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
