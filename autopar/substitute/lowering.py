"""Values → Graph: what no rule has touched stays as it was, the rest becomes ATen operators.

Chains of concatenations become one aten.cat, and parts of one tensor one aten.split_with_sizes, whose backward
direction is one copy. Nodes keep the order that they had; new ones stand where the first value that they serve stood.
"""

from __future__ import annotations

import ast
import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from autopar.ir.graph import Graph, Node, Ref, Scope, Tensor, common_scope, reading, with_nodes
from autopar.substitute.defined import Definition, Values
from autopar.substitute.fitting import dim_of, pair

PARTS = ("first", "second")


class WrittenCall(NamedTuple):
    """An ATen call, among whose arguments may be others, with the shapes that these make."""

    op: str
    args: tuple[Any, ...]
    shape: tuple[int, ...] = ()


class ValueSlice(NamedTuple):
    """A value as the elements [start, stop) of another one along a dim."""

    base: str
    dim: int
    start: int
    stop: int


class AtenLowering:
    """The ATen nodes that compute the values of interest.

    placed: new nodes get the scope and source line of what they serve, which a price does not need.
    """

    def __init__(self, values: Values, placed: bool = True) -> None:
        self.values, self.placed = values, placed
        self.inner: dict[str, tuple[str, Tensor]] = {}  # tensors on the way to a value: that value's name, and what
        self.needed = self._needed()

    def _needed(self) -> list[str]:
        """Values that some node must make: those that given nodes read, and those that the new ones do."""
        values, wanted = self.values, set(self.values.ends)
        for name in reversed(values.live):
            if name in wanted and name in values.definitions:
                wanted.update(self._reads(name))
        return [name for name in values.live if name in wanted]

    def _stays(self, name: str) -> bool:
        """Whether the node of the given graph makes the value."""
        return name not in self.values.virtual and self.values.is_given(name)

    def _reads(self, name: str) -> tuple[str, ...]:
        """What the node that makes a value reads."""
        made = self.values.definitions[name]
        if self._stays(name):
            assert made.node is not None
            return tuple(dict.fromkeys(map(self.values.now, made.node.operands)))
        if made.op in PARTS:
            return (self.part(name).base,)
        if made.op == "concat":
            return tuple(self._inlined(name, made))
        return made.operands

    def _inlined(self, name: str, made: Definition) -> Iterable[str]:
        """The operands of a concatenation, those of operands that are concatenations for it alone in their place."""
        for operand in made.operands:
            inner = self.values.definitions.get(operand)
            is_alone = self.values.readers.get(operand) == (name,) and operand not in self.values.ends
            if inner is not None and inner.op == "concat" and inner.attributes == made.attributes and is_alone:
                yield from self._inlined(operand, inner)
            else:
                yield operand

    def part(self, name: str) -> ValueSlice:
        """A part by the value that it is cut from in the end."""
        made = self.values.definitions[name]
        (operand,), (axis, size) = made.operands, made.attributes
        shape = self.values.tensor(operand).shape
        dim = dim_of(axis, shape)
        assert isinstance(size, int)
        start, stop = (0, size) if made.op == "first" else (size, shape[dim])
        inner = self.values.definitions.get(operand)
        if inner is not None and inner.op in PARTS and self._only_cut(operand):
            outer = self.part(operand)
            if outer.dim == dim:
                return ValueSlice(outer.base, dim, outer.start + start, outer.start + stop)
        return ValueSlice(operand, dim, start, stop)

    def _only_cut(self, name: str) -> bool:
        """Whether a part is there for the sake of its own parts alone."""
        definitions = self.values.definitions
        users = self.values.readers.get(name, ())
        return name not in self.values.ends and all(definitions[user].op in PARTS for user in users)

    def ordered(self) -> list[Node]:
        """The nodes in an order of computation."""
        nodes = list(self.nodes())
        return _ordered(nodes, self._places())

    def nodes(self) -> Iterable[Node]:
        """The nodes, in any order."""
        given: dict[str, tuple[Node, set[str]]] = {}
        cuts: dict[tuple[str, int], list[tuple[ValueSlice, str]]] = {}
        for name in self.needed:
            made = self.values.definitions.get(name)
            if made is None:
                continue
            if self._stays(name):
                assert made.node is not None
                given.setdefault(made.node.name, (made.node, set()))[1].add(name)
            elif made.op in PARTS:
                part = self.part(name)
                cuts.setdefault((part.base, part.dim), []).append((part, name))
            else:
                yield from self._new(name, made)
        yield from (self._given(node, results) for node, results in given.values())
        for found in cuts.values():
            yield from self._cut(sorted(found))

    def _given(self, node: Node, results: set[str]) -> Node:
        """A node of the given graph, with what it reads now, without results that nobody needs."""
        renamed = self.values.renamed
        node = reading(node, {name: self.values.now(name) for name in node.operands if name in renamed})
        if len(node.outputs) > 1 and any(name is not None and name not in results for name in node.outputs):
            node = replace(node, outputs=tuple(name if name in results else None for name in node.outputs))
        return node

    def _new(self, name: str, made: Definition) -> Iterable[Node]:
        """The new nodes that make one value."""
        written = WRITERS[made.op](made, tuple(map(Ref, self._reads(name))), self.values)
        nodes: list[Node] = []
        op, args = self._written(name, made, written, nodes)
        scope, source = self._origin((name,))
        nodes.append(Node(plain_name(name), op, args, (), (name,), scope, source))
        return nodes

    def _written(
        self, name: str, made: Definition, written: WrittenCall, nodes: list[Node]
    ) -> tuple[str, tuple[Any, ...]]:
        """A call whose inner calls are nodes of their own."""
        args = []
        for item in written.args:
            if isinstance(item, WrittenCall):
                op, inner = self._written(name, made, item, nodes)
                new = f"{name}~i{len(nodes) + 1}"
                tensor = Tensor(new, item.shape, made.tensor.dtype, made.tensor.differentiable)
                self.inner[new] = name, tensor
                scope, source = self._origin((name,))
                nodes.append(Node(plain_name(new), op, inner, (), (new,), scope, source))
                item = Ref(new)
            args.append(item)
        return written.op, tuple(args)

    def tensor(self, name: str) -> Tensor:
        """What a node makes."""
        return self.inner[name][1] if name in self.inner else self.values.tensor(name)

    def _cut(self, found: list[tuple[ValueSlice, str]]) -> Iterable[Node]:
        """Parts of one tensor along one dim: one split where they do not overlap."""
        base, dim = found[0][0][:2]
        length = self.values.tensor(base).shape[dim]
        sizes, outputs, end = list[int](), list[str | None](), 0
        for part, name in found:
            if part.start < end:
                yield from map(self._slice, found)
                return
            if part.start > end:
                sizes.append(part.start - end)
                outputs.append(None)
            sizes.append(part.stop - part.start)
            outputs.append(name)
            end = part.stop
        if end < length:
            sizes.append(length - end)
            outputs.append(None)
        scope, source = self._origin([name for _, name in found])
        name = f"{plain_name(found[0][1])}_split"
        args = (Ref(base), tuple(sizes), dim)
        yield Node(name, "aten.split_with_sizes.default", args, (), tuple(outputs), scope, source)

    def _slice(self, found: tuple[ValueSlice, str]) -> Node:
        part, name = found
        scope, source = self._origin((name,))
        args = (Ref(part.base), part.dim, part.start, part.stop)
        return Node(plain_name(name), "aten.slice.Tensor", args, (), (name,), scope, source)

    # where new nodes stand

    @cached_property
    def _serves(self) -> Mapping[str, tuple[int, tuple[Scope, ...], str]]:
        """For each new value the place, scopes and source line of what of the given graph it was made for."""
        graph = self.values.graph
        place = {name: number for number, node in enumerate(graph.nodes) for name in node.results}
        found: dict[str, tuple[int, tuple[Scope, ...], str]] = {}
        for name in reversed(self.values.live):
            if name in place:
                node = graph.nodes[place[name]]
                found[name] = place[name], (node.scope,), node.source
                continue
            users = [found[user] for user in self.values.readers.get(name, ()) if user in found]
            if users:
                scopes = tuple(dict.fromkeys(scope for _, scopes, _ in users for scope in scopes))
                earliest, source = min((number, source) for number, _, source in users)
                found[name] = earliest, scopes, source
        return found

    def _origin(self, names: Iterable[str]) -> tuple[Scope, str]:
        if not self.placed:
            return Scope(()), ""
        served = [self._serves[name] for name in names]
        scopes = [scope for _, scopes, _ in served for scope in scopes]
        return common_scope(scopes), min((number, source) for number, _, source in served)[1]

    def _places(self) -> dict[str, int]:
        """The place in the given graph of what each value serves."""
        found = {name: served[0] for name, served in self._serves.items()}
        return found | {name: found[value] for name, (value, _) in self.inner.items() if value in found}


def lowered(values: Values) -> Graph:
    """The graph of the values, without identity nodes. Tensors that rules made are named after those they serve."""
    lowering = AtenLowering(values)
    nodes = lowering.ordered()
    graph = values.graph
    names = _names(values, nodes)
    made = {new: replace(lowering.tensor(name), name=new) for name, new in names.items()}
    nodes = [_renamed(node, names) for node in nodes]

    def now(name: str) -> str:
        return names.get(values.now(name), values.now(name))

    return with_nodes(graph, nodes, {**graph.tensors, **made}, now)


def _names(values: Values, nodes: list[Node]) -> dict[str, str]:
    """Names of the tensors that the given graph does not have."""
    taken, names = set(values.graph.tensors), {}
    for node in nodes:
        for name in node.results:
            if name not in values.graph.tensors:
                new = plain_name(name)
                while new in taken:
                    new += "_"
                taken.add(new)
                names[name] = new
    return names


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """The node with these names for what it reads and makes."""
    outputs = tuple(None if name is None else names.get(name, name) for name in node.outputs)
    return reading(node if outputs == node.outputs else replace(node, outputs=outputs), names)


def plain_name(name: str) -> str:
    """A value's name as an identifier."""
    return name.replace("~", "_")


def _ordered(nodes: list[Node], place: Mapping[str, int]) -> list[Node]:
    """Operands first; of those that are ready, that which stood first in the given graph."""
    maker = {name: number for number, node in enumerate(nodes) for name in node.results}
    readers: dict[int, list[int]] = {}
    missing = []
    for number, node in enumerate(nodes):
        makers = {maker[name] for name in node.operands if name in maker}
        missing.append(len(makers))
        for own in makers:
            readers.setdefault(own, []).append(number)
    key = [min((place[name] for name in node.results if name in place), default=0) for node in nodes]
    ready = [(key[number], nodes[number].name, number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        *_, number = heapq.heappop(ready)
        order.append(nodes[number])
        for reader in readers.get(number, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (key[reader], nodes[reader].name, reader))
    return order


def _same(op: str) -> Callable[[Definition, tuple[Ref, ...], Values], WrittenCall]:
    return lambda made, operands, values: WrittenCall(op, operands)


def _matmul(made: Definition, operands: tuple[Ref, ...], values: Values) -> WrittenCall:
    first, second = (len(values.tensor(operand.tensor).shape) for operand in operands)
    known = {2: "aten.mm.default", 3: "aten.bmm.default"} if first == second else {}
    return WrittenCall(known.get(first, "aten.matmul.default"), operands)


def _concat(made: Definition, operands: tuple[Ref, ...], values: Values) -> WrittenCall:
    dim = dim_of(made.attributes[0], made.tensor.shape)
    return WrittenCall("aten.cat.default", (operands, dim))


def _transpose(made: Definition, operands: tuple[Ref, ...], values: Values) -> WrittenCall:
    rank = len(made.tensor.shape)
    return WrittenCall("aten.transpose.int", (*operands, rank - 2, rank - 1))


def _map(made: Definition, operands: tuple[Ref, ...], values: Values) -> WrittenCall:
    """The attribute holds the operator, and further arguments as Python writes them."""
    op, _, rest = str(made.attributes[0]).partition(" ")
    more = ast.literal_eval(rest)[0] if rest else ()
    return WrittenCall(op, (*operands, *more))


def _reduce(op: str) -> Callable[[Definition, tuple[Ref, ...], Values], WrittenCall]:
    def write(made: Definition, operands: tuple[Ref, ...], values: Values) -> WrittenCall:
        return WrittenCall(op, (*operands, (dim_of(made.attributes[0], made.tensor.shape),), True))

    return write


def _conv(made: Definition, operands: tuple[Ref, ...], values: Values) -> WrittenCall:
    stride, padding, dilation, groups = made.attributes
    biased = operands if len(operands) == 3 else (*operands, None)
    return WrittenCall("aten.conv2d.default", (*biased, *map(pair, (stride, padding, dilation)), groups))


def _along(op: str) -> Callable[[Definition, tuple[Ref, ...], Values], WrittenCall]:
    """A vector on one dim of a tensor: it gets dims of one element behind its own."""

    def write(made: Definition, operands: tuple[Ref, ...], values: Values) -> WrittenCall:
        shape = made.tensor.shape
        dim = dim_of(made.attributes[0], shape)
        upright = (shape[dim], *(1 for _ in shape[dim + 1 :]))
        if len(upright) == 1:
            return WrittenCall(op, operands)
        return WrittenCall(op, (operands[0], WrittenCall("aten.reshape.default", (operands[1], upright), upright)))

    return write


def _rsqrt(made: Definition, operands: tuple[Ref, ...], values: Values) -> WrittenCall:
    summed = WrittenCall("aten.add.Tensor", (*operands, made.attributes[0]), made.tensor.shape)
    return WrittenCall("aten.rsqrt.default", (summed,))


WRITERS: dict[str, Callable[[Definition, tuple[Ref, ...], Values], WrittenCall]] = {
    "linear": _same("aten.linear.default"),
    "affine": _same("aten.linear.default"),
    "matmul": _matmul,
    "add": _same("aten.add.Tensor"),
    "sub": _same("aten.sub.Tensor"),
    "mul": _same("aten.mul.Tensor"),
    "scale": lambda made, operands, values: WrittenCall("aten.mul.Tensor", (*operands, made.attributes[0])),
    "neg": _same("aten.neg.default"),
    "relu": _same("aten.relu.default"),
    "map": _map,
    "transpose": _transpose,
    "concat": _concat,
    "sum": _reduce("aten.sum.dim_IntList"),
    "mean": _reduce("aten.mean.dim"),
    "max": _reduce("aten.amax.default"),
    "conv": _conv,
    "conv_affine": _conv,
    "scale_along": _along("aten.mul.Tensor"),
    "shift_along": _along("aten.add.Tensor"),
    "rsqrt": _rsqrt,
}
