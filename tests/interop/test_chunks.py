"""Layers shared out to chunks: as even as can be, by what submeshes have to do, and by rounds."""

from __future__ import annotations

import itertools

import pytest

from autopar.interop import chunk_counts, chunk_sizes
from autopar.interop.chunks import round_lengths


def busiest(times: list[int], ends: tuple[int, int], sizes: tuple[int, ...], submeshes: int) -> int:
    """What the busiest submesh takes."""
    loads, begin = [0] * submeshes, 0
    loads[0] += ends[0]
    loads[-1] += ends[1]
    for number, size in enumerate(sizes):
        loads[number % submeshes] += sum(times[begin : begin + size])
        begin += size
    return max(loads)


def least(times: list[int], ends: tuple[int, int], submeshes: int, chunks: int) -> int:
    """Of all ways to share layers out."""
    stages = submeshes * chunks
    cuts = itertools.combinations(range(1, len(times)), stages - 1)
    ways = ([*zip((0, *cut), (*cut, len(times)), strict=True)] for cut in cuts)
    return min(busiest(times, ends, tuple(end - begin for begin, end in way), submeshes) for way in ways)


@pytest.mark.parametrize("submeshes, chunks", [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("layers", [8, 9, 11])
@pytest.mark.parametrize("ends", [(0, 0), (3, 14), (25, 5)])
def test_the_busiest_submesh_of_equal_layers_is_as_little_busy_as_can_be(
    submeshes: int, chunks: int, layers: int, ends: tuple[int, int]
) -> None:
    times = [10] * layers
    sizes = chunk_sizes(times, ends, submeshes, chunks)
    assert sum(sizes) == layers and min(sizes) >= 1 and len(sizes) == submeshes * chunks
    assert busiest(times, ends, sizes, submeshes) == least(times, ends, submeshes, chunks)


@pytest.mark.parametrize("submeshes, chunks", [(2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("times", [[10, 30] * 5, [10, 10, 40] * 4, [50, *[10] * 9], [*range(1, 12)]])
def test_of_unequal_layers_it_is_near_that(submeshes: int, chunks: int, times: list[int]) -> None:
    sizes = chunk_sizes(times, (5, 12), submeshes, chunks)
    assert sum(sizes) == len(times) and min(sizes) >= 1
    best = least(times, (5, 12), submeshes, chunks)
    assert best <= busiest(times, (5, 12), sizes, submeshes) <= best + max(times)


def test_ends_are_chunks_by_themselves_where_there_are_more_chunks_than_layers() -> None:
    assert chunk_sizes([10] * 126, (1, 14), 16, 8) == (0, *[1] * 126, 0), "Llama 3 of 405 billion parameters"
    assert chunk_sizes([10] * 127, (1, 14), 16, 8) == (*[1] * 127, 0), "the longer end"
    assert chunk_sizes([10] * 2, (5, 5), 2, 2) == (0, 1, 1, 0)


def test_rounds_are_the_same_from_either_end() -> None:
    assert list(round_lengths(10, 4)) == [2, 3, 3, 2]
    assert list(round_lengths(8, 7)) == [1, 1, 1, 2, 1, 1, 1]
    assert list(round_lengths(8, 5)) == [1, 2, 2, 2, 1]
    assert sum(round_lengths(11, 4)) == 11 and max(round_lengths(11, 4)) == 3


def test_numbers_of_chunks_make_rounds_shorter() -> None:
    assert chunk_counts(126, 16, 16) == [2, 3, 4, 8]
    assert chunk_counts(80, 8, 16) == [2, 3, 4, 5, 10]
    assert chunk_counts(3, 4, 16) == [], "no chunk has nothing to do"
