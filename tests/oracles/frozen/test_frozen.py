"""What is predicted and emitted for frozen plans is what it was, to the nanosecond, byte and character."""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.oracles.frozen.cases import CASES, Case
from tests.oracles.frozen.figures import Figures, figures
from tests.oracles.frozen.make import frozen

BY_MODEL = {model: tuple(cases) for model, cases in groupby(CASES, lambda case: case.model)}


def _changes(before: Figures, after: Figures) -> list[str]:
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {before.get(key)} was frozen, found {after.get(key)}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("model", BY_MODEL)
def test_figures_and_sources_are_what_they_were(model: str) -> None:
    """Where they should differ, `python -m tests.oracles.frozen.make` freezes them anew."""
    known = frozen()
    faults = {case.name: _changes(known[case.name], figures(case)) for case in BY_MODEL[model]}
    assert not any(faults.values()), "\n".join(f"{name}: {line}" for name, lines in faults.items() for line in lines)


def test_every_case_is_frozen_and_nothing_else() -> None:
    assert [*frozen()] == [case.name for case in CASES]
    assert len({case.model for case in CASES}) == len(BY_MODEL), "cases of a model stand together"


def test_a_nanosecond_a_byte_and_a_character_are_seen() -> None:
    """What the comparison sees of a case with lanes."""
    known = figures(Case("mlp", "h100 2x2", "dp=2, tp=2, zero=3"))
    (lane,) = known["lanes"]
    other = {**known, "lanes": [{**lane, "peak_bytes": lane["peak_bytes"] + 1}]}
    assert _changes(known, other)[0].startswith("lanes: ")
    assert not _changes(known, known)
