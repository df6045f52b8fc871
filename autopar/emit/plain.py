"""One local operator call as text: the same ATen operator on local tensors, with local sizes; and what a call asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from autopar.emit.names import keywords, operator
from autopar.ir.graph import Atom, Graph, Ref
from autopar.ir.placement import Axis, Placement, S, are_alike, axes_along, local_shape
from autopar.ir.plan import StagePlan
from autopar.ir.statements import Operate, Value
from autopar.ir.structure import is_random
from autopar.ir.verifier import MICROBATCH
from autopar.ops.call import Call
from autopar.ops.communication import is_mean_cross_entropy
from autopar.ops.lowering import RankLength, local_arguments


class PlainCalls:
    """Writes the calls of one program that are those of the graph, with local sizes."""

    def __init__(self, graph: Graph, plan: StagePlan) -> None:
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
        return f"rt.start_valid_count({target}, {tuple_of(self.counted_axes(statement))}, ignore_index={ignored})"

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


def local_lengths(graph: Graph, plan: StagePlan, value: Value) -> tuple[int, ...]:
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


def tuple_of(names: list[str]) -> str:
    """ "(dp, tp,)": axes as the argument of a call."""
    return "(" + "".join(f"{name}, " for name in names).rstrip(" ") + ")" if names else "()"
