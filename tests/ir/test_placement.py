"""Placements as text, and slices as torch.chunk cuts them."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.errors import PlacementError
from autopar.ir.placement import (
    Axis,
    I,
    P,
    R,
    S,
    chunk_length,
    format_placement,
    is_even,
    local_shape,
    num_shards,
    parse_placement,
    parse_type,
)
from tests.ops.interpreter import gradient_type


@pytest.mark.parametrize(("size", "parts"), [*itertools.product((0, 1, 2, 5, 6, 7, 12, 50_257), (1, 2, 3, 4, 8))])
def test_lengths_are_those_of_torch_chunk(size: int, parts: int) -> None:
    chunks = [len(chunk) for chunk in torch.empty(size).chunk(parts)] if size else []
    expected = chunks + [0] * (parts - len(chunks))
    assert [chunk_length(size, parts, index) for index in range(parts)] == expected


def test_two_axes_on_one_dim_cut_it_as_nested_chunks() -> None:
    axes = (Axis("x", 2, 3), Axis("y", 3, 1))
    for i, j in itertools.product(range(2), range(3)):
        whole = torch.empty(11, 4)
        outer = whole.chunk(2)[i]
        expected = outer.chunk(3)[j].shape
        assert local_shape((11, 4), (S(0), S(0)), axes, (i, j)) == tuple(expected)
    assert local_shape((11, 4), (S(0), S(0)), axes) == (2, 4)
    assert num_shards((S(0), S(0)), 0, axes) == 6 and num_shards((S(0), R), 0, axes) == 2
    assert not is_even((11, 4), (S(0), R), axes) and is_even((12, 4), (S(0), S(0)), axes)


def test_gradient_types_are_a_duality() -> None:
    assert [gradient_type(t) for t in (S(1), R, I, P)] == [S(1), P, I, R]
    assert all(gradient_type(gradient_type(t)) == t for t in (S(0), R, I, P))


def test_text_round_trips() -> None:
    placement = (S(0), R, I, P, S(12))
    assert parse_placement(format_placement(placement)) == placement


@pytest.mark.parametrize("text", ["S", "S()", "S(-1)", "s(0)", "Q", "", "RR"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="expected a placement type"):
        parse_type(text)
