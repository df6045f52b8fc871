"""The kernels behind matrix products, attention and convolutions, as a profile's tables know them.

A call becomes kernels, each a table's name, the coordinates of its shape there, and its FLOPs; further work is moved
bytes: operands that must be copied first, biases whose gradient is a sum of columns.

| call                | forward            | gradients |
|---------------------|--------------------|-----------|
| x (m, k) · Wᵀ (n, k) | NT (m, n, k)       | NN (m, k, n) to x, TN (n, k, m) to W |
| a (m, k) · b (k, n) | NN (m, n, k)       | NT (m, k, n) to a, TN (k, n, m) to b |
| batches of these    | batched (m, n, k)  | batched (m, k, n), batched (k, n, m) |
| attention           | by (length, width) | by the same |
| convolution         | by (channels, filters, size, batch), 1×1 and 3×3 | by the same, to the input and to the weight |
| strided convolution | by (channels, filters, size) | by the same |
| grouped convolution | by (channels of a group, size, batch) | by the same |

The size of an image is the side of the square that has as many pixels. A transposed convolution is the gradient of the
one that it transposes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.ops.table import operator
from autopar.ops.work import TRANSPOSED_CONVOLUTION, Product, WorkKey


class Kernel(NamedTuple):
    """One kernel: the table that knows it, its coordinates there, its floating-point operations."""

    table: str
    coordinates: tuple[float, ...]
    flops: float


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
    product = kind.product(call) if kind.product else None
    return None if product is None else _product_gradients(call, product)


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
    return Kernel("batched" if batch > 1 else layout, (m, n, k), 2.0 * batch * m * n * k)


def _attention(call: WorkKey, direction: str, flops: int) -> Kernel:
    """Its table counts the forward's operations in both directions."""
    query, key = call.operand_shapes[:2]
    kind = call.detail or "full"
    return Kernel(f"attention {kind} {direction}", (key[-2], query[-1]), flops)


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
