"""Finds runs: the same operators over and over without a module of their own, such as a loop in forward.

Each node is told by its operator, plain arguments, shapes, and how far back each operand was made; where these repeat
with a period, the periods are candidates for equal blocks (`trace.blocks` compares them as it compares modules).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.ir.graph import Graph, Node, map_references

_FEWEST_NODES = 256
"""Shorter runs are planned node by node: that takes no time, and each node may be placed in its own way."""
_FEWEST_TURNS = 4
_LONGEST_PERIOD = 512
"""Nodes of what is repeated."""

Codes = npt.NDArray[np.int64]


def find_runs(graph: Graph, nodes: Sequence[Node]) -> list[list[list[Node]]]:
    """Runs among neighbouring nodes, none of which overlap: each as its periods, which are of one length."""
    codes, found = _codes(graph, nodes), list[list[list[Node]]]()
    free = np.ones(len(nodes), dtype=bool)
    for period in range(1, min(_LONGEST_PERIOD, len(nodes) // _FEWEST_TURNS) + 1):
        if not free.any():
            break
        equal = (codes[period:] == codes[:-period]) & free[period:] & free[:-period]
        for begin, length in _stretches(equal):
            turns = (length + period) // period
            if turns < _FEWEST_TURNS or turns * period < _FEWEST_NODES:
                continue
            if not free[begin : begin + turns * period].all():
                continue
            free[begin : begin + turns * period] = False
            starts = range(begin, begin + turns * period, period)
            found.append([list(nodes[start : start + period]) for start in starts])
    return found


def _stretches(equal: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Begin and length of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]])))
    for begin, end in edges.reshape(-1, 2).tolist():
        yield begin, end - begin


def _codes(graph: Graph, nodes: Sequence[Node]) -> Codes:
    """A number for each node: equal where nodes do the same with what was made as far back."""
    position = {node.name: number for number, node in enumerate(graph.nodes)}
    numbers: dict[Any, int] = {}

    def code(node: Node) -> int:
        here = position[node.name]

        def place(name: str) -> str:
            maker = graph.producers.get(name)
            if maker is not None:
                return f"{here - position[maker.name]} back {maker.results.index(name)}"
            return f"{'stored' if name in graph.stored_by_tensor else 'input'}"

        kinds = [None if name is None else kind_of(graph, name) for name in (*node.operands, *node.outputs)]
        args = map_references((node.args, node.kwargs), place)
        return numbers.setdefault((str(node.op), repr(args), tuple(kinds)), len(numbers))

    return np.array([code(node) for node in nodes], dtype=np.int64)


def kind_of(graph: Graph, tensor: str) -> tuple[Any, ...]:
    """All of a tensor in which like blocks are alike."""
    value = graph.tensors[tensor]
    return (value.shape, value.dtype, value.differentiable)
