"""Attention under a mask that is a sliding window, of documents or not: it is told the window, and no mask is made.

    attention(q, k, v, mask) → window attention(q, k, v)               where mask[i, j] = i − w < j ≤ i
    attention(q, k, v, mask) → window attention(q, k, v, documents)    the same, and documents[i] = documents[j]

The mask depends on no input, and its value is found (`constants`); or it is such a one and others: a comparison of
documents' numbers, and of positions that are given, where documents are numbered by the breaks of these, so that inside
of a document positions differ as places do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Ref, found_once, needed, references, with_nodes
from autopar.ir.structure import constant_tensors
from autopar.ops.call import call_of
from autopar.ops.context import TORCH_ATTENTION
from autopar.ops.window_attention import WINDOW_ATTENTION
from autopar.substitute.constants import Constants, Value, one_number
from autopar.substitute.heads import RESHAPES, unrepeated_heads
from autopar.substitute.intervals import Intervals, common, compared, true_in
from autopar.tunables import TOLD_SEQUENCE

RULE = "window-attention"
STATEMENT = "attention(q, k, v, mask) => attention over a window, without a mask, where the mask is one"
_AND = ("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default")
_VIEWS = (*RESHAPES, "aten.unsqueeze.default", "aten.alias.default", "aten.expand.default", "aten.detach.default")
_ALL_TRUE = ("aten.new_ones.default", "aten.ones_like.default")
_COMPARED = {f"aten.{way}.Tensor": way for way in ("le", "lt", "ge", "gt")}


class SeenWindow(NamedTuple):
    """How many keys a query sees, and which tensor has the documents' numbers, if any."""

    size: int
    documents: str | None


@found_once
def _windows(graph: Graph) -> dict[str, SeenWindow]:
    """Of the attention operators whose mask is a sliding window."""
    nodes = [node for node in graph.nodes if _may_be(graph, node)]
    if not nodes:
        return {}
    reader = MaskReader(graph)
    masks = {name: reader.window(name) for name in {node.operands[3]: None for node in nodes}}
    found = {node.name: masks[node.operands[3]] for node in nodes}
    return {name: window for name, window in found.items() if window is not None}


def over_windows(graph: Graph) -> tuple[str, ...]:
    """The names of the attention operators whose mask is a sliding window, of fewer keys than there are."""
    return tuple(_windows(graph))


def over_narrow_windows(graph: Graph) -> tuple[str, ...]:
    """Those of long sequences whose window is half of the keys or less: a kernel that reads the mask would compute
    twice as much, or more."""
    lengths = {name: graph.tensors[graph.node_by_name[name].operands[1]].shape[2] for name in _windows(graph)}
    return tuple(
        name for name, window in _windows(graph).items()
        if lengths[name] >= TOLD_SEQUENCE and 2 * window.size <= lengths[name]
    )  # fmt: skip


def with_windows(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which these operators are told their window, without what only made masks. Raises PlanError where
    one has none."""
    found = _windows(graph)
    wrong = sorted(set(names) - set(found))
    if wrong:
        raise PlanError(f"expected attention under a mask that is a window at {wrong[0]!r}, found none; plan again")
    nodes = [_told(graph, node, found[node.name]) if node.name in names else node for node in graph.nodes]
    return with_nodes(graph, needed(nodes, {*graph.outputs, *graph.mutations.values()}), graph.tensors)


def _may_be(graph: Graph, node: Node) -> bool:
    """Whether it has a mask of booleans and nothing else that the runtime's function does not know."""
    if node.op != TORCH_ATTENTION or len(node.operands) != 4 or len(references(node.args)) != 4:
        return False
    call = call_of(graph, node)
    query, key, value, mask = call.operand_shapes
    is_plain = not call.arguments["is_causal"] and float(call.arguments["dropout_p"]) == 0.0
    is_alike = len(query) == 4 and query[0] == key[0] and key[:3] == value[:3] and query[2] == key[2] > 1
    is_mask = call.tensor(3).dtype == "bool" and mask[-2:] == (query[2], query[2])
    gradients = {call.tensor(position).differentiable for position in range(3)}
    return is_plain and is_alike and is_mask and query[1] % key[1] == 0 and len(gradients) == 1


def _told(graph: Graph, node: Node, window: SeenWindow) -> Node:
    heads = unrepeated_heads(graph, node)
    names = [node.operands[0], *(heads or node.operands[1:3])]
    names += [] if window.documents is None else [window.documents]
    arguments = call_of(graph, node).arguments
    kwargs = {
        "scale": arguments["scale"], "enable_gqa": bool(heads) or bool(arguments["enable_gqa"]),
        "window": window.size, "length": graph.tensors[names[0]].shape[2],
    }  # fmt: skip
    return replace(node, op=WINDOW_ATTENTION, args=tuple(map(Ref, names)), kwargs=tuple(kwargs.items()))


# Masks ----------------------------------------


class MaskReader:
    """What masks of a graph say."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.fixed, self.constants = graph, constant_tensors(graph), Constants(graph)

    def window(self, name: str, may_be_whole: bool = False) -> SeenWindow | None:
        """None where a mask of booleans is no window; of fewer keys than there are, or as many."""
        length, samples = self.graph.tensors[name].shape[-1], self.graph.tensors[name].shape[0]
        places = torch.arange(length)
        true = torch.tensor(True)
        seen = Intervals(torch.zeros_like(places), torch.full_like(places, length), length, true, ~true)
        leaves = [*self._leaves(name, length)]
        documents = {found for leaf in leaves if (found := self._documents(leaf)) is not None}
        if len(documents) > 1:
            return None
        told = next(iter(documents), None)
        for leaf in leaves:
            if self._documents(leaf) is None:
                interval = self._interval(leaf, length, told)
                if interval is None:
                    return None
                seen = common(seen, interval)
        size = length - int(seen.first[-1])
        is_window = bool((seen.after == places + 1).all() and (seen.first == (places - size + 1).clamp(min=0)).all())
        is_whole = told is None or self.graph.tensors[told].shape == (samples, length)
        is_size = 0 < size < length + may_be_whole
        return SeenWindow(size, told) if is_window and is_whole and is_size else None

    def _leaves(self, name: str, length: int) -> Iterator[str]:
        """What is all true where a mask is."""
        node = self.graph.producers.get(name)
        is_fixed = node is None or (name in self.fixed and self.constants[name] is not None)
        if node is not None and not is_fixed and node.op in _AND:
            for operand in node.operands:
                yield from self._leaves(operand, length)
        elif node is not None and not is_fixed and node.op in _VIEWS and self._keeps_matrices(node, length):
            yield from self._leaves(node.operands[0], length)
        else:
            yield name

    def _keeps_matrices(self, node: Node, length: int) -> bool:
        shapes = [self.graph.tensors[name].shape for name in (node.operands[0], node.results[0])]
        return all(shape[-2:] == (length, length) for shape in shapes)

    def _interval(self, name: str, length: int, documents: str | None) -> Intervals | None:
        """In which columns of each row a mask is true, as far as documents are the same."""
        if name in self.fixed:
            return _true_interval(self.constants[name], length)
        node = self.graph.producers.get(name)
        if node is not None and node.op in _ALL_TRUE and self.graph.tensors[name].dtype == "bool":
            return _true_interval(torch.tensor(True), length)
        if node is None or node.op not in _COMPARED or documents is None or len(node.operands) != 2:
            return None
        one, other = (self._positions(operand) for operand in node.operands)
        if one is None or other is None or {one[1], other[1]} != {-1, -2} or one[0] != other[0]:
            return None
        if not _is_numbered_by_breaks(self.graph, documents, one[0]):
            return None
        way = _COMPARED[node.op]
        if one[1] == -2:
            one, other, way = other, one, {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}[way]
        places = torch.arange(length)
        return compared(places + one[2], places + other[2], way)

    def _documents(self, name: str) -> str | None:
        """Of a comparison of numbers of rows and of columns, what has them."""
        node = self.graph.producers.get(name)
        if node is None or node.op != "aten.eq.Tensor" or name in self.fixed or len(node.operands) != 2:
            return None
        one, other = (self._positions(operand) for operand in node.operands)
        if one is None or other is None or one[0] != other[0] or one[2] or other[2]:
            return None
        return one[0] if {one[1], other[1]} == {-1, -2} else None

    def _positions(self, name: str) -> tuple[str, int, int] | None:
        """Of a column (…, rows, 1) or a row (…, 1, columns): the tensor (samples, positions) that it is, along which
        of the last two dims, and what is added to it."""
        added, shape = 0, self.graph.tensors[name].shape
        if len(shape) < 3 or 1 not in shape[-2:] or any(size != 1 for size in shape[1:-2]):
            return None
        along = -2 if shape[-1] == 1 else -1
        while len(self.graph.tensors[name].shape) > 2:
            node = self.graph.producers.get(name)
            if node is None:
                return None
            if node.op in ("aten.sub.Tensor", "aten.add.Tensor") and len(node.args) == 2 and not node.kwargs:
                left, right = node.args
                if not isinstance(left, Ref) or not isinstance(right, int) or isinstance(right, bool):
                    return None
                added += -right if node.op == "aten.sub.Tensor" else right
                name = left.tensor
            elif node.op in _VIEWS and self._is_same(node):
                name = node.operands[0]
            else:
                return None
        return name, along, added

    def _is_same(self, node: Node) -> bool:
        """Whether a view adds or takes dims of one element alone."""
        one, other = (
            [size for size in self.graph.tensors[name].shape if size > 1]
            for name in (node.operands[0], node.results[0])
        )
        return one == other


def _true_interval(value: Value, length: int) -> Intervals | None:
    """Of a mask's value; of one that is true everywhere, all."""
    if isinstance(value, Intervals):
        return true_in(value) if value.inside.dtype == torch.bool else None
    number = one_number(value)
    if number is None or number.dtype != torch.bool or not bool(number):
        return None
    first = torch.zeros(length, dtype=torch.int64)
    return Intervals(first, torch.full_like(first, length), length, number, ~number)


def _is_numbered_by_breaks(graph: Graph, documents: str, positions: str) -> bool:
    """Whether documents are the sums, along positions, of whether these do not go on by one:
    cumsum(c[:, 1:] − c[:, :-1] ≠ 1) of c = cat(p[:, :1] − a, p), whose first element makes no difference."""
    summed = graph.producers.get(documents)
    unequal = _made_by(graph, summed, "aten.cumsum.default")
    step = _made_by(graph, unequal, "aten.ne.Scalar")
    if summed is None or unequal is None or step is None or len(graph.tensors[documents].shape) != 2:
        return False
    if summed.args[1] not in (-1, 1) or unequal.args[1] != 1 or step.op != "aten.sub.Tensor" or step.kwargs:
        return False
    ends = [graph.producers.get(name) for name in step.operands]
    length = graph.tensors[documents].shape[1]
    slices = [(1, length + 1), (0, length)]
    if len(ends) != 2 or any(one is None or not _is_slice(one, *at) for one, at in zip(ends, slices, strict=True)):
        return False
    sources = {one.operands[0] for one in ends if one is not None}
    joined = graph.producers.get(next(iter(sources)))
    if len(sources) != 1 or joined is None or joined.op != "aten.cat.default" or len(joined.operands) != 2:
        return False
    first, rest = joined.operands
    is_joined = graph.tensors[first].shape[1:] == (1,) and (joined.args[1:] or (0,))[0] in (-1, 1)
    return is_joined and rest == positions and graph.tensors[positions].shape == graph.tensors[documents].shape


def _made_by(graph: Graph, node: Node | None, op: str) -> Node | None:
    """Where a node is such an operator, what made its first operand."""
    return graph.producers.get(node.operands[0]) if node is not None and node.op == op and not node.kwargs else None


def _is_slice(node: Node, begin: int, end: int) -> bool:
    return node.op == "aten.slice.Tensor" and node.args[1] in (-1, 1) and node.args[2:] == (begin, end)
