"""Memory of conversions, and of what the runtime runs in the place of operators, as two gloo ranks take it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from autopar.ir.graph import Node, Ref
from autopar.ir.placement import Axis, P, R, S, local_shape, parse_placement
from autopar.ir.redistribution import Step
from autopar.ops.workspace import RuntimeMemory, Sizes, split_cross_entropy, split_lookup
from autopar.simulate.conversions import Moves, Way
from tests.rank_pool import pool
from tests.simulate.moves import CLASSES, ROWS, Move, memory_of_functions, memory_of_moves

AXES = (Axis("x", 2, 1),)
EVEN, UNEVEN, FLAT = (6, 8, 4), (5, 7, 4), (1, 8, 4)
WAYS = (
    "I R", "R I", "R P", "I P", "P R", "P I", *(f"{kind} S({dim})" for kind in "IRP" for dim in (0, 1)),
    *(f"S({dim}) {kind}" for kind in "RI" for dim in (0, 1)), "S(0) S(1)", "S(1) S(0)", "S(1) S(2)",
    "P R S(1)", "P R S(0)", "S(0) R S(1)", "S(1) I R", "S(1) R P",
)  # fmt: skip
MOVES = [
    *(Move(shape, tuple(way.split())) for shape in (EVEN, FLAT) for way in WAYS if shape == EVEN or "(0)" not in way),
    *(Move(UNEVEN, tuple(way.split())) for way in WAYS),
    *(Move(EVEN, tuple(way.split()), True) for way in ("R S(0)", "R S(1)", "S(1) R", "P S(0)", "S(0) S(1)", "P R")),
]


def _predicted(move: Move) -> tuple[Way, Way]:
    types = [parse_placement(text) for text in move.way]
    steps = tuple(Step(0, before[0], after[0]) for before, after in pairwise(types))
    moves = Moves(AXES, sums_parts=True)

    def local(placement: Any) -> tuple[int, ...]:
        return local_shape(move.shape, placement, AXES)

    return moves.forward(local, 4, types[0], steps, move.is_permuted), moves.backward(local, 4, types[0], steps)


@pytest.mark.ranks
def test_conversions_take_what_is_predicted() -> None:
    """To the byte on the second rank, which makes zeros where the first keeps what it has; of uneven parts, and of a
    turned tensor's gradient, no rank takes more."""
    measured = pool(2).run(memory_of_moves, MOVES)
    for number, move in enumerate(MOVES):
        for place, way in enumerate(_predicted(move)):
            told = (way.own_bytes or 0) + way.workspace_bytes, way.own_bytes or 0
            for rank, found in enumerate(measured):
                most, left, is_whole = found[number][place]
                says = f"{move} rank {rank} {('forward', 'backward')[place]}: takes {most}, {left}, predicted {told}"
                is_exact = is_whole and rank == 1 and move.shape != UNEVEN and not (move.is_permuted and place)
                assert (most, left) == told if is_exact else most <= told[0] and left <= told[1], says


def test_what_lies_between_two_steps_counts() -> None:
    """The sum of summands is there while a slice of it is copied."""
    forward, _ = _predicted(Move(EVEN, ("P", "R", "S(1)")))
    whole = math.prod(EVEN) * 4
    assert forward == Way(whole // 2, whole)
    assert _predicted(Move(EVEN, ("P", "R", "S(0)")))[0] == Way(whole, 0), "the slice is in the sum's memory"


@pytest.mark.ranks
def test_functions_of_the_runtime_keep_and_take_what_is_predicted() -> None:
    measured = pool(2).run(memory_of_functions)[0]
    for name, ((most, left, _), (most_back, _, _)) in measured.items():
        lowered, result = _lowered(name)
        assert left == lowered.saved_bytes + result, name
        assert 0 <= left + lowered.workspace[0] - most <= 8, f"{name}: a mean and what it is divided by come after"
        if name == "cross_entropy":  # what was saved is given back after its gradient is made
            assert most_back == ROWS * CLASSES // 2 * 4 + lowered.workspace[1], name


def _lowered(name: str) -> tuple[RuntimeMemory, int]:
    """And the bytes of the result; beside a mean, of what it is divided by."""
    if name == "cross_entropy":
        sizes = Sizes(((ROWS, CLASSES // 2), (ROWS,)), ((),), 4, (True, False), "cpu", True)
        node = Node("loss", "aten.cross_entropy_loss.default", (Ref("x"), Ref("t")), (), ("loss",))
        found = split_cross_entropy(node, sizes, ((S(1),), (R,)))
        return _there(found), 8
    sizes = Sizes(((CLASSES // 2, 16), (ROWS,)), ((ROWS, 16),), 4, (True, False), "cpu", False)
    padding = (3,) if "padding" in name else ()
    node = Node("rows", "aten.embedding.default", (Ref("table"), Ref("ids"), *padding), (), ("rows",))
    assert split_lookup(node, sizes, ((S(1),), (R,))) is None
    return _there(split_lookup(node, sizes, ((S(0),), (P,)))), ROWS * 16 * 4


def _there(found: RuntimeMemory | None) -> RuntimeMemory:
    assert found is not None
    return found
