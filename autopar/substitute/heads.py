"""Attention that reads each head of keys and values once, where a model repeats it for the queries of its group.

    attention(q, repeated(k), repeated(v), mask) → grouped attention(q, k, v, mask)
                                            where repeated(x) = reshape(expand(unsqueeze(x, 2)))

Decoders of transformers repeat the heads of grouped keys as soon as there is a mask. In a decode step that is most of
what it does: all of the cache is copied, and read several times, for one query of each sequence; in a prefill step of
64 tokens and 256 positions it is more than half of what attention takes beside it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref, map_references, needed, references, with_nodes
from autopar.ops.call import Call

ATTENTION = "aten.scaled_dot_product_attention.default"
RESHAPES = ("aten.reshape.default", "aten.view.default")


def with_grouped_heads(graph: Graph) -> Graph:
    """The graph whose attention reads heads that are not repeated, without what repeated them.

    Attention that is causal by itself, or has a gradient, stays as it is: many kernels of GPUs know grouped heads under
    no mask, and what they save for a gradient differs.
    """
    nodes = [_grouped(graph, node) if _is_plain(graph, node) else node for node in graph.nodes]
    if nodes == list(graph.nodes):
        return graph
    return with_nodes(graph, needed(nodes, {*graph.outputs, *graph.mutations.values()}), graph.tensors)


def unrepeated_heads(graph: Graph, node: Node) -> tuple[str, str] | None:
    """The keys and values of an attention operator before their heads were repeated alike; None where they were not."""
    found = [unrepeated(graph, name) for name in node.operands[1:3]]
    key, value = found
    if key is None or value is None or dict(node.kwargs).get("enable_gqa"):
        return None
    return (key, value) if graph.tensors[key].shape[:-1] == graph.tensors[value].shape[:-1] else None


def unrepeated(graph: Graph, name: str) -> str | None:
    """The heads (batch, heads, …) that are repeated for neighbours: reshape(expand(unsqueeze(heads, 2)))."""
    chain = list[Node]()
    for ops in (RESHAPES, ("aten.expand.default",), ("aten.unsqueeze.default",)):
        node = graph.producers.get(name)
        if node is None or node.op not in ops:
            return None
        chain.append(node)
        name = node.operands[0]
    heads, grouped, made = graph.tensors[name].shape, chain[1].results[0], chain[0].results[0]
    if len(heads) != 4 or graph.tensors[chain[2].results[0]].shape != (*heads[:2], 1, *heads[2:]):
        return None
    group = graph.tensors[grouped].shape[2]
    is_repeat = graph.tensors[grouped].shape == (*heads[:2], group, *heads[2:])
    return name if is_repeat and graph.tensors[made].shape == (heads[0], heads[1] * group, *heads[2:]) else None


def _is_plain(graph: Graph, node: Node) -> bool:
    if node.op != ATTENTION or len(references(node.args)) != len(node.operands):
        return False
    arguments = Call(graph, node).arguments
    if arguments["is_causal"] or float(arguments["dropout_p"]) > 0.0:
        return False
    has_gradient = any(graph.tensors[name].differentiable for name in node.operands)
    return graph.tensors[node.operands[0]].shape[-2] == 1 or (len(node.operands) > 3 and not has_gradient)


def _grouped(graph: Graph, node: Node) -> Node:
    heads = unrepeated_heads(graph, node)
    if heads is None:
        return node
    given = iter((node.operands[0], *heads, *node.operands[3:]))
    args = map_references(node.args, lambda _: Ref(next(given)))
    return replace(node, args=args, kwargs=(*node.kwargs, ("enable_gqa", True)))
