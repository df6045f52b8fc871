"""Times of operators far outside of what was measured, on every GPU that a profile is shipped of: more work takes no
less time but for a kernel that is chosen better, twice the work takes about twice as long, nothing is faster than the
device computes, and few queries take at least what reading keys and values does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from autopar.cost import Profile
from autopar.cost.compute import node_time_ns
from autopar.ir.graph import Node, Tensor
from autopar.ir.placement import Shape
from autopar.profiler import load_profile, profile_names
from autopar.profiler.published.cases import ATTENTION_NODES, LINEAR, MATMUL, MOVING_NODES

GPUS = sorted({load_profile(name).name for name in profile_names() if load_profile(name).device_type == "cuda"})
DTYPES = ("bfloat16", "float16", "float32")
LARGE = 2**14  # from which on no kernel of a library is chosen anew
FALLS = 0.8  # what is left of a time where another kernel is chosen for more work
GROWS = 1.4  # over the work, where the rate falls back to that of a border, or the device is throttled (GB200)
FASTER = 1.05  # than the peak of the data sheet, which boosted clocks of bursts exceed

Line = Callable[[int], tuple[int, int]]


def times(node: Node, operands: tuple[Shape, ...], result: Shape, dtype: str, profile: Profile) -> tuple[int, int]:
    tensors = {name: Tensor(name, (1,), dtype, True) for name in (*node.operands, *node.results)}
    return node_time_ns(node, operands, (result,), tensors, profile)


def powers(first: int, last: int) -> list[int]:
    return [2**n for n in range(first, last + 1)]


def steps(line: Line, sizes: list[int]) -> Iterator[tuple[int, float]]:
    """Each size but the first, and how many times as long it takes as the one before, forward and backward."""
    found = {size: line(size) for size in sizes}
    for before, size in pairwise(sizes):
        yield from ((size, after / max(1, was)) for was, after in zip(found[before], found[size], strict=True) if after)


def product_line(shape: Shape, axis: int, dtype: str, profile: Profile) -> Line:
    def line(size: int) -> tuple[int, int]:
        m, n, k = (*shape[:axis], size, *shape[axis + 1 :])
        return times(LINEAR, ((m, k), (n, k)), (m, n), dtype, profile)

    return line


def attention_line(
    heads: int, shared: int, width: int, causal: bool, profile: Profile, queries: int = 0, keys: int = 0
) -> Line:
    def line(size: int) -> tuple[int, int]:
        count, length = queries or size, keys or size
        operands = (1, heads, count, width), (1, shared, length, width), (1, shared, length, width)
        return times(ATTENTION_NODES[causal], operands, operands[0], "bfloat16", profile)

    return line


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_any_size_take_time_in_proportion(gpu: str, dtype: str) -> None:
    profile = load_profile(gpu)
    for shape in ((1, 1, 1), (32, 4096, 4096), (1000, 1000, 1000), (262144, 8192, 8192), (8192, 262144, 128)):
        for axis in range(3):
            line = product_line(shape, axis, dtype, profile)
            for size, ratio in steps(line, [1, *powers(14, 20)]):
                assert ratio > FALLS, (shape, axis, size, ratio)
                assert ratio < 2 * GROWS or size == LARGE, (shape, axis, size, ratio)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_product_is_faster_than_the_device_computes(gpu: str, dtype: str) -> None:
    profile = load_profile(gpu)
    tall = (2**20, 128, 2**17), (16, 2**18, 2**18), (1, 2**20, 4096)
    for shape in ((8192, 8192, 8192), (131072, 16384, 16384), *tall):
        m, n, k = shape
        forward, backward = times(LINEAR, ((m, k), (n, k)), (m, n), dtype, profile)
        least = 2 * math.prod(shape) / profile.peak_flops(dtype) * 1e9
        assert forward * FASTER > least and backward * FASTER > 2 * least
        both = times(MATMUL, ((64, m // 64 + 1, k), (64, k, n)), (64, m // 64 + 1, n), dtype, profile)
        assert both[0] > 0 and both[1] > both[0] / 2


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_any_length_and_width_takes_time_in_proportion(gpu: str, causal: bool) -> None:
    profile = load_profile(gpu)
    for heads, shared, width in ((1, 1, 64), (32, 8, 128), (16, 2, 192), (8, 1, 256)):
        line = attention_line(heads, shared, width, causal, profile)
        for size, ratio in steps(line, powers(13, 18)):
            assert FALLS < ratio < 4 * GROWS, (heads, shared, width, size, ratio)
        of_keys = attention_line(heads, shared, width, causal, profile, queries=4096)
        for size, ratio in steps(of_keys, powers(13, 18)):
            assert FALLS < ratio < 2 * GROWS, (heads, shared, width, size, ratio)
    by_width = [attention_line(16, 16, width, causal, profile)(8192)[0] for width in (64, 80, 96, 112, 128, 192, 256)]
    assert all(after > FALLS * before for before, after in pairwise(by_width))
    assert by_width[-1] < 4 * GROWS * by_width[0]


@pytest.mark.parametrize("gpu", GPUS)
def test_few_queries_take_what_reading_their_keys_and_values_takes(gpu: str) -> None:
    profile = load_profile(gpu)
    for heads, shared, width in ((1, 1, 64), (32, 8, 128), (64, 8, 192)):
        for queries in (1, 4, 16):
            for keys in powers(5, 17):
                spent = attention_line(heads, shared, width, False, profile, queries=queries)(keys)[0]
                read = 4 * shared * keys * width / profile.facts.memory_bandwidth * 1e9
                assert spent + 1 >= read
            line = attention_line(heads, shared, width, False, profile, queries=queries)
            if queries * heads // shared <= 64:
                assert all(ratio > FALLS for _, ratio in steps(line, powers(7, 17)))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("op", sorted(MOVING_NODES))
def test_operators_that_move_memory_take_time_in_proportion(gpu: str, op: str) -> None:
    profile, node = load_profile(gpu), MOVING_NODES[op]

    def line(rows: int) -> tuple[int, int]:
        shape = (rows, 1024)
        operands: tuple[Shape, ...] = (shape,) * len(node.operands)
        if op in ("embedding", "cross_entropy"):
            operands = (shape if op == "cross_entropy" else (32000, 1024), shape[:1])
        result = {"sum": shape[:1], "cross_entropy": ()}.get(op, shape)
        return times(node, operands, result, "bfloat16", profile)

    for size, ratio in steps(line, powers(0, 24)):
        assert FALLS < ratio < 2 * 2.5, (op, size, ratio)  # where the level-2 cache ends (L4: 1.6 TB/s, then 0.3)
