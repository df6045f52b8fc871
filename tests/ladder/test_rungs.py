"""What is read off a ladder: efficiency, knees, fronts; its text, JSON and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.ir import reading
from autopar.ir.mesh import Mesh
from autopar.ladders import Ladder, Needs, Rung, capacity
from autopar.ladders.form import ladder_schema
from autopar.ladders.rungs import knee_of
from tests.ladder import made


def test_the_knee_is_where_more_devices_bring_less_than_half() -> None:
    assert knee_of([(1, 1.0), (2, 1.9), (4, 3.4), (8, 4.0)]) == 2  # 3.4 → 4.0 is 18% of twice as many
    assert knee_of([(1, 1.0), (2, 2.0), (4, 4.0)]) == 2  # none
    assert knee_of([(1, 1.0), (2, 1.0), (4, 4.0)]) == 0
    assert knee_of([(8, 1.0), (12, 1.26)]) == 1  # half of half as many more


def amdahl() -> Ladder:
    return made.ladder(lambda n, batch: 8 / n + 0.5 + 0.02 * n, batches=(256, 512), price=2.0)


def test_efficiency_is_of_the_smallest_rung() -> None:
    ladder = amdahl()
    first, *rest = ladder.of("h100", 256)
    assert ladder.efficiency(first) == 1.0
    found = [ladder.efficiency(rung) for rung in rest]
    assert found == sorted(found, reverse=True) and found[0] == pytest.approx(8.52 / (2 * 4.54), rel=1e-6)


def test_a_rung_that_fewer_devices_overtake_is_told_everywhere(tmp_path: Path) -> None:
    ladder = made.ladder(lambda n, batch: {16: 9.0, 32: 8.0, 64: 4.0}.get(n, 64 / n), batches=(256,))
    found = {rung.devices: ladder.overtaken_by(rung) for rung in ladder.of("h100", 256)}
    by = {devices: one.devices for devices, one in found.items() if one is not None}
    expected = {n: 8 for n in (16, 32) if n in found}
    assert by == expected and by, found
    told = {one["devices"]: one.get("overtaken_by_devices") for one in json.loads(ladder.to_json())["rungs"]}
    assert {n: m for n, m in told.items() if m is not None} == by
    ladder.report(tmp_path / "ladder.html")
    for text in (str(ladder), (tmp_path / "ladder.html").read_text()):
        assert "12.5% slower than h100:1x8" in text and "no faster than h100:1x8" in text


def test_none_is_faster_and_cheaper_than_one_of_the_front() -> None:
    ladder = amdahl()
    front = ladder.front(256)
    assert front and [rung.samples_s for rung in front] == sorted((r.samples_s for r in front), reverse=True)
    for rung in ladder.of("h100", 256):
        beaten = [
            other for other in front
            if other.samples_s >= rung.samples_s and (other.money(1) or 0) <= (rung.money(1) or 0) and other is not rung
        ]  # fmt: skip
        assert bool(beaten) != (rung in front)


def test_text_json_and_page_say_the_same(tmp_path: Path) -> None:
    whole = amdahl()
    refused = Rung(Mesh("l40s"), 256, refusal="needs <b>more</b> than 48 GB")
    taken = capacity(whole, Needs(1e9, deadline=10.0))
    ladder = Ladder("model", (*whole.rungs, refused), taken)
    data = json.loads(ladder.to_json())
    reading.validate(data, reading.validator(ladder_schema()))
    assert len(data["rungs"]) == 13 and data["rungs"][-1]["refusal"] == refused.refusal
    assert data["rungs"][0]["samples_per_second"] == pytest.approx(256 / 8.52)
    knee = next(one for one in data["knees"] if one["global_batch"] == 256)["devices"]
    assert knee == ladder.knee("h100", 256).devices
    text = str(ladder)
    assert f"knee of h100, batch 256: {knee} devices" in text and "none: needs" in text and "CP-SAT" in text
    ladder.save(tmp_path / "out")
    page = (tmp_path / "out" / "ladder.html").read_text()
    assert page.count("<svg") == 3 and "<b>more" not in page and "<script" not in page
    plans = {rung["plan"] for rung in data["rungs"] if "plan" in rung}
    assert len(plans) == 12 and all((tmp_path / "out" / plan).exists() for plan in plans)


def test_what_is_not_on_the_ladder_is_refused() -> None:
    with pytest.raises(PlanError, match="h100 with batch 256"):
        amdahl().of("a100", 256)
    with pytest.raises(PlanError, match="found none: too small"):
        _ = Rung(Mesh("l40s"), 8, refusal="too small").step_ns
