"""Measures operators of this host's GPU: tables of points, as `autopar profile --from FOLDER` reads them.

Needs torch only and imports nothing of autopar, so the file can be copied to another machine and run there:
`python -P measure_gpu.py FOLDER [--seconds 180] [--gpu NAME] [--only SECTION …]`. Each section is a file, written as it
is measured; each has its share of the seconds, and shapes in an order of chance, so that one that is cut short has
some of all sizes. What a GPU or its torch cannot run is left out.

A point is the time of one kernel among many equal calls: captured in a CUDA graph, so that the host's launches are not
in it, over several sets of operands in turn, whose data are normal numbers (zeros are faster). What the host takes to
launch operators, and how the clock falls in seconds of work, are sections of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw

Call = Callable[[], Any]
Row = dict[str, Any]

TARGET_NS = 1_000_000  # of work that is timed at once
MOST_CALLS = 48  # of it
OPERAND_BYTES = 1 << 27  # of all sets of operands of a case: more than a second-level cache holds
MOST_SETS = 6
MOST_FLOPS = {"float32": 4e11, "tf32": 2e12}  # of a product; of other dtypes:
MOST = 8e12
MOST_BYTES = 1 << 34  # of operands and results of a case

aten = torch.ops.aten


class GpuCase(NamedTuple):
    """What its row says; how a set of operands is made, and what is called with it. num_bytes: of a set, about."""

    row: Row
    operands: Callable[[], Any]
    run: Callable[[Any], Any]
    num_bytes: int


class Section(NamedTuple):
    """A file of points, its columns beside `gpu`, `time_us` and `software`, and its share of the time."""

    file: str
    columns: tuple[str, ...]
    cases: Callable[[], Iterable[GpuCase]]
    share: float


# Timing -----------------------------------------------------------------


class GraphTimer:
    """Microseconds of one call among many, on a stream of its own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def time_us(self, calls: Sequence[Call]) -> float:
        """The calls in turn. Where they cannot be captured, the host launches them."""
        with torch.cuda.stream(self.stream):
            for call in calls[:2]:
                call()
            once = max(1.0, 1000 * min(self._events_ms(calls[0]) for _ in range(2)))
            count = max(3, min(MOST_CALLS, round(TARGET_NS / 1000 / once)))
            chosen = [calls[number % len(calls)] for number in range(count)]
            return 1000 * self._all_ms(chosen) / count

    def _all_ms(self, calls: Sequence[Call]) -> float:
        def together() -> None:
            for call in calls:
                call()

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                together()
        except RuntimeError:
            torch.cuda.synchronize()
            return min(self._events_ms(together) for _ in range(2))
        return statistics.median(self._events_ms(graph.replay) for _ in range(3))

    def _events_ms(self, call: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def point(case: GpuCase, timer: GraphTimer) -> Row:
    """A case's row with its time."""
    with torch.cuda.stream(timer.stream):
        count = max(1, min(MOST_SETS, OPERAND_BYTES // max(1, case.num_bytes)))
        sets = [case.operands() for _ in range(count)]
    calls = [lambda own=own: case.run(own) for own in sets]
    return {**case.row, "time_us": float(f"{timer.time_us(calls):.5g}")}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, device="cuda", dtype=torch.float16 if dtype.itemsize == 1 else dtype).to(dtype)


# Products ---------------------------------------------------------------

TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
WIDTHS = (256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 16384, 51200)
FEW_TOKENS, FEW_WIDTHS = (1024, 4096, 16384), (768, 1024, 2048, 4096, 8192, 16384, 51200)
ROLES = {"forward": "NT", "grad_input": "NN", "grad_weight": "TN"}


def forward_products() -> Iterator[GpuCase]:
    """(m, k)·(n, k)ᵀ in bf16."""
    for m, n, k in itertools.product(TOKENS, WIDTHS, WIDTHS):
        if 2 * m * n * k <= MOST:
            yield _product("bfloat16", "NT", m, n, k, {"m": m, "n": n, "k": k, "dtype": "bfloat16"})


def trained_products() -> Iterator[GpuCase]:
    """The three of a layer, in each dtype; (m, n, k) are those of each kernel."""
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        widths = WIDTHS if dtype == "bfloat16" else FEW_WIDTHS
        for tokens, features, width in itertools.product(FEW_TOKENS, widths, widths):
            if 2 * tokens * features * width > MOST_FLOPS.get(dtype, MOST) or features == width == 51200:
                continue
            yield _trained(dtype, "forward", tokens, features, width)
            yield _trained(dtype, "grad_input", tokens, width, features)
            yield _trained(dtype, "grad_weight", features, width, tokens)


def _trained(dtype: str, role: str, m: int, n: int, k: int) -> GpuCase:
    row = {"role": role, "layout": ROLES[role], "batch": 1, "m": m, "n": n, "k": k, "accumulate": 0}
    return _product(dtype, ROLES[role], m, n, k, {**row, "dtype": dtype, "out_dtype": dtype})


def _product(name: str, layout: str, m: int, n: int, k: int, row: Row) -> GpuCase:
    dtype = torch.float32 if name in ("tf32", "float32") else getattr(torch, name)

    def operands() -> Any:
        left, right = (k, m) if layout == "TN" else (m, k), (n, k) if layout == "NT" else (k, n)
        return drawn(*left, dtype=dtype), drawn(*right, dtype=dtype)

    def run(own: Any) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        left, right = own
        return torch.mm(left.t() if layout == "TN" else left, right.t() if layout == "NT" else right)

    return GpuCase(row, operands, run, (m * k + n * k + m * n) * dtype.itemsize)


def scaled_products() -> Iterator[GpuCase]:
    """fp8 with a scale a tensor, operands already in fp8, to bf16."""
    for m, n, k in itertools.product(FEW_TOKENS, FEW_WIDTHS[:-1], FEW_WIDTHS[:-1]):

        def operands(m: int = m, n: int = n, k: int = k) -> Any:
            own = drawn(m, k, dtype=torch.float8_e4m3fn), drawn(n, k, dtype=torch.float8_e4m3fn)
            return (*own, torch.ones((), device="cuda"), torch.ones((), device="cuda"))

        def run(own: Any) -> Any:
            a, b, one, other = own
            return torch._scaled_mm(a, b.t(), one, other, out_dtype=torch.bfloat16, use_fast_accum=True)

        row = {"m": m, "n": n, "k": k, "dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
        yield GpuCase(row, operands, run, m * k + n * k + 2 * m * n)


def batched_products() -> Iterator[GpuCase]:
    """Batches of products in bf16, as of attention that is written out."""
    for batch, m, n in itertools.product((8, 64, 256), (128, 512, 2048), (64, 128, 512, 2048)):
        for k in (64, 128, 512, 2048):
            if 2 * batch * m * n * k <= MOST / 8 and batch * (m * k + k * n + m * n) < 1 << 29:
                row = {"batch": batch, "m": m, "n": n, "k": k, "dtype": "bfloat16"}
                yield GpuCase(
                    row, _batch(batch, m, n, k), lambda own: torch.bmm(*own), 2 * batch * (m * k + k * n + m * n)
                )


def _batch(batch: int, m: int, n: int, k: int) -> Callable[[], Any]:
    return lambda: (drawn(batch, m, k), drawn(batch, k, n))


def grouped_products() -> Iterator[GpuCase]:
    """Experts' products: every group as many rows; forward, and both gradients."""
    for groups, rows, (n, k) in itertools.product(
        (8, 16, 64), (64, 256, 1024, 4096), ((4096, 2048), (2048, 4096), (14336, 4096), (4096, 14336), (1408, 2048))
    ):
        if 2 * groups * rows * n * k <= MOST and groups * n * k < 1 << 31:
            for stage in ("forward", "grad_input", "grad_weight"):
                yield _grouped(stage, groups, rows, n, k)


def _grouped(stage: str, groups: int, rows: int, n: int, k: int) -> GpuCase:
    def operands() -> Any:
        ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * rows
        if stage == "grad_weight":
            return drawn(groups * rows, k).t(), drawn(groups * rows, n), ends
        matrices = drawn(groups, k, n)
        if stage == "forward":
            return drawn(groups * rows, k), matrices, ends
        return drawn(groups * rows, n), matrices.mT, ends

    def run(own: Any) -> Tensor:
        return torch._grouped_mm(own[0], own[1], offs=own[2])

    row = {"groups": groups, "m_per_group": rows, "n": n, "k": k, "stage": stage, "accumulate": 0}
    size = 2 * groups * (rows * k + n * k + rows * n)
    return GpuCase({**row, "dtype": "bfloat16", "out_dtype": "bfloat16"}, operands, run, size)


# Attention --------------------------------------------------------------

KERNELS = {
    "torch_cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash2": SDPBackend.FLASH_ATTENTION,
    "torch_efficient": SDPBackend.EFFICIENT_ATTENTION, "torch_math": SDPBackend.MATH, "torch": None,
    "torch_masked": None,  # by a tensor that hides later keys, as models of libraries do
}  # fmt: skip
LENGTHS, HEADS, HEAD_DIMS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768), (8, 16, 32, 64), (64, 128, 256)
SHARES = {"torch_cudnn": 0.7, "torch_flash2": 0.5}  # of shapes
ATTENTION = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "causal")


def attention_shapes() -> Iterator[tuple[int, ...]]:
    """As `ATTENTION` has them: of batches of a few thousand to some ten thousand tokens."""
    for length, heads, width, causal in itertools.product(LENGTHS, HEADS, HEAD_DIMS, (1, 0)):
        for tokens, sharing in itertools.product((1024, 4096, 16384), (1, 4)):
            batch = max(1, tokens // length)
            flops = 4 * batch * heads * length * length * width / (1 + causal)
            if flops <= MOST and batch * heads * length * width <= 1 << 28 and (batch * length <= 2 * tokens):
                yield batch, length, length, heads, heads // sharing, width, causal


def attention(passes: str) -> Callable[[], Iterator[GpuCase]]:
    """Cases of the forward or the backward pass, by kernel; the default one, and those that keep scores, less often."""

    def cases() -> Iterator[GpuCase]:
        for kernel, shape in itertools.product(KERNELS, dict.fromkeys(attention_shapes())):
            batch, length, _, heads, shared, _, _ = shape
            is_large = batch * heads * length**2 > 1 << (28 if kernel == "torch_math" else 36)
            chosen = random.Random(f"{kernel} {shape}").random()
            can_share = heads == shared or kernel in ("torch_cudnn", "torch_flash2", "torch")
            if (
                not is_large
                and can_share
                and (shape[-1] or kernel != "torch_masked")
                and chosen < SHARES.get(kernel, 0.25)
            ):
                yield _attention(kernel, shape, passes)

    return cases


def _hidden(batch: int, length: int) -> Tensor:
    return torch.ones(length, length, device="cuda", dtype=torch.bool).tril().expand(batch, 1, length, length)


def _attention(kernel: str, shape: tuple[int, ...], passes: str) -> GpuCase:
    batch, length, _, heads, shared, width, causal = shape
    is_backward = passes == "backward"

    backend, is_shared = KERNELS[kernel], heads != shared

    def called(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        is_causal = bool(causal) and mask is None
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=is_shared)

    def operands() -> Any:
        own = [drawn(batch, length, count, width).transpose(1, 2) for count in (heads, shared, shared)]
        mask = _hidden(batch, length) if kernel == "torch_masked" else None
        if not is_backward:
            return own[0], own[1], own[2], mask
        leaves = [x.detach().requires_grad_() for x in own]
        return called(leaves[0], leaves[1], leaves[2], mask), leaves, drawn(batch, length, heads, width).transpose(1, 2)

    def run(own: Any) -> Any:
        return torch.autograd.grad(own[0], own[1], own[2], retain_graph=True) if is_backward else called(*own)

    names = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "causal")
    row: Row = {**dict(zip(names, shape, strict=True)), "kernel": kernel, "dtype": "bfloat16"}
    if is_backward:
        row |= {"pass": "backward", "seq": length, "qk_head_dim": width, "v_head_dim": width, "qkv_contiguous": 0}
    return GpuCase(row, operands, run, 2 * batch * length * width * (4 * heads + 4 * shared) * (1 + is_backward))


# What moves bytes -------------------------------------------------------

ROW_SHAPES = tuple(
    (rows, cols) for cols in (768, 2048, 4096, 8192, 51200) for rows in (16, 256, 1024, 4096, 16384, 65536)
    if rows * cols <= 1 << 29
)  # fmt: skip
#: by operator, how many operands; and what is called
MOVING: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "add": (2, aten.add.Tensor), "mul": (2, aten.mul.Tensor), "gelu": (1, aten.gelu.default),
    "gelu_tanh": (1, lambda x: aten.gelu.default(x, approximate="tanh")), "silu": (1, aten.silu.default),
    "relu": (1, aten.relu.default), "tanh": (1, aten.tanh.default), "softmax": (1, lambda x: aten.softmax.int(x, -1)),
    "layer_norm": (1, lambda x: _layer_norm(x)), "rms_norm": (1, lambda x: F.rms_norm(x, x.shape[-1:], _ones(x))),
    "dropout": (1, lambda x: F.dropout(x, 0.1)), "clone": (1, aten.clone.default),
    "transposed_copy": (1, lambda x: aten.clone.default(x.t(), memory_format=torch.contiguous_format)),
    "sum": (1, lambda x: aten.sum.dim_IntList(x, [-1])), "column_sum": (1, lambda x: aten.sum.dim_IntList(x, [0])),
    "cast": (1, lambda x: x.to(torch.float32 if x.dtype != torch.float32 else torch.bfloat16)),
}  # fmt: skip


def _ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-1], device="cuda", dtype=x.dtype, requires_grad=x.requires_grad)


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], _ones(x), _ones(x))


def moving() -> Iterator[GpuCase]:
    """Operators that move bytes and compute little, forward and backward."""
    for op, (rows, cols), dtype in itertools.product(MOVING, ROW_SHAPES, ("bfloat16", "float32")):
        for passes in ("forward", "backward"):
            if dtype == "bfloat16" or random.Random(f"{op} {rows} {cols}").random() < 0.4:
                yield _moving(op, rows, cols, dtype, passes)


def _moving(op: str, rows: int, cols: int, dtype: str, passes: str) -> GpuCase:
    count, call = MOVING[op]
    is_backward = passes == "backward"

    def operands() -> Any:
        own = [drawn(rows, cols, dtype=getattr(torch, dtype)).requires_grad_(is_backward) for _ in range(count)]
        if not is_backward:
            return own
        result = call(*own)
        return result, own, torch.randn_like(result)

    def run(own: Any) -> Any:
        return torch.autograd.grad(own[0], own[1], own[2], retain_graph=True) if is_backward else call(*own)

    row = {"op": op, "pass": passes, "rows": rows, "cols": cols, "dtype": dtype}
    return GpuCase(row, operands, run, 4 * rows * cols * (count + 1 + is_backward))


def lookups() -> Iterator[GpuCase]:
    """Embedding (rows: tokens, cols: width) and cross-entropy (cols: vocabulary), forward and backward."""
    for rows, dtype, passes in itertools.product((1024, 4096, 16384, 65536), ("bfloat16", "float32"), PASSES):
        for cols in (768, 2048, 4096, 8192):
            yield _looked_up("embedding", rows, cols, dtype, passes)
        for cols in (32000, 50304, 128256):
            if rows * cols <= 1 << 30:
                yield _looked_up("cross_entropy", rows, cols, dtype, passes)


PASSES = ("forward", "backward")
VOCABULARY = 32_000  # of an embedding


def _looked_up(op: str, rows: int, cols: int, dtype: str, passes: str) -> GpuCase:
    is_backward = passes == "backward"

    def call(source: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(source, ids) if op == "cross_entropy" else F.embedding(ids, source)

    def operands() -> Any:
        shape = (rows, cols) if op == "cross_entropy" else (VOCABULARY, cols)
        source = drawn(*shape, dtype=getattr(torch, dtype)).requires_grad_(is_backward)
        ids = torch.randint(0, cols if op == "cross_entropy" else VOCABULARY, (rows,), device="cuda")
        if not is_backward:
            return source, ids
        result = call(source, ids)
        return result, source, torch.randn_like(result)

    def run(own: Any) -> Any:
        return torch.autograd.grad(own[0], own[1], own[2], retain_graph=True) if is_backward else call(*own)

    row = {"op": op, "pass": passes, "rows": rows, "cols": cols, "dtype": dtype}
    return GpuCase(row, operands, run, 8 * rows * cols)


# Optimizers, convolutions -----------------------------------------------


def optimizers() -> Iterator[GpuCase]:
    """AdamW on parameters of one size, as torch's three ways: one fused kernel, lists of tensors, one after another."""
    for way, elements, count in itertools.product(
        ("fused", "foreach", "for_loop"), (1 << 12, 1 << 18, 1 << 22, 1 << 24, 1 << 26), (1, 8, 64)
    ):
        if elements * count <= 1 << 29:
            yield _optimizer(way, elements, count)


def _optimizer(way: str, elements: int, count: int) -> GpuCase:
    flags: dict[str, Any] = {
        "foreach": way == "foreach", "fused": way == "fused", "capturable": True, "differentiable": False,
        "amsgrad": False, "maximize": False, "beta1": 0.9, "beta2": 0.999, "lr": 1e-4, "weight_decay": 0.01,
        "eps": 1e-8,
    }  # fmt: skip

    def operands() -> Any:
        kinds = [[drawn(elements, dtype=torch.float32).abs_() for _ in range(count)] for _ in range(4)]
        return (*kinds, [], [torch.ones((), device="cuda") for _ in range(count)])

    def run(own: Any) -> None:
        with torch.no_grad():
            adamw(*own, **flags)

    row = {"op": "adamw", "way": way, "elements": elements, "tensors": count, "dtype": "float32"}
    return GpuCase(row, operands, run, 16 * elements * count)


IMAGES = (  # channels, filters, size of the result, kernel, stride
    (3, 64, 112, 7, 2), (64, 64, 56, 1, 1), (64, 64, 56, 3, 1), (128, 128, 28, 3, 1), (256, 256, 14, 3, 1),
    (512, 512, 7, 3, 1), (256, 1024, 14, 1, 1), (320, 320, 64, 3, 1), (640, 640, 32, 3, 1), (1280, 1280, 16, 3, 1),
)  # fmt: skip


def convolutions() -> Iterator[GpuCase]:
    """Of images as models of vision have them; float32 is tf32 where cuDNN may use it, which is torch's default."""
    for batch, dtype, (channels, filters, size, kernel, stride) in itertools.product(
        (1, 8, 64), ("bfloat16", "float32"), IMAGES
    ):
        for passes in ("forward", "grad_input", "grad_weight"):
            yield _convolution(batch, channels, filters, size, kernel, stride, dtype, passes)


def _convolution(
    batch: int, channels: int, filters: int, size: int, kernel: int, stride: int, dtype: str, passes: str
) -> GpuCase:
    def operands() -> Any:
        image = drawn(batch, channels, size * stride, size * stride, dtype=getattr(torch, dtype))
        weight = drawn(filters, channels, kernel, kernel, dtype=getattr(torch, dtype))
        result = F.conv2d(image, weight, stride=stride, padding=kernel // 2)
        return torch.randn_like(result), image, weight

    def run(own: Any) -> Any:
        gradient, image, weight = own
        if passes == "forward":
            return F.conv2d(image, weight, stride=stride, padding=kernel // 2)
        wanted = [passes == "grad_input", passes == "grad_weight", False]
        steps, around = [stride] * 2, [kernel // 2] * 2
        return aten.convolution_backward(gradient, image, weight, None, steps, around, [1, 1], False, [0, 0], 1, wanted)

    names = ("batch", "channels", "filters", "size", "kernel", "stride")
    row = dict(zip(names, (batch, channels, filters, size, kernel, stride), strict=True))
    moved = 4 * batch * size**2 * (channels * stride**2 + filters)
    return GpuCase({"op": "conv2d", "pass": passes, **row, "dtype": dtype}, operands, run, moved)


SECTIONS = {
    "products": Section("gemm_measured.csv", ("dtype", "m", "n", "k"), forward_products, 0.2),
    "trained": Section(
        "gemm_training_layouts_measured.csv",
        ("dtype", "role", "layout", "batch", "m", "n", "k", "accumulate", "out_dtype"), trained_products, 0.2,
    ),
    "attention": Section("attention_forward.csv", (*ATTENTION, "dtype", "kernel"), attention("forward"), 0.12),
    "attention_backward": Section(
        "attention_forward_backward_measured.csv",
        ("dtype", "causal", "pass", "batch", "seq", "heads", "kv_heads", "qk_head_dim", "v_head_dim", "qkv_contiguous",
         "kernel"), attention("backward"), 0.16,
    ),
    "moving": Section("memory_bound_measured.csv", ("op", "pass", "rows", "cols", "dtype"), moving, 0.14),
    "lookups": Section("lookups_measured.csv", ("op", "pass", "rows", "cols", "dtype"), lookups, 0.03),
    "optimizers": Section("optimizers_measured.csv", ("op", "way", "elements", "tensors", "dtype"), optimizers, 0.03),
    "grouped": Section(
        "grouped_gemm_measured.csv",
        ("dtype", "groups", "m_per_group", "n", "k", "stage", "accumulate", "out_dtype"), grouped_products, 0.04,
    ),
    "scaled": Section("products_fp8_measured.csv", ("dtype", "m", "n", "k", "out_dtype"), scaled_products, 0.02),
    "batched": Section("bmm_measured.csv", ("dtype", "batch", "m", "n", "k"), batched_products, 0.02),
    "convolutions": Section(
        "convolutions_measured.csv",
        ("op", "pass", "batch", "channels", "filters", "size", "kernel", "stride", "dtype"), convolutions, 0.04,
    ),
}  # fmt: skip


# The device as a whole --------------------------------------------------


def device_facts() -> Row:
    """What the device holds and what a process takes of it before any tensor: context, then libraries."""
    torch.zeros(1, device="cuda")
    context = _outside_bytes()
    torch.mm(drawn(4096, 4096), drawn(4096, 4096))
    F.conv2d(drawn(8, 64, 56, 56), drawn(64, 64, 3, 3))
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name, "total_bytes": torch.cuda.mem_get_info()[1], "context_bytes": context,
        "outside_bytes": _outside_bytes(), "workspace_bytes": torch.cuda.memory_reserved(),
        "multiprocessors": properties.multi_processor_count, "cache_bytes": properties.L2_cache_size,
    }  # fmt: skip


def _outside_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def sustained_paces(seconds: float = 4.0) -> list[float]:
    """TFLOP/s of one large product, a tenth of a second after another, from rest."""
    size = 8192
    left, right = drawn(size, size), drawn(size, size)
    torch.mm(left, right)
    torch.cuda.synchronize()
    time.sleep(1.0)
    paces: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(60):
            torch.mm(left, right)
        end.record()
        end.synchronize()
        paces.append(round(60 * 2 * size**3 / begin.elapsed_time(end) / 1e9, 1))
    return paces


def copied_bytes_a_second() -> dict[str, float]:
    """Of large copies: on the device (bytes read and written), to it and from it, from pinned memory."""
    one, other = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    held = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    ways: dict[str, tuple[int, Call]] = {
        "device": (2 << 30, lambda: other.copy_(one)),
        "to_device": (1 << 28, lambda: one[: 1 << 28].copy_(held, non_blocking=True)),
        "from_device": (1 << 28, lambda: held.copy_(one[: 1 << 28], non_blocking=True)),
    }
    timer = GraphTimer()
    return {
        name: float(f"{size / min(timer._events_ms(call) for _ in range(5)) * 1000:.4g}")
        for name, (size, call) in ways.items()
    }


def host_memory() -> dict[str, float]:
    """The host's memory in bytes and its GPUs, microseconds of a copy of 4 bytes each way, and bytes a second that a
    fused AdamW on the host reads and writes: 4 (of gradients), 8 (of parameters) and 16 (of both moments) an element of
    float32."""
    small, pinned = torch.zeros(1, device="cuda"), torch.zeros(1, pin_memory=True)
    timer = GraphTimer()
    copies = [timer._events_ms(lambda: small.copy_(pinned, non_blocking=True)) for _ in range(20)]
    parameter = torch.zeros(1 << 26)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return {
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "gpus": torch.cuda.device_count(),
        "copy_us": round(statistics.median(copies) * 1000, 2),
        "update": float(f"{28 * parameter.numel() / min(times[1:]):.4g}"),
    }  # fmt: skip


def host_paces() -> dict[str, float]:
    """Microseconds of the host's thread to launch one operator while the device has work: forward, backward."""
    x, w = drawn(4, 64, 64).requires_grad_(), drawn(64, 64).requires_grad_()
    heads = drawn(1, 2, 16, 64).requires_grad_()
    norm = torch.ones(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ways: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        "add": (x, lambda y: aten.add.Tensor(y, x)), "gelu": (x, aten.gelu.default),
        "linear": (x, lambda y: aten.linear.default(y, w)),
        "layer_norm": (x, lambda y: aten.layer_norm.default(y, [64], norm, norm)),
        "attention": (heads, lambda y: aten.scaled_dot_product_attention.default(y, heads, heads, None, 0.0, True)),
        "view": (x, lambda y: aten.transpose.int(y, 1, 2)),
        "cast": (x, lambda y: y.to(torch.float32).to(torch.bfloat16)),
    }  # fmt: skip
    found = {}
    for name, (leaf, call) in ways.items():
        times = [_chain_us(leaf, call) for _ in range(5)]
        found[name] = statistics.median(forward for forward, _ in times)
        found[f"{name} backward"] = statistics.median(backward for _, backward in times)
    return {name: round(value, 2) for name, value in found.items()}


def _chain_us(leaf: Tensor, call: Callable[[Tensor], Tensor], count: int = 200) -> tuple[float, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    y = leaf
    for _ in range(count):
        y = call(y)
    middle = time.perf_counter()
    torch.cuda.synchronize()
    gradient = torch.ones_like(y)
    torch.cuda.synchronize()
    after = time.perf_counter()
    torch.autograd.grad(y, leaf, gradient)
    return (middle - begin) * 1e6 / count, (time.perf_counter() - after) * 1e6 / count


# The sweep --------------------------------------------------------------


def measure(folder: Path, seconds: float, gpu: str, only: Sequence[str] = ()) -> None:
    """Writes every section's file, and `device.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.allow_tf32 = True
    found: Row = {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "device": device_facts()}
    if not only:
        found |= {"host_us": host_paces(), "copies": copied_bytes_a_second(), "paces": sustained_paces()}
        found["host"] = host_memory()
        (folder / "device.json").write_text(json.dumps(found, indent=1) + "\n")
    software = f"torch-{torch.__version__} CUDA graph"
    timer = GraphTimer()
    chosen = {name: SECTIONS[name] for name in only or SECTIONS}
    whole, share = time.perf_counter() + seconds, sum(section.share for section in chosen.values())
    for name, section in chosen.items():
        left = whole - time.perf_counter()
        count = _measure_section(folder, section, left * section.share / share, (gpu, software), timer)
        share -= section.share
        print(f"{name}: {count}, {whole - time.perf_counter():.0f} s left", file=sys.stderr, flush=True)


def _measure_section(
    folder: Path, section: Section, seconds: float, told: tuple[str, str], timer: GraphTimer
) -> str:  # fmt: skip
    cases = [case for case in section.cases() if case.num_bytes <= MOST_BYTES]
    random.Random(0).shuffle(cases)
    deadline, done, refused = time.perf_counter() + seconds, 0, 0
    with (folder / section.file).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("gpu", *section.columns, "time_us", "software"))
        for case in cases:
            if time.perf_counter() > deadline:
                break
            try:
                row = point(case, timer)
            except (RuntimeError, NotImplementedError) as error:
                refused += 1
                if isinstance(
                    error, getattr(torch, "AcceleratorError", ())
                ):  # nothing runs on this process's device any more
                    raise
                torch.cuda.empty_cache()
                continue
            done += 1
            writer.writerow((told[0], *(row[column] for column in section.columns), row["time_us"], told[1]))
            file.flush()
            if torch.cuda.memory_reserved() > MOST_BYTES:
                torch.cuda.empty_cache()
    return f"{done} of {len(cases)} points, {refused} refused"


def gpu_name() -> str:
    """As tables have it: the words of torch's name without the maker's."""
    return "-".join(word for word in torch.cuda.get_device_name().split() if word != "NVIDIA")


def main() -> None:
    """Writes tables into the folder; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0, help="about how long it may take")
    parser.add_argument("--gpu", default="", help="what rows call the GPU; default: torch's name of it")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=(), help="these sections alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a GPU that torch can use, found none: torch.cuda.is_available() is false")
    measure(options.folder, options.seconds, options.gpu or gpu_name(), options.only)


if __name__ == "__main__":
    main()
