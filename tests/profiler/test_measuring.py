"""The measuring scripts run for real, over a smaller sweep, and what they print becomes a profile."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.clock import Interrupted
from autopar.cost import collective_time_ns
from autopar.cost.files import profiles_folder
from autopar.cost.profile import profile_from_json
from autopar.errors import ProfileError
from autopar.ir.placement import Axis
from autopar.profiler import host, measure, measure_gloo
from autopar.profiler.fit import non_decreasing, profile_from_points
from autopar.runtime.allocation import CHOICES

SMALLER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("script", {script!r})
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
for name, value in {changes!r}.items():
    assert hasattr(script, name), name
    setattr(script, name, value)
script.main()
"""
OPERATORS = {
    "SECONDS_A_POINT": 0.001, "ROW_SHAPES": ((2, 8), (128, 64)), "ROWS": (16, 64), "COLUMNS": (32,), "INNER": (32, 128),
    "BATCHED": (16,), "LENGTHS": (32,), "WIDTHS": (16,), "CHANNELS": (4, 16), "FILTERS": (16,), "SIZES": (4,),
    "KERNELS": (1,), "BATCHES": (1,), "GROUP_CHANNELS": (4,),
    "LOOKUP_SHAPES": ((4, 10, 4), (64, 1000, 64)), "LOSS_SHAPES": ((2, 8), (32, 256)),
    "IMAGE_SHAPES": ((2, 2, 2), (4, 16, 8)), "LINEAR_SHAPES": ((2, 4, 4), (128, 128, 128)),
    "DECODE_LENGTHS": (32,), "DECODE_WIDTHS": (16,), "GROUPED_QUERIES": (1, 2), "DECODE_ELEMENTS": 1 << 12,
    "TYPED_PRODUCTS": ((64, 64, 64),), "TYPED_ATTENTION": ((2, 16, 16),), "TYPED_ROWS": ((64, 64),),
}  # fmt: skip
COLLECTIVES = {
    "RUNS": 3, "COLLECTIVE_BYTES": (1 << 10, 1 << 22), "MOST_IN_A_RUN": 2, "WAITING_ROUNDS": 2, "WAITING_UNITS": (1, 3),
    "MESSAGE_BYTES": (1 << 10, 1 << 21), "PASS_UNITS": 1, "LATE_RUNS": 2,
}  # fmt: skip


def measured(script: Path, changes: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = SMALLER.format(script=str(script), changes=changes)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=250)


def printed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-2000:]
    points: dict[str, Any] = json.loads(done.stdout)
    return points


@pytest.mark.ranks
def test_what_this_host_measures_is_a_profile(tmp_path: Path) -> None:
    kept = tmp_path / "points"
    operators = printed(measured(host.MEASURE[0], OPERATORS, "--points", str(kept)))
    collectives = printed(measured(host.MEASURE[1], COLLECTIVES))
    facts = {"model": "this host", "cores": 2, "memory": 8 << 30}
    profile = profile_from_json(profile_from_points(operators | collectives, facts, "2026-01-01"), "measured")
    assert {source.split(":")[0] for source in profile.provenance.values()} == {"measured"}
    runtime = profile.runtime
    assert runtime is not None and min(runtime.pass_ns, runtime.receive_ns) > 0
    assert runtime.around_pass_ns((1 << 21,), 0) > runtime.around_pass_ns((1 << 10,), 0) > runtime.pass_ns
    assert runtime.carrying_ns((1 << 21,)) > 0
    assert profile.facts.memory_bandwidth > 1e8
    assert profile.peak_flops("float32") > 1e8
    assert (
        {"bfloat16", "float16"}
        == set(profile.curve("matmul").dtype_ratios)
        == set(profile.curve("pointwise").dtype_ratios)
    )
    assert profile.tables["decode forward float32"].axes == ((32,), (16,), (1, 2))
    axis = Axis("dp", 2, 1)
    few, many = (collective_time_ns("all_reduce", size, axis, 2, profile) for size in (1 << 10, 1 << 22))
    assert 0 < few <= many < 10**10
    for ranks in (2, 4):
        (short, none), (long, waited) = profile.waits["intra_node", ranks].points
        assert 2 * short < long < 10 * short
        assert none == 0 <= waited < 10**9

    lines = kept.read_text()
    again = printed(measured(host.MEASURE[0], OPERATORS, "--points", str(kept)))
    assert kept.read_text() == lines, "what is known is not measured again"
    assert len(again["points"]) == len(operators["points"])
    kept.write_text(lines.replace('"dtype": "float32"', '"dtype": "bfloat16"', 1))
    refused = measured(host.MEASURE[0], OPERATORS, "--points", str(kept))
    assert refused.returncode != 0
    assert "do not mix; name another file, or remove this one" in refused.stderr


def test_times_that_fall_take_the_mean_of_their_neighbours() -> None:
    assert non_decreasing([1.0, 4.0, 2.0, 3.0, 7.0]) == [1.0, 3.0, 3.0, 3.0, 7.0]
    assert non_decreasing([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert non_decreasing([]) == []


def test_weights_are_those_that_were_read_the_longest_ago() -> None:
    """One after another, none of the lines of a cache twice, until the pool is used up."""
    weights, like = measure._Weights(), torch.empty(1000, 5, requires_grad=True)
    taken = [weights.take(like) for _ in range(measure.POOL_ELEMENTS // 5008 + 1)]
    assert all(one.shape == like.shape and one.requires_grad for one in taken)
    begins = [one.data_ptr() for one in taken]
    assert begins[-1] == begins[0], "from the start again"
    assert {after - before for before, after in itertools.pairwise(begins[:-1])} == {4 * 5008}
    assert not weights.take(like.detach()).requires_grad


def test_several_windows_take_the_median_of_each_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast window, as hosts have them, changes nothing; operators and collectives take turns."""
    asked: list[tuple[str, ...]] = []
    speeds = iter((1.0, 1.0, 0.5, 0.5, 1.1, 1.1))

    def measure(script: Path, *arguments: str) -> dict[str, Any]:
        asked.append((script.name, *arguments))
        speed = next(speeds)
        if script == host.MEASURE[1]:
            return {
                "busy_share": {"2": 0.5 * speed},
                "collectives": [{"ranks": 2, "points": [[1024, int(900 * speed)]]}],
            }
        return {"points": [{"op": "mm", "wanted": True, "forward_ns": int(1000 * speed)}], "launch": [int(10 * speed)]}

    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(host, "_points", measure)
    monkeypatch.setattr(host, "others_share", lambda: 0.0)
    monkeypatch.setattr(host, "profile_from_points", lambda found, facts, day: kept.append(found) or found)
    host.measure_host(tmp_path / "points", windows=3)
    assert kept == [{
        "points": [{"op": "mm", "wanted": True, "forward_ns": 1000}], "launch": [10],
        "busy_share": {"2": 0.5}, "collectives": [{"ranks": 2, "points": [[1024, 900]]}],
    }]  # fmt: skip
    first, second = (script.name for script in host.MEASURE)
    assert [name for name, *_ in asked] == [first, second] * 3
    files = [Path(arguments[1]).name for name, *arguments in asked if name == first]
    assert files == ["points", "points.1", "points.2"]


def test_measuring_ranks_allocate_as_training_ones_do() -> None:
    assert measure.ALLOCATION == measure_gloo.ALLOCATION == CHOICES


@pytest.mark.parametrize(("shares", "count"), [((0.0, 0.1), 1), ((0.6, 0.1), 2), ((0.0, 0.7), 2), ((0.9, 0.9), 2)])
def test_on_a_busy_host_everything_is_measured_once_more_and_says_so(
    shares: tuple[float, float], count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, runs = iter((*shares, *[shares[-1]] * 8)), []
    block = {"provenance": {"kind": "measured", "source": "a host", "date": "2026-01-01"}}
    monkeypatch.setattr(host, "others_share", lambda: next(told))
    monkeypatch.setattr(host, "_points", lambda script, *arguments: runs.append(script) or {})
    monkeypatch.setattr(host, "median_of", lambda found: found)
    monkeypatch.setattr(host, "profile_from_points", lambda found, facts, day: {"links": [block], "facts": block})
    data = host.measure_host()
    assert len(runs) == 2 * count
    says = [item["provenance"]["source"] for item in (data["facts"], data["links"][0])]
    assert all(("on a busy host" in text) == (count > 1) for text in says)
    assert "measuring this host" in capsys.readouterr().err


def test_without_a_terminal_a_line_now_and_then_says_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "measure_slowly.py"
    script.write_text("import time; time.sleep(0.5); print('{}')")
    monkeypatch.setattr(host, "LINE_SECONDS", 0.1)
    assert host._points(script) == {}
    assert "autopar: measuring this host, slowly: 0 s" in capsys.readouterr().err
    monkeypatch.setattr(host, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(ProfileError, match=r"expected to measure this host within 0\.2 s, found .* still at it"):
        host._points(script)


def test_measuring_ends_with_its_children_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a search, Ctrl-C is only noted; children of a terminal's own group would each print a traceback."""
    script, noted = tmp_path / "measure_slowly.py", tmp_path / "child"
    script.write_text(
        f"import os, time; child = os.fork()\nif child: open({str(noted)!r}, 'w').write(str(child))\ntime.sleep(60)"
    )
    monkeypatch.setattr(host, "is_interrupted", lambda: noted.exists())
    with pytest.raises(Interrupted):
        host._points(script)
    child = Path(f"/proc/{noted.read_text()}/stat")
    for _ in range(100):
        if not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("a measuring process goes on")


@pytest.mark.parametrize("damage", ["truncated", "of another kind", "locked"])
def test_a_damaged_cache_is_measured_anew_and_one_that_cannot_be_locked_is_read(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (profiles_folder() / "cpu.json").read_text()
    path = tmp_path / "autopar" / "cpu.json"
    path.parent.mkdir()
    path.write_text({"truncated": text[:1000], "of another kind": "[]", "locked": text}[damage])
    if damage == "locked":
        path.with_suffix(".lock").mkdir()
    runs: list[int] = []
    monkeypatch.setattr(host, "cache_path", lambda: path)
    monkeypatch.setattr(host, "measure_host", lambda: runs.append(1) or json.loads(text))
    assert host.host_profile().name == "cpu" and host.host_profile().name == "cpu"
    assert len(runs) == (damage != "locked")
    assert ("measuring this host anew" in capsys.readouterr().err) == bool(runs)
    assert json.loads(path.read_text()) == json.loads(text)
