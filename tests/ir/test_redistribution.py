"""The redistribution table: which steps exist, which are legal where, and the cheapest sequence of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ir.placement import Axis, I, P, Placement, R, S, Type
from autopar.ir.redistribution import TABLE, Step, apply, cheapest_path, is_legal, transfer_bytes
from tests.ops.interpreter import gradient_type

AXES = (Axis("x", 2, 2), Axis("y", 2, 1))
KINDS = (S(0), S(1), R, I, P)


def count(placement: Placement, step: Step) -> int:
    """One for each direction that communicates."""
    return sum(1 for transfer in step.transfers if transfer.collective)


def test_summands_only_come_from_values_that_one_rank_keeps() -> None:
    assert ("S", "P") not in TABLE
    assert {before for before, after in TABLE if after == "P"} == {"R", "I"}


def test_backward_of_a_step_is_the_step_of_the_gradient_types() -> None:
    """S → R all-gathers, and its backward turns P into S: the table's own row, which reduce-scatters."""
    for (before, after), (_, backward) in TABLE.items():
        types = (S(0) if before == "S" else Type(before), S(1 if before == "S" else 0) if after == "S" else Type(after))
        gradient = (gradient_type(types[1]).kind, gradient_type(types[0]).kind)
        if gradient in TABLE:
            assert TABLE[gradient][0] == backward, (before, after)
        else:
            assert backward.collective is None  # a slice pads into a summand, or nothing changes
            assert gradient == ("S", "P") or gradient[0] == gradient[1], (before, after)


@pytest.mark.parametrize(
    ("step", "placement", "legal"),
    [
        (Step(0, S(0), R), (S(0), R), True),
        (Step(0, S(0), R), (S(0), S(1)), True),
        (Step(0, S(0), R), (S(0), S(0)), False),  # the inner axis cuts the slice: it goes first
        (Step(1, S(0), R), (S(0), S(0)), True),
        (Step(0, R, S(0)), (R, S(0)), False),
        (Step(1, R, S(0)), (S(0), R), True),
        (Step(0, S(1), S(0)), (S(1), S(0)), False),
        (Step(0, S(0), P), (S(0), R), False),
        (Step(0, P, S(0)), (R, R), False),  # not what the tensor is
        (Step(0, R, R), (R, R), False),
    ],
)
def test_legality(step: Step, placement: Placement, legal: bool) -> None:
    assert is_legal(step, placement) == legal


def test_cheapest_paths_are_legal_and_as_cheap_as_an_exhaustive_search() -> None:
    for source, target in itertools.product(itertools.product(KINDS, repeat=2), repeat=2):
        path = cheapest_path(source, target, count)
        best = exhaustive(source, target)
        if path is None:
            assert best is None, (source, target)
            continue
        placement, spent = source, 0
        for step in path:
            assert is_legal(step, placement)
            spent += count(placement, step)
            placement = apply(step, placement)
        assert placement == target
        assert best is not None and spent >= best
        if all(type_.kind != "S" for type_ in source + target) or spent == best:
            assert spent == best, (source, target, path)


def exhaustive(source: Placement, target: Placement) -> int | None:
    """The least number of collectives over all sequences of legal steps through any types."""
    best = {source: 0}
    changed = True
    while changed:
        changed = False
        for placement, spent in list(best.items()):
            for axis, after in itertools.product(range(2), KINDS):
                step = Step(axis, placement[axis], after)
                if is_legal(step, placement):
                    reached, cost = apply(step, placement), spent + count(placement, step)
                    if cost < best.get(reached, 1_000):
                        best[reached] = cost
                        changed = True
    return best.get(target)


def test_no_path_turns_slices_into_what_they_cannot_be() -> None:
    assert cheapest_path((S(0), R), (P, R), count) is not None  # gathered, then kept by one rank
    assert cheapest_path((R, R), (R, R), count) == ()


@pytest.mark.parametrize(
    ("placement", "step", "expected"),
    [
        ((S(0), R), Step(0, S(0), R), (4 * 6 * 4, 4 * 6 * 4)),  # the whole, both ways
        ((S(0), S(1)), Step(0, S(0), R), (4 * 3 * 4, 4 * 3 * 4)),  # the other axis holds half
        ((S(0), R), Step(0, S(0), I), (4 * 6 * 4, 0)),
        ((I, R), Step(0, I, R), (0, 4 * 6 * 4)),
        ((P, R), Step(0, P, I), (4 * 6 * 4, 0)),
        ((P, R), Step(0, P, S(1)), (4 * 6 * 4, 4 * 6 * 4)),
        ((S(0), R), Step(0, S(0), S(1)), (2 * 6 * 4, 2 * 6 * 4)),  # what one rank holds
        ((R, R), Step(0, R, S(0)), (0, 0)),
    ],
)
def test_bytes(placement: Placement, step: Step, expected: tuple[int, int]) -> None:
    assert transfer_bytes((4, 6), 4, placement, AXES, step) == expected


def test_bytes_of_uneven_slices_are_padded() -> None:
    axes = (Axis("x", 4, 1),)
    assert transfer_bytes((5, 3), 4, (S(0),), axes, Step(0, S(0), R)) == (8 * 3 * 4, 8 * 3 * 4)
    assert torch.Size((8, 3)).numel() * 4 == 96
