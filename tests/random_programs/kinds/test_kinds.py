"""A few kinds of models; `python -m tests.random_programs.kinds` runs all."""

from __future__ import annotations

import random

import pytest

from tests.random_programs.kinds.judge import judged
from tests.random_programs.kinds.row import row
from tests.random_programs.kinds.table import GROUPS, KINDS

SAMPLE = [random.Random(f"kinds {group}").choice(rows).name for group, rows in GROUPS.items()]


@pytest.mark.sweep
@pytest.mark.parametrize("name", SAMPLE)
def test_a_kind_of_each_group(name: str) -> None:
    found = list(judged(KINDS[name], 1, 1, 0))
    assert [text for _, text in found if text] == []


def test_names_are_unique() -> None:
    assert len(KINDS) == sum(map(len, GROUPS.values()))


@pytest.mark.parametrize(("forward", "what"), [("h = h @ nothing", "does not run"), ("h = h / 0.0", "no finite")])
def test_rows_that_show_nothing_are_wrong(forward: str, what: str) -> None:
    (found,) = judged(row("faulty", forward), 1, 1, 1)
    assert what in found[1]
