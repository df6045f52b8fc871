"""The work of linear operators that compute block by block beside what they send (`ops.async_linears`).

How many blocks there are, the shapes on a rank say: results have so many times the rows of the input where rows come,
and the input so many times the rows of the result where sums go home. Products of blocks are kernels of their own;
gradients of weights are one product each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.ir.placement import Shape
from autopar.ops.work import Several, Work, WorkKey, WorkKind


class _Linears(NamedTuple):
    """rows: of the input, of all ranks; pieces: in how many blocks they are multiplied; moves: whether rows of blocks
    do not lie next to each other."""

    rows: int
    width: int
    features: tuple[int, ...]
    pieces: int
    moves: bool
    sums: bool  # blocks of results are added up on their way


def _linears(call: WorkKey) -> _Linears:
    x, made = call.operand_shapes[0], call.result_shapes[0]
    weights = [shape for shape in call.operand_shapes[1:] if len(shape) == 2]
    rows, results = math.prod(x[:-1]), math.prod(made[:-1])
    pieces = max(rows, results) // max(1, min(rows, results))
    features = tuple(shape[0] for shape in weights)
    return _Linears(max(rows, results), x[-1], features, pieces, _moves(x, made), rows > results)


def _moves(x: Shape, made: Shape) -> bool:
    """Whether the dim that blocks are of has others before it."""
    dim = next((dim for dim, size in enumerate(x[:-1]) if size != made[dim]), 0)
    return math.prod(x[:dim]) > 1


def _flops(call: WorkKey) -> int:
    own = _linears(call)
    return 2 * own.rows * own.width * sum(own.features)


def _kernels(call: WorkKey) -> int:
    own = _linears(call)
    return own.pieces * len(own.features)


def _moved(call: WorkKey) -> int:
    """Rows of all ranks, weights, results, and what is copied and added."""
    own, forward, _ = _linears(call), *_copied(call)
    every = own.rows * (own.width + sum(own.features)) * call.operand_itemsizes[0]
    return every + sum(call.operand_bytes[1:]) + forward


def _copied(call: WorkKey) -> tuple[int, int]:
    """Bytes read and written, forward and backward: results are put in order, and so are rows and gradients; blocks of
    sums are added to what comes."""
    own, itemsize = _linears(call), call.operand_itemsizes[0]
    if own.pieces == 1:
        return 0, 0
    rows, made = own.rows * own.width * itemsize, own.rows * sum(own.features) * itemsize
    if own.sums:
        added = 3 * made * (own.pieces - 1) // own.pieces
        return added + 2 * own.moves * (rows + made // own.pieces), 2 * own.moves * (2 * rows + made // own.pieces)
    own_rows = rows // own.pieces
    return 2 * own.moves * (own_rows + made), 2 * own.moves * (made + 2 * own_rows)


def _gradient(call: WorkKey) -> Work:
    own = _linears(call)
    wanted = _wanted(call)
    products = [*([own.pieces if own.sums else 1] * wanted[0] * len(own.features)), *([1] * wanted[1])]
    flops = _flops(call) * wanted[0] + 2 * own.rows * own.width * _trained_features(call)
    summed = (*_biases(call), *([size] if (size := _copied(call)[1]) else []))
    moved = (wanted[0] + (wanted[1] > 0)) * (_moved(call) - _copied(call)[0])
    return Work(flops, moved, sum(products) + len(summed), summed)


def _wanted(call: WorkKey) -> tuple[int, int]:
    """Whether rows have a gradient, and how many weights."""
    stored = zip(call.operand_shapes[1:], call.differentiable[1:], strict=True)
    return int(call.differentiable[0]), sum(wanted for shape, wanted in stored if len(shape) == 2)


def _trained_features(call: WorkKey) -> int:
    stored = zip(call.operand_shapes[1:], call.differentiable[1:], strict=True)
    return sum(shape[0] for shape, wanted in stored if len(shape) == 2 and wanted)


def _biases(call: WorkKey) -> tuple[int, ...]:
    """Bytes that are summed over rows for each bias that has a gradient."""
    stored = [*zip(call.operand_shapes[1:], call.differentiable[1:], strict=True)]
    places = (place for place, (_, wanted) in enumerate(s for s in stored if len(s[0]) == 1) if wanted)
    return tuple(math.prod(call.result_shapes[place]) * call.result_itemsizes[place] for place in places)


def _several(call: WorkKey, direction: int) -> Several:
    """The products of one direction, as (layout, rows, columns, inner)."""
    own, copied = _linears(call), _copied(call)[direction]
    part = own.rows // own.pieces
    if direction == 0:
        found = [("NT", part, features, own.width) for features in own.features for _ in range(own.pieces)]
        return Several(tuple(found), copied, ())
    found = []
    if call.differentiable[0]:
        pieces, rows = (own.pieces, part) if own.sums else (1, own.rows)
        found += [("NN", rows, own.width, features) for features in own.features for _ in range(pieces)]
    stored = zip(call.operand_shapes[1:], call.differentiable[1:], strict=True)
    found += [("TN", shape[0], own.width, own.rows) for shape, wanted in stored if len(shape) == 2 and wanted]
    return Several(tuple(found), copied, _biases(call))


ASYNC_LINEARS = WorkKind("matmul", _flops, _moved, gradient=_gradient, pieces=_kernels, several=_several)
