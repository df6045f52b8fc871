"""Graphs whose sequences may be split: what says so of attention, and of a loss over the tokens of all samples.

    attention(q, k, v)                                 → context_attention(q, k, v)
    context_attention(q, k, v), attention(q, k, v, m)  → the same in a ring, and back
    cross_entropy(reshape(x, (B·S, C)), reshape(t))    → cross_entropy(permute(x, (B, C, S)), t)

Samples and positions in one dim can be split by samples alone; a mean or sum over both does not ask for their order.
Keys and values that models repeat for each query head of a group are read as they are before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Ref, Tensor, map_references, needed, references, with_nodes
from autopar.ops.call import Call, call_of
from autopar.ops.context import CONTEXT_ATTENTION, TORCH_ATTENTION, as_torch, may_split
from autopar.ops.window_attention import WINDOWED
from autopar.substitute.heads import RESHAPES, unrepeated_heads

RULE = "split-sequence"
RING_RULE = "ring-attention"
STATEMENT = "attention and losses over samples × positions => the same, which may be split by positions"
RING_STATEMENT = "attention => the same; split by positions, keys and values pass from rank to rank"
GATHER_RULE = "gathered-attention"
GATHER_STATEMENT = "attention in a ring => the same; split by positions, keys and values are gathered"
_LOSS = "aten.cross_entropy_loss.default"


def over_sequences(graph: Graph) -> tuple[str, ...]:
    """The names of the operators that can be told."""
    return tuple(node.name for node in graph.nodes if _is_attention(graph, node) or _is_loss(graph, node))


def with_sequences(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which these operators are told. Raises PlanError where one cannot be."""
    wrong = sorted(set(names) - set(over_sequences(graph)))
    if wrong:
        raise PlanError(f"expected attention, or a loss over positions, at {wrong[0]!r}, found none; plan again")
    nodes, tensors = list[Node](), dict(graph.tensors)
    for node in graph.nodes:
        if node.name not in names:
            nodes.append(node)
        elif node.op == _LOSS:
            nodes += _loss(graph, node, tensors)
        else:
            nodes.append(_attention(graph, node))
    return with_nodes(graph, needed(nodes, {*graph.outputs, *graph.mutations.values()}), tensors)


# Attention ----------------------------------------


def over_rings(graph: Graph) -> tuple[str, ...]:
    """The names of the attention operators whose keys and values can pass from rank to rank."""
    return tuple(node.name for node in graph.nodes if _may_ring(graph, node))


def with_rings(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which these operators do so. Raises PlanError where one cannot."""
    wrong = sorted(set(names) - set(over_rings(graph)))
    if wrong:
        raise PlanError(f"expected attention whose keys can pass around at {wrong[0]!r}, found none; plan again")
    nodes = [_in_ring(graph, node) if node.name in names else node for node in graph.nodes]
    return with_nodes(graph, needed(nodes, {*graph.outputs, *graph.mutations.values()}), graph.tensors)


def in_rings(graph: Graph) -> tuple[str, ...]:
    """The names of the attention operators that do."""
    ops = CONTEXT_ATTENTION, *WINDOWED
    return tuple(node.name for node in graph.nodes if node.op in ops and dict(node.kwargs).get("ring"))


def with_gathers(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which these operators do so no more. Raises PlanError where one does not."""
    wrong = sorted(set(names) - set(in_rings(graph)))
    if wrong:
        raise PlanError(f"expected attention in a ring at {wrong[0]!r}, found none; plan again")
    nodes = [_gathered(node) if node.name in names else node for node in graph.nodes]
    return with_nodes(graph, needed(nodes, {*graph.outputs, *graph.mutations.values()}), graph.tensors)


def _gathered(node: Node) -> Node:
    """A mask is read whole along the keys, which torch's own operator does."""
    plain = replace(node, kwargs=tuple((name, value) for name, value in node.kwargs if name != "ring"))
    return plain if len(node.operands) == 3 or node.op in WINDOWED else as_torch(plain)


def _may_ring(graph: Graph, node: Node) -> bool:
    if node.op in WINDOWED:
        return True
    if node.op not in (TORCH_ATTENTION, CONTEXT_ATTENTION) or not _is_positional(node):
        return False
    call = call_of(graph, node)
    return float(call.arguments["dropout_p"]) == 0.0 and may_split(call, ring=True)


def _in_ring(graph: Graph, node: Node) -> Node:
    told = node if node.op != TORCH_ATTENTION else _attention(graph, node)
    return replace(told, kwargs=tuple({**dict(told.kwargs), "ring": True}.items()))


def _is_attention(graph: Graph, node: Node) -> bool:
    if node.op != TORCH_ATTENTION:
        return False
    call = call_of(graph, node)
    return float(call.arguments["dropout_p"]) == 0.0 and may_split(call) and _is_positional(node)


def _is_positional(node: Node) -> bool:
    """Whether its tensors come by position."""
    return len(references(node.args)) == len(node.operands)


def _attention(graph: Graph, node: Node) -> Node:
    """The call with its number of keys, on heads that are not repeated."""
    query, key = node.operands[:2]
    names, kwargs, heads = node.operands, dict(node.kwargs), unrepeated_heads(graph, node)
    if heads is not None:
        names, kwargs = (query, *heads, *node.operands[3:]), {**kwargs, "enable_gqa": True}
    given = iter(names)
    args = map_references(node.args, lambda _: Ref(next(given)))
    length = graph.tensors[key].shape[-2]
    return replace(node, op=CONTEXT_ATTENTION, args=args, kwargs=tuple({**kwargs, "length": length}.items()))


# Losses ----------------------------------------


def _is_loss(graph: Graph, node: Node) -> bool:
    """Whether logits (samples, positions, …, classes) and their targets are reshaped for it, and summed up by it."""
    if node.op != _LOSS or not _is_positional(node):
        return False
    call = call_of(graph, node)
    sources = _reshaped(call)
    if call.arguments["reduction"] not in (1, 2) or sources is None:
        return False
    (*rows, classes), targets = (graph.tensors[name].shape for name in sources)
    return len(rows) > 1 and tuple(rows) == targets and call.shape(0) == (math.prod(rows), classes)


def _reshaped(call: Call) -> tuple[str, str] | None:
    """What logits and targets are reshaped from."""
    made = [call.graph.producers.get(name) for name in call.node.operands[:2]]
    if any(node is None or node.op not in RESHAPES for node in made):
        return None
    logits, targets = (node.operands[0] for node in made if node is not None)
    return logits, targets


def _loss(graph: Graph, node: Node, tensors: dict[str, Tensor]) -> list[Node]:
    """The loss of logits whose classes are their second dim, as torch has it, and what moves them there."""
    found = _reshaped(call_of(graph, node))
    assert found is not None
    logits, targets = found
    shape = graph.tensors[logits].shape
    order = (0, len(shape) - 1, *range(1, len(shape) - 1))
    name = f"{node.name}_by_position"
    tensors[name] = replace(graph.tensors[logits], name=name, shape=tuple(shape[dim] for dim in order))
    moved = Node(name, "aten.permute.default", (Ref(logits), order), (), (name,), node.scope, node.source)
    given = iter((name, targets, *node.operands[2:]))
    return [moved, replace(node, args=map_references(node.args, lambda _: Ref(next(given))))]
