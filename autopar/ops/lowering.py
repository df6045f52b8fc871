"""How a node's arguments read on one rank: sizes that the operator was told are those of the local result.

Only operators that are told the shape of their result, or the number of its channels' groups, need this. All others
take their sizes from their operands, so they run on local tensors with the arguments of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from autopar.ir.graph import Graph, Node
from autopar.ops.call import call_of, overload
from autopar.ops.table import operator

Args = tuple[Any, ...]
Kwargs = tuple[tuple[str, Any], ...]


class RankLength(int):
    """A local length that ranks do not share: rank 0's, with the text that computes each rank's own."""

    text: str

    def __new__(cls, length: int, text: str) -> RankLength:
        """Makes the length of rank 0 with the expression for any rank."""
        made = super().__new__(cls, length)
        made.text = text
        return made

    def __repr__(self) -> str:
        return self.text


def local_arguments(graph: Graph, node: Node, result_local_shapes: tuple[tuple[int, ...], ...]) -> tuple[Args, Kwargs]:
    """The node's args and kwargs with the shape or groups of the result, where the operator is told, made local.

    result_local_shapes: the shape that this rank holds of each named result (`node.results`). A size of -1 stays
    -1, unless the local result is empty on a rank, where it would be ambiguous. References stay as they are.
    """
    row = operator(node.op)
    if not result_local_shapes or not (row.size or row.groups):
        return node.args, node.kwargs
    local, whole = result_local_shapes[0], graph.tensors[node.results[0]].shape
    if row.groups is None:
        return _replaced(node, row.size, lambda size: _local_size(size, local))
    channel = row.groups.channel(call_of(graph, node))
    return _replaced(node, row.groups.argument, lambda count: _local_groups(count, whole[channel], local[channel]))


def _replaced(node: Node, wanted: str, change: Callable[[Any], Any]) -> tuple[Args, Kwargs]:
    """The node's arguments with the wanted one changed, where it is given."""
    names = [argument.name for argument in overload(node.op)._schema.arguments]
    args = tuple(change(value) if name == wanted else value for name, value in zip(names, node.args, strict=False))
    return args, tuple((key, change(value) if key == wanted else value) for key, value in node.kwargs)


def _local_groups(groups: int, channels: int, held: int) -> int:
    """Of a grouped operator whose channels split by whole groups; one group reads all channels and makes any."""
    return groups if groups == 1 else groups * held // channels


def _local_size(size: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    assert len(size) == len(local), f"expected the local shape of the result, found {local} for size {size}"
    if math.prod(local) == 0 or any(isinstance(length, RankLength) for length in local):
        return local
    return tuple(-1 if told == -1 else length for told, length in zip(size, local, strict=True))
