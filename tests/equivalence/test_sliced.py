"""Ranks that have slices of the experts, and tokens of their own, compute what one device does: rows travel, or slices,
or either as the load asks for, which changes within a step."""

from __future__ import annotations

import pytest

from tests.equivalence import sliced


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "experts"), [("dp", "tensor"), ("recomputed", "data"), ("both", "adaptive")])
def test_what_travels_changes_nothing(name: str, experts: str) -> None:
    """Both ways of the table are taken in each step; stored experts, and their gradients, lie alike in both."""
    found = sliced.faults(name, experts)
    assert not found, "\n".join(found)


def test_what_is_stored_stays_whatever_travels() -> None:
    stored = [dict(sliced.planned("ep", experts)[0].stage.storage) for experts in sliced.WAYS]
    assert stored[0] == stored[1] == stored[2]
