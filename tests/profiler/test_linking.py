"""Collectives measured under torchrun for real, and what becomes of them in a profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cli import main
from autopar.cost import collective_time_ns
from autopar.errors import ProfileError
from autopar.ir.placement import Axis
from autopar.profiler import load_profile, measure_links, template_profile
from autopar.profiler.linked import with_measured_links
from autopar.profiler.measure_links import REVISION, default_meshes, parse_mesh
from tests.rank_pool import pool

HOST = {"device_type": "cuda", "device": "NVIDIA H200", "torch": "2.11.0", "backend": "nccl", "ranks": 16, "local": 8,
        "node": "n1", "revision": REVISION}  # fmt: skip
FOUND = {
    "host": HOST,
    "collectives": [
        {"collective": "all_reduce", "nodes": 1, "inside": 8, "points": [[1024, 9000], [8192, 8000], [1 << 20, 90000]]},
        {"collective": "send", "nodes": 2, "inside": 1, "points": [[1024, 7000], [1 << 20, 40000]]},
        {"collective": "all_reduce", "nodes": 2, "inside": 8, "points": [[1024, 7000], [1 << 20, 40000]]},
    ],
}


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def measure_on(rank: int, world: int, per_node: int, folder: str, torch_version: str) -> list[dict[str, Any]] | str:
    """A short sweep of ranks that take themselves for those of several nodes; or why it is refused."""
    measure_links.WINDOWS, measure_links.NS_A_WINDOW = 1, 1e6
    here = measure_links.RankWorld(torch.device("cpu"), tuple(n // per_node for n in range(world)), per_node)
    host = {**measure_links.host_facts(here), "torch": torch_version}
    try:
        kept = measure_links.KeptLinkPoints(Path(folder) / "kept", host, rank)
    except SystemExit as refused:
        return str(refused)
    meshes = default_meshes(world, per_node)
    return measure_links.measure(here, meshes, 0.0, kept, lambda text: None)


@pytest.mark.sampled(only=("2-2", "4-2"))
@pytest.mark.ranks
@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (4, 4), (4, 2)])
def test_every_collective_is_measured_along_every_kind_of_axis(world: int, per_node: int, tmp_path: Path) -> None:
    ranks = pool(world)
    found = ranks.run(measure_on, per_node, str(tmp_path), "2.13")
    assert all(other == found[0] for other in found), "all ranks agree on sizes and times"
    spans = {(2, 2): {(1, 2)}, (4, 4): {(1, 2), (1, 4)}, (4, 2): {(1, 2), (2, 1), (2, 2)}}[world, per_node]
    sends = {("send", *span) for span in ((1, 2), (2, 1)) if span in spans}
    groups = [(item["collective"], item["nodes"], item["inside"]) for item in found[0]]
    assert len(groups) == len(set(groups))
    assert set(groups) == {*((kind, *span) for kind in KINDS for span in spans), *sends}
    assert all(len(item["points"]) == 2 and item["points"][0][1] > 0 for item in found[0])
    kept = (tmp_path / "kept").read_text()
    assert ranks.run(measure_on, per_node, str(tmp_path), "2.13") == found, "what is known is not measured again"
    assert (tmp_path / "kept").read_text() == kept
    refused = ranks.run(measure_on, per_node, str(tmp_path), "2.12")
    assert all("do not mix; name another file, or remove this one" in str(text) for text in refused)


@pytest.mark.ranks
def test_a_copy_of_the_file_runs_alone_under_torchrun(tmp_path: Path) -> None:
    text = Path(measure_links.__file__).read_text(encoding="utf-8")
    for usual, short in (
        ("\nWINDOWS = 7\n", "\nWINDOWS = 1\n"),
        ("NS_A_WINDOW, MOST_IN_A_WINDOW = 2e7", "NS_A_WINDOW, MOST_IN_A_WINDOW = 1e6"),
    ):
        assert usual in text
        text = text.replace(usual, short)
    script = tmp_path / "links.py"
    script.write_text(text, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), "--seconds", "0"], capture_output=True, text=True, timeout=250, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["host"]["backend"] == "gloo" and found["host"]["ranks"] == 2
    profile = replace(template_profile(), title=f"CPU rank of one thread: {found['host']['device']}")
    measured = with_measured_links(profile, found, "2026-01-01")
    assert {("send", "intra_node", 2), *((kind, "intra_node", 2) for kind in KINDS)} <= set(measured.collectives)


def test_without_torchrun_it_says_how_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=r"under torchrun with at least 2 ranks, found one process"):
        main(["profile", "--collectives", "-o", str(tmp_path / "points.json")])


def test_measured_groups_take_the_place_of_modelled_ones() -> None:
    profile = with_measured_links(load_profile("h200"), FOUND, "2026-01-01")
    assert collective_time_ns("all_reduce", 1024, Axis("dp", 8, 1), 8, profile) == 8500, "times never fall with size"
    assert collective_time_ns("all_reduce", 1 << 20, Axis("dp", 8, 1), 8, profile) == 90000
    assert collective_time_ns("send", 1 << 20, Axis("stages", 2, 8), 8, profile) == 40000
    mixed, before = (collective_time_ns("all_reduce", 1 << 20, Axis("dp", 16, 1), 8, p) for p in
                     (profile, load_profile("h200")))  # fmt: skip
    assert mixed == pytest.approx(before, rel=0.05), "several ranks in each of several nodes stay modelled"
    assert profile.collectives["send", "inter_node", 2].provenance.kind == "measured"


def test_points_are_put_into_a_profile_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "points.json").write_text(json.dumps(FOUND))
    links = ["profile", "--links", str(tmp_path / "points.json"), "-o", str(tmp_path / "own.json")]
    assert main([*links, "--into", "h200"]) == 0
    assert "all_reduce     1 × 8 ranks: 9 µs for 1024 bytes" in capsys.readouterr().out
    assert load_profile(str(tmp_path / "own.json")).collectives["all_reduce", "intra_node", 8].points[-1] == (
        1 << 20,
        90000,
    )
    assert main([*links, "--into", "a100"]) == 2
    assert "points of different devices do not mix" in capsys.readouterr().err
    assert main(links) == 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a CPU's": ({"device_type": "cpu"}, r"of different devices do not mix"),
    "another GPU's": ({"device": "NVIDIA A100-SXM4-80GB"}, r"found those of 'NVIDIA A100-SXM4-80GB'"),
    "another sweep's": ({"revision": 0}, r"expected points of revision"),
}


@pytest.mark.parametrize("case", BAD)
def test_points_of_other_devices_are_refused(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(ProfileError, match=message):
        with_measured_links(load_profile("h200"), {**FOUND, "host": {**HOST, **changes}}, "2026-01-01")
    with pytest.raises(ProfileError, match=r"as `autopar profile --collectives` writes them, found nothing"):
        with_measured_links(template_profile(), {}, "2026-01-01")


def test_meshes_have_axes_of_every_size_inside_a_node_and_across() -> None:
    assert default_meshes(4, 4) == [(2, 2), (1, 4)]
    assert default_meshes(16, 8) == [(8, 2), (4, 4), (2, 8), (2, 8), (16,)]
    assert parse_mesh("2x4") == (2, 4)
