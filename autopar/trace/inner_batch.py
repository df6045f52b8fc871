"""A batch that lies behind another dim in the dim that a reshape merges both into: no slice of that is a sample's.

Before → after, for x of (L, B, …) where B is the batch:

    linear(x.reshape(L·B, D), w)             →  linear(x, w).reshape(L·B, E), and so on to a reshape that parts L and B
    loss(x.reshape(L·B, C), t.reshape(L·B))  →  loss(xᵀ.reshape(B·L, C), tᵀ.reshape(B·L)), rows in another order
    f(cat([a, b])).split(B)                  →  f(stack([a, b])).unbind()

So attention of torch.nn, losses over (length, batch) and models that see two views of a batch at once are cut by
samples. A tensor t of (…, L·B, …) is made in up to three forms: *parted* (…, L, B, …), *turned* (…, B·L, …), and as it
was, where an operator is neither one of any leading dims nor known to work on each row by itself.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.ir.graph import Graph, Node, Ref, reading_each
from autopar.ir.placement import S, Type
from autopar.ir.structure import batch_inputs
from autopar.ops import axis_rules, call_key
from autopar.ops.call import call_of
from autopar.ops.notation import AxisRule
from autopar.ops.table import find, pointwise
from autopar.ops.windows import has_windows, windows

RESHAPE, TRANSPOSE, CAT, SLICE = "aten.reshape.default", "aten.transpose.int", "aten.cat.default", "aten.slice.Tensor"
_SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default")
_ANY_LEADING = ("aten.linear.default", "aten.native_dropout.default")
#: what does the same with rows in another order, along whichever dim a rule of it is split
_BY_ROW = frozenset({f"aten.{name}" for name in (
    "linear.default", "mm.default", "bmm.default", "baddbmm.default", "matmul.default", "addmm.default",
    "layer_norm.default", "rms_norm.default",
    "softmax.int", "_softmax.default", "log_softmax.int", "_log_softmax.default", "logsumexp.default", "topk.default",
    "cumsum.default", "sort.default", "argsort.default", "one_hot.default", "gather.default", "sum.default",
    "sum.dim_IntList", "mean.default", "mean.dim", "amax.default", "amin.default", "argmax.default", "argmin.default",
    "max.dim", "min.dim", "any.dim", "all.dim", "var.correction", "std.correction", "var_mean.correction",
    "linalg_vector_norm.default", "transpose.int", "t.default", "permute.default", "unsqueeze.default", "squeeze.dim",
    "squeeze.dims", "squeeze.default", "expand.default", "slice.Tensor", "select.int", "split.Tensor",
    "split_with_sizes.default", "unbind.int", "cat.default", "stack.default", "pad.default", "constant_pad_nd.default",
)})  # fmt: skip
#: the same along their first dim alone: others are told apart by number (classes), or in groups (channels, heads)
_BY_SAMPLE = ("aten.cross_entropy_loss.default", "aten.group_norm.default")
_ATTENTION, _EMBEDDING = "aten.scaled_dot_product_attention.default", "aten.embedding.default"


class Batch(NamedTuple):
    """Where the batch is: in `dim`, whose elements are `outer` times all that is made of the batch."""

    dim: int
    outer: int = 1

    def parted(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape with the dim in two."""
        length = shape[self.dim] // self.outer
        return (*shape[: self.dim], self.outer, length, *shape[self.dim + 1 :])


def with_leading_batch(graph: Graph) -> Graph:
    """The graph with such tensors parted or turned; equal to the given one, which is left as it is."""
    return _InnerBatchRewriting(graph).run()


def landing(before: Sequence[int], dim: int, after: Sequence[int]) -> Batch | None:
    """Where a reshape takes `dim`: the dim of the result, and how many times over; None where no one dim has it."""
    outer, passed = math.prod(before[:dim]), 1
    for place, size in enumerate(after):
        if passed <= outer < passed * size:
            times = outer // passed
            fits = outer % passed == 0 and size % times == 0 and math.gcd(before[dim], size // times) > 1
            return Batch(place, times) if fits else None
        passed *= size
    return None


class _InnerBatchRewriting:
    """The nodes so far, and of each tensor where its batch is and the forms that it is made in."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.tensors = graph, dict(graph.tensors)
        self.nodes: list[Node] = []
        self.batches = {name: Batch(0) for name in batch_inputs(graph) if graph.tensors[name].shape[0] > 1}
        self.forms: dict[tuple[str, Batch, str], str] = {}
        self.unmade: set[str] = set()  # as they were in the model
        self.rules: dict[Hashable, tuple[AxisRule, ...]] = {}
        self.node = graph.nodes[0] if graph.nodes else None

    def run(self) -> Graph:
        if not self.batches or not any(node.op in (RESHAPE, CAT) for node in self.graph.nodes):
            return self.graph
        for node in self.graph.nodes:
            self.node = node
            self._follow(node)
        for name in (*self.graph.outputs, *self.graph.mutations.values()):
            self._whole(name)
        return replace(self.graph, nodes=tuple(self.nodes), tensors=self.tensors)

    def _follow(self, node: Node) -> None:
        found = {self.batches[name] for name in node.operands if name in self.batches}
        if found and node.op == RESHAPE:
            return self._reshape(node)
        if node.op == CAT and self._joined(node, found):
            return None
        if not any(batch.outer > 1 for batch in found):
            self.nodes.append(node)
            rule = self._rule(node, 1) if found else None
            return self._know(node, rule, 1)
        batch = next(batch for batch in found if batch.outer > 1)
        if self._cut_at(node, batch) or (len(found) == 1 and self._parted_call(node, batch)):
            return None
        alike = len({batch.outer for batch in found}) == 1
        rule = self._rule(node, batch.outer) if alike and self._is_by_row(node, found) else None
        if rule is None:
            for name in node.operands:
                self._whole(name)
            self.nodes.append(node)
            return None
        return self._turned_call(node, rule, batch.outer)

    def _know(self, node: Node, rule: AxisRule | None, outer: int) -> None:
        for name, type_ in zip(node.results, rule.results if rule else (), strict=False):
            if type_.kind == "S":
                self.batches[name] = Batch(type_.dim, outer)

    # forms of a tensor ----------------------------------------

    def _make(self, name: str, shape: Sequence[int], like: str, op: str, *args: Any) -> str:
        assert self.node is not None
        self.tensors[name] = replace(self.graph.tensors[like], name=name, shape=tuple(shape))
        self.nodes.append(Node(name, op, args, (), (name,), self.node.scope, self.node.source))
        return name

    def _whole(self, name: str) -> None:
        """Sees that the tensor is there as it was."""
        if name in self.unmade:
            self.unmade.remove(name)
            shape = self.graph.tensors[name].shape
            self._make(name, shape, name, RESHAPE, Ref(self._parted(name, self.batches[name])), shape)

    def _parted(self, name: str, batch: Batch) -> str:
        key = name, batch, "parted"
        if key not in self.forms:
            parted = batch.parted(self.graph.tensors[name].shape)
            new, dim = f"{name} parted {batch.dim} {batch.outer}", batch.dim
            if (name, batch, "turned") not in self.forms:
                self._make(new, parted, name, RESHAPE, Ref(name), parted)
            else:
                swapped = (*parted[:dim], parted[dim + 1], parted[dim], *parted[dim + 2 :])
                turned = Ref(self.forms[name, batch, "turned"])
                back = self._make(f"{new} back", swapped, name, RESHAPE, turned, swapped)
                self._make(new, parted, name, TRANSPOSE, Ref(back), dim, dim + 1)
            self.forms[key] = new
        return self.forms[key]

    def _turned(self, name: str, batch: Batch) -> str:
        key = name, batch, "turned"
        if key not in self.forms:
            shape, dim = self.graph.tensors[name].shape, batch.dim
            parted = batch.parted(shape)
            swapped = (*parted[:dim], parted[dim + 1], parted[dim], *parted[dim + 2 :])
            new = f"{name} turned {dim} {batch.outer}"
            first = self._make(f"{new} first", swapped, name, TRANSPOSE, Ref(self._parted(name, batch)), dim, dim + 1)
            self.forms[key] = self._make(new, shape, name, RESHAPE, Ref(first), shape)
        return self.forms[key]

    def _is_made(self, name: str, batch: Batch, form: str, made: str) -> None:
        """Notes that a result is there in a form, and not as it was."""
        self.batches[name] = batch
        self.forms[name, batch, form] = made
        self.unmade.add(name)

    # operators ----------------------------------------

    def _reshape(self, node: Node) -> None:
        source, result = node.operands[0], node.results[0]
        batch, after = self.batches[source], self.graph.tensors[result].shape
        before, dim = self.graph.tensors[source].shape, batch.dim
        if batch.outer > 1:
            before, dim = batch.parted(before), dim + 1
        target = landing(before, dim, after)
        if target is None or (batch.outer == target.outer == 1):
            self._whole(source)
            self.nodes.append(node)
            if target is not None:
                self.batches[result] = target
            return
        given = Ref(source if batch.outer == 1 else self._parted(source, batch))
        if target.outer == 1:
            self._make(result, after, result, RESHAPE, given, after)
            self.batches[result] = target
            return
        shape = target.parted(after)
        made = self._make(f"{result} parted {target.dim} {target.outer}", shape, result, RESHAPE, given, shape)
        self._is_made(result, target, "parted", made)

    def _joined(self, node: Node, found: set[Batch]) -> bool:
        """Whether a cat joins tensors of the same batch along it: then it stacks them."""
        result = node.results[0]
        rank, shapes = len(self.graph.tensors[result].shape), {self.graph.tensors[n].shape for n in node.operands}
        batch = Batch(call_of(self.graph, node).dim("dim", rank))
        if found != {batch} or len(shapes) > 1 or len(node.operands) < 2:
            return False
        if not all(name in self.batches for name in node.operands):
            return False
        target = Batch(batch.dim, len(node.operands))
        shape = target.parted(self.graph.tensors[result].shape)
        new = f"{result} parted {target.dim} {target.outer}"
        made = self._make(new, shape, result, "aten.stack.default", node.args[0], batch.dim)
        self._is_made(result, target, "parted", made)
        return True

    def _cut_at(self, node: Node, batch: Batch) -> bool:
        """Whether a node cuts the dim where all of the batch ends: then each piece is one of the parted tensor."""
        if node.op != SLICE and node.op not in _SPLITS:
            return False
        call, shape = call_of(self.graph, node), self.graph.tensors[node.operands[0]].shape
        if call.dim("dim", len(shape)) != batch.dim:
            return False
        length = shape[batch.dim] // batch.outer
        pieces = _pieces(node, call.arguments, shape[batch.dim])
        if pieces is None or any(start % length or size % length or not size for start, size in pieces):
            return False
        parted = Ref(self._parted(node.operands[0], batch))
        for name, (start, size) in zip(node.outputs, pieces, strict=True):
            if name is not None:
                self._piece(name, parted, batch.dim, start // length, size // length)
        return True

    def _piece(self, name: str, parted: Ref, dim: int, start: int, count: int) -> None:
        shape = self.graph.tensors[name].shape
        if count == 1:
            self._make(name, shape, name, "aten.select.int", parted, dim, start)
            self.batches[name] = Batch(dim)
            return
        batch = Batch(dim, count)
        new = f"{name} parted {dim} {count}"
        self._is_made(
            name, batch, "parted", self._make(new, batch.parted(shape), name, SLICE, parted, dim, start, start + count)
        )

    def _parted_call(self, node: Node, batch: Batch) -> bool:
        """Whether an operator runs on the parted tensors as well: it leaves the dims before its own as they are."""
        results = [self.graph.tensors[name].shape for name in node.results]
        shape = self.graph.tensors[node.operands[0]].shape
        if node.op in _ANY_LEADING:
            given = {0: self._parted(node.operands[0], batch)} if batch.dim < len(shape) - 1 else {}
            if not given or any(name in self.batches for name in node.operands[1:]):
                return False
        elif find(node.op) is pointwise and len(set(results)) == 1:
            given = {}
            for position, name in enumerate(node.operands):
                own = self.graph.tensors[name].shape
                if self.batches.get(name) == batch and own == results[0]:
                    given[position] = self._parted(name, batch)
                elif name in self.batches or len(own) >= len(results[0]) - batch.dim:
                    return False
        else:
            return False
        self._call(node, given, batch, "parted")
        return True

    def _turned_call(self, node: Node, rule: AxisRule, outer: int) -> None:
        given = {}
        for position, (name, type_) in enumerate(zip(node.operands, rule.operands, strict=True)):
            if type_.kind == "S":
                given[position] = self._turned(name, Batch(type_.dim, outer))
        placed = [Batch(type_.dim, outer) if type_.kind == "S" else None for type_ in rule.results]
        self._call(node, given, placed, "turned")

    def _call(self, node: Node, given: dict[int, str], placed: Batch | Sequence[Batch | None], form: str) -> None:
        """The node on other forms of some operands, by position, with results in that form."""
        positions = iter(range(len(node.operands)))
        other = reading_each(node, lambda name: given.get(next(positions), name))
        batches = iter([placed] * len(node.results) if isinstance(placed, Batch) else placed)
        outputs: list[str | None] = []
        for name in node.outputs:
            batch = next(batches) if name is not None else None
            if name is None or batch is None:
                outputs.append(name)
                continue
            made = f"{name} {form} {batch.dim} {batch.outer}"
            shape = self.graph.tensors[name].shape
            self.tensors[made] = replace(
                self.graph.tensors[name], name=made, shape=batch.parted(shape) if form == "parted" else shape
            )
            self._is_made(name, batch, form, made)
            outputs.append(made)
        self.nodes.append(replace(other, outputs=tuple(outputs)))

    # rules ----------------------------------------

    def _is_by_row(self, node: Node, found: Iterable[Batch]) -> bool:
        if node.op in _BY_ROW or find(node.op) is pointwise:
            return True
        if node.op == _EMBEDDING:
            return node.operands[0] not in self.batches  # rows of a table go by number
        if not all(batch.dim == 0 for batch in found):
            return False
        rank = len(self.graph.tensors[node.operands[0]].shape)
        if node.op == _ATTENTION:
            return rank == 4
        return node.op in _BY_SAMPLE or (has_windows(node.op) and rank == len(windows(call_of(self.graph, node))) + 2)

    def _rule(self, node: Node, outer: int) -> AxisRule | None:
        """The rule that takes each operand with its batch cut there, and cuts the fewest others."""
        key = call_key(self.graph, node)
        if key not in self.rules:
            self.rules[key] = axis_rules(self.graph, node)
        counted = [(self._cuts(node, rule, outer), rule) for rule in self.rules[key]]
        fitting = [(cuts, rule) for cuts, rule in counted if cuts is not None]
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def _cuts(self, node: Node, rule: AxisRule, outer: int) -> int | None:
        fits = [self._fits(name, type_, outer) for name, type_ in zip(node.operands, rule.operands, strict=True)]
        return None if None in fits else sum(fit or 0 for fit in fits)

    def _fits(self, name: str, type_: Type, outer: int) -> int | None:
        """0 where the rule takes the operand as it is, 1 where it must be cut, None where it cannot."""
        if name in self.batches:
            return 0 if type_ == S(self.batches[name].dim) else None
        if type_.kind != "S":
            return 0
        is_whole = name not in self.graph.stored_by_tensor and self.graph.tensors[name].shape[type_.dim] % outer == 0
        return 1 if is_whole else None


def _pieces(node: Node, arguments: dict[str, Any], length: int) -> list[tuple[int, int]] | None:
    """Start and length of each piece."""
    if node.op == SLICE:
        start, stop, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(length)
        return [(start, stop - start)] if step == 1 else None
    sizes = arguments.get("split_sizes")
    if sizes is None:
        size = arguments["split_size"]
        sizes = [min(size, length - start) for start in range(0, length, size)]
    return [(sum(sizes[:place]), size) for place, size in enumerate(sizes)]
