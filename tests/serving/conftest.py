"""The pool of ranks, for tests that ask for it by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rank_pool import RankPool, pool


@pytest.fixture(scope="session")
def rank_pool() -> Callable[[int], RankPool]:
    """`rank_pool(4)` is the pool of 4 ranks of this session."""
    return pool
