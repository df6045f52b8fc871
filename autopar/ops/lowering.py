"""How a node's arguments read on one rank: sizes that the operator was told are those of the local result.

Only operators that are told the shape of their result need this. All others take their sizes from their operands,
so they run on local tensors with the arguments of the graph.
"""

from __future__ import annotations

import math
from typing import Any

from autopar.ir.graph import Graph, Node
from autopar.ops.call import overload

Args = tuple[Any, ...]
Kwargs = tuple[tuple[str, Any], ...]

#: operator (without its overload) -> the argument that holds the shape of the result
_SHAPE_ARGUMENT = {
    "view": "size", "_unsafe_view": "size", "view_copy": "size", "reshape": "shape", "_reshape_copy": "size",
    "expand": "size", "expand_copy": "size",
    "zeros": "size", "ones": "size", "full": "size", "empty": "size", "rand": "size", "randn": "size",
    "new_zeros": "size", "new_ones": "size", "new_full": "size", "new_empty": "size",
}  # fmt: skip


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
    """The node's args and kwargs with the shape of the result, where the operator is told it, made local.

    result_local_shapes: the shape that this rank holds of each named result (`node.results`). A size of -1 stays
    -1, unless the local result is empty on a rank, where it would be ambiguous. References stay as they are.
    """
    wanted = _SHAPE_ARGUMENT.get(node.op.split(".")[1])
    if wanted is None or not result_local_shapes:
        return node.args, node.kwargs
    local = result_local_shapes[0]
    names = [argument.name for argument in overload(node.op)._schema.arguments]
    args = tuple(
        _local_size(value, local) if name == wanted else value for name, value in zip(names, node.args, strict=False)
    )
    kwargs = tuple((key, _local_size(value, local) if key == wanted else value) for key, value in node.kwargs)
    return args, kwargs


def _local_size(size: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    assert len(size) == len(local), f"expected the local shape of the result, found {local} for size {size}"
    if math.prod(local) == 0 or any(isinstance(length, RankLength) for length in local):
        return local
    return tuple(-1 if told == -1 else length for told, length in zip(size, local, strict=True))
