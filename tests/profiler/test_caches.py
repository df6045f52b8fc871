"""What autopar keeps in the user's cache is never needed: damaged, of another kind or out of reach, it is made anew."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.cost.files import profiles_folder
from autopar.profiler import host, measure

TEXT = (profiles_folder() / "cpu.json").read_text()


def _folder_is_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_text(TEXT[: len(TEXT) // 2]),
    "empty": lambda path: path.write_text(""),
    "zeros": lambda path: path.write_bytes(bytes(len(TEXT))),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x80" * 100),
    "a list": lambda path: path.write_text("[1, 2]"),
    "null": lambda path: path.write_text("null"),
    "another format": lambda path: path.write_text(TEXT.replace('"format": 2', '"format": 1', 1)),
    "a field of another type": lambda path: path.write_text(json.dumps({**json.loads(TEXT), "operators": "many"})),
    "not a number": lambda path: path.write_text(json.dumps({**json.loads(TEXT), "facts": {"x": float("nan")}})),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a folder": lambda path: path.mkdir(),
    "a link to nowhere": lambda path: path.symlink_to(path.parent / "nowhere"),
    "no folder": _folder_is_a_file,
}  # fmt: skip


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the host was measured."""
    runs: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host.cache_folder().mkdir()

    def measure_host() -> Any:
        runs.append(1)
        return json.loads(TEXT)

    monkeypatch.setattr(host, "measure_host", measure_host)
    return runs


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_profile_that_cannot_be_read_is_measured_anew_and_that_is_said(
    damage: str, measured: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert '"format": 2' in TEXT
    path = host.cache_path()
    DAMAGES[damage](path)
    assert host.host_profile().name == "cpu"
    assert measured == [1]
    said = capsys.readouterr().err
    assert damage == "a link to nowhere" or (
        "autopar: " in said and str(path.parent) in said and len(said.splitlines()) <= 2
    )
    if damage not in ("a folder", "no folder"):  # where another cannot be put in its place
        assert host.host_profile().name == "cpu" and measured == [1]
    assert not list(path.parent.glob("*.tmp")) if path.parent.is_dir() else True


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_profile_that_cannot_be_kept_serves_this_process(
    code: int, measured: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as during:
        during.setattr(json, "dump", refuse)
        assert host.host_profile().name == "cpu"
    assert os.strerror(code) in capsys.readouterr().err
    assert not list(host.cache_folder().glob("*.tmp")), "nothing half written is left"
    with monkeypatch.context() as during:
        during.setattr(host.tempfile, "NamedTemporaryFile", refuse)
        assert host.host_profile().name == "cpu"
    assert measured == [1, 1]


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", staticmethod(refuse))
    assert host.cache_folder().name == f"autopar-{os.getuid()}"


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_points_of_a_run_that_was_stopped_while_it_wrote_go_on(
    cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, machine = tmp_path / "points", {"cpu": "one"}
    kept = measure.KeptPoints(file, machine)
    for key in ("a", "b", "c"):
        kept.get(key, lambda: [1, 2])
    file.write_bytes(file.read_bytes()[:-cut])
    again = measure.KeptPoints(file, machine)
    assert ("cannot be read" in capsys.readouterr().err) == (cut > 1)
    assert [again.get(key, lambda: [3, 4]) for key in "abc"] == [[1, 2], [1, 2], [1, 2] if cut == 1 else [3, 4]]
    assert measure.KeptPoints(file, machine).points.keys() == {"a", "b", "c"}


def test_another_file_is_not_taken_for_points(tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_bytes(b"\xff not points\n")
    with pytest.raises(SystemExit, match=r"expected .*thesis\.txt to hold points of"):
        measure.KeptPoints(file, {"cpu": "one"})
    assert file.read_bytes() == b"\xff not points\n"
