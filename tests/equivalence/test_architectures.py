"""Architectures of the transformers library: the benchmark's list is whole, and what has failed is equal."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.equivalence.architectures import compare
from tests.equivalence.architectures import ARCHITECTURES

BY_NAME = {item.name: item for item in ARCHITECTURES}
AT_LEAST = {"decoder": 25, "encoder": 10, "encoder-decoder": 5, "vision": 10, "audio": 5, "recurrent": 5}


def test_the_list_has_every_kind_and_no_architecture_twice() -> None:
    kinds = Counter(item.kind for item in ARCHITECTURES)
    assert len(BY_NAME) == len(ARCHITECTURES)
    assert kinds.keys() == AT_LEAST.keys()
    assert all(kinds[kind] >= count for kind, count in AT_LEAST.items())


@pytest.mark.parametrize("name", ["Speech2Text", "CLIP", "Mamba"])
def test_what_has_failed_is_equal(name: str) -> None:
    """Positions that a microbatch reads a slice of; a loss over all pairs of the batch; a scan over time."""
    row = compare(BY_NAME[name], "searched")
    assert row["result"] == "equal", row["why"]
