"""The kernels behind matrix products, attention and convolutions, as a profile's tables know them.

A call becomes kernels, each a table's name, the coordinates of its shape there, and its FLOPs; further work is moved
bytes: operands that must be copied first, biases whose gradient is a sum of columns.

| call                | forward            | gradients |
|---------------------|--------------------|-----------|
| x (m, k) · Wᵀ (n, k) | NT (m, n, k)       | NN (m, k, n) to x, TN (n, k, m) to W |
| a (m, k) · b (k, n) | NN (m, n, k)       | NT (m, k, n) to a, TN (k, n, m) to b |
| batches of these    | batched (m, n, k)  | batched (m, k, n), batched (k, n, m) |
| experts' products   | NN (m, n, k) of all | NT (m, k, n) of all, TN (k, n, m) each |
| attention           | by (length, width) | by the same |
| convolution         | by (channels, filters, size, batch), 1×1 and 3×3 | by the same, to the input and to the weight |
| strided convolution | by (channels, filters, size) | by the same |
| grouped convolution | by (channels of a group, size, batch) | by the same |

A table may know a dtype alone (`NT bfloat16`; `known_kernels`): of attention, such a table is by (sequences, length,
width, query heads that share a key and a value), its sequences those of all heads together (`flash causal forward
bfloat16`). Under a mask that is a tensor it has tables of its own (`flash masked …`); where a profile has none, those
of attention without a mask. Attention of one query a sequence, which takes what reading its keys and values from memory
does, has a table by (length, width, query heads that share a key and a value) where it was measured (`decode forward
float32`). Batches of products that a profile does not know are like one product of as many rows.

The size of an image is the side of the square that has as many pixels. A transposed convolution is the gradient of the
one that it transposes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.cost.tables import Table
from autopar.ops.table import operator
from autopar.ops.work import (
    EXPERTS,
    GROUPED,
    TRANSPOSED_CONVOLUTION,
    Product,
    Several,
    WorkKey,
    attended,
    computed_experts,
    routed_chunks,
    routed_rows,
)

GROUP_TILE = 128  # rows of an expert that a grouped product computes together
GROUP_TIMES = 1.1  # what one product of as many rows takes
GROUP_REACH = 0.75  # of the memory's bandwidth
GROUP_DTYPE = "bfloat16"  # of others each product is a kernel of its own
QUERY_TILE = 64  # rows that a tile of fused attention has at least, of all query heads that share a key and a value


class Kernel(NamedTuple):
    """One kernel: the table that knows it, its coordinates there, its floating-point operations.

    typed: where it stands in tables that know one dtype, (name without the dtype, coordinates), best first. repeats:
    kernels of that shape, one after the other. is_grouped: there may be one for all of them. is_alike: its operands are
    in such proportions as those of the kernels that its table was made of. is_one_tile: attention of so few queries
    that their keys and values are read once.
    """

    table: str
    coordinates: tuple[float, ...]
    flops: float
    typed: tuple[tuple[str, tuple[float, ...]], ...] = ()
    repeats: int = 1
    is_alike: bool = True
    is_one_tile: bool = False
    is_grouped: bool = False


class Found(NamedTuple):
    """A kernel in its table. is_typed: that table knows the call's dtype; is_inside: it was measured about there.
    reach: the part of the memory's bandwidth that it has at most."""

    table: Table
    coordinates: tuple[float, ...]
    flops: float
    is_typed: bool
    is_inside: bool
    repeats: int = 1
    reach: float = 1.0

    @property
    def duration_ns(self) -> float:
        return self.repeats * self.table.kernel_ns(self.coordinates, self.flops)


class Kernels(NamedTuple):
    """A call's kernels in one direction; bytes copied besides, and those of gradients summed over rows."""

    kernels: tuple[Kernel, ...]
    copied_bytes: int = 0
    summed_bytes: tuple[int, ...] = ()


def forward_kernels(call: WorkKey) -> Kernels | None:
    """The kernels of the forward direction; None for a call that no table is made for."""
    kind = operator(call.op).work
    if kind.family == "attention":
        return Kernels((_attention(call, "forward", kind.forward_flops(call)),))
    if kind.family == "convolution":
        return Kernels((_convolution(call, "forward"),))
    experts = _experts(call)
    if experts:
        return Kernels(tuple(_group("NN", count, m, n, k) for count, m, n, k in experts))
    if kind.several:
        return _several(kind.several(call, 0))
    product = kind.product(call) if kind.product else None
    if product is None:
        return None
    layout = "NT" if product.is_transposed else "NN"
    return Kernels((_product(product.batch, layout, product.m, product.n, product.k),), 2 * sum(product.copied))


def backward_kernels(call: WorkKey) -> Kernels | None:
    """The kernels of the gradients of the differentiable operands."""
    kind = operator(call.op).work
    if kind.family == "attention":
        return Kernels((_attention(call, "backward", kind.forward_flops(call)),))
    if kind.family == "convolution":
        sides = zip(("input", "weight"), call.differentiable, strict=False)
        return Kernels(tuple(_convolution(call, side) for side, wanted in sides if wanted), 0, _biases(call, 2))
    experts = _experts(call)
    if experts:
        inputs = [_group("NT", count, m, k, n) for count, m, n, k in experts]
        return Kernels((*inputs, *(_group("TN", count, k, n, m) for count, m, n, k in experts)))
    if kind.several:
        return _several(kind.several(call, 1))
    product = kind.product(call) if kind.product else None
    return None if product is None else _product_gradients(call, product)


def _several(found: Several) -> Kernels:
    products = tuple(_product(1, layout, m, n, k) for layout, m, n, k in found.products)
    return Kernels(products, found.copied_bytes, found.summed_bytes)


def found_in(kernels: Kernels, dtypes: Sequence[str], tables: Mapping[str, Table]) -> list[Found] | None:
    """The kernels in a profile's tables of the first dtype that has one; None where a kernel has no table."""
    found = [_found(kernel, dtypes, tables) for kernel in kernels.kernels]
    return [item for item in found if item] if all(found) else None


def _found(kernel: Kernel, dtypes: Sequence[str], tables: Mapping[str, Table]) -> Found | None:
    for known in dtypes:
        for name, coordinates in kernel.typed:
            table = tables.get(f"{name} {known}")
            if table is not None:
                is_like_known = kernel.is_alike and coordinates == kernel.typed[0][1] and kernel.repeats == 1
                is_inside = is_like_known and table.holds(coordinates)
                if name.startswith("flash"):
                    return _of_tiles(kernel, table, coordinates, is_inside)
                if kernel.is_grouped and dtypes[0] == GROUP_DTYPE:
                    return _of_groups(kernel, table, coordinates)
                return Found(table, coordinates, kernel.flops, True, is_inside, kernel.repeats)
    plain = tables.get(kernel.table)
    return Found(plain, kernel.coordinates, kernel.flops, False, False) if plain else None


def _of_tiles(kernel: Kernel, table: Table, coordinates: tuple[float, ...], is_inside: bool) -> Found:
    """Fused attention in tiles of queries. One tile of each head reads keys and values once, which is all that it
    takes (FlashDecoding shares them out among all processors). Of more keys than the table has, as many sequences of
    its longest stand for them as have the same number of tiles, where a FLOP takes no longer in those."""
    sequences, length, *others = coordinates
    at, longest = coordinates, table.axes[1][-1]
    if length > longest:
        more = (sequences * length / longest, longest, *others)
        at = min(coordinates, more, key=table.ns_per_flop)
    return Found(table, at, 0.0 if kernel.is_one_tile else kernel.flops, True, is_inside, kernel.repeats)


def _of_groups(kernel: Kernel, table: Table, coordinates: tuple[float, ...]) -> Found:
    """One kernel for all experts, of which no more have rows than there are rows."""
    each, features, width = coordinates
    experts = kernel.repeats * min(1.0, each)
    rows = experts * GROUP_TILE * max(1, math.ceil(each / GROUP_TILE))
    flops = GROUP_TIMES * 2.0 * rows * features * width
    return Found(table, (rows, features, width), flops, True, False, 1, GROUP_REACH)


def _product_gradients(call: WorkKey, product: Product) -> Kernels:
    batch, m, n, k, is_transposed, copied, first = product
    kernels, moved = [], 0
    if call.differentiable[first]:
        kernels.append(_product(batch, "NN" if is_transposed else "NT", m, k, n))
        moved += 2 * copied[0]
    if len(call.differentiable) > first + 1 and call.differentiable[first + 1]:
        rows, columns, inner = (n, k, m) if is_transposed else (k, n, m)
        kernels.append(_product(batch, "TN", rows, columns, inner))
        moved += 2 * copied[1]
    bias = 0 if first else 2
    return Kernels(tuple(kernels), moved, _biases(call, bias))


def _biases(call: WorkKey, position: int) -> tuple[int, ...]:
    wanted = len(call.differentiable) > position and call.differentiable[position]
    return (call.result_bytes,) if wanted and len(call.operand_shapes[position]) == 1 else ()


def _product(batch: int, layout: str, m: int, n: int, k: int) -> Kernel:
    alone = (layout, (batch * m, n, k))
    typed = (alone,) if batch == 1 else (("batched", (m, n, k)), alone)
    return Kernel("batched" if batch > 1 else layout, (m, n, k), 2.0 * batch * m * n * k, typed)


def _experts(call: WorkKey) -> list[tuple[int, float, int, int]]:
    """(experts, rows of each, features, width) of the products of routed or grouped experts; none of other calls.

    Rows are those of the busiest rank in the mean, spread evenly over its experts; of each chunk by itself.
    """
    kind, shapes = operator(call.op).work, call.operand_shapes
    if kind is EXPERTS:
        chunks = routed_chunks(call)
        groups = shapes[3][0] * chunks + computed_experts(call) - shapes[3][0]
        rows = routed_rows(call) / max(1, groups)
        return [(groups, rows, math.prod(shape[2:]), shape[1]) for shape in shapes[3:5]]
    if kind is GROUPED and len(shapes[0]) == 2 and len(shapes[1]) == 3:
        count, width, features = shapes[1]
        return [(count, shapes[0][0] / count, features, width)]
    return []


def _group(layout: str, count: int, m: float, n: float, k: float) -> Kernel:
    """No table without a dtype knows these."""
    typed = ((layout, (m, n, k)),)
    return Kernel("experts", (m, n, k), 2.0 * m * n * k, typed, count, is_grouped=layout != "TN" and count > 1)


def _attention(call: WorkKey, direction: str, flops: int) -> Kernel:
    """Its table counts the forward's operations in both directions, and was made where there are as many queries as
    keys: fewer read as much for less work."""
    query, key = call.operand_shapes[:2]
    kind, length = attended(call)
    plain, width = "full" if kind == "masked" else kind, query[-1]
    sequences = math.prod(query[:-1]) / length  # as many tiles of queries as that many of the keys' length have
    sharing = math.prod(query[:-2]) / math.prod(key[:-2])
    at = sequences, length, width, sharing
    typed: list[tuple[str, tuple[float, ...]]]
    typed = [(f"flash {known} {direction}", at) for known in dict.fromkeys((kind, plain))]
    if query[-2] == 1:
        typed.append((f"decode {direction}", (length, width, sharing)))
    is_alike = query[-2] >= key[-2]
    is_one_tile = not is_alike and query[-2] * max(1.0, sharing) <= QUERY_TILE
    return Kernel(f"attention {plain} {direction}", (length, width), flops, tuple(typed), 1, is_alike, is_one_tile)


def _convolution(call: WorkKey, side: str) -> Kernel:
    image, weight, result = call.operand_shapes[0], call.operand_shapes[1], call.result_shapes[0]
    if operator(call.op).work is TRANSPOSED_CONVOLUTION:
        image, result = result, image
        side = {"forward": "input", "input": "forward"}.get(side, side)
    groups = max(1, image[1] // weight[1])
    channels, filters, size = weight[1], max(1, weight[0] // groups), math.sqrt(math.prod(result[2:]))
    kernel = "1x1" if math.prod(weight[2:]) == 1 else "3x3"
    flops = operator(call.op).work.forward_flops(call)
    if groups > 1:
        return Kernel(f"grouped convolution 3x3 {side}", (math.sqrt(channels * filters), size, image[0]), flops)
    if any(length > made + window - 1 for length, made, window in zip(image[2:], result[2:], weight[2:], strict=True)):
        return Kernel(f"strided convolution {kernel} {side}", (channels, filters, size), flops)
    return Kernel(f"plain convolution {kernel} {side}", (channels, filters, size, image[0]), flops)
