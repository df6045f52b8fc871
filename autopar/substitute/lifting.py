"""Graph → Values: each ATen operator as one of the algebra where it is one, and as an opaque one where not.

aten.linear(x, w, b) → affine(x, w, b)      aten.split(x, 4, -1) → first[col, 4](x), second[col, 4](x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from autopar.ir.graph import Graph, Node, Ref, Tensor
from autopar.ir.sharing import unshared
from autopar.substitute.defined import OPAQUE, Definition, Values
from autopar.substitute.fitting import Misfit, made_shape
from autopar.substitute.rules.terms import Attribute

POINTWISE = (
    "abs", "cos", "elu", "erf", "exp", "gelu", "hardswish", "hardtanh", "leaky_relu", "log", "mish", "reciprocal",
    "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "square", "tanh",
)  # fmt: skip


class Reading(NamedTuple):
    """An ATen call in the terms of the algebra."""

    op: str
    attributes: tuple[Attribute, ...]
    operands: tuple[str, ...]


def lifted(graph: Graph) -> Values:
    """The values of a graph."""
    plain = unshared(graph)
    lifter = _Lifter(plain)
    for node in plain.nodes:
        lifter.take(node)
    return Values(plain, lifter.definitions, frozenset(lifter.virtual))


class _Lifter:
    """The definitions found so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.definitions: dict[str, Definition] = {}
        self.virtual: list[str] = []

    def take(self, node: Node) -> None:
        read = READERS.get(node.op)
        if not (read and read(self, node)):
            self.opaque(node)

    def opaque(self, node: Node) -> None:
        for number, name in enumerate(node.outputs):
            if name is not None:
                operands = tuple(dict.fromkeys(node.operands))
                self._put(name, Definition(OPAQUE, (number, node.name), operands, self.graph.tensors[name], node))

    def define(self, node: Node, reading: Reading, name: str | None = None) -> bool:
        """Defines the node's result, or a virtual value by name. False where the algebra has no such shapes."""
        shapes = [self.tensor(operand).shape for operand in reading.operands]
        if len({self.tensor(name).dtype for name in (*reading.operands, *node.results)}) > 1:
            return False
        try:
            shape = made_shape(reading.op, reading.attributes, shapes)
        except Misfit:
            return False
        if name is None:
            (name,) = node.results
            tensor = self.graph.tensors[name]
            if tensor.shape != shape:
                return False
        else:
            differentiable = any(self.tensor(operand).differentiable for operand in reading.operands)
            tensor = Tensor(name, shape, self.tensor(reading.operands[0]).dtype, differentiable)
            self.virtual.append(name)
        self._put(name, Definition(*reading, tensor, node))
        return True

    def _put(self, name: str, definition: Definition) -> None:
        self.definitions[name] = definition

    def tensor(self, name: str) -> Tensor:
        made = self.definitions.get(name)
        return self.graph.tensors[name] if made is None else made.tensor


def _tensors(node: Node, count: int) -> tuple[str, ...] | None:
    """The names of the first arguments, if just those are tensors and no others are given but None."""
    first, rest = node.args[:count], node.args[count:]
    if len(first) < count or not all(isinstance(item, Ref) for item in first):
        return None
    return tuple(item.tensor for item in first) if not any(item is not None for item in rest) else None


def _plain(op: str, count: int) -> Callable[[_Lifter, Node], bool]:
    """An operator that takes tensors alone."""

    def read(lifter: _Lifter, node: Node) -> bool:
        operands = _tensors(node, count)
        return operands is not None and not node.kwargs and lifter.define(node, Reading(op, (), operands))

    return read


def _linear(lifter: _Lifter, node: Node) -> bool:
    if len(node.args) == 3 and isinstance(node.args[2], Ref):
        return _plain("affine", 3)(lifter, node)
    return _plain("linear", 2)(lifter, node)


def _addmm(lifter: _Lifter, node: Node) -> bool:
    """b + x·w, as x·(wᵀ)ᵀ + b."""
    operands = _tensors(node, 3)
    if operands is None or node.kwargs:
        return False
    b, x, w = operands
    if len(lifter.tensor(b).shape) != 1:
        return False
    turned = f"{node.results[0]}~w"
    return lifter.define(node, Reading("transpose", (), (w,)), turned) and lifter.define(
        node, Reading("affine", (), (x, turned, b))
    )


def _scaled(lifter: _Lifter, node: Node) -> bool:
    x, factor = (*node.args, None)[:2]
    if isinstance(x, Ref) and isinstance(factor, (int, float)) and not isinstance(factor, bool) and not node.kwargs:
        is_float = lifter.tensor(x.tensor).dtype.startswith(("float", "bfloat"))
        return is_float and lifter.define(node, Reading("scale", (float(factor),), (x.tensor,)))
    return _plain("mul", 2)(lifter, node)


def _mapped(lifter: _Lifter, node: Node) -> bool:
    x = node.args[0]
    rest = (node.args[1:], node.kwargs)
    text = node.op if rest == ((), ()) else f"{node.op} {rest!r}"
    return isinstance(x, Ref) and lifter.define(node, Reading("map", (text,), (x.tensor,)))


def _transposed(lifter: _Lifter, node: Node) -> bool:
    x = node.args[0]
    rank = len(lifter.tensor(x.tensor).shape)
    dims = {dim % rank for dim in node.args[1:3]} if node.op == "aten.transpose.int" else {0, 1}
    return rank >= 2 and dims == {rank - 2, rank - 1} and lifter.define(node, Reading("transpose", (), (x.tensor,)))


def _axis(dim: int, rank: int) -> str | None:
    """The name of a dim. Of images, whose rank is 4, the first two have names, too."""
    named = {-1: "col", -2: "row"} | ({-4: "batch", -3: "channel"} if rank == 4 else {})
    return named.get(dim % rank - rank) if rank else None


def _concat(lifter: _Lifter, node: Node) -> bool:
    """Of several tensors: of the first two, then of that and the third."""
    parts, dim = node.args[0], (*node.args, 0)[1]
    axis = _axis(dim, len(lifter.tensor(parts[0].tensor).shape))
    if axis is None or len(parts) < 2 or node.kwargs:
        return False
    so_far, result = parts[0].tensor, node.results[0]
    for number, part in enumerate(parts[1:-1], 1):
        name = f"{result}~{number}"
        if not lifter.define(node, Reading("concat", (axis,), (so_far, part.tensor)), name):
            return False
        so_far = name
    return lifter.define(node, Reading("concat", (axis,), (so_far, parts[-1].tensor)))


def _split(lifter: _Lifter, node: Node) -> bool:
    """Into several parts: the first and what is left, then the first of that."""
    x, given, dim = (*node.args, 0)[:3]
    shape = lifter.tensor(x.tensor).shape
    axis = _axis(dim, len(shape))
    if axis is None or node.kwargs or len(node.outputs) < 2:
        return False
    sizes = part_sizes(given, shape[dim], len(node.outputs))
    rest = x.tensor
    for number, (name, size) in enumerate(zip(node.outputs[:-1], sizes, strict=False)):
        made = name or f"{node.name}~part{number}"
        left = node.outputs[-1] if number == len(sizes) - 2 else f"{node.name}~rest{number}"
        left = left or f"{node.name}~part{number + 1}"
        for part, target in (("first", made), ("second", left)):
            if not _part(lifter, node, Reading(part, (axis, size), (rest,)), target):
                return False
        rest = left
    return True


def _part(lifter: _Lifter, node: Node, reading: Reading, name: str) -> bool:
    """One part of a split: a tensor of the graph, or a virtual one."""
    if name not in node.results:
        return lifter.define(node, reading, name)
    lifter.definitions[name] = Definition(*reading, lifter.graph.tensors[name], node)
    return True


def part_sizes(given: int | Sequence[int], length: int, count: int) -> tuple[int, ...]:
    """Lengths of the parts that aten.split makes of a dim."""
    if isinstance(given, int):
        return tuple(min(given, length - given * number) for number in range(count))
    return tuple(given)


def _rows(lifter: _Lifter, node: Node) -> bool:
    """reshape(affine(reshape(x, (−1, k)), w, b), (…, n)) as affine(x, w, b): a product takes row by row."""
    x = node.args[0]
    product = lifter.definitions.get(x.tensor) if isinstance(x, Ref) else None
    if product is None or product.op not in ("linear", "affine") or product.node is None:
        return False
    flat = lifter.definitions.get(product.operands[0])
    if flat is None or flat.node is None or flat.node.op != node.op or not isinstance(flat.node.args[0], Ref):
        return False
    source = flat.node.args[0].tensor
    shapes = [
        tensor.shape for tensor in (lifter.tensor(source), flat.tensor, product.tensor, lifter.tensor(node.results[0]))
    ]
    given, rows, made, result = shapes
    if len(rows) != 2 or given[-1] != rows[1] or result != (*given[:-1], made[-1]):
        return False
    operands = (source, *product.operands[1:])
    tensor = lifter.tensor(node.results[0])
    lifter.definitions[node.results[0]] = Definition(product.op, (), operands, tensor, node, (x.tensor,))
    return True


def _conv(lifter: _Lifter, node: Node) -> bool:
    defaults: tuple[Any, ...] = (None, None, None, (1, 1), (0, 0), (1, 1), 1)
    x, k, b, stride, padding, dilation, groups = (*node.args, *defaults[len(node.args) :])
    if node.kwargs or not isinstance(x, Ref) or isinstance(padding, str):
        return False
    pairs = [text_of_pair(item) for item in (stride, padding, dilation)]
    attributes = (*pairs, int(groups))
    if b is None:
        return lifter.define(node, Reading("conv", attributes, (x.tensor, k.tensor)))
    return lifter.define(node, Reading("conv_affine", attributes, (x.tensor, k.tensor, b.tensor)))


def _batch_norm(lifter: _Lifter, node: Node) -> bool:
    """With the statistics that it keeps, where nothing reads those of the batch."""
    operands = _tensors(Node("", "", node.args[:5], (), ()), 5)
    if operands is None or node.kwargs or len(node.results) != 1:
        return False
    return lifter.define(node, Reading("batch_norm", (node.args[6],), operands))


def text_of_pair(value: Any) -> Attribute:
    """(2, 2) → 2; (2, 1) → "2x1"."""
    first, second = [*value, *value][:2] if isinstance(value, (list, tuple)) else [value, value]
    return int(first) if first == second else f"{first}x{second}"


READERS: dict[str, Callable[[_Lifter, Node], bool]] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    **dict.fromkeys(("aten.mm.default", "aten.bmm.default", "aten.matmul.default"), _plain("matmul", 2)),
    "aten.add.Tensor": _plain("add", 2),
    "aten.sub.Tensor": _plain("sub", 2),
    "aten.mul.Tensor": _scaled,
    "aten.neg.default": _plain("neg", 1),
    "aten.relu.default": _plain("relu", 1),
    **{f"aten.{name}.default": _mapped for name in POINTWISE},
    "aten.t.default": _transposed,
    "aten.transpose.int": _transposed,
    "aten.cat.default": _concat,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.conv2d.default": _conv,
    "aten.reshape.default": _rows,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
}
