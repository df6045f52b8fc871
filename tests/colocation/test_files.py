"""`autopar pack`: sessions read from a file, a packing written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.colocation import pack, packing_schema, read_sessions
from autopar.errors import PlanError
from autopar.ir import reading

POINTS = [{"batch": b, "latency_ns": (5 + b) * 10**6, "peak_bytes": 10**9} for b in (1, 2, 4, 8)]


def asked(**changed: Any) -> dict[str, Any]:
    served = {"file": "curve.json", "prompt_length": 64, "new_tokens": 4}
    return {
        "autopar_sessions": 1,
        "sessions": [
            {"name": "resnet", "rate_per_second": 100, "bound_ms": 60, "curves": {"cpu:1x1": POINTS}},
            {"name": "llama", "rate_per_second": 2, "bound_ms": 200, "curves": {"cpu:1x1": served}},
        ],
        "hosts": {"cpu:1x1": {"devices": 1, "capacity_bytes": 8 * 10**9, "price_per_device_hour": 0.5}},
        **changed,
    }


def written(folder: Path, data: Any) -> Path:
    step = {"predicted_ns": 4 * 10**6, "interval_ns": None}
    point = {"batch": 2, "decode": step, "prefill": {"64": step}, "peak_bytes": 10**9, "layout": "", "refusal": ""}
    (folder / "curve.json").write_text(json.dumps([point]))
    (folder / "sessions.json").write_text(json.dumps(data))
    return folder / "sessions.json"


def test_a_file_is_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, asked())
    assert main(["pack", str(path), "-o", str(tmp_path / "packing.json")]) == 0
    said = capsys.readouterr().out
    data = json.loads((tmp_path / "packing.json").read_text())
    reading.validate(data, reading.validator(packing_schema()))
    assert "none is better" in said and "resnet" in said and "llama" in said
    assert data["cost"] == 0.5 and data["is_proved"] and len(data["hosts"][0]["runs"]) == 2
    assert data["hosts"][0]["runs"][1]["latency_ns"] == 16 * 10**6  # a prompt, and three more tokens


def test_one_that_is_alone_has_a_window(tmp_path: Path) -> None:
    data = asked()
    read = read_sessions(written(tmp_path, {**data, "sessions": data["sessions"][:1]}))
    found = json.loads(pack(read.sessions, read.hosts, percentile=read.percentile).to_json())
    assert found["hosts"][0]["runs"][0]["window"]["wait_ns"] > 0
    even = read_sessions(written(tmp_path, {**data, "arrivals": "even"}))
    assert (
        even.percentile is None and json.loads(pack(even.sessions, even.hosts, percentile=None).to_json())["is_proved"]
    )


def test_what_cannot_be_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = {"cpu:1x1": {"devices": 1, "capacity_bytes": 10**6}}
    assert main(["pack", str(written(tmp_path, asked(hosts=hosts)))]) == 1
    assert "1,000,000,000 bytes a device at least" in capsys.readouterr().out


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="/hosts"):
        read_sessions(written(tmp_path, asked(hosts={})))
    with pytest.raises(PlanError, match=r"sessions\.json"):
        (tmp_path / "sessions.json").write_text("{")
        read_sessions(tmp_path / "sessions.json")
    path = written(tmp_path, asked())
    (tmp_path / "curve.json").write_text("[3]")
    with pytest.raises(PlanError, match=r"curve\.json"):
        read_sessions(path)
