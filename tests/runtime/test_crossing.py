"""Routing between the ranks of two stages, played in one process on slices of a tensor whose elements all differ."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.crossing import Crossing, Side, crossing
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import AxisType, local_slices

SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)
SIZES = st.lists(st.integers(1, 4), min_size=0, max_size=2).map(tuple)


@st.composite
def sides(draw, shape, first_rank, kinds=("I", "R")):
    sizes = draw(SIZES)
    options = [*map(AxisType, kinds), *(AxisType("S", dim) for dim in range(len(shape)))]
    types = tuple(draw(st.sampled_from(options)) for _ in sizes)
    return Side(tuple(range(first_rank, first_rank + math.prod(sizes))), sizes, types)


@st.composite
def cases(draw):
    shape = draw(SHAPES)
    sender = draw(sides(shape, 3))
    first = draw(st.sampled_from([3, 3 + len(sender.ranks), 40]))  # the same ranks, those behind, others far away
    return shape, sender, draw(sides(shape, first))


def held(whole: torch.Tensor, side: Side) -> dict[int, torch.Tensor]:
    """What each rank holds of a tensor under its placement."""
    places = [torch.unravel_index(torch.tensor(n), side.sizes) if side.sizes else () for n in range(len(side.ranks))]
    found = {}
    for rank, place in zip(side.ranks, places, strict=True):
        axes = [Axis("", size, int(index), None) for size, index in zip(side.sizes, place, strict=True)]
        found[rank] = whole[local_slices(whole.shape, side.types, axes)].clone()
    return found


def played(route: Crossing, sent: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What the ranks have once all moves are made; −1 where nothing has come."""
    wire = {(rank, m.peer): sent[rank][m.slices] for rank in sent for m in route.sends(rank)}
    found = {rank: torch.full_like(tensor, -1) for rank, tensor in wanted.items()}
    for rank, tensor in found.items():
        for move in route.receives(rank):
            part = wire.pop((move.peer, rank))
            assert part.shape == tensor[move.slices].shape, "a message is as long as its place"
            tensor[move.slices] = part
    assert not wire, "every message is received"
    return found


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_rank_ends_with_what_its_placement_says_both_ways(case):
    shape, first, second = case
    whole = torch.arange(math.prod(shape)).view(shape)
    for sender, receiver in ((first, second), (second, first)):
        wanted = held(whole, receiver)
        found = played(crossing(shape, sender, receiver), held(whole, sender), wanted)
        assert all(torch.equal(found[rank], wanted[rank]) for rank in wanted)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_ranks_that_hold_the_same_send_alike(case):
    shape, sender, receiver = case
    route = crossing(shape, sender, receiver)
    moves = {rank: [m.num_elements for m in route.sends(rank) if m.peer != rank] for rank in sender.ranks}
    alike: dict[tuple, list[int]] = {}
    for rank, tensor in held(torch.arange(math.prod(shape)).view(shape), sender).items():
        alike.setdefault(tuple(tensor.flatten().tolist()), []).append(rank)
    if set(sender.ranks) & set(receiver.ranks) or (sender.sizes, sender.types) == (receiver.sizes, receiver.types):
        return  # what stays on a rank is not for another to send
    for ranks in alike.values():
        loads = [sum(moves[rank]) for rank in ranks]
        assert max(loads) - min(loads) <= max((size for rank in ranks for size in moves[rank]), default=0)


@given(SHAPES, st.data())
def test_equal_sides_send_rank_to_rank_whatever_the_type(shape, data):
    sender = data.draw(sides(shape, 0, kinds=("I", "R", "P")))
    receiver = sender._replace(ranks=tuple(rank + 50 for rank in sender.ranks))
    route = crossing(shape, sender, receiver)
    for rank, tensor in held(torch.zeros(shape), sender).items():
        whole = tuple(slice(0, size) for size in tensor.shape)
        expected = [(rank + 50, whole)] if tensor.numel() else []
        assert [tuple(move) for move in route.sends(rank)] == expected
        assert [tuple(move) for move in route.receives(rank + 50)] == [(rank, part) for _, part in expected]


def test_a_slice_is_sent_by_one_rank_and_replicas_share_the_work():
    sender, receiver = Side.of(0, (2,), "I"), Side.of(2, (4,), "S(0)")
    route = crossing((8, 3), sender, receiver)
    assert [[move.peer for move in route.sends(rank)] for rank in (0, 1)] == [[2, 4], [3, 5]]
    assert [move.slices for move in route.sends(1)] == [(slice(2, 4), slice(0, 3)), (slice(6, 8), slice(0, 3))]


def test_a_rank_on_both_sides_keeps_what_it_has():
    route = crossing((4,), Side.of(0, (2,), "I"), Side.of(0, (4,), "I"))
    assert [[move.peer for move in route.receives(rank)] for rank in range(4)] == [[0], [1], [0], [1]]


def test_one_rank_to_three_and_back():
    """Stages on 1 + 3 ranks, a batch of 4: slices of 2, 2 and none."""
    one, three = Side.of(0, (), ""), Side.of(1, (3,), "S(0)")
    assert [move.slices for move in crossing((4, 2), one, three).sends(0)] == [
        (slice(0, 2), slice(0, 2)),
        (slice(2, 4), slice(0, 2)),
    ]
    assert [move.peer for move in crossing((4, 2), three, one).receives(0)] == [1, 2]


def test_summands_do_not_travel_between_unequal_axes():
    with pytest.raises(ProgramError, match=r"expected slices or whole values .* found P on \(2,\) to I on \(4,\)"):
        crossing((4,), Side.of(0, (2,), "P"), Side.of(2, (4,), "I"))
