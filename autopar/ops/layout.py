"""What copies its operand: how tensors lie in memory, followed through the graph.

A reshape shares its operand's memory where the new dims can be stepped through with fixed strides, and copies
otherwise: after a transpose, say. Strides are those that torch gives results: of views by their arithmetic, of
pointwise operators in the order of their first operand's dims, of attention in that of its queries; contiguous
everywhere else. A product of a stack of rows and a matrix reshapes the rows to a matrix first, and one of two stacks of
matrices makes one stack of each, of as many matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.ir.graph import Graph, Node, found_once
from autopar.ir.placement import Shape
from autopar.ops.call import argument, base_name
from autopar.ops.work import sizes_of

Strides = tuple[int, ...]

RESHAPES = frozenset(["view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as"])
_LIKE_FIRST_NAMES = """
    scaled_dot_product_attention context_attention window_attention sink_attention mul add sub rsub div neg pow
    maximum minimum remainder fmod where masked_fill _to_copy clone dropout exp expm1 exp2 log log1p log2 log10 sqrt
    rsqrt square reciprocal abs sign sin cos tan atan sinh cosh erf floor ceil round trunc frac nan_to_num clamp
    clamp_min clamp_max eq ne lt le gt ge logical_not gelu silu relu relu6 tanh sigmoid log_sigmoid softplus softsign
    elu selu celu leaky_relu hardtanh hardswish hardsigmoid mish softmax log_softmax _softmax _log_softmax
"""
_LIKE_FIRST = frozenset(_LIKE_FIRST_NAMES.split())
_SAME = frozenset([
    "alias", "detach", "identity", "split", "split_with_sizes", "chunk", "slice", "narrow", "unsafe_split",
    "unsafe_split_with_sizes", "tensor_split",
])  # fmt: skip


PRODUCTS = frozenset(["linear", "matmul"])


class Copied(NamedTuple):
    """The names of the nodes that copy operands: those that reshape into new memory; and of each product and einsum,
    the operands whose dims do not lie as it multiplies them. permuted: the strides of tensors whose dims lie in memory
    in another order than theirs, or with gaps."""

    reshapes: frozenset[str]
    factors: Mapping[str, tuple[int, ...]]
    permuted: Mapping[str, Strides]


@found_once
def copied(graph: Graph) -> Copied:
    """What is copied in a graph."""
    strides = {name: contiguous_strides(tensor.shape) for name, tensor in graph.tensors.items()}
    reshapes, factors = set(), dict[str, tuple[int, ...]]()
    for node in graph.nodes:
        shapes, lies = _of_operands(node, graph, strides)
        if base_name(node.op) in PRODUCTS and (copies := copied_operands(node, shapes, lies)):
            factors[node.name] = copies
        if base_name(node.op) == "einsum":
            factors[node.name] = copied_operands(node, shapes, lies)
            made = contiguous_strides(graph.tensors[node.results[0]].shape)
            strides[node.results[0]] = _einsum(node, shapes, lies)[1] or made
            continue
        found = view_strides(node, graph, strides) if node.operands else None
        if found is not None:
            strides.update((name, found) for name in node.results)
        elif node.operands and base_name(node.op) in RESHAPES:
            reshapes.add(node.name)
    permuted = {name: own for name, own in strides.items() if not _in_order(graph.tensors[name].shape, own)}
    return Copied(frozenset(reshapes), factors, permuted)


def _of_operands(node: Node, graph: Graph, strides: Mapping[str, Strides]) -> tuple[list[Shape], list[Strides]]:
    return [graph.tensors[name].shape for name in node.operands], [strides[name] for name in node.operands]


def copied_operands(
    node: Node, shapes: Sequence[Shape], strides: Sequence[Strides], made: Shape = ()
) -> tuple[int, ...]:
    """The positions of the operands, of these shapes and strides, that a reshape, a product or an einsum copies.

    made: the shape that a reshape makes.
    """
    name = base_name(node.op)
    if name == "einsum":
        return _einsum(node, shapes, strides)[0]
    if name in PRODUCTS:
        return _copied_factors(shapes[:2], strides[:2])
    if name in RESHAPES:
        return () if reshaped_strides(shapes[0], strides[0], made) is not None else (0,)
    return ()


def _copied_factors(shapes: Sequence[Shape], strides: Sequence[Strides]) -> tuple[int, ...]:
    """Of two factors, those that a product copies (aten/src/ATen/native/LinearAlgebra.cpp, _matmul_impl): stacks that
    do not lie as one, such as heads that are transposed with the length; and beside a matrix or a vector that gets a
    gradient, the stack whose rows, or columns from the right, do not lie as those of one matrix."""
    left, right = shapes
    if min(len(left), len(right)) > 2:
        return _copied_stacks(shapes, strides)
    if len(left) > 2:
        return () if _has_rows(left, strides[0]) else (0,)
    turned = (*right[:-2], *right[:-3:-1]), (*strides[1][:-2], *strides[1][:-3:-1])
    return () if len(right) < 3 or _has_rows(*turned) else (1,)


def _copied_stacks(shapes: Sequence[Shape], strides: Sequence[Strides]) -> tuple[int, ...]:
    count = max(map(len, shapes)) - 2
    stacks = [(1,) * (count + 2 - len(shape)) + shape[:-2] for shape in shapes]
    made = tuple(map(max, *stacks))
    return tuple(
        position for position, (stack, shape, own) in enumerate(zip(stacks, shapes, strides, strict=True))
        if _as_one_stack(stack, made, shape, own) is None
    )  # fmt: skip


def _as_one_stack(stack: Shape, made: Shape, shape: Shape, strides: Strides) -> Strides | None:
    """The strides of an operand that is expanded to the stack of the product, whose dims are one; None if there are
    none."""
    steps = (0,) * (len(stack) + 2 - len(shape)) + strides[:-2]
    expanded = tuple(0 if length == 1 else step for length, step in zip(stack, steps, strict=True))
    matrix = shape[-2:]
    return reshaped_strides((*made, *matrix), (*expanded, *strides[-2:]), (math.prod(made), *matrix))


def _in_order(shape: Shape, strides: Strides) -> bool:
    """Whether the elements of a tensor lie in the order of its dims, without gaps."""
    usual = contiguous_strides(shape)
    return all(size == 1 or own == other for size, own, other in zip(shape, strides, usual, strict=True))


def _has_rows(shape: Shape, strides: Strides) -> bool:
    """Whether the rows of a stack lie as those of one matrix."""
    return reshaped_strides(shape, strides, (math.prod(shape[:-1]), shape[-1])) is not None


def _einsum(node: Node, shapes: Sequence[Shape], strides: Sequence[Strides]) -> tuple[tuple[int, ...], Strides]:
    """The operands that are copied, and the strides of the result (none: contiguous ones).

    Torch makes two matrices of the operands, dims in the order (those of both that stay, those of its own, those that
    are summed), and permutes the product (aten/src/ATen/native/Linear.cpp, sumproduct_pair). Dims of one element are
    in no group; where none is left to be summed, it multiplies element by element. Other equations than of two
    operands with different letters each are taken to copy nothing.
    """
    terms, _, out = str(node.args[0]).replace(" ", "").partition("->")
    letters, sizes = terms.split(","), dict[str, int]()
    if len(letters) == len(shapes) == 2 and all(map(str.isalpha, letters)):
        sizes = sizes_of(letters, shapes)
    alone = set(letters[0]) ^ set(letters[-1])
    if not sizes or not alone <= set(out) or any(len(set(text)) < len(text) for text in (*letters, out)):
        return (), ()
    both = {letter for letter in letters[0] if letter in letters[1] and sizes[letter] > 1}
    stay, summed = [letter for letter in out if letter in both], sorted(both - set(out))
    if not summed:
        lies = dict(zip(letters[0], strides[0], strict=True))
        in_order = tuple(lies[letter] for letter in out) if set(out) <= lies.keys() else ()
        return (), dense_strides(tuple(sizes[letter] for letter in out), in_order) if in_order else ()
    left, right = ([letter for letter in out if letter in text and letter not in both] for text in letters)
    copied = []
    for position, groups in enumerate(((stay, left, summed), (stay, summed, right))):
        order = [letters[position].index(letter) for group in groups for letter in group]
        lengths = tuple(math.prod(sizes[letter] for letter in group) for group in groups)
        shape = tuple(shapes[position][dim] for dim in order)
        if reshaped_strides(shape, tuple(strides[position][dim] for dim in order), lengths) is None:
            copied.append(position)
    order_made = [*stay, *left, *(letter for letter in right if letter not in left)]
    steps_made = dict(zip(order_made, contiguous_strides(tuple(sizes[letter] for letter in order_made)), strict=True))
    return tuple(copied), tuple(steps_made[letter] for letter in out)


def strides_of_part(shape: Shape, strides: Strides, part: Shape) -> Strides:
    """Strides of a part of a tensor that lies as the whole does: dims in its order, as far apart for their lengths."""
    found, whole_step, step = [0] * len(shape), 1, 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim]:
            found[dim] = step = max(1, strides[dim] * step // whole_step)
            whole_step, step = strides[dim] * shape[dim], step * part[dim]
    return tuple(found)


def view_strides(node: Node, graph: Graph, strides: Mapping[str, Strides]) -> Strides | None:
    """The strides of the results, by those of the first operand; None for contiguous ones in memory of their own."""
    name, operand = base_name(node.op), node.operands[0]
    before, shape = strides[operand], graph.tensors[operand].shape
    after = graph.tensors[node.results[0]].shape if node.results else ()
    if name in RESHAPES:
        return reshaped_strides(shape, before, after)
    if name == "transpose":
        return _transposed(before, argument(node, 1, "dim0", 0), argument(node, 2, "dim1", 1))
    if name == "t":
        return before[::-1]
    if name == "permute":
        return tuple(before[dim] for dim in argument(node, 1, "dims", ()))
    if name in _SAME and len(after) == len(before):
        return _sliced(node, before) if name == "slice" else before
    if name in ("select", "unbind"):
        return _without(before, [argument(node, 1, "dim", 0)])
    if name == "squeeze":
        dims = argument(node, 1, "dim", range(len(shape)))
        return _without(before, [dim for dim in ([dims] if isinstance(dims, int) else dims) if shape[dim] == 1])
    if name == "unsqueeze":
        dim = argument(node, 1, "dim", 0) % len(after)
        return (*before[:dim], shape[dim] * before[dim] if dim < len(shape) else 1, *before[dim:])
    if name == "diagonal":
        dims = argument(node, 2, "dim1", 0), argument(node, 3, "dim2", 1)
        return (*_without(before, dims), sum(before[dim] for dim in dims))
    if name == "expand":
        shape, before = ((1,) * (len(after) - len(shape)) + whole for whole in (shape, before))
        return tuple(0 if n != m else stride for n, m, stride in zip(shape, after, before, strict=True))
    if name in _LIKE_FIRST and after[:-1] == shape[:-1] and len(after) == len(shape):
        return dense_strides(after, before)
    return None


def _sliced(node: Node, strides: Strides) -> Strides:
    """Every so many elements along a dim."""
    dim, step = argument(node, 1, "dim", 0) % len(strides), argument(node, 4, "step", 1)
    return tuple(step * stride if place == dim else stride for place, stride in enumerate(strides))


def _without(strides: Strides, dims: Sequence[int]) -> Strides:
    gone = {dim % len(strides) for dim in dims}
    return tuple(stride for dim, stride in enumerate(strides) if dim not in gone)


def _transposed(strides: Strides, first: int, second: int) -> Strides:
    swapped = list(strides)
    swapped[first], swapped[second] = strides[second], strides[first]
    return tuple(swapped)


def contiguous_strides(shape: Shape) -> Strides:
    """Of a tensor whose last dim is the innermost."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def dense_strides(shape: Shape, like: Strides) -> Strides:
    """Without gaps, the dims in the order of the strides `like`; those without a stride, which are expanded, stay where
    they are among the others (aten/src/ATen/TensorIterator.cpp, reorder_dimensions)."""
    order = list(reversed(range(len(shape))))  # the innermost first
    for place in range(1, len(order)):
        for before in reversed(range(place)):
            inner, outer = order[before], order[place]
            if like[inner] == 0 or like[outer] == 0 or (like[inner] == like[outer] and shape[inner] <= shape[outer]):
                continue
            if like[inner] < like[outer]:
                break
            order[before], order[place], place = outer, inner, before
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def reshaped_strides(shape: Shape, strides: Strides, new: Shape) -> Strides | None:
    """The strides under which the same memory has the new shape; None where there are none.

    Runs of dims that lie in memory one after the other are one dim; each new dim must lie inside of such a run.
    """
    if 0 in shape:
        return contiguous_strides(new)
    runs = _runs(shape, strides)
    found: list[int] = []
    left, step = runs.pop() if runs else (1, 1)
    for size in reversed(new):
        while left == 1 and size > 1:
            if not runs:
                return None
            left, step = runs.pop()
        if left % size:
            return None
        found.append(step)
        left, step = left // size, step * size
    return tuple(reversed(found))


def _runs(shape: Shape, strides: Strides) -> list[tuple[int, int]]:
    """(length, innermost stride) of each run of dims, outermost first."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs
