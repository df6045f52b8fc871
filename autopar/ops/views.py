"""Rules of operators that only rearrange dims: reshape, permute, expand, slice and their kin."""

from __future__ import annotations

import math

from autopar.ir.placement import Axis, P, Placement, S, Type, format_placement, lengths_along, num_shards
from autopar.ops.call import Call
from autopar.ops.notation import AxisRule

Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]


def reshape_groups(before: tuple[int, ...], after: tuple[int, ...]) -> Groups:
    """The smallest groups of dims with equal products: [(dims before, dims after), ...], in order."""
    groups: Groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(left), j + len(right)
        while _product(before, left) != _product(after, right):
            if j < len(after) and (_product(before, left) > _product(after, right) or i == len(before)):
                right.append(j)
                j += 1
            else:
                left.append(i)
                i += 1
        groups.append((tuple(left), tuple(right)))
    return groups


def _product(shape: tuple[int, ...], dims: list[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


def _leading(shape: tuple[int, ...], dims: tuple[int, ...]) -> int | None:
    """The outermost dim of a group that is longer than 1: the only one whose slices stay contiguous."""
    return next((dim for dim in dims if shape[dim] > 1), None)


def reshape(call: Call) -> list[AxisRule]:
    """S on the leading dim of a group ↔ S on the leading dim it becomes; linear."""
    before, after = call.shape(0), call.result_shapes[0]
    rules = [AxisRule((P,), (P,))]
    if 0 in before:
        return rules  # without elements, no dim becomes another
    for left, right in reshape_groups(before, after):
        source, target = _leading(before, left), _leading(after, right)
        if source is not None and target is not None:
            rules.append(AxisRule((S(source),), (S(target),)))
    return rules


def reshape_limit(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int:
    """How many equal slices of `dim` the reshape keeps contiguous: it must divide this length."""
    if 0 in before:
        return 1
    for left, right in reshape_groups(before, after):
        if dim in left:
            target = _leading(after, right)
            return math.gcd(before[dim], after[target]) if target is not None else 1
    return 1


def reshape_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Equal slices stay whole: they must not be cut in a group of dims that becomes others."""
    before, after = call.shape(0), call.result_shapes[0]
    for type_ in operands[0]:
        if type_.kind == "S":
            shards = num_shards(operands[0], type_.dim, axes)
            if reshape_limit(before, after, type_.dim) % shards and not _same_dim(before, after, type_.dim):
                return f"dim {type_.dim} of {list(before)} in {shards} slices does not reshape to {list(after)}"
    return None


def _same_dim(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> bool:
    """Whether the dim passes the reshape unchanged, so that uneven slices stay slices."""
    return any(
        left == (dim,) and len(right) == 1 and before[dim] == after[right[0]]
        for left, right in reshape_groups(before, after)
    )


def dim_map(mapping: list[int | None], linear: bool = True) -> list[AxisRule]:
    """Rules of a one-operand operator whose result dim d comes from operand dim `mapping[d]`."""
    rules = [AxisRule((P,), (P,))] if linear else []
    return rules + [AxisRule((S(source),), (S(dim),)) for dim, source in enumerate(mapping) if source is not None]


def transpose(call: Call) -> list[AxisRule]:
    """A split dim goes to its new place; linear."""
    rank = len(call.shape(0))
    order: list[int | None] = list(range(rank))
    if rank:
        first, second = call.dim("dim0", rank), call.dim("dim1", rank)
        order[first], order[second] = order[second], order[first]
    return dim_map(order)


def matrix_transpose(call: Call) -> list[AxisRule]:
    """A split dim goes to its new place; linear."""
    return dim_map(list(reversed(range(len(call.shape(0))))))


def permute(call: Call) -> list[AxisRule]:
    """A split dim goes to its new place; linear."""
    rank = len(call.shape(0))
    return dim_map([dim % rank for dim in call.arguments["dims"]])


def unsqueeze(call: Call) -> list[AxisRule]:
    """Dims that are there stay split, the new one is whole; linear."""
    rank = len(call.shape(0))
    new = call.dim("dim", rank + 1)
    return dim_map([None if dim == new else dim - (dim > new) for dim in range(rank + 1)])


def squeezed_dims(call: Call) -> set[int]:
    """The dims that a squeeze removes where their length is 1: the named ones, or all."""
    rank = len(call.shape(0))
    dims = call.arguments.get("dim", tuple(range(rank)))
    return {dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,)) if rank}


def squeeze(call: Call) -> list[AxisRule]:
    """Dims that stay pass through; `squeeze_error` keeps a slice of length 1 from being squeezed too."""
    gone = squeezed_dims(call)
    return dim_map([dim for dim, size in enumerate(call.shape(0)) if size > 1 or dim not in gone])


def squeeze_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """A slice of length 1 must not be squeezed away where the whole dim stays."""
    for dim in squeezed_dims(call):
        length = call.shape(0)[dim]
        if length > 1 and 1 in lengths_along(call.shape(0), operands[0], dim, axes):
            placement = format_placement(operands[0])
            return f"dim {dim} of {list(call.shape(0))} as {placement} would be squeezed away on a rank"
    return None


def expand(call: Call) -> list[AxisRule]:
    """Dims that grow from 1 are new: every rank makes its own part of them, so R → S there."""
    before, after = call.shape(0), call.result_shapes[0]
    lead = len(after) - len(before)
    mapping: list[int | None] = [
        None if dim < lead or before[dim - lead] != after[dim] or after[dim] == 1 else dim - lead
        for dim in range(len(after))
    ]
    grown = [dim for dim, source in enumerate(mapping) if source is None and after[dim] > 1]
    return dim_map(mapping) + [AxisRule((Type("R"),), (S(dim),)) for dim in grown]


def slice_(call: Call) -> list[AxisRule]:
    """Dims that are not cut stay split; linear."""
    rank = len(call.shape(0))
    cut = call.dim("dim", rank)
    whole = call.shape(0)[cut] == call.result_shapes[0][cut]
    return dim_map([None if dim == cut and not whole else dim for dim in range(rank)])


def select(call: Call) -> list[AxisRule]:
    """Dims that are not selected stay split; linear."""
    rank = len(call.shape(0))
    gone = call.dim("dim", rank)
    return dim_map([dim + (dim >= gone) for dim in range(rank - 1)])


def split(call: Call) -> list[AxisRule]:
    """All pieces share the operand's type along the dims that are not cut."""
    rank, count = len(call.shape(0)), len(call.node.results)
    cut = call.dim("dim", rank)
    rules = [AxisRule((P,), (P,) * count)]
    return rules + [AxisRule((S(dim),), (S(dim),) * count) for dim in range(rank) if dim != cut]


def cat(call: Call) -> list[AxisRule]:
    """Dims that are not joined, split alike in all operands; linear."""
    count, rank = len(call.node.operands), len(call.result_shapes[0])
    joined = call.dim("dim", rank)
    types = [P, *(S(dim) for dim in range(rank) if dim != joined)]
    return [AxisRule((type_,) * count, (type_,)) for type_ in types]


def stack(call: Call) -> list[AxisRule]:
    """Dims that are there, split alike in all operands; linear."""
    count, rank = len(call.node.operands), len(call.result_shapes[0])
    new = call.dim("dim", rank)
    rules = [AxisRule((P,) * count, (P,))]
    return rules + [AxisRule((S(d - (d > new)),) * count, (S(d),)) for d in range(rank) if d != new]


def pad(call: Call) -> list[AxisRule]:
    """Dims that are not padded pass through; padding with zeros is linear."""
    rank = len(call.shape(0))
    widths = call.arguments["pad"]
    padded = {rank - 1 - k // 2 for k, width in enumerate(widths) if width != 0}
    linear = not call.arguments["value"] and call.arguments.get("mode", "constant") == "constant"
    return dim_map([None if dim in padded else dim for dim in range(rank)], linear)


def roll_or_flip(call: Call) -> list[AxisRule]:
    """Dims that are not moved stay split; linear."""
    rank = len(call.shape(0))
    moved = {dim % rank for dim in call.arguments["dims"]} or set(range(rank))  # no dims: rolls the flat tensor
    return dim_map([None if dim in moved else dim for dim in range(rank)])


def diagonal(call: Call) -> list[AxisRule]:
    """The two dims that the diagonal runs through become the last one."""
    rank = len(call.shape(0))
    gone = {call.dim("dim1", rank), call.dim("dim2", rank)}
    return dim_map([*(dim for dim in range(rank) if dim not in gone), None])


def unfold(call: Call) -> list[AxisRule]:
    """Windows along one dim; their contents become the last dim."""
    rank = len(call.shape(0))
    cut = call.dim("dimension", rank)
    return dim_map([*(None if dim == cut else dim for dim in range(rank)), None])
