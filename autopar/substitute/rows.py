"""Graphs whose tokens keep their dims: what flattens them, computes row by row, and views them apart again.

    reshape(addmm(b, reshape(x, (B·S, C)), w), (B, S, N))   →   add(matmul(x, w), b)         where x is (B, S, C)
    reshape(layer_norm(reshape(x, (-1, C))), x.shape)       →   layer_norm(x)

Samples and positions in one dim can be split by samples alone. An operator that takes each row by itself takes rows
under several dims just as well. It is told so where all that is made of flattened rows is: up to views, sums over all
rows, and losses, which read them flattened as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Ref, needed, reading, with_nodes
from autopar.ir.sharing import share, unshared
from autopar.ir.structure import is_random
from autopar.ops.call import Call, call_of, overload

RULE = "rows-by-position"
STATEMENT = "what computes flattened samples × positions row by row => the same on samples and positions"
Shape = tuple[int, ...]
Lift = Callable[[Call, Sequence[bool], Shape], "Lifted | None"]
"""An operator on rows: its call, which operands have rows, and the dims that rows have in their place."""

_VIEWS = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")
_LOSS = "aten.cross_entropy_loss.default"
_WHOLE = tuple(f"aten.{name}.default" for name in ("sum", "mean", "max", "min", "amax", "amin", "any", "all"))
"""Of all elements, whatever dims they have, where no dims are named."""


class Lifted:
    """A call on rows under several dims: its operator and arguments."""

    def __init__(self, call: Call, op: str | None = None, **arguments: Any) -> None:
        """arguments: those that differ, by their names in the schema."""
        self.op = op or call.node.op
        self.args, self.kwargs = _with_arguments(call, arguments)


def over_rows(graph: Graph) -> tuple[str, ...]:
    """The names of the views that flatten rows which can keep their dims."""
    found = _Rows(unshared(graph))
    return tuple(name for name, tensor in found.openings.items() if found.is_kept(tensor))


def with_rows(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which rows that these views flatten keep their dims. Raises PlanError where some cannot."""
    plain = unshared(graph)
    found = _Rows(plain)
    wrong = sorted(name for name in names if not found.is_kept(found.openings.get(name, "")))
    if wrong:
        raise PlanError(f"expected a view that flattens rows at {wrong[0]!r}, found none; plan again")
    return share(_KeptRows(found, {found.group(found.openings[name]) for name in names}).graph())


# Which rows ----------------------------------------


class _Rows:
    """Tensors with flattened rows, in groups of those that are computed of each other.

    lead: of each such tensor the dims that its rows had; openings: what the views that flatten them make, by name.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.lead, self.openings = graph, dict[str, Shape](), dict[str, str]()
        self.parent, self.odd, self.used = dict[str, str](), set[str](), set[str]()
        for node in graph.nodes:
            self._follow(node)
        for name in (*graph.outputs, *graph.mutations.values()):
            self._refuse([name])

    def group(self, name: str) -> str:
        """The tensor that stands for all that are in a group with one."""
        while self.parent.get(name, name) != name:
            name = self.parent[name]
        return name

    def is_kept(self, name: str) -> bool:
        """Whether a group's rows can keep their dims, and something is computed, or viewed apart, of them."""
        return self.group(name) in self._kept

    @cached_property
    def _kept(self) -> set[str]:
        return {self.group(name) for name in self.used} - {self.group(name) for name in self.odd}

    def _follow(self, node: Node) -> None:
        rows = [name for name in node.operands if name in self.lead]
        if not rows and node.op in _VIEWS:
            self._open(node)
        elif rows and node.op in _VIEWS and not self._stays_flat(node):
            self.used.add(rows[0])
        elif rows and lifted(self.graph, node, self.lead) is not None:
            self._join(node, rows)
        elif rows and not _closes(call_of(self.graph, node)):
            self._refuse(rows)

    def _open(self, node: Node) -> None:
        before, after = (self.graph.tensors[name].shape for name in (node.operands[0], node.results[0]))
        lead = _flattened(before, after)
        if lead:
            self.lead[node.results[0]] = lead
            self.openings[node.name] = node.results[0]

    def _stays_flat(self, node: Node) -> bool:
        """Whether a view of rows is one of rows again."""
        before, after = (self.graph.tensors[name].shape for name in (node.operands[0], node.results[0]))
        return len(after) > 0 and before[0] == after[0]

    def _join(self, node: Node, rows: Sequence[str]) -> None:
        for name in (*rows, *node.results):
            self.lead[name] = self.lead[rows[0]]
            self.parent[self.group(name)] = self.group(rows[0])
        self.used.add(rows[0])

    def _refuse(self, names: Sequence[str]) -> None:
        self.odd.update(name for name in names if name in self.lead)


def _flattened(before: Shape, after: Shape) -> Shape:
    """The leading dims that a reshape makes one of, if it does: several that are longer than 1."""
    if not after or 0 in before:
        return ()
    for count in range(2, len(before) + 1):
        if math.prod(before[:count]) == after[0]:
            return before[:count] if sum(length > 1 for length in before[:count]) > 1 else ()
    return ()


def _closes(call: Call) -> bool:
    """Whether an operator makes of all rows what has none, and reads them flattened as well as not."""
    if call.node.op == _LOSS:
        return call.arguments["reduction"] in (1, 2)
    return call.node.op in _WHOLE and call.arguments.get("dim") in (None, ())


# Operators on rows ----------------------------------------


def lifted(graph: Graph, node: Node, lead: Mapping[str, Shape]) -> Lifted | None:
    """The call on rows under several dims, each row by itself; None where that is not known to be the same."""
    call, rows = call_of(graph, node), [name in lead for name in node.operands]
    dims = {lead[name] for name in node.operands if name in lead}
    lengths = {graph.tensors[name].shape[:1] for name in (*node.results, *(n for n in node.operands if n in lead))}
    if len(dims) > 1 or len(lengths) > 1:
        return None
    find = _pointwise if _is_pointwise(node) else _LIFTS.get(node.op)
    return find(call, rows, next(iter(dims))) if find else None


def _is_pointwise(node: Node) -> bool:
    is_tagged = node.op.startswith("aten.") and torch.Tag.pointwise in overload(node.op).tags
    return (is_tagged and not is_random(node)) or node.op in _ALIKE


def _pointwise(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    """Others broadcast along rows: they have fewer dims."""
    rank = len(call.result_shapes[0])
    pairs = zip(call.operand_shapes, rows, strict=True)
    fits = all(len(shape) == rank if own else len(shape) < rank for shape, own in pairs)
    return Lifted(call) if fits else None


def _first_only(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    """Of the rows of the first operand; others are the same for all."""
    return Lifted(call) if rows[0] and not any(rows[1:]) and len(call.shape(0)) > 1 else None


def _norm(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    inside = len(call.arguments["normalized_shape"]) < len(call.shape(0))
    return _first_only(call, rows, lead) if inside else None


def _lookup(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    """Of rows of numbers in a table, whose gradient does not look at how often they come."""
    return Lifted(call) if list(rows) == [False, True] else None


def _product(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    """A matrix for all rows."""
    is_plain = rows[0] and not rows[1] and len(call.shape(0)) == len(call.shape(1)) == 2
    return Lifted(call, "aten.matmul.default") if is_plain else None


def _plus_product(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    """And what is added to each row."""
    is_plain = not rows[0] and rows[1] and not rows[2] and len(call.shape(0)) == 1
    is_sum = call.arguments["beta"] == 1 and call.arguments["alpha"] == 1
    return Lifted(call, "aten.matmul.default") if is_plain and is_sum else None


def _along(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    """Along dims of each row, which are so many later now."""
    if not all(rows) or call.arguments.get("dim", ()) in (None, ()):
        return None
    rank, more, given = len(call.shape(0)), len(lead) - 1, call.arguments["dim"]
    dims = [dim % (rank + (call.node.op in _NEW_DIM)) for dim in (given if isinstance(given, tuple) else (given,))]
    if 0 in dims:
        return None
    moved = tuple(dim + more for dim in dims)
    return Lifted(call, dim=moved if isinstance(given, tuple) else moved[0])


def _swapped(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    rank, more = len(call.shape(0)), len(lead) - 1
    dims = [call.dim(name, rank) for name in ("dim0", "dim1")]
    return None if 0 in dims else Lifted(call, dim0=dims[0] + more, dim1=dims[1] + more)


def _expanded(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    after = call.result_shapes[0]
    return Lifted(call, size=(*lead, *after[1:])) if len(after) == len(call.shape(0)) else None


def _viewed(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    """Rows in another form: those that are no rows after it are viewed apart, whatever was flattened."""
    after = call.result_shapes[0]
    size = (*lead, *after[1:])
    return Lifted(call, shape=size) if call.node.op == _VIEWS[0] else Lifted(call, size=size)


def _losses(call: Call, rows: Sequence[bool], lead: Shape) -> Lifted | None:
    """The loss of each row: classes are the second dim of what has several."""
    is_each = call.arguments["reduction"] == 0 and list(rows[:2]) == [True, True] and not any(rows[2:])
    return Lifted(call) if is_each and len(call.shape(1)) == 1 else None


_ALIKE = tuple(
    f"aten.{name}"
    for name in (
        "clone.default", "detach.default", "_to_copy.default", "zeros_like.default", "ones_like.default",
        "full_like.default", "native_dropout.default", "__and__.Tensor", "__or__.Tensor", "__xor__.Tensor", "to.dtype",
    )
)  # fmt: skip
_NEW_DIM = ("aten.unsqueeze.default", "aten.stack.default")
_ALONG = (
    "softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default", "cumsum.default", "topk.default",
    "sort.default", "argsort.default", "sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "argmax.default",
    "argmin.default", "var.correction", "std.correction", "max.dim", "min.dim", "any.dim", "all.dim",
    "logsumexp.default", "cat.default", "stack.default", "split.Tensor", "split_with_sizes.default", "slice.Tensor",
    "select.int", "unbind.int", "unsqueeze.default", "squeeze.dim", "linalg_vector_norm.default",
)  # fmt: skip
_LIFTS: dict[str, Lift] = {
    "aten.linear.default": _first_only,
    "aten.layer_norm.default": _norm,
    "aten.rms_norm.default": _norm,
    "aten.embedding.default": _lookup,
    "aten.mm.default": _product,
    "aten.matmul.default": _product,
    "aten.addmm.default": _plus_product,
    **{f"aten.{name}": _along for name in _ALONG},
    "aten.transpose.int": _swapped,
    "aten.expand.default": _expanded,
    **dict.fromkeys(_VIEWS, _viewed),
    _LOSS: _losses,
}


def _with_arguments(call: Call, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """The arguments of a call of which some differ."""
    names = [argument.name for argument in overload(call.node.op)._schema.arguments]
    args = [given.get(name, value) for name, value in zip(names, call.node.args, strict=False)]
    late = {name: value for name, value in given.items() if name not in names[: len(args)]}
    return tuple(args), tuple({**dict(call.node.kwargs), **late}.items())


# The graph ----------------------------------------


class _KeptRows:
    """Nodes of the graph in which some groups of rows keep their dims."""

    def __init__(self, found: _Rows, groups: set[str]) -> None:
        self.found, self.plain = found, found.graph
        self.lead = {name: dims for name, dims in found.lead.items() if found.group(name) in groups}
        self.tensors, self.nodes, self.renamed = dict(self.plain.tensors), list[Node](), dict[str, str]()
        for name, dims in self.lead.items():
            self.tensors[name] = replace(self.tensors[name], shape=(*dims, *self.tensors[name].shape[1:]))

    def graph(self) -> Graph:
        """All of it."""
        for node in self.plain.nodes:
            self._take(node)
        nodes = [reading(node, {name: self._now(name) for name in node.operands}) for node in self.nodes]
        nodes = needed(nodes, {self._now(n) for n in (*self.plain.outputs, *self.plain.mutations.values())})
        return with_nodes(self.plain, nodes, self.tensors, self._now)

    def _now(self, name: str) -> str:
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def _take(self, node: Node) -> None:
        has_rows = any(name in self.lead for name in node.operands)
        makes_rows = any(name in self.lead for name in node.results)
        if not has_rows and not makes_rows:
            self.nodes.append(node)
        elif node.op in _VIEWS:
            self._view(node)
        elif makes_rows:
            self._lift(node)
        elif node.op == _LOSS:
            self._flatten(node)
        else:
            self.nodes.append(node)

    def _view(self, node: Node) -> None:
        """What flattened rows, or views them apart, need not be where both have the same dims."""
        source, made = node.operands[0], node.results[0]
        shape = self.tensors[made].shape
        if self.tensors[source].shape == shape:
            self.renamed[made] = source
        else:
            self.nodes.append(replace(node, op=_VIEWS[0], args=(Ref(source), shape), kwargs=()))

    def _lift(self, node: Node) -> None:
        found = lifted(self.plain, node, self.found.lead)
        assert found is not None
        if node.op == "aten.addmm.default":
            self._product_and_sum(node)
        elif node.op == _LOSS:
            self.nodes += self._by_classes(node)
        else:
            self.nodes.append(replace(node, op=found.op, args=found.args, kwargs=found.kwargs))

    def _product_and_sum(self, node: Node) -> None:
        bias, rows, matrix = node.operands
        product = self._made(f"{node.name}_product", node.results[0], self.tensors[node.results[0]].shape)
        self.nodes.append(replace(node, name=product, op="aten.matmul.default", args=(Ref(rows), Ref(matrix)),
                                  kwargs=(), outputs=(product,)))  # fmt: skip
        self.nodes.append(replace(node, op="aten.add.Tensor", args=(Ref(product), Ref(bias)), kwargs=()))

    def _by_classes(self, node: Node) -> list[Node]:
        logits = node.operands[0]
        shape = self.tensors[logits].shape
        order = (0, len(shape) - 1, *range(1, len(shape) - 1))
        name = self._made(f"{node.name}_by_position", logits, tuple(shape[dim] for dim in order))
        moved = Node(name, "aten.permute.default", (Ref(logits), order), (), (name,), node.scope, node.source)
        return [moved, reading(node, {logits: name})]

    def _flatten(self, node: Node) -> None:
        """A mean or sum over all rows is read as it was: `sequences` says it by position."""
        names = dict[str, str]()
        for operand in dict.fromkeys(name for name in node.operands if name in self.lead):
            shape = self.plain.tensors[operand].shape
            names[operand] = name = self._made(f"{operand}_flattened", operand, shape)
            self.nodes.append(Node(name, _VIEWS[0], (Ref(operand), shape), (), (name,), node.scope, node.source))
        self.nodes.append(reading(node, names))

    def _made(self, name: str, like: str, shape: Shape) -> str:
        while name in self.tensors:
            name += "_"
        self.tensors[name] = replace(self.tensors[like], name=name, shape=shape)
        return name
