"""What is predicted and emitted for frozen plans is what it was, to the nanosecond, byte and character."""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.oracles.frozen.cases import CASES, Case
from tests.oracles.frozen.figures import Figures, figures
from tests.oracles.frozen.make import frozen


def _model(case: Case) -> str:
    """What is traced for a case: each staged plan's model is another."""
    return case.model if case.model != "staged" else f"staged, {case.plan.partition(',')[0]}"


BY_MODEL = {model: tuple(cases) for model, cases in groupby(CASES, _model)}
#: which have each mesh, kind of plan and kind of operator between them
SAMPLE = (
    "mlp", "gpt", "gpt, tied, dropout", "gpt, wide", "gpt 1.3b, float16", "llama, lora", "moe", "bert", "dlrm",
    "wide_resnet", "two_towers", "hf_gpt2", "staged, gpt",
)  # fmt: skip


def _changes(before: Figures, after: Figures) -> list[str]:
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {before.get(key)} was frozen, found {after.get(key)}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


@pytest.mark.sweep
@pytest.mark.sampled(only=SAMPLE)
@pytest.mark.parametrize("model", BY_MODEL)
def test_figures_and_sources_are_what_they_were(model: str) -> None:
    """Where they should differ, `python -m tests.oracles.frozen.make` freezes them anew."""
    known = frozen()
    faults = {case.name: _changes(known[case.name], figures(case)) for case in BY_MODEL[model]}
    assert not any(faults.values()), "\n".join(f"{name}: {line}" for name, lines in faults.items() for line in lines)


def test_every_case_is_frozen_and_nothing_else() -> None:
    assert [*frozen()] == [case.name for case in CASES]
    assert len({*map(_model, CASES)}) == len(BY_MODEL), "cases of a model stand together"


def test_a_nanosecond_a_byte_and_a_character_are_seen() -> None:
    """What the comparison sees of a case with lanes."""
    known = figures(Case("mlp", "h100 2x2", "dp=2, tp=2, zero=3"))
    (lane,) = known["lanes"]
    other = {**known, "lanes": [{**lane, "peak_bytes": lane["peak_bytes"] + 1}]}
    assert _changes(known, other)[0].startswith("lanes: ")
    assert not _changes(known, known)
