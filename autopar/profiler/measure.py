"""Measures operators of this host's CPU (or first GPU): prints raw points as JSON.

Needs torch only and imports nothing of autopar, so the file can be copied to another machine and run there:
`OMP_NUM_THREADS=1 python -P measure.py [--device cuda] [--points FILE] > points.json`; `fit.py` makes a profile of it.

As many processes as there are cores measure at the same time, since ranks that train share memory bandwidth and cache.
They keep the memory that they free, as ranks that train do (`runtime.allocation`).
Times are those of the thread on the CPU, so that other programs disturb little; on a GPU those of events, with the
second-level cache overwritten before each. Operands alternate, so that small ones do not stay in the cache; weights are
read from memory, since whatever a step does between two uses of one has passed through the caches meanwhile; and before
the smallest calls others' data pass through it, as in a training step, so that the code must be fetched again too.
Operators are called as emitted programs call them, by their overloads, which costs more than torch's functions.

The whole sweep is made in ROUNDS, of which medians are kept: a machine whose speed drifts is then alike fast for all
points, and what one operator takes more than another does not come of when each was measured.

With --points, every measured point is kept in that file, and a run that was stopped goes on there. A file of another
machine, device, torch or revision is refused.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.optim.adamw import adamw

REVISION = 11  # of the sweep: points of another one do not mix
ROUNDS = 4
SECONDS_A_POINT = 0.005  # of a round
LEAST_TIMES = 2  # of a point in a round; the first one only warms up
BYTES_OF_OPERANDS = 1 << 25
SMALL_BYTES, PASSING_BYTES = 1 << 12, 1 << 21
MOST_FLOPS = 1.1e9  # a larger product is as efficient as one of this size
MOST_CONVOLUTION_FLOPS = 6e8  # so is a larger convolution
MOST_ELEMENTS = 1 << 23  # of an operand, so that memory never runs out
POOL_ELEMENTS = 1 << 24  # from which weights are taken in turn: of all ranks of a host, more than its caches hold

ALLOCATION = ((-1, (1 << 31) - 1), (-2, 1 << 26), (-3, 1 << 25))  # of mallopt(3): those of `runtime.allocation`

CHAIN = 4  # views one after another between two kernels

aten = torch.ops.aten
Tensors = list[torch.Tensor]
Operator = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """What to measure: its family, how it is called, how its operands are made, which gradients are wanted.

    `kind` tells apart cases of one family whose times do not follow from work alone. weights: how many of the last
    operands are such, or kept for as long, which no cache holds.
    """

    family: str
    op: str
    shape: tuple[int, ...]
    operands: Callable[[], Tensors]
    run: Operator
    detail: str = ""
    kind: str = ""
    weights: int = 0


def operator_cases() -> list[Case]:
    """The sweep: each family from launch-bound to bandwidth- or compute-bound sizes."""
    cases = [_linear(*shape) for shape in LINEAR_SHAPES]
    cases += [case for rows, width in ROW_SHAPES for case in _row_cases(rows, width)]
    cases += [case for shape in IMAGE_SHAPES for case in _image_cases(*shape)]
    cases += [_embedding(*shape) for shape in LOOKUP_SHAPES]
    cases += [_cross_entropy(*shape) for shape in LOSS_SHAPES]
    cases.append(Case("view", "transpose", (2, 2), lambda: _leaves((2, 2)), _transposed))
    cases.append(_einsum())
    return cases + list(_product_cases()) + list(_attention_cases()) + list(_convolution_cases())


TYPES = ("float32", "bfloat16", "float16")
TYPED_PRODUCTS = ((128, 128, 128), (512, 512, 512))  # m, n, k
TYPED_ATTENTION = ((4, 128, 64),)  # heads, length, width
TYPED_ROWS = ((256, 256), (512, 2048))


def typed_cases(dtype: torch.dtype) -> list[Case]:
    """A few operators of the families whose kernels differ by dtype."""
    products = [((m, k), (n, k)) for m, n, k in TYPED_PRODUCTS]
    heads = [((1, heads, length, width),) * 3 for heads, length, width in TYPED_ATTENTION]
    attention = F.scaled_dot_product_attention
    return [
        *(_typed("matmul", "linear", shapes, F.linear, dtype) for shapes in products),
        *(_typed("attention", "scaled_dot_product_attention", shapes, attention, dtype) for shapes in heads),
        *(_typed("pointwise", "mul", (shape, shape), torch.mul, dtype) for shape in TYPED_ROWS),
    ]


def _typed(family: str, op: str, shapes: tuple[tuple[int, ...], ...], run: Operator, dtype: torch.dtype) -> Case:
    def operands() -> Tensors:
        return [_drawn(*shape).to(dtype).requires_grad_() for shape in shapes]

    return Case(family, op, tuple(size for shape in shapes for size in shape), operands, run)


def measure_type(name: str, clock: WorkTimer) -> list[dict[str, Any]]:
    """The points of a dtype; none where the device has no kernels for it."""
    found = []
    for case in typed_cases(getattr(torch, name)):
        try:
            forward, backward = measure_case(case, clock)
        except (RuntimeError, NotImplementedError):
            continue
        kept = {"family": case.family, "op": case.op, "shape": case.shape, "dtype": name}
        found.append({**kept, "forward_ns": forward, "backward_ns": backward})
    return found


def _row_cases(rows: int, width: int) -> list[Case]:
    shape = (rows, width)
    return [
        Case("pointwise", "mul", shape, lambda: _leaves(shape, shape), aten.mul.Tensor),
        Case("transcendental", "tanh", shape, lambda: _leaves(shape), aten.tanh.default),
        Case("gelu", "gelu", shape, lambda: _leaves(shape), aten.gelu.default),
        Case("gelu_tanh", "gelu", shape, lambda: _leaves(shape), _gelu_tanh, "tanh"),
        Case("silu", "silu", shape, lambda: _leaves(shape), aten.silu.default),
        _layer_norm(rows, width),
        _rms_norm(rows, width),
        Case("softmax", "softmax", shape, lambda: _leaves(shape), _softmax),
        Case("reduction", "sum", shape, lambda: _leaves(shape), _sum),
        Case("column_sum", "sum", shape, lambda: _leaves(shape), _column_sum),
        Case("dropout", "native_dropout", shape, lambda: _leaves(shape), _dropout),
        Case("copy", "clone", shape, lambda: _leaves((width, rows)), _transposed_copy),
        Case("straight_copy", "clone", shape, lambda: _leaves(shape), aten.clone.default),
    ]


LINEAR_SHAPES = ((2, 4, 4), (128, 128, 128), (512, 512, 512))
ROW_SHAPES = ((2, 8), (16, 64), (128, 64), (256, 256), (512, 512), (512, 2048), (2048, 2048))
IMAGE_SHAPES = ((2, 2, 2), (4, 16, 8), (8, 32, 16), (8, 64, 32), (16, 64, 32))  # batch, channels, size
WINDOW = 3  # of pools
LOOKUP_SHAPES = ((4, 10, 4), (64, 1000, 64), (512, 2000, 256), (512, 4000, 512), (2048, 16000, 512))
LOSS_SHAPES = ((2, 8), (32, 256), (256, 1024), (512, 2048), (512, 8192))

#: The vertices of the tables: a table's ns a FLOP are interpolated between them.
LAYOUTS = ("NT", "NN", "TN")  # x·Wᵀ (forward), g·W (to the input), gᵀ·x (to the weight)
ROWS, COLUMNS, INNER = (16, 64, 256, 1024, 4096), (32, 128, 512, 2048), (32, 128, 512, 2048)
BATCHED = (16, 64, 256, 1024)
LENGTHS, WIDTHS = (32, 128, 512), (16, 32, 64, 128)
BATCH = 8
#: Of attention of one query a sequence: cached keys, their width, query heads that share them, elements of all keys.
DECODE_LENGTHS, DECODE_WIDTHS, GROUPED_QUERIES, DECODE_ELEMENTS = (64, 256, 1024), (32, 128), (1, 4), 1 << 20
#: Of convolutions: channels from those of photographs on; sizes of results; one image, whose weights are laid out anew
#: for few pixels, and several. Strided ones are of other kernels, so are grouped ones, whose channels are a group's.
CHANNELS, FILTERS, SIZES = (3, 16, 64, 256, 1024), (16, 64, 256, 1024), (4, 8, 16, 32, 64)
BATCHES, KERNELS = (1, 8), (1, 3)
GROUPS, GROUP_CHANNELS = 32, (1, 4, 8, 16, 64)


def _product_cases() -> Iterator[Case]:
    """Layouts of one shape come one after the other: a rewrite changes the layout alone, and machines drift."""
    for m, n, k in itertools.product(ROWS, COLUMNS, INNER):
        if 2 * m * n * k <= MOST_FLOPS:
            yield from (_product(layout, m, n, k) for layout in LAYOUTS)
    for m in BATCHED:
        for n in BATCHED:
            for k in BATCHED:
                if 2 * BATCH * m * n * k <= MOST_FLOPS:
                    yield _batched(m, n, k)


def _product(layout: str, m: int, n: int, k: int) -> Case:
    def operands() -> Tensors:
        left, right = (k, m) if layout == "TN" else (m, k), (n, k) if layout == "NT" else (k, n)
        return [_drawn(*left), _drawn(*right)]

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.mm(left.t() if layout == "TN" else left, right.t() if layout == "NT" else right)

    return Case("matmul", "mm", (m, n, k), operands, run, kind=layout, weights=int(layout != "TN"))


def _batched(m: int, n: int, k: int) -> Case:
    def operands() -> Tensors:
        return [_drawn(BATCH, m, k), _drawn(BATCH, k, n)]

    return Case("matmul", "bmm", (m, n, k), operands, torch.bmm, kind="batched", weights=1)


def _attention_cases() -> Iterator[Case]:
    for causal in (False, True):
        for length in LENGTHS:
            for width in WIDTHS:
                yield _attention(max(1, 2048 // length), length, width, causal)
    yield _attention(1, 2, 2, True)  # what a call costs
    for length, width, group in itertools.product(DECODE_LENGTHS, DECODE_WIDTHS, GROUPED_QUERIES):
        yield _decode(max(1, DECODE_ELEMENTS // (length * width)), length, width, group)


class Convolution(NamedTuple):
    """Sizes of a square convolution, padded so that a stride divides the image's size: `size` is the result's."""

    batch: int
    channels: int
    filters: int
    size: int
    kernel: int
    stride: int = 1
    groups: int = 1

    @property
    def kind(self) -> str:
        """The kernels that it takes."""
        form = "grouped" if self.groups > 1 else "strided" if self.stride > 1 else "plain"
        return f"{form} {self.kernel}x{self.kernel}"

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Where it stands in the table of its kind (`kernels`)."""
        if self.groups > 1:
            return self.channels // self.groups, self.size, self.batch
        return (self.channels, self.filters, self.size, *(() if self.stride > 1 else (self.batch,)))

    @property
    def is_small_enough(self) -> bool:
        image = self.batch * self.channels * (self.stride * self.size) ** 2
        weight = self.filters * self.channels // self.groups * self.kernel**2
        flops = 2 * self.batch * self.size**2 * weight
        return flops <= MOST_CONVOLUTION_FLOPS and max(image, weight) <= MOST_ELEMENTS


def _convolution_cases() -> Iterator[Case]:
    least = Convolution(1, 1, 1, 1, 1)
    for made in (*_plain_convolutions(), *_grouped_convolutions(), least):
        if made.is_small_enough:
            yield _convolution(made, gradient="input")
            yield _convolution(made, gradient="weight")


def _plain_convolutions() -> Iterator[Convolution]:
    for kernel, size, channels, filters in itertools.product(KERNELS, SIZES, CHANNELS, FILTERS):
        for batch in BATCHES:
            yield Convolution(batch, channels, filters, size, kernel)
        yield Convolution(1, channels, filters, size, kernel, stride=2)


def _grouped_convolutions() -> Iterator[Convolution]:
    for channels, size, batch in itertools.product(GROUP_CHANNELS, SIZES, BATCHES):
        yield Convolution(batch, GROUPS * channels, GROUPS * channels, size, 3, groups=GROUPS)


@lru_cache(maxsize=1)
def _pool(device: torch.device) -> torch.Tensor:
    return torch.randn(POOL_ELEMENTS, device=device)


def _drawn(*shape: int) -> torch.Tensor:
    """Normal numbers: a copy of the same ones each time, since drawing them takes longer than most operators."""
    return _pool(torch.get_default_device())[: math.prod(shape)].view(shape).clone()


class _Weights:
    """Parts of the pool in turn, so that the one taken next is the one that was read the longest ago."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """One of that shape, a gradient wanted as there."""
        begin = self._next if self._next + like.numel() <= POOL_ELEMENTS else 0
        self._next = begin + -(-like.numel() // 16) * 16  # whole lines of a cache
        part = _pool(like.device)[begin : begin + like.numel()]
        return part.view(like.shape).requires_grad_(like.requires_grad)


_WEIGHTS = _Weights()


def _leaves(*shapes: tuple[int, ...]) -> Tensors:
    return [_drawn(*shape).requires_grad_() for shape in shapes]


def _tensor(result: Any) -> torch.Tensor:
    """What an overload returns, whose type is not declared."""
    found: torch.Tensor = result
    return found


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return _tensor(aten.transpose.int(x, 0, 1))


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return _tensor(aten.softmax.int(x, -1))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return _tensor(aten.gelu.default(x, approximate="tanh"))


def _sum(x: torch.Tensor) -> torch.Tensor:
    return _tensor(aten.sum.dim_IntList(x, [-1]))


def _column_sum(x: torch.Tensor) -> torch.Tensor:
    return _tensor(aten.sum.dim_IntList(x, [0]))


def _dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.1, True)


def _transposed_copy(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _linear(tokens: int, width: int, features: int) -> Case:
    shape = (tokens, width, features)
    return Case(
        "linear",
        "linear",
        shape,
        lambda: _leaves((1, tokens, width), (features, width)),
        aten.linear.default,
        weights=1,
    )


def _einsum() -> Case:
    """What a call costs: operands are permuted, made matrices, multiplied and made tensors again."""
    equation, shapes = "egcm,emh->egch", ((2, 1, 2, 4), (2, 4, 4))

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.einsum.default(equation, [x, weight]))

    return Case("einsum", "einsum", (2, 1, 2, 4, 4), lambda: _leaves(*shapes), run, equation)


def _attention(heads: int, length: int, width: int, causal: bool) -> Case:
    shape = (1, heads, length, width)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, causal))

    detail = "causal" if causal else ""
    name = "scaled_dot_product_attention"
    return Case("attention", name, shape, lambda: _leaves(shape, shape, shape), run, detail, detail or "full")


def _decode(heads: int, length: int, width: int, group: int) -> Case:
    """One query a sequence, under the mask that a cache of keys has: the queries of a head as those of one sequence."""
    shape, mask = (1, heads, length, width), torch.ones(1, 1, 1, length, dtype=torch.bool)

    def operands() -> Tensors:
        return [_drawn(1, heads, group, width), _drawn(*shape), _drawn(*shape)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.scaled_dot_product_attention.default(q, k, v, mask))

    name, sizes = "scaled_dot_product_attention", (heads, length, width, group)
    return Case("decode", name, sizes, operands, run, "masked", weights=2)


def _convolution(made: Convolution, gradient: str) -> Case:
    def operands() -> Tensors:
        side = made.stride * made.size
        image = _drawn(made.batch, made.channels, side, side)
        weight = _drawn(made.filters, made.channels // made.groups, made.kernel, made.kernel)
        return [image.requires_grad_(gradient == "input"), weight.requires_grad_(gradient == "weight")]

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        stride, padding = [made.stride] * 2, [made.kernel // 2] * 2
        return _tensor(aten.conv2d.default(x, weight, None, stride, padding, [1, 1], made.groups))

    return Case("convolution", "conv2d", made.coordinates, operands, run, kind=f"{made.kind} {gradient}", weights=1)


def _layer_norm(rows: int, width: int) -> Case:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.layer_norm.default(x, [width], weight, bias))

    shape = (rows, width)
    return Case("normalization", "layer_norm", shape, lambda: _leaves(shape, (width,), (width,)), run)


def _rms_norm(rows: int, width: int) -> Case:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.rms_norm.default(x, [width], weight))

    return Case("rms_norm", "rms_norm", (rows, width), lambda: _leaves((rows, width), (width,)), run)


def _image_cases(batch: int, channels: int, size: int) -> list[Case]:
    shape = (batch, channels, size, size)

    def operands() -> Tensors:
        return _leaves(shape, (channels,), (channels,))

    def normalized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.batch_norm.default(x, weight, bias, None, None, True, 0.1, 1e-5, False))

    def scaled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        statistics = _statistics(channels)
        return _tensor(aten.batch_norm.default(x, weight, bias, *statistics, False, 0.1, 1e-5, False))

    def max_pooled(x: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.max_pool2d.default(x, [WINDOW] * 2, [1, 1], [WINDOW // 2] * 2))

    def avg_pooled(x: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.avg_pool2d.default(x, [WINDOW] * 2, [1, 1], [WINDOW // 2] * 2))

    sizes, window = (batch, channels, size), str(WINDOW**2)
    return [
        Case("batch_norm", "batch_norm", sizes, operands, normalized),
        Case("batch_norm_inference", "_native_batch_norm_legit_no_training", sizes, operands, scaled),
        Case("max_pool", "max_pool2d", sizes, lambda: _leaves(shape), max_pooled, window),
        Case("avg_pool", "avg_pool2d", sizes, lambda: _leaves(shape), avg_pooled, window),
    ]


@cache
def _statistics(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(channels), torch.ones(channels)


def _embedding(tokens: int, vocabulary: int, width: int) -> Case:
    def operands() -> Tensors:
        return [*_leaves((vocabulary, width)), torch.randint(0, vocabulary, (tokens,))]

    def run(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return _tensor(aten.embedding.default(table, indices))

    return Case("gather", "embedding", (tokens, vocabulary, width), operands, run)


def _cross_entropy(tokens: int, vocabulary: int) -> Case:
    def operands() -> Tensors:
        return [*_leaves((tokens, vocabulary)), torch.randint(0, vocabulary, (tokens,))]

    return Case("cross_entropy", "cross_entropy_loss", (tokens, vocabulary), operands, aten.cross_entropy_loss.default)


# Timing ----------------------------------------


class WorkTimer:
    """Nanoseconds that work takes on the device: of this thread on a CPU, between events on a GPU."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self._flushed = torch.empty(1 << 28, dtype=torch.uint8, device=device) if self.is_cuda else None
        self._own_ns = 0
        empty = sorted(self.time_ns(lambda: None)[0] for _ in range(200))
        self._own_ns = empty[len(empty) // 4]

    def time_ns(self, call: Callable[[], Any]) -> tuple[int, Any]:
        """How long a call takes, and what it returns."""
        if self.is_cuda:
            return self._time_cuda(call)
        start = time.thread_time_ns()
        result = call()
        return max(0, time.thread_time_ns() - start - self._own_ns), result

    def _time_cuda(self, call: Callable[[], Any]) -> tuple[int, Any]:
        assert self._flushed is not None
        self._flushed.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        result = call()
        events[1].record()
        torch.cuda.synchronize()
        return max(0, round(events[0].elapsed_time(events[1]) * 1e6) - self._own_ns), result


def measure_case(case: Case, clock: WorkTimer) -> tuple[int, int]:
    """Nanoseconds (forward, backward), everything included: the median over one round's repetitions."""
    sets = [case.operands()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in sets[0])
    sets += [case.operands() for _ in range(min(16, BYTES_OF_OPERANDS // (4 * size)))]
    gradient = torch.ones_like(case.run(*sets[0]))
    passing = torch.zeros(PASSING_BYTES if size <= SMALL_BYTES else 0, dtype=torch.uint8)
    times: list[tuple[int, int]] = []
    deadline = time.perf_counter() + SECONDS_A_POINT * (4 if passing.numel() else 1)
    while time.perf_counter() < deadline or len(times) < LEAST_TIMES:
        operands = sets[len(times) % len(sets)]
        if case.weights:
            operands = [*operands[: -case.weights], *map(_WEIGHTS.take, operands[-case.weights :])]
        times.append(_measure_once(case, operands, gradient, passing, clock))
    forward, backward = zip(*times[1:], strict=True)
    return median_high(forward), median_high(backward)


def _measure_once(
    case: Case, operands: Tensors, gradient: torch.Tensor, passing: torch.Tensor, clock: WorkTimer
) -> tuple[int, int]:
    passing.add_(1)
    forward, result = clock.time_ns(lambda: case.run(*operands))
    leaves = [leaf for leaf in operands if leaf.requires_grad]
    if not leaves:
        return forward, 0
    passing.add_(1)
    return forward, clock.time_ns(lambda: torch.autograd.grad(result, leaves, gradient))[0]


def measure_launch(step: Operator, shape: tuple[int, ...], clock: WorkTimer) -> tuple[int, int, int]:
    """Nanoseconds of one operator of a long chain, forward and backward; and a backward pass's own cost."""
    one = [_chain(step, shape, 1, clock) for _ in range(10)]
    many = [_chain(step, shape, 201, clock) for _ in range(5)]
    forward = (median_high([f for f, _ in many]) - median_high([f for f, _ in one])) // 200
    backward = (median_high([b for _, b in many]) - median_high([b for _, b in one])) // 200
    return forward, backward, max(0, median_high([b for _, b in one]) - backward)


def measure_view(clock: WorkTimer) -> tuple[int, int]:
    """Nanoseconds of one of a few views between kernels whose data pass through the caches, forward and backward."""
    passing = torch.zeros(PASSING_BYTES, dtype=torch.uint8)

    def chain(length: int) -> tuple[int, int]:
        passing.add_(1)
        return _chain(_transposed, (2, 2), length, clock)

    one, several = ([chain(length) for _ in range(20)] for length in (1, CHAIN))
    alone, together = median_high([b for _, b in one]), median_high([b for _, b in several])
    return median_high([f for f, _ in several]) // CHAIN, max(1, (together - alone) // (CHAIN - 1))


def _chain(step: Operator, shape: tuple[int, ...], length: int, clock: WorkTimer) -> tuple[int, int]:
    leaf, gradient = torch.randn(shape, requires_grad=True), torch.ones(shape)

    def run() -> torch.Tensor:
        result = leaf
        for _ in range(length):
            result = step(result)
        return result

    forward, result = clock.time_ns(run)
    return forward, clock.time_ns(lambda: torch.autograd.grad(result, [leaf], gradient))[0]


def measure_optimizer(num_elements: int, clock: WorkTimer, num_tensors: int = 4) -> int:
    """Nanoseconds of AdamW on one tensor of that size."""
    parameters, gradients, means, variances = (
        [torch.zeros(num_elements) + 0.1 for _ in range(num_tensors)] for _ in range(4)
    )
    steps = [torch.tensor(1.0, device="cpu") for _ in range(num_tensors)]

    def update() -> None:
        with torch.no_grad():
            adamw(parameters, gradients, means, variances, [], steps, **ADAMW)

    times = _repeat(update, clock)
    return median_high(times[1:]) // num_tensors


def _repeat(call: Callable[[], Any], clock: WorkTimer) -> list[int]:
    times: list[int] = []
    deadline = time.perf_counter() + SECONDS_A_POINT
    while time.perf_counter() < deadline or len(times) < LEAST_TIMES:
        times.append(clock.time_ns(call)[0])
    return times


# The update without the Optimizer class, whose first use imports torch.compile for seconds.
ADAMW: dict[str, Any] = {
    "foreach": False, "capturable": False, "differentiable": False, "fused": False, "amsgrad": False,
    "maximize": False, "beta1": 0.9, "beta2": 0.999, "lr": 1e-4, "weight_decay": 0.01, "eps": 1e-8,
}  # fmt: skip


def measure_dtype(dtype: torch.dtype, clock: WorkTimer, size: int = 384) -> int:
    """Nanoseconds of a square matrix product, for the peak rate of a dtype."""
    left, right = (_drawn(size, size).to(dtype) for _ in range(2))
    return median_high(_repeat(lambda: torch.mm(left, right), clock)[1:])


# The sweep ----------------------------------------


class KeptPoints:
    """Points that are measured already, by key; each new one is appended to the file, if there is one.

    Lines that cannot be read, as a run that was stopped may leave one, are measured again.
    """

    def __init__(self, path: Path | None, host: dict[str, Any]) -> None:
        self.path, self.host = path, host
        lines = path.read_text(errors="replace").splitlines() if path is not None and path.exists() else []
        if lines and _parsed(lines[0]) != host:
            raise SystemExit(
                f"expected {path} to hold points of {json.dumps(host)}, found {lines[0][:500]}: points of different "
                "machines, devices or versions do not mix; name another file, or remove this one"
            )
        rows = [row for row in map(_parsed, lines[1:]) if isinstance(row, list) and len(row) == 2]  # a key, its point
        self.points: dict[str, Any] = {key: point for key, point in rows if isinstance(key, str)}
        damaged = len(lines) - 1 - len(self.points)
        if damaged > 0:
            print(f"{path}: {damaged} lines cannot be read, and are measured again", file=sys.stderr)
        if path is not None and damaged:
            path.write_text("".join(json.dumps(row) + "\n" for row in (host, *self.points.items())))

    def get(self, key: str, measure: Callable[..., Any], *arguments: Any) -> Any:
        """The point of that key, measured now if it is not known."""
        if key not in self.points:
            self.points[key] = measure(*arguments)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([key, self.points[key]]) + "\n")
        return self.points[key]


def _parsed(line: str) -> Any:
    """None where it is no JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _describe(case: Case) -> dict[str, Any]:
    operands = case.operands()
    result = case.run(*operands)
    return {
        "family": case.family,
        "op": case.op,
        "shape": case.shape,
        "detail": case.detail,
        "kind": case.kind,
        "operands": [[list(x.shape), x.element_size(), x.requires_grad] for x in operands],
        "result": [list(result.shape), result.element_size()],
    }


def keep_freed_memory() -> None:
    """As ranks that train do: what was freed is taken again, without a page fault for each page of a large result."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda number, value: 0)  # glibc's
    for number, value in ALLOCATION:
        mallopt(ctypes.c_int(number), ctypes.c_int(value))


def measure_operators(kept: KeptPoints, clock: WorkTimer, report: Callable[[str], None]) -> dict[str, Any]:
    """Every operator point of one rank: of each number the median over the rounds."""
    return median_of([_measure_round(number, kept, clock, report) for number in range(ROUNDS)])  # type: ignore[no-any-return]


def _measure_round(number: int, kept: KeptPoints, clock: WorkTimer, report: Callable[[str], None]) -> dict[str, Any]:
    """Every point once."""

    def get(key: str, measure: Callable[..., Any], *arguments: Any) -> Any:
        return kept.get(f"{key} round {number}", measure, *arguments)

    launch = get("launch", measure_launch, lambda x: x * 1.5, (4,), clock)
    view = get("view", measure_view, clock)
    points, cases = [], operator_cases()
    for place, case in enumerate(cases):
        name = f"{case.op} {'x'.join(map(str, case.shape))}"
        report(f"round {number + 1} of {ROUNDS}, {place + 1} of {len(cases)}: {name}")
        points.append(get(f"{case.family} {name} {case.kind}", _point, case, clock))
    sizes = (64, 1 << 14, 1 << 18, 1 << 22)
    optimizer = [[n, get(f"optimizer {n}", measure_optimizer, n, clock)] for n in sizes]
    names = ("float64", "float32", "bfloat16", "float16")
    dtypes = {name: [384, get(f"dtype {name}", measure_dtype, getattr(torch, name), clock)] for name in names}
    typed = [point for name in TYPES for point in get(f"typed {name}", measure_type, name, clock)]
    return {
        "launch": launch, "view": view, "points": points, "optimizer": optimizer, "dtypes": dtypes, "typed": typed
    }  # fmt: skip


def _point(case: Case, clock: WorkTimer) -> dict[str, Any]:
    forward, backward = measure_case(case, clock)
    return {**_describe(case), "forward_ns": forward, "backward_ns": backward}


def median_of(results: Sequence[Any]) -> Any:
    """Results of one form as one: of each number the median, the higher of two in the middle."""
    first = results[0]
    if isinstance(first, dict):
        return {key: median_of([result[key] for result in results]) for key in first}
    if isinstance(first, list | tuple):
        return [median_of(items) for items in zip(*results, strict=True)]
    return median_high(results) if isinstance(first, int | float) and not isinstance(first, bool) else first


def measure_together(count: int, kept: KeptPoints, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """What each of `count` processes finds that measure at the same time; the first one's points are kept."""
    others = KeptPoints(None, kept.host)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(count)]
        children = [
            _fork(file, others if rank else kept, (lambda text: None) if rank else report)
            for rank, file in enumerate(files)
        ]
        failed = [child for child in children if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        if failed:
            raise SystemExit(f"{len(failed)} of {count} measuring processes failed")
        return [json.loads(file.read_text()) for file in files]


def _fork(file: Path, kept: KeptPoints, report: Callable[[str], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        keep_freed_memory()
        file.write_text(json.dumps(measure_operators(kept, WorkTimer("cpu"), report)))
        status = 0
    finally:
        os._exit(status)


def host_facts(device: str) -> dict[str, Any]:
    """What points must agree in to be of one profile."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "machine": platform.machine(), "device": name, "torch": torch.__version__, "dtype": "float32",
        "cores": len(os.sched_getaffinity(0)), "node": platform.node(), "revision": REVISION,
    }  # fmt: skip


def main() -> None:
    """Prints the points as one JSON object; progress goes to stderr when that is a terminal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--points", type=Path, help="keep points here, and go on from those that are there")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    report = _report if sys.stderr.isatty() else (lambda text: None)
    host = host_facts(options.device)
    kept = KeptPoints(options.points, host)
    if options.device == "cuda":
        torch.set_default_device("cuda")
        ranks = [measure_operators(kept, WorkTimer("cuda"), report)]
    else:
        ranks = measure_together(host["cores"], kept, report)
    report("")
    json.dump({**_mean(ranks), "host": host}, sys.stdout)


def _mean(ranks: Sequence[Any]) -> Any:
    """The ranks' results as one: of each number the mean, as all ranks of a step take their time."""
    first = ranks[0]
    if isinstance(first, dict):
        return {key: _mean([rank[key] for rank in ranks]) for key in first}
    if isinstance(first, list):
        return [_mean(items) for items in zip(*ranks, strict=True)]
    return round(sum(ranks) / len(ranks)) if isinstance(first, int) and not isinstance(first, bool) else first


def _report(text: str) -> None:
    sys.stderr.write(f"\r\x1b[2Kmeasuring this host: {text}" if text else "\r\x1b[2K")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
