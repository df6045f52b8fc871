"""Cleaning: nodes that compute nothing are removed, and equal nodes are computed once.

Before → after: `y = alias(x); z = f(y)` → `z = f(x)`; an assert → nothing; a node that nothing reads → nothing;
two equal calls of a pure operator in one module → one; `view(clone(x))` → `reshape(x)`, and every view a reshape,
since which of the two it is follows from how a device lays out its results (attention on a CPU, a GPU and meta
tensors differ), and a plan must not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.graph import Atom, Graph, Node, Ref, Stored, needed, reading, with_nodes
from autopar.ir.structure import has_own_backward, is_random

_IDENTITIES = {"aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default"}
_ASSERTIONS = ("aten._assert", "aten.sym_constrain", "aten._functional_assert")
_VIEWS = {"aten.view.default", "aten._unsafe_view.default"}
_WITH_BACKWARD = {"aten._embedding_bag_forward_only.default": "aten._embedding_bag.default"}  # of an activation, too


def clean(graph: Graph) -> Graph:
    """Removes asserts, identities, duplicates, dead nodes and updates of a buffer by itself (`self.b = self.b.to(d)`);
    the input graph is left as it is."""
    nodes = [_plainer(graph, node) for node in graph.nodes if not node.op.startswith(_ASSERTIONS)]
    nodes, renamed = _drop_identities(graph, nodes)
    nodes, merged = _merge_equal(nodes)
    renamed = {**{old: merged.get(new, new) for old, new in renamed.items()}, **merged}

    def final(name: str) -> str:
        return renamed.get(name, name)

    own = {item.name: item.tensor for item in graph.stored}
    mutations = {name: value for name, value in graph.mutations.items() if final(value) != own[name]}
    graph = replace(graph, mutations=mutations)
    leave = {final(name) for name in (*graph.outputs, *graph.mutations.values())}
    live = _live_nodes(nodes, set(leave))
    used = {name for node in live for name in node.operands} | leave
    stored = tuple(s for s in graph.stored if s.tensor in used or _is_state(s))
    return with_nodes(replace(graph, stored=stored), live, graph.tensors, final)


def _is_state(stored: Stored) -> bool:
    """Whether checkpoints hold it, read or not."""
    return stored.kind == "parameter" or (stored.kind == "buffer" and stored.persistent)


def _drop_identities(graph: Graph, nodes: list[Node]) -> tuple[list[Node], dict[str, str]]:
    renamed: dict[str, str] = {}
    kept = []
    strided = {name for node in nodes if ".as_strided" in node.op for name in node.operands}  # they read the memory
    for node in nodes:
        node = reading(node, renamed)
        if _is_identity(graph, node) and strided.isdisjoint(node.results):
            renamed[node.results[0]] = node.operands[0]
        else:
            kept.append(node)
    return kept, renamed


def _plainer(graph: Graph, node: Node) -> Node:
    if node.op in _VIEWS:
        return replace(node, op="aten.reshape.default")
    if node.op in _WITH_BACKWARD:
        return replace(node, op=_WITH_BACKWARD[node.op])
    if node.op in ("aten.squeeze.default", "aten.squeeze.dims"):
        return _naming_dims(graph, node)
    return _without_nothing(graph, node) if node.op == "aten.cat.default" else node


def _naming_dims(graph: Graph, node: Node) -> Node:
    """Squeezes dims that are 1 in the model, by number: in a microbatch of one sample, or a slice, others are too."""
    shape = graph.tensors[node.operands[0]].shape
    dims = range(len(shape)) if node.op == "aten.squeeze.default" else node.args[1]
    ones = tuple(dim % len(shape) for dim in dims if shape and shape[dim] == 1)
    return replace(node, op="aten.squeeze.dims", args=(node.args[0], ones), kwargs=())


def _without_nothing(graph: Graph, node: Node) -> Node:
    """Without the operands of shape [0], which torch joins to tensors of any rank: how empty caches begin."""
    joined = tuple(ref for ref in node.args[0] if graph.tensors[ref.tensor].shape != (0,))
    return replace(node, args=(joined, *node.args[1:])) if joined else node


def _is_contiguous_copy(node: Node) -> bool:
    """A copy for the layout's sake: nothing is written in place here, so only the layout could tell."""
    formats = [value for key, value in node.kwargs if key == "memory_format"] + list(node.args[1:])
    plain = (None, Atom("memory_format", "contiguous_format"), Atom("memory_format", "preserve_format"))
    return node.op in ("aten.clone.default", "aten.contiguous.default") and all(f in plain for f in formats)


def _is_identity(graph: Graph, node: Node) -> bool:
    if node.op in _IDENTITIES or _is_contiguous_copy(node):
        return True
    if len(node.results) != 1 or not node.operands:
        return False
    source, result = graph.tensors[node.operands[0]], graph.tensors[node.results[0]]
    same = source.shape == result.shape and source.dtype == result.dtype
    if node.op in ("aten.reshape.default", "aten.expand.default", "aten.cat.default"):
        return same
    if node.op == "aten._to_copy.default":
        return same and all(key in ("dtype", "device", "layout") for key, _ in node.kwargs)
    if node.op == "aten.slice.Tensor":
        return same
    if node.op.startswith("aten.squeeze."):  # of dims that are not 1, as those of a microbatch or of a slice may be
        return same
    if node.op == "aten.add.Tensor" and len(node.operands) == 1:  # how Python's sum() begins
        return same and not node.kwargs and node.args[1:] == (0,)
    return node.op == "aten.native_dropout.default" and (node.args[1] == 0.0 or node.args[2] is False) and same


def _merge_equal(nodes: list[Node]) -> tuple[list[Node], dict[str, str]]:
    seen: dict[Any, Node] = {}
    renamed: dict[str, str] = {}
    kept = []
    for node in nodes:
        node = reading(node, renamed)
        key = (node.op, _typed(node.args), _typed(node.kwargs), node.scope)
        twin = seen.get(key)
        if twin is None or is_random(node) or has_own_backward(node) or not _same_results(node, twin):
            seen[key] = node
            kept.append(node)
        else:
            renamed.update(zip(node.results, twin.results, strict=True))
    return kept, renamed


def _typed(value: Any) -> Any:
    """The value with its types, since 1, 1.0 and True are equal in Python but not to an operator."""
    if isinstance(value, (Ref, Atom)):
        return value
    if isinstance(value, tuple):
        return tuple(_typed(item) for item in value)
    return (type(value).__name__, value)


def _same_results(node: Node, twin: Node) -> bool:
    return [name is None for name in node.outputs] == [name is None for name in twin.outputs]


def _live_nodes(nodes: list[Node], wanted: set[str]) -> list[Node]:
    return [
        node if wanted.issuperset(node.results)
        else replace(node, outputs=tuple(name if name in wanted else None for name in node.outputs))
        for node in needed(nodes, wanted)
    ]  # fmt: skip
