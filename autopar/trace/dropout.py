"""Writes out the dropout that is hidden inside other operators, so that its mask can be split as any other tensor.

Before → after: attention with dropout → the products, softmax and dropout that torch's own CPU path computes, in its
order, so that results agree with it bit for bit; `dropout_(x)` → `copy_(x, dropout(x))`; and a mask of a transposed
tensor, which torch draws in the order of its memory: `dropout(x.mT)` → `permute(dropout(permute(x.mT)))`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)


def write_out_dropout(module: fx.GraphModule) -> None:
    """Rewrites the exported, not yet functional graph in place."""
    for node in list(module.graph.nodes):
        if node.target == aten.dropout_.default:
            replaced(module, node, _dropout_in_place)
        elif node.target == aten.dropout.default and _memory_order(arguments_of(node)["input"]):
            replaced(module, node, _dropout)
        elif node.target == aten.scaled_dot_product_attention.default and arguments_of(node)["dropout_p"] > 0.0:
            replaced(module, node, _attention)
    module.recompile()


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments by name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    bound.update({argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)})
    return {**bound, **node.kwargs}


class Writer:
    """Inserts calls before a node, with its module and source line."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {key: value for key, value in self.node.meta.items() if key != "val"}
        return made


def replaced(module: fx.GraphModule, node: fx.Node, write: Any) -> None:
    with module.graph.inserting_before(node):
        result = write(Writer(module.graph, node), arguments_of(node))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    module.graph.erase_node(node)


def _memory_order(x: fx.Node) -> list[int]:
    """The dims from the outer one to the inner in the memory of a mask like x; empty where that is their order."""
    mask = torch.empty_like(x.meta["val"])
    order = sorted(range(mask.dim()), key=mask.stride, reverse=True)
    return [] if mask.is_contiguous() else order


def _dropout(call: Writer, given: dict[str, Any]) -> fx.Node:
    source, order = given["input"], _memory_order(given["input"])
    if not order:
        return call(aten.dropout.default, source, given["p"], given["train"])
    dropped = call(aten.dropout.default, call(aten.permute.default, source, order), given["p"], given["train"])
    return call(aten.permute.default, dropped, [order.index(dim) for dim in range(len(order))])


def _dropout_in_place(call: Writer, given: dict[str, Any]) -> fx.Node:
    dropped = _dropout(call, {**given, "input": given["self"]})
    return call(aten.copy_.default, given["self"], dropped)


def _attention(call: Writer, given: dict[str, Any]) -> fx.Node:
    """softmax(q k / √d + mask), dropped, times v. Query and key are each scaled by the root, as torch does."""
    query, key, value = given["query"], given["key"], given["value"]
    shape, dtype = query.meta["val"].shape, query.meta["val"].dtype
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(shape[-1])
    groups = shape[-3] // key.meta["val"].shape[-3] if given["enable_gqa"] else 1
    mask = _mask(call, given, dtype)
    if dtype in _NARROW:
        query, key, value = (call(aten._to_copy.default, x, dtype=torch.float32) for x in (query, key, value))
    if groups > 1:
        key, value = (call(aten.repeat_interleave.self_int, x, groups, -3) for x in (key, value))
    root = math.sqrt(abs(scale))
    query = call(aten.mul.Scalar, query, -root if scale < 0 else root)
    key = call(aten.mul.Scalar, call(aten.transpose.int, key, -2, -1), root)
    scores = call(aten.matmul.default, query, key)
    if mask is not None:
        scores = call(aten.add.Tensor, scores, mask)
    weights = call(aten.dropout.default, call(aten._safe_softmax.default, scores, -1), given["dropout_p"], True)
    result = call(aten.matmul.default, weights, value)
    return call(aten._to_copy.default, result, dtype=dtype) if dtype in _NARROW else result


def _mask(call: Writer, given: dict[str, Any], dtype: torch.dtype) -> fx.Node | None:
    """What is added to the scores: −∞ where a position must not be seen."""
    mask = given["attn_mask"]
    if given["is_causal"]:
        lengths = [given[name].meta["val"].shape[-2] for name in ("query", "key")]
        mask = call(aten.tril.default, call(aten.new_ones.default, given["query"], lengths, dtype=torch.bool))
    elif mask is None or mask.meta["val"].dtype != torch.bool:
        return mask  # type: ignore[no-any-return]
    hidden = call(aten.logical_not.default, mask)
    zeros = call(aten.zeros_like.default, mask, dtype=dtype)
    return call(aten.masked_fill.Scalar, zeros, hidden, -math.inf)
