"""The shape that each operator of the algebra makes: Misfit where it cannot be applied.

linear (…, m, k), (n, k) → (…, m, n)      matmul (…, m, k), (…, k, n) → (…, m, n)      concat adds up one dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.placement import Shape
from autopar.substitute.rules.terms import Attribute

DIMS = {"row": -2, "col": -1, "batch": 0, "channel": 1, "out": 0, "in": 1}
"""Which dim an axis is."""


class Misfit(Exception):
    """An operator of the algebra does not apply to these shapes."""


def made_shape(op: str, attributes: Sequence[Attribute], shapes: Sequence[Shape]) -> Shape:
    """The shape of a result. Raises Misfit."""
    if op not in _RULES:
        raise Misfit(op)
    return _RULES[op](tuple(attributes), *shapes)


def dim_of(axis: Attribute, shape: Shape) -> int:
    """An axis as a dim of a shape, counted from the front. Raises Misfit."""
    if axis not in DIMS:
        raise Misfit(f"axis {axis}")
    dim = DIMS[str(axis)]
    _expect(-len(shape) <= dim < len(shape))
    return dim % len(shape)


def _expect(holds: bool) -> None:
    if not holds:
        raise Misfit


def _linear(_: Sequence[Attribute], x: Shape, w: Shape) -> Shape:
    _expect(len(w) == 2 and len(x) >= 1 and x[-1] == w[1])
    return (*x[:-1], w[0])


def _affine(attributes: Sequence[Attribute], x: Shape, w: Shape, b: Shape) -> Shape:
    _expect(len(w) == 2 and b == (w[0],))
    return _linear(attributes, x, w)


def _matmul(_: Sequence[Attribute], x: Shape, y: Shape) -> Shape:
    _expect(len(x) >= 2 and len(y) >= 2 and x[-1] == y[-2])
    _expect(len(y) == 2 or x[:-2] == y[:-2])  # other stacks would be broadcast
    return (*x[:-1], y[-1])


def _equal(_: Sequence[Attribute], x: Shape, y: Shape) -> Shape:
    _expect(x == y or (len(y) == 1 and x[-1:] == y))
    return x


def _unchanged(_: Sequence[Attribute], x: Shape, *others: Shape) -> Shape:
    return x


def _transpose(_: Sequence[Attribute], x: Shape) -> Shape:
    _expect(len(x) >= 2)
    return (*x[:-2], x[-1], x[-2])


def _concat(attributes: Sequence[Attribute], x: Shape, y: Shape) -> Shape:
    dim = dim_of(attributes[0], x)
    _expect(len(x) == len(y) and x[:dim] == y[:dim] and x[dim + 1 :] == y[dim + 1 :])
    return (*x[:dim], x[dim] + y[dim], *x[dim + 1 :])


def _first(attributes: Sequence[Attribute], x: Shape) -> Shape:
    axis, size = attributes
    dim = dim_of(axis, x)
    _expect(isinstance(size, int) and 0 < size < x[dim])
    assert isinstance(size, int)
    return (*x[:dim], size, *x[dim + 1 :])


def _second(attributes: Sequence[Attribute], x: Shape) -> Shape:
    dim, first = dim_of(attributes[0], x), _first(attributes, x)
    return (*x[:dim], x[dim] - first[dim], *x[dim + 1 :])


def _reduced(attributes: Sequence[Attribute], x: Shape) -> Shape:
    dim = dim_of(attributes[0], x)
    return (*x[:dim], 1, *x[dim + 1 :])


def _conv(attributes: Sequence[Attribute], x: Shape, k: Shape, *bias: Shape) -> Shape:
    stride, padding, dilation, groups = attributes
    assert isinstance(groups, int)
    _expect(len(x) == len(k) == 4 and x[1] == k[1] * groups and k[0] % groups == 0)
    _expect(all(b == (k[0],) for b in bias))
    sides = [_side(*item) for item in zip(x[2:], k[2:], *map(pair, (stride, padding, dilation)), strict=True)]
    return (x[0], k[0], *sides)


def _along(attributes: Sequence[Attribute], x: Shape, v: Shape) -> Shape:
    _expect(v == (x[dim_of(attributes[0], x)],))
    return x


def _batch_norm(_: Sequence[Attribute], x: Shape, *vectors: Shape) -> Shape:
    _expect(len(x) == 4 and all(vector == (x[1],) for vector in vectors))
    return x


def _side(length: int, size: int, stride: int, padding: int, dilation: int) -> int:
    made = (length + 2 * padding - dilation * (size - 1) - 1) // stride + 1
    _expect(made > 0)
    return made


def pair(value: Attribute) -> tuple[int, int]:
    """What an attribute such as a stride says of height and width: 2, or "2x1"."""
    if isinstance(value, int):
        return value, value
    first, _, second = str(value).partition("x")
    _expect(first.isdigit() and second.isdigit())
    return int(first), int(second)


_RULES: dict[str, Callable[..., Shape]] = {
    "linear": _linear,
    "affine": _affine,
    "matmul": _matmul,
    **dict.fromkeys(("add", "sub", "mul"), _equal),
    **dict.fromkeys(("scale", "neg", "relu", "map", "cast"), _unchanged),
    "transpose": _transpose,
    "concat": _concat,
    "first": _first,
    "second": _second,
    **dict.fromkeys(("sum", "mean", "max"), _reduced),
    **dict.fromkeys(("conv", "conv_affine"), _conv),
    **dict.fromkeys(("scale_along", "shift_along"), _along),
    "batch_norm": _batch_norm,
    "rsqrt": _unchanged,
}
