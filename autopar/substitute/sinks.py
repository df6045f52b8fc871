"""Attention with sinks that is written out: it is told the window, and neither scores nor a mask are made.

    weights = softmax(cat(q·kᵀ·s + mask, sinks) − maximum)          sinks: one score of each head, of no key
    weights[…, :keys] · v → sink attention(q, k, v, sinks)          where mask hides all but i − w < j ≤ i, of the same
                                                                    document or not

So gpt-oss has it. The mask is one of numbers, 0 where a boolean one is true (`bands` reads that) and at most half of
the dtype's least number elsewhere: after the softmax that is exactly nothing, since each query sees itself. A window
may be as long as the sequence. Dropout of the weights stays written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from autopar.errors import PlanError
from autopar.ir.graph import Atom, Graph, Node, Ref, found_once, needed, with_nodes
from autopar.ops.window_attention import SINK_ATTENTION
from autopar.substitute.bands import MaskReader, SeenWindow
from autopar.substitute.constants import one_number
from autopar.substitute.heads import RESHAPES, unrepeated
from autopar.tunables import TOLD_SEQUENCE

RULE = "sink-attention"
STATEMENT = "slice(softmax(cat(scores + mask, sinks))) · v => attention over a window with sinks, without a mask"
_PRODUCT, _SUM, _SCALED = "aten.matmul.default", "aten.add.Tensor", "aten.mul.Tensor"
_SAME = ("aten.alias.default", "aten.detach.default")


class SinkAttention(NamedTuple):
    """What attention that is written out reads, by the names of tensors, and how its scores are scaled. The sinks are
    one score a head (heads,)."""

    query: str
    key: str
    value: str
    sinks: str
    mask: str
    scale: float


@found_once
def _attention(graph: Graph) -> dict[str, tuple[SinkAttention, SeenWindow]]:
    """By the product with the values."""
    written = {node.name: found for node in graph.nodes if (found := _written(graph, node)) is not None}
    if not written:
        return {}
    reader = MaskReader(graph)
    windows = {mask: _window(graph, reader, mask) for mask in {found.mask: None for found in written.values()}}
    pairs = {name: (found, windows[found.mask]) for name, found in written.items()}
    return {
        name: (found, window)
        for name, (found, window) in pairs.items()
        if window is not None and (window.documents is None or _has_each_sample(graph, found))
    }


def _has_each_sample(graph: Graph, found: SinkAttention) -> bool:
    return graph.tensors[found.mask].shape[0] == graph.tensors[found.query].shape[0]


def over_sinks(graph: Graph) -> tuple[str, ...]:
    """The names of the products with values that attention with sinks under a window ends with."""
    return tuple(_attention(graph))


def over_long_sinks(graph: Graph) -> tuple[str, ...]:
    """Those of long sequences, whose scores would take most of the memory."""
    return tuple(name for name, (found, _) in _attention(graph).items() if _length(graph, found) >= TOLD_SEQUENCE)


def _length(graph: Graph, found: SinkAttention) -> int:
    return graph.tensors[found.query].shape[2]


def with_sinks(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which these are one operator that is told its window, without what only made scores and masks.
    Raises PlanError where one is no such product."""
    found = _attention(graph)
    if wrong := sorted(set(names) - set(found)):
        raise PlanError(f"expected attention with sinks under a window at {wrong[0]!r}, found none; plan again")
    nodes = [_told(graph, node, *found[node.name]) if node.name in names else node for node in graph.nodes]
    return with_nodes(graph, needed(nodes, {*graph.outputs, *graph.mutations.values()}), graph.tensors)


def _told(graph: Graph, node: Node, found: SinkAttention, window: SeenWindow) -> Node:
    heads = [unrepeated(graph, name) for name in (found.key, found.value)]
    is_grouped = None not in heads and len({graph.tensors[name or ""].shape[1] for name in heads}) == 1
    sides = [name for name in heads if name is not None] if is_grouped else [found.key, found.value]
    names = [found.query, *sides, found.sinks, *([window.documents] if window.documents else [])]
    kwargs = {"scale": found.scale, "enable_gqa": is_grouped, "window": window.size, "length": _length(graph, found)}
    return replace(node, op=SINK_ATTENTION, args=tuple(map(Ref, names)), kwargs=tuple(kwargs.items()))


# What is written out ----------------------------------------


def _written(graph: Graph, node: Node) -> SinkAttention | None:
    """What a product with values is of, from its weights back to queries and keys."""
    softmax = _softmax_of_keys(graph, node)
    if softmax is None:
        return None
    joined = _joined(graph, softmax)
    if joined is None:
        return None
    scores, sinks = _scores(graph, joined.operands[0]), _heads_of_column(graph, joined.operands[1])
    if scores is None or sinks is None:
        return None
    query, key, mask, scale = scores
    found = SinkAttention(query, key, node.operands[1], sinks, mask, scale)
    return found if _is_alike(graph, found, node) else None


def _is_alike(graph: Graph, found: SinkAttention, node: Node) -> bool:
    """Whether as many queries as keys have heads of their own, in one precision, all with a gradient or none."""
    query, key, value, sinks, mask = (graph.tensors[name] for name in found[:5])
    sides = (query, key, value)
    is_one = len({x.dtype for x in (*sides, sinks, graph.tensors[node.results[0]])}) == 1
    has_heads = len({(len(x.shape), x.shape[:3]) for x in sides}) == 1 and len(query.shape) == 4
    is_square = has_heads and query.shape[2] > 1 and mask.shape[-2:] == (query.shape[2],) * 2
    is_one_mask = len(mask.shape) == 4 and mask.shape[1] == 1 and mask.shape[0] in (1, query.shape[0])
    is_wide = has_heads and query.shape[3] == key.shape[3] and sinks.shape == (query.shape[1],)
    return is_one and is_square and is_one_mask and is_wide and len({x.differentiable for x in sides}) == 1


def _softmax_of_keys(graph: Graph, node: Node) -> Node | None:
    """What weights are a softmax of, all but the last of its columns."""
    if node.op != _PRODUCT or len(set(node.operands)) != 2:
        return None
    cut = _producer(graph, node.operands[0])
    if cut is None or cut.op != "aten.slice.Tensor" or cut.kwargs or len(cut.args) != 4:
        return None
    rank = len(graph.tensors[cut.results[0]].shape)
    columns = graph.tensors[cut.operands[0]].shape[-1]
    softmax = _producer(graph, cut.operands[0])
    is_cut = cut.args[1] in (-1, rank - 1) and cut.args[2] == 0 and cut.args[3] in (-1, columns - 1)
    if not is_cut or softmax is None or softmax.op != "aten.softmax.int" or softmax.args[1] not in (-1, rank - 1):
        return None
    dtypes = {graph.tensors[name].dtype for name in (softmax.operands[0], softmax.results[0], node.results[0])}
    told = {one.name for one in softmax.args if isinstance(one, Atom)}
    return softmax if len(dtypes) == 1 and told <= dtypes and not softmax.kwargs else None


def _joined(graph: Graph, softmax: Node) -> Node | None:
    """Scores of keys and, as the last column, of sinks: less their maximum, which makes no difference, or not."""
    node = _producer(graph, softmax.operands[0])
    if node is not None and node.op == "aten.sub.Tensor" and len(node.operands) == 2 and not node.kwargs:
        whole, greatest = _source(graph, node.operands[0]), _producer(graph, node.operands[1])
        if greatest is None or not _is_maximum(graph, greatest, node.operands[1], whole):
            return None
        node = graph.producers.get(whole)
    if node is None or node.op != "aten.cat.default" or len(node.operands) != 2 or node.kwargs:
        return None
    along = node.args[1] if len(node.args) > 1 else 0
    return node if along in (-1, len(graph.tensors[node.results[0]].shape) - 1) else None


def _is_maximum(graph: Graph, node: Node, name: str, whole: str) -> bool:
    """Whether a tensor is the maximum of all columns, kept as one."""
    last = len(graph.tensors[whole].shape) - 1
    is_first = _source(graph, name) == node.results[0]
    is_kept = graph.tensors[node.results[0]].shape == (*graph.tensors[whole].shape[:-1], 1)
    if node.op == "aten.max.dim":
        is_last = node.args[1] in (-1, last)
    else:
        is_last = node.op == "aten.amax.default" and node.args[1] in ((-1,), (last,))
    return is_last and is_first and is_kept and _source(graph, node.operands[0]) == whole


def _scores(graph: Graph, name: str) -> tuple[str, str, str, float] | None:
    """Of scores under a mask: queries, keys, the mask and what their product is scaled by."""
    node, scale = _producer(graph, name), 1.0
    if node is None or node.op != _SUM or len(node.operands) != 2 or node.kwargs:
        return None
    mask, product = node.operands[1], _producer(graph, node.operands[0])
    if product is not None and product.op == _SCALED and len(product.operands) == 1:
        number = product.args[1]
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        scale, product = float(number), _producer(graph, product.operands[0])
    if product is None or product.op != _PRODUCT or len(product.operands) != 2:
        return None
    turned = _producer(graph, product.operands[1])
    if turned is None or turned.op != "aten.transpose.int":
        return None
    rank = len(graph.tensors[turned.results[0]].shape)
    dims = {int(dim) % rank for dim in turned.args[1:3] if isinstance(dim, int)}
    return (product.operands[0], turned.operands[0], mask, scale) if dims == {rank - 2, rank - 1} else None


def _heads_of_column(graph: Graph, name: str) -> str | None:
    """Of a column (samples, heads, queries, 1) that is one number a head, these (heads,)."""
    expanded = _producer(graph, name)
    shape = graph.tensors[name].shape
    if expanded is None or expanded.op != "aten.expand.default" or len(shape) != 4 or shape[-1] != 1:
        return None
    reshaped, one = _producer(graph, expanded.operands[0]), graph.tensors[expanded.operands[0]].shape
    is_of_heads = one == (1, shape[1], 1, 1) and reshaped is not None and reshaped.op in RESHAPES
    if reshaped is None or not is_of_heads:
        return None
    return reshaped.operands[0] if graph.tensors[reshaped.operands[0]].shape == (shape[1],) else None


def _window(graph: Graph, reader: MaskReader, mask: str) -> SeenWindow | None:
    """What a mask that is added to scores lets through: where(window, 0, hidden)."""
    node = _producer(graph, mask)
    if node is None or node.op != "aten.where.self" or len(node.operands) != 3:
        return None
    seen, shown, hidden = node.operands
    numbers = [one_number(reader.constants[name]) if name in reader.fixed else None for name in (shown, hidden)]
    if numbers[0] is None or numbers[1] is None or bool(numbers[0] != 0):
        return None
    dtype = getattr(torch, graph.tensors[mask].dtype)
    is_same = graph.tensors[seen].dtype == "bool" and graph.tensors[seen].shape == graph.tensors[mask].shape
    return reader.window(seen, may_be_whole=True) if is_same and _hides(numbers[1], dtype) else None


def _hides(number: torch.Tensor, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and bool(number.double() <= torch.finfo(dtype).min / 2)


def _producer(graph: Graph, name: str) -> Node | None:
    return graph.producers.get(_source(graph, name))


def _source(graph: Graph, name: str) -> str:
    """What a tensor is another name of."""
    node = graph.producers.get(name)
    return _source(graph, node.operands[0]) if node is not None and node.op in _SAME else name
