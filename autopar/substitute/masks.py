"""Attention under a mask that is the causal one: kernels know it, so nobody has to make it and read it.

    attention(q, k, v, mask) → causal attention(q, k, v)      where mask = lower triangle, and as many keys as queries

No algebra says so: the mask depends on no input and no parameter, and is computed here, whole. Masks of numbers that
are added to the scores count as causal where they are 0 for what may be seen and at most half of the dtype's least
number elsewhere: after the softmax that is exactly nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Ref, needed, with_nodes
from autopar.ir.structure import OWN_BACKWARD, constant_tensors
from autopar.ops import run

RULE = "causal-mask"
STATEMENT = "attention(q, k, v, mask) => causal attention(q, k, v) where mask is the lower triangle"
ATTENTION = "aten.scaled_dot_product_attention.default"
MOST_ELEMENTS = 1 << 27
"""Larger masks are left alone."""


def under_causal_masks(graph: Graph) -> tuple[str, ...]:
    """The names of the attention operators whose mask is the causal one."""
    masked = [node for node in graph.nodes if node.op == ATTENTION and _mask(node) is not None]
    if not masked:
        return ()
    constants = constant_tensors(graph)
    known: dict[str, bool] = {}
    for node in masked:
        mask = _mask(node)
        assert mask is not None
        if mask not in known:
            known[mask] = mask in constants and _is_causal(graph, mask)
    return tuple(node.name for node in masked if known[_mask(node) or ""] and _is_square(graph, node))


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


def _is_causal(graph: Graph, name: str) -> bool:
    """Whether a constant is the lower triangle, the same for every sample and head."""
    shape = graph.tensors[name].shape
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] ** 2 > MOST_ELEMENTS:
        return False
    value = _computed(graph, name)
    return value is not None and all(_is_triangle(part) for part in _distinct(value))


def _distinct(mask: torch.Tensor) -> Iterable[torch.Tensor]:
    """The matrices of a stack, without those that are others' by expansion."""
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask.reshape(-1, *mask.shape[-2:])


def _is_triangle(mask: torch.Tensor) -> bool:
    seen = torch.ones(mask.shape, dtype=torch.bool).tril()
    if mask.dtype == torch.bool:
        return bool(torch.equal(mask, seen))
    if not mask.dtype.is_floating_point:
        return False
    hidden = mask[~seen]
    return bool((mask[seen] == 0).all() and (hidden <= torch.finfo(mask.dtype).min / 2).all())


def _computed(graph: Graph, name: str) -> torch.Tensor | None:
    """The value of a constant; None where it cannot be computed here, or is too large on the way."""
    values: dict[str, Any] = dict(graph.values)
    for node in needed(graph.nodes, {name}):
        if any(
            graph.tensors[result].num_elements > MOST_ELEMENTS for result in node.results if "expand" not in node.op
        ):
            return None
        if node.op in OWN_BACKWARD or any(operand not in values for operand in node.operands):
            return None
        results = zip(node.outputs, run(node, values.__getitem__, "cpu"), strict=True)
        values.update((one, value) for one, value in results if one is not None)
    found: torch.Tensor | None = values.get(name)
    return found
