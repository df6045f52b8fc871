"""Attention under a mask that is the causal one: kernels know it, so nobody has to make it and read it.

    attention(q, k, v, mask) → causal attention(q, k, v)      where mask = lower triangle, and as many keys as queries

No algebra says so: the mask depends on no input and no parameter, and its value is found here, of long sequences by
counting (`constants`). Masks of numbers that are added to the scores count as causal where they are 0 for what may be
seen and at most half of the dtype's least number elsewhere: after the softmax that is exactly nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Ref, found_once, needed, with_nodes
from autopar.substitute.constants import Constants, Value
from autopar.substitute.intervals import Intervals

RULE = "causal-mask"
STATEMENT = "attention(q, k, v, mask) => causal attention(q, k, v) where mask is the lower triangle"
ATTENTION = "aten.scaled_dot_product_attention.default"


@found_once
def under_causal_masks(graph: Graph) -> tuple[str, ...]:
    """The names of the attention operators whose mask is the causal one, the same for every sample and head."""
    masked = [
        node for node in graph.nodes if node.op == ATTENTION and _mask(node) is not None and _is_square(graph, node)
    ]
    if not masked:
        return ()
    constants = Constants(graph)
    causal = {name: is_causal(constants[name]) for name in {_mask(node) or "": None for node in masked}}
    return tuple(node.name for node in masked if causal[_mask(node) or ""])


def without_masks(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which these operators are told that they are causal, without what only made masks.

    Raises PlanError where one of them is not.
    """
    found = set(under_causal_masks(graph))
    if not found.issuperset(names):
        wrong = sorted(set(names) - found)
        raise PlanError(f"expected attention under a causal mask at {wrong[0]!r}, found none; plan again")
    nodes = [_causal(node) if node.name in names else node for node in graph.nodes]
    return with_nodes(graph, needed(nodes, {*graph.outputs, *graph.mutations.values()}), graph.tensors)


def _mask(node: Node) -> str | None:
    """The mask of an attention operator that is not told to be causal as well."""
    given = dict(node.kwargs)
    mask = node.args[3] if len(node.args) > 3 else given.get("attn_mask")
    causal = node.args[5] if len(node.args) > 5 else given.get("is_causal", False)
    return mask.tensor if isinstance(mask, Ref) and not causal else None


def _is_square(graph: Graph, node: Node) -> bool:
    query, key = (graph.tensors[name].shape[-2] for name in node.operands[:2])
    return query == key


def _causal(node: Node) -> Node:
    kwargs = tuple(item for item in node.kwargs if item[0] not in ("attn_mask", "is_causal", "dropout_p"))
    dropout = node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("dropout_p", 0.0)
    return replace(node, args=(*node.args[:3], None, dropout, True), kwargs=kwargs)


def is_causal(mask: Value) -> bool:
    """Whether a constant is the causal mask, of booleans or of what is added to scores."""
    if isinstance(mask, Tensor):
        return mask.dim() > 1 and all(map(_is_triangle, _distinct(mask)))
    return isinstance(mask, Intervals) and mask.is_causal


def _distinct(mask: Tensor) -> Iterable[Tensor]:
    """The matrices of a stack, without those that are others' by expansion."""
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask.reshape(-1, *mask.shape[-2:])


def _is_triangle(mask: Tensor) -> bool:
    seen = torch.ones(mask.shape, dtype=torch.bool).tril()
    if mask.dtype == torch.bool:
        return bool(torch.equal(mask, seen))
    if not mask.dtype.is_floating_point or mask.shape[-1] != mask.shape[-2]:
        return False
    hidden = mask[~seen]
    return bool((mask[seen] == 0).all() and (hidden <= torch.finfo(mask.dtype).min / 2).all())
