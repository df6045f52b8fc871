"""Intervals of measured iterations: how many rows lie in theirs, and the spread that 90% of them need."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.files import profiles_folder
from autopar.cost.profile import profile_from_json
from autopar.odds import NINE_IN_TEN
from autopar.profiler import load_profile
from benchmarks.accuracy.gpu.odds import Miss, calibration, covered, misses, needed_spread, resolution, write_steps
from benchmarks.accuracy.gpu.predictions import Predicted
from benchmarks.accuracy.gpu.rows import Row, Sizes


def miss(log: float, model: str = "a", variance: float = 0.0, cell: str = "", device: str = "h100") -> Miss:
    return Miss(device, "somebody", model, log, cell, variance)


def test_nine_in_ten_rows_are_inside_of_the_spread_that_they_need() -> None:
    rows = [miss(step / 100) for step in range(1, 101)]
    spread = needed_spread(rows)
    assert sum(row.log <= NINE_IN_TEN * spread + 1e-12 for row in rows) in (90, 91)


def test_no_rows_have_no_share_of_rows() -> None:
    assert calibration([], {}).splitlines()[-1].split() == ["all", "0", "–", "–"]


def test_what_operators_explain_is_not_asked_of_whole_steps() -> None:
    explained = (0.1 / NINE_IN_TEN) ** 2
    assert needed_spread([miss(0.1, variance=explained)] * 10) == pytest.approx(0.0, abs=1e-9)
    assert needed_spread([miss(-0.2)] * 10) == pytest.approx(0.2 / NINE_IN_TEN)


def test_a_model_is_checked_under_the_spread_of_the_others_on_its_device() -> None:
    others = [miss(0.05, model) for model in "abc" for _ in range(4)]
    rows = [*others, miss(0.06, "far"), miss(0.06, "far", device="a100")]
    inside = covered(rows)
    assert all(inside[: len(others)]) and not inside[-2]
    assert inside[-1], "of a device with one row, the row itself says how sure it is"


def test_a_source_is_checked_under_the_spread_of_the_others() -> None:
    own = [miss(0.05)._replace(source="near") for _ in range(6)]
    far = [miss(0.3, model)._replace(source="far") for model in "bc" for _ in range(6)]
    assert all(covered([*own, *far])[len(own) :]), "its other model is as far off"
    assert not any(covered([*own, *far], "source")[len(own) :])


def test_a_softwares_own_tests_say_nothing_of_steps() -> None:
    sizes = Sizes(2, 64, 2, 2, 32, 256, False, 512, True)
    row = Row(
        "1", "somebody", "megatron", "H100-SXM5-80GB", 8, 8, "small", sizes, "bf16", 64, 1, 8, 8, 1, 1, measured_s=1
    )
    found = misses([Predicted(row, 0.9), Predicted(replace(row, id="2", other="test settings"), 0.2)], {})
    assert [miss.log for miss in found] == [pytest.approx(-math.log(0.9))]


def test_what_a_cell_has_in_common_does_not_blur_its_ranks() -> None:
    shifted = [miss(0.5 + step / 100, cell="cell") for step in (-2, -1, 0, 1, 2)]
    found = resolution(shifted)
    assert found == resolution([row._replace(log=row.log - 0.5) for row in shifted])
    assert found is not None and 0.01 < found < 0.02
    assert resolution([miss(0.1)]) is None


def test_the_block_is_written_once_into_the_profile_of_that_name(tmp_path: Path) -> None:
    told = {"kind": "fitted", "source": "rows", "date": "2026-11-26"}
    path, other = tmp_path / "h100.json", tmp_path / "v100.json"
    for file in (path, other):
        file.write_text(json.dumps(json.loads(_shipped(file.name)), indent=2))
    before = json.loads(other.read_text())
    for spread in (0.1, 0.2):
        write_steps(tmp_path, {"h100": {"count": 9, "spread": spread, "resolution": 0.05, "provenance": told}})
    steps = profile_from_json(json.loads(path.read_text()), "written").steps
    assert steps is not None and (steps.count, steps.spread) == (9, 0.2)
    assert path.read_text().count('"steps"') == 1 and json.loads(other.read_text()) == before


def _shipped(name: str) -> str:
    return (profiles_folder() / name).read_text(encoding="utf-8")


def test_shipped_profiles_tell_how_sure_steps_are() -> None:
    steps = load_profile("h100").steps
    assert steps is not None and 0 < steps.resolution < math.expm1(NINE_IN_TEN * steps.spread)
