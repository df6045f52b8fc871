"""Parameters that a graph only joins, slices and transposes become what is stored: packed parameters.

Before → after: `linear(x, cat(q, k, v))` → `linear(x, p)` with p stored, made of all of q, k and v;
`split(c, [n, n, n], 1)` → three stored parameters, each a slice of c. Sound where every element of the parameters
involved lands in exactly one place; a parameter that is also read as it is stays, and so do its operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.ir.graph import Graph, Node, Packing, Piece, Stored, Tensor, reading
from autopar.ir.packed import Box, box_of, cover_fault, packed_shape, piece_shape
from autopar.substitute.naming import packed_names

_TRANSPOSES = {"aten.t.default", "aten.numpy_T.default", "aten.mT.default"}


def packed(graph: Graph) -> Graph:
    """The graph with packed parameters where that is possible, and without the operators that packed them.

    The same graph gets the same names. What cannot be packed stays an operator of the graph.
    """
    layouts = _layouts(graph)
    chosen = _packable(graph, layouts)
    return _rewritten(graph, layouts, chosen) if chosen else graph


# What moves elements of parameters ----------------------------------------


def _layouts(graph: Graph) -> dict[str, Packing]:
    """For each tensor that holds elements of parameters and nothing else, once each: which, and how."""
    found = {item.tensor: _whole(graph, item) for item in graph.parameters}
    shapes = {piece.name: shape for name, own in found.items() for piece, shape in _pieces(graph, name, own)}
    for node in graph.nodes:
        if node.operands and all(name in found for name in node.operands):
            made = _moved(graph, node, found, shapes)
            if made is not None:
                found.update((name, made[position]) for position, name in enumerate(node.outputs) if name is not None)
    return found


def _whole(graph: Graph, item: Stored) -> Packing:
    """What a stored parameter is made of: of itself, unless it is packed already."""
    return graph.packed.get(item.name) or Packing(0, (Piece(item.name),))


def _pieces(graph: Graph, tensor: str, packing: Packing) -> Iterable[tuple[Piece, tuple[int, ...]]]:
    """The pieces, each with the shape of the model's parameter that it is of."""
    for piece in packing.pieces:
        own = graph.unpacked.get(piece.name)
        yield piece, graph.tensors[tensor].shape if own is None else own.shape


def _moved(
    graph: Graph, node: Node, layouts: Mapping[str, Packing], shapes: Mapping[str, tuple[int, ...]]
) -> list[Packing] | None:
    """What a node makes of packings, an output each; None where it does more than move, or what is no packing."""
    rank = len(graph.tensors[node.operands[0]].shape)
    own = [layouts[name] for name in node.operands]
    name, args = node.op.split(".")[1], _arguments(node)
    if node.op == "aten.cat.default":
        return _one(_joined(own, args.get("dim", 0) % rank, shapes)) if rank else None
    if node.op in _TRANSPOSES or (name in ("transpose", "permute") and _swaps(args, rank)):
        return _one(_transposed(own[0], rank))
    cuts = _cuts(name, args, graph.tensors[node.operands[0]].shape)
    if cuts is None:
        return None
    dim, spans = cuts
    parts = [_cut(own[0], dim, span, shapes) for span in spans]
    return [part for part in parts if part is not None] if None not in parts else None


_SIGNATURES = {
    "cat": ("tensors", "dim"), "slice": ("x", "dim", "start", "end", "step"), "narrow": ("x", "dim", "start", "length"),
    "split_with_sizes": ("x", "sizes", "dim"), "split": ("x", "size", "dim"), "transpose": ("x", "dim0", "dim1"),
    "permute": ("x", "dims"),
}  # fmt: skip


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments that are given, by name."""
    names = _SIGNATURES.get(node.op.split(".")[1], ())
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _swaps(args: Mapping[str, Any], rank: int) -> bool:
    """Whether the two dims of a matrix change places."""
    dims = args["dims"] if "dims" in args else (args["dim0"], args["dim1"])
    swapped = [dim % rank for dim in dims] == [1, 0] if "dims" in args else dims[0] % rank != dims[1] % rank
    return rank == 2 and swapped


def _cuts(name: str, args: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, list[range]] | None:
    """The dim that a slicing operator cuts, and the elements along it that each output gets; None for others."""
    if name not in ("slice", "narrow", "split_with_sizes", "split") or not shape:
        return None
    dim = args.get("dim", 0) % len(shape)
    length = shape[dim]
    if name == "slice":
        start, end, step = slice(args.get("start"), args.get("end"), args.get("step", 1)).indices(length)
        return (dim, [range(start, end)]) if step == 1 else None
    if name == "narrow":
        start = args["start"] % length
        return dim, [range(start, start + args["length"])]
    if name == "split":
        return dim, [range(start, min(start + args["size"], length)) for start in range(0, length, args["size"])]
    ends = [sum(args["sizes"][: count + 1]) for count in range(len(args["sizes"]))]
    return dim, [range(end - size, end) for end, size in zip(ends, args["sizes"], strict=True)]


def _one(packing: Packing | None) -> list[Packing] | None:
    return None if packing is None else [packing]


def _joined(own: Sequence[Packing], dim: int, shapes: Mapping[str, tuple[int, ...]]) -> Packing | None:
    """Packings one after the other; neighbouring slices of one parameter become one again."""
    if any(len(packing.pieces) > 1 and packing.dim != dim for packing in own):
        return None
    pieces: list[Piece] = []
    for piece in (piece for packing in own for piece in packing.pieces):
        merged = _merged(pieces[-1], piece, dim, shapes[piece.name]) if pieces else None
        pieces[-1:] = [merged] if merged else [*pieces[-1:], piece]
    return Packing(dim if len(pieces) > 1 else 0, tuple(pieces))


def _merged(one: Piece, other: Piece, dim: int, shape: tuple[int, ...]) -> Piece | None:
    """The slice that two make that touch along the dim in which they are joined, if they do."""
    along = 1 - dim if one.transposed else dim
    if one.length is None or other.length is None or one.dim != along:
        return None
    if replace(one, start=other.start, length=other.length) != other or one.start + one.length != other.start:
        return None
    return _slice(one, range(one.start, other.start + other.length), shape)


def _slice(piece: Piece, span: range, shape: tuple[int, ...]) -> Piece:
    """The piece's elements in the span of its dim, stated in one way."""
    if span == range(shape[piece.dim]):
        return replace(piece, dim=0, start=0, length=None)
    return replace(piece, start=span.start, length=len(span))


def _transposed(packing: Packing, rank: int) -> Packing | None:
    if rank != 2:
        return None
    pieces = tuple(replace(piece, transposed=not piece.transposed) for piece in packing.pieces)
    return Packing(1 - packing.dim if len(pieces) > 1 else 0, pieces)


def _cut(packing: Packing, dim: int, span: range, shapes: Mapping[str, tuple[int, ...]]) -> Packing | None:
    """The part of a packing that lies in the span of a dim."""
    pieces: list[Piece] = []
    start = 0
    for piece in packing.pieces:
        whole = range(piece_shape(piece, shapes[piece.name])[dim])
        joined_here = len(packing.pieces) > 1 and dim == packing.dim
        own = range(max(span.start - start, 0), min(span.stop - start, len(whole))) if joined_here else span
        start += len(whole) if joined_here else 0
        if len(own):
            part = _part(piece, 1 - dim if piece.transposed else dim, own, shapes[piece.name])
            if part is None:
                return None
            pieces.append(part)
    return Packing(packing.dim if len(pieces) > 1 else 0, tuple(pieces)) if pieces else None


def _part(piece: Piece, dim: int, span: range, shape: tuple[int, ...]) -> Piece | None:
    """A slice of a piece along a dim of the parameter; None where it is sliced along another one already."""
    own = box_of(piece, shape)
    if span == range(len(own[dim])):
        return piece
    if piece.length is not None and piece.dim != dim:
        return None
    start = own[dim].start + span.start
    return _slice(replace(piece, dim=dim), range(start, start + len(span)), shape)


# What may be stored so ----------------------------------------


def _packable(graph: Graph, layouts: Mapping[str, Packing]) -> dict[Packing, list[str]]:
    """The packings to be stored, each with its tensors: those that something reads that does more than move.

    Parameters that packings connect, on the way too, are packed together or not at all.
    """
    ends: dict[Packing, list[str]] = defaultdict(list)
    for tensor, packing in layouts.items():
        if _is_end(graph, tensor, layouts):
            ends[packing].append(tensor)
    now = {_whole(graph, item): item.tensor for item in graph.parameters}
    left = {*graph.outputs, *graph.mutations.values()}
    own = originals(graph)
    chosen = {}
    for group in _groups(layouts.values()):
        new = [packing for packing in group if packing in ends]
        stays = all(ends[packing] == [now.get(packing)] for packing in new)
        stays |= any(left.intersection(ends[packing]) for packing in new)
        stays |= any(piece.name in graph.mutations for packing in group for piece in packing.pieces)
        if not stays and _is_sound(new, own):
            chosen.update({packing: ends[packing] for packing in new})
    return chosen


def _is_end(graph: Graph, tensor: str, layouts: Mapping[str, Packing]) -> bool:
    """Whether a tensor is read as it is, or by nothing."""
    readers = [node for node, _ in graph.consumers[tensor]]
    return not readers or not all(any(name in layouts for name in node.results) for node in readers)


def _groups(packings: Iterable[Packing]) -> list[list[Packing]]:
    """Packings that hold slices of a common parameter, directly or through others."""
    group_of: dict[str, list[Packing]] = {}
    for packing in dict.fromkeys(packings):
        names = dict.fromkeys(piece.name for piece in packing.pieces)
        groups = {id(group_of[name]): group_of[name] for name in names if name in group_of}
        merged = [*(item for group in groups.values() for item in group), packing]
        group_of.update((piece.name, merged) for item in merged for piece in item.pieces)
    return list({id(group): group for group in group_of.values()}.values())


class Original(NamedTuple):
    """A parameter of the model as it is kept, and the dtype that is computed with."""

    kept: Tensor
    dtype: str


def originals(graph: Graph) -> dict[str, Original]:
    """The model's parameters by name, also those that are stored in pieces."""
    found = {}
    for item in graph.parameters:
        kept, dtype = graph.kept(item.tensor), graph.tensors[item.tensor].dtype
        for piece in _whole(graph, item).pieces:
            own = graph.unpacked.get(piece.name) or replace(kept, name=piece.name, differentiable=item.requires_grad)
            found[piece.name] = Original(own, dtype)
    return found


def _is_sound(packings: Sequence[Packing], own: Mapping[str, Original]) -> bool:
    """Whether the packings alone hold all of their parameters once, and what they join is alike."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for packing in packings:
        for piece in packing.pieces:
            boxes[piece.name].append(box_of(piece, own[piece.name].kept.shape))
        found = (own[piece.name] for piece in packing.pieces)
        if len({(item.dtype, item.kept.dtype, item.kept.differentiable) for item in found}) > 1:
            return False
    return all(cover_fault(own[name].kept, found) is None for name, found in boxes.items())


# The graph with what is stored so ----------------------------------------


def _rewritten(graph: Graph, layouts: Mapping[str, Packing], chosen: Mapping[Packing, list[str]]) -> Graph:
    names = packed_names(graph, list(chosen))
    own = originals(graph)
    renamed = {tensor: names[packing] for packing, ends in chosen.items() for tensor in ends}
    moved = {piece.name for packing in chosen for piece in packing.pieces}
    gone = {tensor for tensor, packing in layouts.items() if packing.pieces[0].name in moved}
    new = [_stored(packing, name, own) for packing, name in names.items()]
    stored = _in_place(graph, gone, dict(zip(names, new, strict=True)))
    whole = {item.name: item.packing for item in new if item.packing != Packing(0, (Piece(item.name),))}
    packings = {name: packing for name, packing in graph.packed.items() if packing.pieces[0].name not in moved} | whole
    kept = {name: dtype for name, dtype in graph.kept_dtypes.items() if name not in gone}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name not in gone}
    return replace(
        graph,
        stored=stored,
        nodes=tuple(reading(node, renamed) for node in graph.nodes if gone.isdisjoint(node.results)),
        tensors=tensors | {item.name: item.tensor for item in new},
        kept_dtypes=kept | {item.name: item.kept for item in new if item.kept != item.tensor.dtype},
        packed=packings,
        unpacked={piece.name: own[piece.name].kept for packing in packings.values() for piece in packing.pieces},
    )


class _New(NamedTuple):
    """What is stored anew: its name, of what it is made, its tensor, and the dtype that is kept."""

    name: str
    packing: Packing
    tensor: Tensor
    kept: str


def _stored(packing: Packing, name: str, own: Mapping[str, Original]) -> _New:
    first = own[packing.pieces[0].name]
    shape = packed_shape(packing, [piece_shape(piece, own[piece.name].kept.shape) for piece in packing.pieces])
    assert shape is not None, "of a tensor of the graph"
    return _New(name, packing, Tensor(name, shape, first.dtype, first.kept.differentiable), first.kept.dtype)


def _in_place(graph: Graph, gone: set[str], new: Mapping[Packing, _New]) -> tuple[Stored, ...]:
    """What is stored, the new where the first parameter stood that it has a piece of."""
    place = {piece.name: n for n, item in enumerate(graph.stored) for piece in _whole(graph, item).pieces}
    order = {item.name: min((place[p.name], p.start) for p in packing.pieces) for packing, item in new.items()}
    items = [((n, -1), item) for n, item in enumerate(graph.stored) if item.tensor not in gone]
    items += [
        (order[item.name], Stored(item.name, item.name, "parameter", item.tensor.differentiable))
        for item in new.values()
    ]
    return tuple(item for _, item in sorted(items, key=lambda pair: pair[0]))
