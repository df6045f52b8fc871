"""Memory over time is the same whether its changes are put in order at once or one stretch of time after another."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.simulate import timeline
from autopar.simulate.engine import Change
from autopar.simulate.timeline import Memory, Samples


class Piece(NamedTuple):
    begin_ns: int
    changes: list[Change]


CHANGES = st.lists(
    st.tuples(st.integers(-5, 40), st.integers(-9, 9), st.sampled_from("abc"), st.sampled_from([0, 7, 10])), max_size=9
)


@st.composite
def drawn_pieces(draw: st.DrawFn) -> list[Piece]:
    """Few lists of changes that begin at many times, in any order."""
    lists = draw(st.lists(CHANGES, min_size=1, max_size=3))
    return [Piece(begin, draw(st.sampled_from(lists))) for begin in draw(st.lists(st.integers(0, 60), max_size=12))]


def seen(pieces: list[Piece], stretch: int) -> tuple[list[tuple[int, int]], dict[str, int], Samples]:
    """The curve with how much of each kind there is, the fullest moment, and samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "STRETCH", stretch)
        whole = Memory(pieces)
        curve = [
            pair
            for part in whole.stretches()
            for pair in zip(part.times_ns.tolist(), part.totals.tolist(), strict=True)
        ]
        most, held = whole.fullest
        assert most == sum(held.values()) == max(total for _, total in curve)
        return curve, held, whole.samples(100, 7)


@given(drawn_pieces(), st.integers(1, 20))
def test_one_stretch_after_another_is_the_same(pieces: list[Piece], stretch: int) -> None:
    at_once = seen(pieces, 1 << 30)
    assert seen(pieces, stretch) == at_once
    rows = sorted((piece.begin_ns + time, moment, size) for piece in pieces for time, size, _, moment in piece.changes)
    total, curve = 0, list[tuple[int, int]]()
    for time, _, size in rows:
        total += size
        curve.append((time, total))
    assert at_once[0] == (curve or [(0, 0)])
