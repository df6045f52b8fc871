"""Buffers that a model computes with in float32 stay float32 where the rest is cast: rotary frequencies, statistics.

A cast model rounds them, and what follows is exact for nothing: `inv_freq.float() * positions` turns positions beyond
some hundred by wrong angles, a running mean in bfloat16 stands still, a counter stops at 256. Before → after, for
`b` stored in float32 and a model cast to bfloat16:

    cos(b · positions) · x        →  cast(cos(b32 · positions)) · x      what is made of buffers alone is wide,
    b ← 0.9 b + 0.1 mean(x)       →  b32 ← 0.9 b32 + 0.1 mean(x)         so is what updates them,
    x + b[:n]                     →  as it was                           what is moved, but not computed with, is not

Parameters that forward updates are as such buffers: their new values are made of what is stored in float32.

Where a wide tensor meets one of the model's, it is cast as the buffer was before; so no operator of the model has other
operands than in the cast model, but for batch norms, whose statistics and weights are float32 (as under autocast).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from autopar.errors import TraceError
from autopar.ir.buffers import update_line
from autopar.ir.graph import Atom, Graph, Node, Ref, Stored, Tensor, needed, reading_each
from autopar.ops import run

CAST = "aten._to_copy.default"
_WIDE = "float32"
_MADE = ("aten.arange.", "aten.linspace.")
_BATCH_NORMS = ("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit_no_training.default")
_MOVES = frozenset({
    "view", "reshape", "_unsafe_view", "expand", "slice", "select", "index", "index_select", "gather", "embedding",
    "unsqueeze", "squeeze", "permute", "transpose", "t", "alias", "detach", "clone", "contiguous", "cat", "stack",
    "split", "split_with_sizes", "chunk", "unbind", "repeat", "flip", "roll", "lift_fresh_copy", "neg", "where",
    "masked_fill", "tril", "triu", "constant_pad_nd", "flatten", "_to_copy",
})  # fmt: skip


def with_wide_buffers(graph: Graph, own_dtypes: Mapping[str, str], narrow: str) -> Graph:
    """The graph of a model cast to `narrow`, in which such buffers are float32. own_dtypes: by name in the model.

    Raises TraceError for a parameter whose new value cannot be made in float32.
    """
    buffers = {
        item.tensor
        for item in graph.stored
        if graph.tensors[item.tensor].dtype == narrow
        and (own_dtypes.get(item.name) == _WIDE if item.kind == "buffer" else item.name in graph.mutations)
    }
    wide = _worth_it(graph, buffers, narrow) if buffers else frozenset()
    if not wide:
        return graph
    found = _Widened(graph, wide, narrow).graph()
    for item in found.parameters:
        if item.name in found.mutations:
            _check_kept(found, item)
    return found


def _check_kept(graph: Graph, parameter: Stored) -> None:
    """That what a parameter becomes keeps of its value what float32 holds, if anything."""
    made_of, kept = {parameter.tensor}, {parameter.tensor}
    for node in graph.nodes:
        if not made_of.isdisjoint(node.operands):
            made_of.update(node.results)
        if not kept.isdisjoint(node.operands):
            kept.update(name for name in node.results if graph.tensors[name].dtype == _WIDE)
    value = graph.mutations[parameter.name]
    value = graph.producers[value].operands[0] if value.startswith("%") and value.endswith(f":{_WIDE}") else value
    if value in made_of and value not in kept:
        raise TraceError(
            f"expected the new value of parameter {parameter.name!r}, which forward updates"
            f"{update_line(graph, parameter.name)}, to be made in float32, in which it is stored, found that it meets "
            "other dtypes on the way and would be rounded at each step; write to it after optimizer.step(), or plan "
            "with precision=None"
        )


def _on_the_way(graph: Graph, parameters: Iterable[Stored]) -> set[str]:
    """The nodes that make these parameters' new values of their old ones, all of a parameter's shape."""
    found: set[str] = set()
    for item in parameters:
        shape, after = graph.tensors[item.tensor].shape, {item.tensor}
        nodes = [node for node in graph.nodes if _goes_on(graph, node, shape, after)]
        found.update(node.name for node in needed(nodes, {graph.mutations[item.name]}))
    return found


def _goes_on(graph: Graph, node: Node, shape: tuple[int, ...], after: set[str]) -> bool:
    """Whether a node makes a tensor of the shape of one of these, which it is added to."""
    goes_on = not after.isdisjoint(node.operands)
    after.update(name for name in node.results if goes_on and graph.tensors[name].shape == shape)
    return goes_on and not after.isdisjoint(node.results)


def _worth_it(graph: Graph, buffers: set[str], narrow: str) -> frozenset[str]:
    """Of the buffers, and of numbers that forward makes beside them, those that are computed with."""
    tensors, found = graph.tensors, {graph_name for graph_name in buffers if _is_updated(graph, graph_name)}
    origins: dict[str, frozenset[str]] = {name: frozenset({name}) for name in buffers}
    met: list[frozenset[str]] = []
    for node in graph.nodes:
        of = frozenset[str]().union(*(origins.get(name, ()) for name in node.operands))
        narrows = [name for name in node.operands if tensors[name].dtype == narrow]
        if node.op in _BATCH_NORMS:
            found |= of & buffers
        elif _is_number(graph, node, narrow):
            origins[node.results[0]] = frozenset({node.results[0]})
        elif node.op == CAST:
            found |= of if tensors[node.results[0]].dtype != narrow else frozenset()
        elif narrows and all(name in origins for name in narrows):
            origins.update(dict.fromkeys(node.results, of))
            met.append(of)
            found |= of & buffers if node.op.split(".")[1] not in _MOVES else frozenset()
    while more := {name for of in met if not of.isdisjoint(found & buffers) for name in of} - found:
        found |= more
    return frozenset(found & buffers) and frozenset(found)


def _is_updated(graph: Graph, tensor: str) -> bool:
    return graph.stored_by_tensor[tensor].name in graph.mutations


def _is_number(graph: Graph, node: Node, narrow: str) -> bool:
    """Whether forward makes numbers there, or casts integers: positions, as a rule."""
    if len(node.results) != 1 or graph.tensors[node.results[0]].dtype != narrow:
        return False
    if node.op == CAST:
        return graph.tensors[node.operands[0]].dtype.startswith(("int", "uint"))
    return node.op.startswith(_MADE)


class _Widened:
    """Goes through the nodes in order; `wide`: tensors that are float32 now, from the given ones on."""

    def __init__(self, graph: Graph, wide: Iterable[str], narrow: str) -> None:
        self.given, self.wide, self.narrow = graph, set(wide), narrow
        self.tensors = dict(graph.tensors)
        self.nodes: list[Node] = []
        self.casts: dict[tuple[str, str], str] = {}
        self.kept = {graph.stored_by_tensor[name].name for name in self.wide if name in graph.stored_by_tensor}
        self.updates = _only_updating(graph, {graph.mutations[name] for name in self.kept & set(graph.mutations)})
        self.updates |= _on_the_way(graph, [item for item in graph.parameters if item.name in self.kept])
        for name in self.wide:
            self._set_dtype(name)

    def graph(self) -> Graph:
        for node in self.given.nodes:
            self._write(node)
        mutations = {
            name: self._cast(value, _WIDE, self.given.producers[value]) if name in self.kept else value
            for name, value in self.given.mutations.items()
        }
        return replace(self.given, nodes=tuple(self.nodes), tensors=self.tensors, mutations=mutations)

    def _set_dtype(self, name: str, dtype: str = _WIDE) -> None:
        self.tensors[name] = replace(self.tensors[name], dtype=dtype)

    def _write(self, node: Node) -> None:
        if node.op in _BATCH_NORMS and not self.wide.isdisjoint(node.operands):
            self.nodes.append(self._with_cast(node, set(node.operands[1:]), _WIDE))
        elif node.results and node.results[0] in self.wide:  # numbers that are made here
            self.nodes.append(_asked_for(node))
        elif node.op == CAST:
            self._write_cast(node)
        elif self.wide.isdisjoint(node.operands):
            self.nodes.append(node)
        elif not (self._stays_wide(node) and self._widen(node)):
            self.nodes.append(self._with_cast(node, self.wide, self.narrow))

    def _write_cast(self, node: Node) -> None:
        """A cast is as the model has it, but for one on the way to what a buffer becomes."""
        widens = node.name in self.updates and self.tensors[node.results[0]].dtype == self.narrow
        self.nodes.append(_asked_for(node) if widens else node)
        if widens:
            self.wide.update(node.results)
            self._set_dtype(node.results[0])

    def _stays_wide(self, node: Node) -> bool:
        operands = (name for name in node.operands if self.given.tensors[name].dtype == self.narrow)
        return node.name in self.updates or all(name in self.wide for name in operands)

    def _widen(self, node: Node) -> bool:
        """Writes the node on its operands as they are now; False where it cannot run on them."""
        asked = _asked_for(node)
        dtypes = _dtypes(asked, [self.tensors[name] for name in node.operands])
        if dtypes is None:
            return False
        for name, dtype in zip(node.outputs, dtypes, strict=True):
            if name is not None and dtype is not None and dtype != self.tensors[name].dtype:
                self._set_dtype(name, dtype)
                self.wide.add(name)
        self.nodes.append(asked)
        return True

    def _with_cast(self, node: Node, names: set[str], dtype: str) -> Node:
        """The node with these of its operands in the dtype."""
        return reading_each(node, lambda name: self._cast(name, dtype, node) if name in names else name)

    def _cast(self, name: str, dtype: str, where: Node) -> str:
        if self.tensors[name].dtype == dtype:
            return name
        key = name, dtype
        if key not in self.casts:
            self.casts[key] = made = f"%{name}:{dtype}"
            self.tensors[made] = replace(self.tensors[name], name=made, dtype=dtype)
            arguments = (("dtype", Atom("dtype", dtype)),)
            self.nodes.append(Node(made, CAST, (Ref(name),), arguments, (made,), where.scope, where.source))
        return self.casts[key]


def _only_updating(graph: Graph, updates: set[str]) -> set[str]:
    """The nodes that make these new values, and those that are read for them alone."""
    found: set[str] = set()
    leave = set(graph.outputs) | set(graph.mutations.values())
    for node in reversed(graph.nodes):
        readers = {reader.name for name in node.results for reader, _ in graph.consumers[name]}
        is_on_the_way = readers and readers <= found and leave.isdisjoint(node.results)
        if is_on_the_way or not updates.isdisjoint(node.results):
            found.add(node.name)
    return found


def _asked_for(node: Node) -> Node:
    """The node that makes float32 where it is told to make a narrower dtype."""
    kwargs = tuple(
        (key, Atom("dtype", _WIDE) if key == "dtype" and isinstance(value, Atom) and value.name != _WIDE else value)
        for key, value in node.kwargs
    )
    return replace(node, kwargs=kwargs)


def _dtypes(node: Node, operands: list[Tensor]) -> list[str | None] | None:
    """Of each result, by asking torch on meta tensors; None where the operator does not take them."""
    metas = iter([torch.empty(x.shape, dtype=getattr(torch, x.dtype), device="meta") for x in operands])
    try:
        results = run(node, lambda _: next(metas), "meta")
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return [str(x.dtype).removeprefix("torch.") if torch.is_tensor(x) else None for x in results]
