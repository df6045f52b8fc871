"""Scores under a mask that is the causal one: the mask of one sample and head, which all others have, too.

    softmax(scores + mask) → softmax(scores + triangle)      where mask = triangle, expanded

Where attention is written out, as it is with dropout, or in models that do not call a kernel, a mask that was made for
each sample is kept for each: of long sequences it is larger than what the attention itself leaves. That it is the
causal one is found as for kernels (`masks`), by values: numbers at most half of the dtype's least count as −∞, since
after the softmax they are exactly nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.graph import Atom, Graph, Node, Ref, Tensor, found_once, map_references, needed, with_nodes
from autopar.substitute.constants import Constants
from autopar.substitute.masks import is_causal

RULE = "causal-scores"
STATEMENT = "softmax(scores + mask) => softmax(scores + triangle) where mask is the lower triangle for all samples"
_ADDS = "aten.add.Tensor"
_SOFTMAX = ("aten._safe_softmax.default", "aten.softmax.int", "aten._softmax.default")


@found_once
def under_expanded_masks(graph: Graph) -> tuple[str, ...]:
    """The names of the operators that add a causal mask, made for each sample or head, to scores."""
    found = [(node, name) for node in graph.nodes if (name := _mask(graph, node)) is not None]
    if not found:
        return ()
    constants = Constants(graph)
    is_triangle = {name: is_causal(constants[name]) for name in {name for _, name in found}}
    return tuple(node.name for node, name in found if is_triangle[name])


def with_triangles(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which these add a mask of one sample and head, without what only made the others.

    Raises PlanError where one of them does not add a causal mask.
    """
    if wrong := sorted({*names}.difference(under_expanded_masks(graph))):
        raise PlanError(f"expected scores under a causal mask at {wrong[0]!r}, found none; plan again")
    nodes, tensors, made = list[Node](), dict(graph.tensors), dict[Tensor, str]()
    for node in graph.nodes:
        mask = _mask(graph, node) if node.name in names else None
        if mask is not None:
            like = replace(graph.tensors[mask], name="", shape=graph.tensors[mask].shape[-2:], differentiable=False)
            if like not in made:
                made[like] = _triangle(graph, node, like, nodes, tensors)
            node = _adding(node, mask, made[like])
        nodes.append(node)
    return with_nodes(graph, needed(nodes, {*graph.outputs, *graph.mutations.values()}), tensors)


def _mask(graph: Graph, node: Node) -> str | None:
    """What an operator adds to scores of which a softmax is taken, where that is larger than one of their matrices."""
    if node.op != _ADDS or len(set(node.operands)) != 2 or node.kwargs:
        return None
    scores, mask = (graph.tensors[name] for name in node.operands)
    readers = graph.consumers.get(node.results[0], [])
    is_softmax = len(readers) == 1 and _is_over_keys(readers[0][0], len(scores.shape))
    is_square = len(scores.shape) > 2 and scores.shape[-1] == scores.shape[-2] and mask.shape[-2:] == scores.shape[-2:]
    is_expanded = mask.num_elements > math.prod(mask.shape[-2:])
    return mask.name if is_softmax and is_square and is_expanded and not mask.differentiable else None


def _is_over_keys(node: Node, num_dims: int) -> bool:
    return node.op in _SOFTMAX and node.args[1] in (-1, num_dims - 1)


def _triangle(graph: Graph, node: Node, like: Tensor, nodes: list[Node], tensors: dict[str, Tensor]) -> str:
    """Adds the operators that make it, before the first that reads it; its name."""
    full, triangle = (_fresh(tensors, f"{node.results[0]}_{what}") for what in ("hidden", "triangle"))
    kwargs = ("dtype", Atom("dtype", like.dtype)), ("device", Atom("device", "rank"))
    size = tuple(like.shape)
    for name, op, args, told in (
        (full, "aten.full.default", (size, -math.inf), kwargs),
        (triangle, "aten.triu.default", (Ref(full), 1), ()),
    ):
        nodes.append(Node(name, op, args, told, (name,), node.scope, node.source))
        tensors[name] = replace(like, name=name)
    return triangle


def _adding(node: Node, mask: str, triangle: str) -> Node:
    return replace(node, args=map_references(node.args, lambda one: Ref(triangle if one == mask else one)))


def _fresh(tensors: dict[str, Tensor], name: str) -> str:
    return _fresh(tensors, f"{name}_") if name in tensors else name
