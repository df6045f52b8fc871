"""The operators of the algebra, one entry each: attributes, arity, shape of the result, and how it is computed.

Shapes are in shapes.py, the kinds of numbers that terms are computed on in values.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.errors import PlanError
from autopar.substitute.rules.expressions import Expression, Operation
from autopar.substitute.rules.terms import Apply, Attribute
from rulemaking.shapes import AXES, STACK, Conditions, Shape, matrix

Attributes: TypeAlias = tuple[Attribute, ...]


@dataclass(frozen=True)
class Operator:
    """attributes: the kind of each: axis, size, count, number, function, dtype, pair (one number, or height,
    width) or padding (such a pair, of at least 0).
    shape(conditions, attributes, *shapes): of the result. compute(values, attributes, *arrays): the result, with
    attributes as plain values. pointwise: each element is a function of the elements at its place alone.
    """

    attributes: tuple[str, ...]
    arity: int
    shape: Callable[..., Shape]
    compute: Callable[..., Any]
    pointwise: bool = False


def operator_of(term: Apply) -> Operator:
    """The table's entry of a term's operator. Raises PlanError where there is none, or arity or attributes differ."""
    operator = OPERATORS.get(term.op)
    if operator is None:
        raise PlanError(f"no operator {term.op!r} in the algebra; there are {', '.join(OPERATORS)}")
    if len(term.operands) != operator.arity or len(term.attributes) != len(operator.attributes):
        expected = f"[{', '.join(operator.attributes)}] and {operator.arity} operands"
        raise PlanError(f"{term.op} takes {expected}, found {term}")
    return operator


def _same(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    return x


def _pointwise2(conditions: Conditions, attributes: Attributes, x: Shape, y: Shape) -> Shape:
    if y.sort == "vector" and x.is_matrix:
        conditions.equal(x["col"], y["col"])
    else:
        conditions.same(x, y)
    return x


def _linear(conditions: Conditions, attributes: Attributes, x: Shape, w: Shape) -> Shape:
    if not (x.is_matrix or x.sort == "vector") or w.sort != "weight":
        raise PlanError(f"linear takes a matrix or vector and a weight, found a {x.sort} and a {w.sort}")
    conditions.equal(x["col"], w["col"])
    return x.resized({"col": w["row"]})


def _affine(conditions: Conditions, attributes: Attributes, x: Shape, w: Shape, b: Shape) -> Shape:
    return _pointwise2(conditions, (), _linear(conditions, (), x, w), _sorted(b, "vector"))


def _matmul(conditions: Conditions, attributes: Attributes, x: Shape, y: Shape) -> Shape:
    if not (x.is_matrix and y.is_matrix):
        raise PlanError(f"matmul takes matrices, found a {x.sort} and a {y.sort}")
    conditions.equal(x["col"], y["row"])
    if x.sort == y.sort:
        conditions.equal(x[STACK], y[STACK])
    stack = y[STACK] if x.sort == "weight" else x[STACK]
    return matrix({"row": x["row"], "col": y["col"], STACK: stack})


def _transpose(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    return x.resized({"row": x["col"], "col": x["row"]})


def _concat(conditions: Conditions, attributes: Attributes, x: Shape, y: Shape) -> Shape:
    axis = _axis(attributes[0])
    conditions.same(x, y, axis)
    return x.resized({axis: Operation("+", (x[axis], y[axis]))})


def _first(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    axis, length = _axis(attributes[0]), attributes[1]
    conditions.rest(x[axis], length)
    return x.resized({axis: length})


def _second(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    axis, length = _axis(attributes[0]), attributes[1]
    return x.resized({axis: conditions.rest(x[axis], length)})


def _reduced(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    axis = _axis(attributes[0])
    conditions.rest(x[axis], 1)
    return x.resized({axis: 1})


def _summed(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    return x.resized({_axis(attributes[0]): 1})


def _split_heads(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    stack = Operation("push", (x[STACK], attributes[0]))
    return matrix({"row": x["row"], "col": conditions.quotient(x["col"], attributes[0]), STACK: stack})


def _merge_heads(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    rest, heads = conditions.popped(x[STACK])
    return matrix({"row": x["row"], "col": Operation("*", (heads, x["col"])), STACK: rest})


def _conv(conditions: Conditions, attributes: Attributes, x: Shape, k: Shape) -> Shape:
    stride, padding, dilation, groups = attributes
    image, kernel = _sorted(x, "image"), _sorted(k, "kernel")
    conditions.equal(image["channel"], k["in"] if groups == 1 else Operation("*", (groups, k["in"])))
    if groups != 1:
        conditions.quotient(kernel["out"], groups)
    sizes = {
        axis: _windows(conditions, axis, x[axis], k[axis], stride, padding, dilation) for axis in ("height", "width")
    }
    return image.resized({"channel": kernel["out"], **sizes})


def _conv_affine(conditions: Conditions, attributes: Attributes, x: Shape, k: Shape, b: Shape) -> Shape:
    image = _conv(conditions, attributes, x, k)
    conditions.equal(image["channel"], _sorted(b, "vector")["col"])
    return image


def _pool(conditions: Conditions, attributes: Attributes, x: Shape) -> Shape:
    size, stride, padding = attributes
    sizes = {
        axis: _windows(conditions, axis, x[axis], _part(axis, size), stride, padding, 1) for axis in ("height", "width")
    }
    return _sorted(x, "image").resized(sizes)


def _windows(conditions: Conditions, axis: str, length: Expression, size: Expression, *pairs: Attribute) -> Expression:
    """The length of a convolution's result along one axis: how many windows fit, at least one."""
    windows = Operation("conv_size", (length, size, *(_part(axis, pair) for pair in pairs)))
    conditions.defined.append(windows)
    return windows


def _part(axis: str, pair: Attribute) -> Expression:
    return pair if isinstance(pair, int) else Operation(axis, (pair,))


def _along(conditions: Conditions, attributes: Attributes, x: Shape, v: Shape) -> Shape:
    conditions.equal(x[_axis(attributes[0])], _sorted(v, "vector")["col"])
    return x


def _batch_norm(conditions: Conditions, attributes: Attributes, x: Shape, *vectors: Shape) -> Shape:
    for vector in vectors:
        conditions.equal(_sorted(x, "image")["channel"], _sorted(vector, "vector")["col"])
    return x


def _weight(conditions: Conditions, attributes: Attributes) -> Shape:
    return matrix({"row": attributes[0], "col": attributes[-1], STACK: ()})


def _sorted(shape: Shape, sort: str) -> Shape:
    if shape.sort != sort:
        raise PlanError(f"expected a {sort}, found a {shape.sort}")
    return shape


def _axis(axis: Attribute) -> str:
    if not isinstance(axis, str) or not any(axis in axes for axes in AXES.values()):
        raise PlanError(f"expected the name of an axis, found {axis}")
    return axis


_WINDOW = ("pair", "padding", "pair", "count")
_POOL = ("pair", "pair", "padding")

OPERATORS: Mapping[str, Operator] = {
    "linear": Operator((), 2, _linear, lambda v, a, x, w: v.matmul(x, v.transpose(w))),
    "affine": Operator((), 3, _affine, lambda v, a, x, w, b: v.add(v.matmul(x, v.transpose(w)), b)),
    "matmul": Operator((), 2, _matmul, lambda v, a, x, y: v.matmul(x, y)),
    "add": Operator((), 2, _pointwise2, lambda v, a, x, y: v.add(x, y), pointwise=True),
    "sub": Operator((), 2, _pointwise2, lambda v, a, x, y: v.add(x, -y), pointwise=True),
    "mul": Operator((), 2, _pointwise2, lambda v, a, x, y: v.mul(x, y), pointwise=True),
    "scale": Operator(("number",), 1, _same, lambda v, a, x: v.mul(x, v.number(a[0])), pointwise=True),
    "neg": Operator((), 1, _same, lambda v, a, x: v.mul(x, v.number(-1)), pointwise=True),
    "relu": Operator((), 1, _same, lambda v, a, x: v.relu(x), pointwise=True),
    "map": Operator(("function",), 1, _same, lambda v, a, x: v.map(a[0], x), pointwise=True),
    "rsqrt": Operator(("number",), 1, _same, lambda v, a, x: v.rsqrt(a[0], x), pointwise=True),
    "cast": Operator(("dtype",), 1, _same, lambda v, a, x: v.cast(a[0], x), pointwise=True),
    "transpose": Operator((), 1, _transpose, lambda v, a, x: v.transpose(x)),
    "concat": Operator(("axis",), 2, _concat, lambda v, a, x, y: v.concat(a[0], x, y)),
    "first": Operator(("axis", "size"), 1, _first, lambda v, a, x: v.part(a[0], x, 0, a[1])),
    "second": Operator(("axis", "size"), 1, _second, lambda v, a, x: v.part(a[0], x, a[1], None)),
    "sum": Operator(("axis",), 1, _summed, lambda v, a, x: v.sum(a[0], x)),
    "mean": Operator(("axis",), 1, _reduced, lambda v, a, x: v.mean(a[0], x)),
    "max": Operator(("axis",), 1, _reduced, lambda v, a, x: v.max(a[0], x)),
    "split_heads": Operator(("count",), 1, _split_heads, lambda v, a, x: v.split_heads(a[0], x)),
    "merge_heads": Operator((), 1, _merge_heads, lambda v, a, x: v.merge_heads(x)),
    "conv": Operator(_WINDOW, 2, _conv, lambda v, a, x, k: v.conv(x, k, *a)),
    "conv_affine": Operator(
        _WINDOW, 3, _conv_affine, lambda v, a, x, k, b: v.add(v.conv(x, k, *a), v.along("channel", x, b))
    ),
    "max_pool": Operator(_POOL, 1, _pool, lambda v, a, x: v.max_pool(x, *a)),
    "avg_pool": Operator(_POOL, 1, _pool, lambda v, a, x: v.avg_pool(x, *a)),
    "scale_along": Operator(("axis",), 2, _along, lambda v, a, x, b: v.mul(x, v.along(a[0], x, b))),
    "shift_along": Operator(("axis",), 2, _along, lambda v, a, x, b: v.add(x, v.along(a[0], x, b))),
    "batch_norm": Operator(("number",), 5, _batch_norm, lambda v, a, x, *vectors: v.batch_norm(a[0], x, *vectors)),
    "zeros": Operator(("size", "size"), 0, _weight, lambda v, a: v.full(0, *a)),
    "ones": Operator(("size", "size"), 0, _weight, lambda v, a: v.full(1, *a)),
    "eye": Operator(("size",), 0, _weight, lambda v, a: v.eye(a[0])),
}
"""`affine(x, w, b)` is `add(linear(x, w), b)`, `conv_affine` adds a bias to each channel, `scale_along[axis](x, v)` and
`shift_along[axis](x, v)` multiply and add a vector along one axis, `rsqrt[e](x)` is 1 / sqrt(x + e), and
`batch_norm[e](x, g, b, m, v)` normalises each channel by given statistics. `avg_pool` counts its padding."""
