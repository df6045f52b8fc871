"""Measures this host's CPU with one thread, and gloo between ranks: prints raw points as JSON.

Needs torch only and imports nothing of autopar, so the file can be copied to another machine and run there:
`OMP_NUM_THREADS=1 python -P measure.py > points.json`. `host.py` turns the points into a profile.

The ranks are forked before this process has started any thread pool, so torch is imported once for all.
Operators cycle over several sets of operands, so that small ones do not stay in the cache.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.optim.adamw import adamw

SECONDS_A_POINT = 0.04
BYTES_OF_OPERANDS = 1 << 25
COLLECTIVE_BYTES = (1 << 10, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
COLLECTIVE_RUNS = 6
RANKS = (2, 4)

Tensors = list[torch.Tensor]
Operator = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """An operator to measure: its family, how it is called, and how its operands are made."""

    family: str
    op: str
    shape: tuple[int, ...]
    operands: Callable[[], Tensors]
    run: Operator
    detail: str = ""


def operator_cases() -> list[Case]:
    """The sweep: each family from launch-bound to bandwidth- or compute-bound sizes."""
    cases = [_linear(*shape) for shape in LINEAR_SHAPES]
    cases += [_attention(*shape) for shape in ATTENTION_SHAPES]
    cases += [_convolution(*shape) for shape in CONVOLUTION_SHAPES]
    cases += [case for rows, width in ROW_SHAPES for case in _row_cases(rows, width)]
    cases += [_embedding(*shape) for shape in LOOKUP_SHAPES]
    return cases + [_cross_entropy(*shape) for shape in LOSS_SHAPES]


def _row_cases(rows: int, width: int) -> list[Case]:
    shape = (rows, width)
    return [
        Case("pointwise", "mul", shape, lambda: _leaves(shape, shape), torch.mul),
        Case("transcendental", "gelu", shape, lambda: _leaves(shape), F.gelu),
        _layer_norm(rows, width),
        Case("softmax", "softmax", shape, lambda: _leaves(shape), _softmax),
        Case("reduction", "sum", shape, lambda: _leaves(shape), _sum),
        Case("dropout", "native_dropout", shape, lambda: _leaves(shape), _dropout),
        Case("copy", "clone", shape, lambda: _leaves((width, rows)), _transposed_copy),
    ]


LINEAR_SHAPES = (
    (16, 64, 64), (64, 128, 128), (128, 128, 512), (256, 256, 256), (256, 256, 1024),
    (512, 512, 512), (512, 512, 2048), (1024, 768, 2048),
)  # fmt: skip
ATTENTION_SHAPES = ((1, 2, 32, 32), (1, 4, 128, 32), (2, 4, 256, 64), (2, 8, 512, 64))
CONVOLUTION_SHAPES = ((1, 8, 8, 8), (4, 16, 16, 16), (8, 32, 32, 32), (8, 64, 32, 64))
ROW_SHAPES = ((8, 64), (128, 64), (256, 256), (512, 1024), (2048, 2048))
LOOKUP_SHAPES = ((64, 1000, 64), (512, 4000, 256), (2048, 16000, 512))
LOSS_SHAPES = ((32, 256), (256, 1024), (512, 8192), (1024, 16000))


def _leaves(*shapes: tuple[int, ...]) -> Tensors:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def _dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.1, True)


def _transposed_copy(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _linear(tokens: int, width: int, features: int) -> Case:
    shape = (tokens, width, features)
    return Case("matmul", "linear", shape, lambda: _leaves((tokens, width), (features, width)), F.linear)


def _attention(batch: int, heads: int, length: int, width: int) -> Case:
    shape = (batch, heads, length, width)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Case(
        "attention",
        "scaled_dot_product_attention",
        shape,
        lambda: _leaves(shape, shape, shape),
        run,
        "causal",
    )


def _convolution(batch: int, channels: int, size: int, filters: int) -> Case:
    def operands() -> Tensors:
        return _leaves((batch, channels, size, size), (filters, channels, 3, 3))

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, padding=1)

    return Case("convolution", "conv2d", (batch, channels, size, filters), operands, run)


def _layer_norm(rows: int, width: int) -> Case:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (width,), weight, bias)

    shape = (rows, width)
    return Case("normalization", "layer_norm", shape, lambda: _leaves(shape, (width,), (width,)), run)


def _embedding(tokens: int, vocabulary: int, width: int) -> Case:
    def operands() -> Tensors:
        return [*_leaves((vocabulary, width)), torch.randint(0, vocabulary, (tokens,))]

    def run(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices, table)

    return Case("gather", "embedding", (tokens, vocabulary, width), operands, run)


def _cross_entropy(tokens: int, vocabulary: int) -> Case:
    def operands() -> Tensors:
        return [*_leaves((tokens, vocabulary)), torch.randint(0, vocabulary, (tokens,))]

    return Case("cross_entropy", "cross_entropy_loss", (tokens, vocabulary), operands, F.cross_entropy)


def measure_case(case: Case) -> tuple[int, int]:
    """Nanoseconds (forward, backward), everything included: the lower quartile over the repetitions."""
    sets = [case.operands()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in sets[0])
    sets += [case.operands() for _ in range(min(16, BYTES_OF_OPERANDS // (4 * size)))]
    gradient = torch.ones_like(case.run(*sets[0]))
    times: list[tuple[int, int]] = []
    deadline = time.perf_counter() + SECONDS_A_POINT
    while time.perf_counter() < deadline or len(times) < 4:
        operands = sets[len(times) % len(sets)]
        start = time.perf_counter_ns()
        result = case.run(*operands)
        middle = time.perf_counter_ns()
        torch.autograd.grad(result, [leaf for leaf in operands if leaf.requires_grad], gradient)
        times.append((middle - start, time.perf_counter_ns() - middle))
    forward, backward = zip(*times[1:], strict=True)
    return _quartile(forward), _quartile(backward)


def _quartile(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 4]


def measure_launch(step: Operator, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Nanoseconds of one operator of a long chain, forward and backward; and a backward pass's own cost."""
    one = [_chain(step, shape, 1) for _ in range(40)]
    many = [_chain(step, shape, 201) for _ in range(20)]
    forward = (_quartile([f for f, _ in many]) - _quartile([f for f, _ in one])) // 200
    backward = (_quartile([b for _, b in many]) - _quartile([b for _, b in one])) // 200
    return forward, backward, max(0, _quartile([b for _, b in one]) - backward)


def _chain(step: Operator, shape: tuple[int, ...], length: int) -> tuple[int, int]:
    leaf = torch.randn(shape, requires_grad=True)
    result, gradient = leaf, torch.ones(shape)
    start = time.perf_counter_ns()
    for _ in range(length):
        result = step(result)
    middle = time.perf_counter_ns()
    torch.autograd.grad(result, [leaf], gradient)
    return middle - start, time.perf_counter_ns() - middle


def measure_optimizer(num_elements: int, num_tensors: int = 4) -> int:
    """Nanoseconds of AdamW on one tensor of that size."""
    parameters, gradients, means, variances = (
        [torch.zeros(num_elements) + 0.1 for _ in range(num_tensors)] for _ in range(4)
    )
    steps = [torch.tensor(1.0) for _ in range(num_tensors)]
    times: list[int] = []
    deadline = time.perf_counter() + SECONDS_A_POINT
    while time.perf_counter() < deadline or len(times) < 4:
        start = time.perf_counter_ns()
        with torch.no_grad():
            adamw(parameters, gradients, means, variances, [], steps, **ADAMW)
        times.append(time.perf_counter_ns() - start)
    return _quartile(times[1:]) // num_tensors


# The update without the Optimizer class, whose first use imports torch.compile for seconds.
ADAMW: dict[str, Any] = {
    "foreach": False, "capturable": False, "differentiable": False, "fused": False, "amsgrad": False,
    "maximize": False, "beta1": 0.9, "beta2": 0.999, "lr": 1e-4, "weight_decay": 0.01, "eps": 1e-8,
}  # fmt: skip


def measure_dtype(dtype: torch.dtype, size: int = 384) -> int:
    """Nanoseconds of a square matrix product, for the peak rate of a dtype."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    times: list[int] = []
    deadline = time.perf_counter() + SECONDS_A_POINT
    while time.perf_counter() < deadline or len(times) < 3:
        start = time.perf_counter_ns()
        torch.mm(left, right)
        times.append(time.perf_counter_ns() - start)
    return _quartile(times)


def _describe(case: Case) -> dict[str, Any]:
    operands = case.operands()
    result = case.run(*operands)
    return {
        "family": case.family,
        "op": case.op,
        "shape": case.shape,
        "detail": case.detail,
        "operands": [[list(x.shape), x.element_size(), x.requires_grad] for x in operands],
        "result": [list(result.shape), result.element_size()],
    }


def measure_operators(report: Callable[[str], None]) -> dict[str, Any]:
    """Every operator point of one rank."""
    launch = measure_launch(lambda x: x * 1.5, (4,))
    view = measure_launch(lambda x: x.transpose(0, 1), (2, 2))
    points = []
    for case in operator_cases():
        report(f"{case.op} {'x'.join(map(str, case.shape))}")
        forward, backward = measure_case(case)
        points.append({**_describe(case), "forward_ns": forward, "backward_ns": backward})
    optimizer = [[size, measure_optimizer(size)] for size in (64, 1 << 14, 1 << 18, 1 << 22)]
    names = ("float64", "float32", "bfloat16", "float16")
    dtypes = {name: [384, measure_dtype(getattr(torch, name))] for name in names}
    return {"launch": launch, "view": view, "points": points, "optimizer": optimizer, "dtypes": dtypes}


# Collectives ----------------------------------------


def measure_collectives(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Points of each collective among 2 and 4 ranks of this host; also how compute slows meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        report(f"gloo among {max(RANKS)} ranks")
        children = [_fork(rank, Path(folder)) for rank in range(max(RANKS))]
        failed = [child for child in children if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        if failed:
            raise SystemExit(f"{len(failed)} of {max(RANKS)} gloo ranks failed")
        return list(json.loads((Path(folder) / "points.json").read_text()))


def _fork(rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _run_rank(rank, folder)
        status = 0
    finally:
        os._exit(status)


def _run_rank(rank: int, folder: Path) -> None:
    address = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=max(RANKS))
    points = []
    for ranks in RANKS:
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            points += [_measure_collective(kind, ranks, group) for kind in KINDS]
            points.append(_measure_overlap(ranks, group))
        dist.barrier()
    if rank == 0:
        (folder / "points.json").write_text(json.dumps(points))
    dist.barrier()


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _collective(kind: str, num_bytes: int, ranks: int, group: Any) -> Callable[[], Any]:
    """The call, with buffers sized as `ir.redistribution.transfer_bytes` counts them."""
    elements = max(ranks, num_bytes // 4 // ranks * ranks)
    whole, part = torch.ones(elements), torch.ones(elements // ranks)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: _reduce_scatter(part, whole, ranks, group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }[kind]


def _reduce_scatter(part: torch.Tensor, whole: torch.Tensor, ranks: int, group: Any) -> None:
    """As the runtime does it on gloo, whose own is several times slower."""
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole, group=group)
    torch.sum(received.view(ranks, -1), 0, out=part)


def _measure_collective(kind: str, ranks: int, group: Any) -> dict[str, Any]:
    points = []
    for num_bytes in COLLECTIVE_BYTES:
        call = _collective(kind, num_bytes, ranks, group)
        points.append([num_bytes, _time_together(call, group)])
    return {"collective": kind, "ranks": ranks, "points": points}


def _time_together(call: Callable[[], Any], group: Any) -> int:
    """Nanoseconds a call, in runs of equal length on all ranks; the least, as other processes disturb."""
    call()
    once = torch.tensor([float(_time_runs(call, 2))])
    dist.all_reduce(once, dist.ReduceOp.MAX, group=group)
    repeats = max(1, min(50, int(1e9 * SECONDS_A_POINT / COLLECTIVE_RUNS / max(1.0, once.item()))))
    times = []
    for _ in range(COLLECTIVE_RUNS):
        dist.barrier(group)
        times.append(_time_runs(call, repeats))
    return min(times)


def _time_runs(call: Callable[[], Any], repeats: int) -> int:
    start = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - start) // repeats


def _measure_overlap(ranks: int, group: Any) -> dict[str, Any]:
    """Matrix products alone, an all-reduce alone, both at once: [compute_ns, communication_ns, both_ns]."""
    buffer, matrix = torch.ones(1 << 21), torch.randn(256, 256)

    def compute() -> None:
        for _ in range(60):
            torch.mm(matrix, matrix)

    def both() -> None:
        work = dist.all_reduce(buffer, group=group, async_op=True)
        compute()
        work.wait()

    alone = _time_together(compute, group)
    communication = _time_together(lambda: dist.all_reduce(buffer, group=group), group)
    points = [[alone, communication, _time_together(both, group)]]
    return {"collective": "overlap", "ranks": ranks, "points": points}


def main() -> None:
    """Prints the points as one JSON object; progress goes to stderr when that is a terminal."""
    warnings.simplefilter("ignore", FutureWarning)  # newer names of collectives that torch 2.10 lacks
    report = _report if sys.stderr.isatty() else (lambda text: None)
    collectives = measure_collectives(report)
    torch.set_num_threads(1)
    result = measure_operators(report)
    report("")
    host = {"machine": platform.machine(), "torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    json.dump({**result, "collectives": collectives, "host": host}, sys.stdout)


def _report(text: str) -> None:
    sys.stderr.write(f"\r\x1b[2Kmeasuring this host: {text}" if text else "\r\x1b[2K")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
