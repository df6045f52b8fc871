"""Packed parameters: what they are made of, and what must hold of it.

A rewrite may only *move* elements of parameters, merging query, key and value or splitting what a model has fused.
Then the moved parameter is what is stored: elementwise optimizers and norms do not notice, and state dicts are cut
back into the model's own names and shapes. Sound where every element of the model's parameters lies in one place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Packing, Piece, Stored, Tensor

Box = tuple[range, ...]
"""The elements of a slice: a range of each dim."""


def box_of(piece: Piece, shape: Sequence[int]) -> Box:
    """The elements of the model's parameter, which has this shape, that a piece takes."""
    whole = [range(length) for length in shape]
    if shape:
        end = shape[piece.dim] if piece.length is None else piece.start + piece.length
        whole[piece.dim] = range(piece.start, end)
    return tuple(whole)


def piece_shape(piece: Piece, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a piece of a parameter, as it is stored."""
    lengths = [len(span) for span in box_of(piece, shape)]
    return tuple(reversed(lengths)) if piece.transposed else tuple(lengths)


def packed_shape(packing: Packing, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of all pieces together, given each piece's; None where they do not fit."""
    first = shapes[0]
    if not 0 <= packing.dim < max(len(first), 1):
        return None
    rests = {(*shape[: packing.dim], *shape[packing.dim + 1 :]) for shape in shapes}
    if len(rests) != 1 or len({len(shape) for shape in shapes}) != 1:
        return None
    if not first:
        return first if len(shapes) == 1 else None
    length = sum(shape[packing.dim] for shape in shapes)
    return (*first[: packing.dim], length, *first[packing.dim + 1 :])


def check_packing(graph: Graph) -> None:
    """Raises PlanError where a packed parameter is not made of the model's, or an element lies nowhere or twice."""
    stored = {item.name: item for item in graph.stored}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for name, packing in graph.packed.items():
        if name not in stored:
            raise PlanError(f"expected the packed parameter {name} among what is stored, found no such name")
        _check_made(graph, stored[name], packing)
        for piece in packing.pieces:
            boxes[piece.name].append(box_of(piece, graph.unpacked[piece.name].shape))
    for name, tensor in graph.unpacked.items():
        if name in stored:
            raise PlanError(f"expected {name} to be stored in pieces alone, found it stored by its own name too")
        fault = cover_fault(tensor, boxes[name])
        if fault is not None:
            raise PlanError(fault)


def _check_made(graph: Graph, item: Stored, packing: Packing) -> None:
    """That the pieces exist and make up the stored parameter: its shape, its kept dtype, trained or not."""
    tensor = graph.kept(item.tensor)
    if item.kind != "parameter" or item.name in graph.unpacked or not packing.pieces:
        raise PlanError(f"expected {item.name}, a parameter of another name than the model's, to be made of pieces")
    for piece in packing.pieces:
        own = graph.unpacked.get(piece.name)
        if own is None:
            raise PlanError(f"expected {piece.name}, of which {item.name} is made, in `unpacked`, found it missing")
        _check_piece(piece, own)
        if (own.dtype, own.differentiable) != (tensor.dtype, item.requires_grad):
            raise PlanError(
                f"expected {item.name}, {_kind(tensor.dtype, item.requires_grad)}, of parameters alike, found "
                f"{piece.name} to be {_kind(own.dtype, own.differentiable)}"
            )
    found = packed_shape(packing, [piece_shape(piece, graph.unpacked[piece.name].shape) for piece in packing.pieces])
    if found != tensor.shape:
        raise PlanError(f"expected pieces that make up {item.name} {list(tensor.shape)}, found {found}")


def _check_piece(piece: Piece, own: Tensor) -> None:
    dims = len(own.shape)
    fits = 0 <= piece.dim < max(dims, 1) and (dims == 2 or not piece.transposed) and piece.start >= 0
    if fits and dims:
        end = box_of(piece, own.shape)[piece.dim].stop
        fits = piece.start < end <= own.shape[piece.dim] or (piece.start, end) == (0, own.shape[piece.dim])
    elif fits:
        fits = (piece.start, piece.length) == (0, None)
    if not fits:
        raise PlanError(f"expected a slice of {own.name}{list(own.shape)}, found {piece}")


def _kind(dtype: str, trained: bool) -> str:
    return f"{dtype} and {'trained' if trained else 'frozen'}"


def cover_fault(tensor: Tensor, boxes: Sequence[Box]) -> str | None:
    """Why slices of a parameter do not hold each of its elements once; None where they do."""
    for one, other in _neighbours(boxes):
        if all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(one, other, strict=True)):
            return f"expected each element of {tensor.name} in one place, found {_text(one)} and {_text(other)}"
    count = sum(math.prod(map(len, box)) for box in boxes)
    if count != tensor.num_elements:
        return f"expected all {tensor.num_elements} elements of {tensor.name} to be stored, found {count} of them"
    return None


def _neighbours(boxes: Sequence[Box]) -> Iterable[tuple[Box, Box]]:
    """Pairs of which one overlaps if any two do: of slices along one dim, those next to each other; else all."""
    cut = {dim for box in boxes for dim, span in enumerate(box) if span != boxes[0][dim]}
    if len(cut) > 1:
        return combinations(boxes, 2)
    dim = next(iter(cut), 0)
    return pairwise(sorted(boxes, key=lambda box: box[dim].start) if cut else boxes)


def _text(box: Box) -> str:
    return f"[{', '.join(f'{span.start}:{span.stop}' for span in box)}]"
