"""Ranks that exchange tokens as the load asks for compute what one device does, while the way changes within a step."""

from __future__ import annotations

import pytest

from tests.equivalence import adaptive


@pytest.mark.sampled(only=("recomputed", "pp"))
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ep", "recomputed", "pp"])
def test_ways_change_within_a_step_and_the_model_stays(name: str) -> None:
    """Every row of the table is taken in each step, by all ranks of a group alike, and again where it is recomputed."""
    found = adaptive.faults(name)
    assert not found, "\n".join(found)
