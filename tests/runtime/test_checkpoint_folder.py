"""At whatever instant saving ends, a whole checkpoint is found; damage, other runs and foreign pickles are."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import runtime as rt
from autopar.runtime import folder as folders
from tests.rank_pool import RankPool
from tests.runtime.crashes import DAMAGES, Dead, Disk, Run, damaged, killed

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with steps 1 and 2."""
    run = Run(tmp_path / "two")
    run.save(1, 1)
    run.save(2, 2)
    return run.folder


def end_at(at: int, how: str, start: Path, folder: Path, step: int) -> tuple[int, Disk]:
    """Goes on in a copy of a folder with steps 1 and 2, up to a call; what is found then."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    run, disk = Run(folder), Disk(at, how)
    assert run.load() == (2, 2)
    try:
        with disk():
            run.save(step, 3)
    except (Dead, rt.ProgramError):
        assert disk.has_ended
    _, value = Run(folder).load()
    return value, disk


def goes_on(folder: Path) -> None:
    """After a run was cut off; what it has left is cleaned up."""
    run = Run(folder)
    run.load()
    run.save(4, 4)
    assert Run(folder).load() == (4, 4)
    assert len(names(folder)) == 2 and names(folder)[-1] == "step_00000004"


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["killed", "power", "names", "full"])
@pytest.mark.parametrize("step", [3, 2])
def test_at_every_call_the_last_or_the_one_before_is_whole(how: str, step: int, two: Path, tmp_path: Path) -> None:
    at, found, folder = 0, [], tmp_path / "copy"
    while True:
        at += 1
        value, disk = end_at(at, how, two, folder, step)
        if not disk.has_ended:
            break
        found.append(value)
        if how in ("killed", "names"):
            goes_on(folder)
    assert at > 15, "the calls of a save are watched"
    assert found == sorted(found), "once it is found, it stays"
    assert set(found) == {2, 3}


def test_what_is_found_of_processes_that_were_killed(tmp_path: Path) -> None:
    saved: list[int] = []
    for seed in range(20):
        new, found = killed(tmp_path / "run", seed)
        saved += new
        assert found in (saved[-2:]) or found > saved[-1]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", folders.MANIFEST])
def test_damage_is_told_and_the_one_before_is_loaded(name: str, damage: str, two: Path) -> None:
    step, told = damaged(two, name, damage, seed=0)
    assert step == 1
    assert len(told) == 1 and "loaded step_00000001, the last whole checkpoint. step_00000002: " in told[0]
    assert ("manifest" if name == folders.MANIFEST else name) in told[0]


def test_lost_steps_are_told_where_warnings_are_ignored(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(two.glob("step_00000002/*.distcp")).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Run(two).load()[0] == 1
    assert "loaded step_00000001, the last whole checkpoint. step_00000002: " in capsys.readouterr().err
    with pytest.warns(UserWarning, match="the last whole checkpoint"):
        Run(two).load()
    assert "loaded" not in capsys.readouterr().err, "said once"


def test_without_a_whole_one_nothing_is_loaded(two: Path) -> None:
    for path in two.glob("*/.metadata"):
        path.unlink()
    with pytest.raises(rt.ProgramError, match=r"found none. step_00000002: .metadata cannot be read .*step_00000001: "):
        Run(two).load()


def test_the_newest_written_is_kept_whatever_its_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for value, step in enumerate([399, 400, 5]):
        run.save(step, value)
    assert names(tmp_path) == ["step_00000005", "step_00000400"]
    assert Run(tmp_path).load() == (5, 2)
    run.save(6, 3, keep=1)
    assert names(tmp_path) == ["step_00000006"]


def test_a_folder_belongs_to_a_run(tmp_path: Path) -> None:
    first, other = Run(tmp_path), Run(tmp_path)
    first.save(400, 1)
    with pytest.raises(rt.ProgramError, match=r"found step 400 saved by process .*: the folder belongs to another run"):
        other.save(5, 2)
    assert Run(tmp_path).load() == (400, 1)
    other.load()
    other.save(401, 2)  # goes on with the run
    with pytest.raises(rt.ProgramError, match="another process goes on with this run: it has saved step 401 since"):
        first.save(401, 3)
    assert Run(tmp_path).load() == (401, 2)
    shutil.rmtree(tmp_path / "step_00000401")  # somebody takes the last back
    other.save(401, 4)
    assert Run(tmp_path).load() == (401, 4)


def test_a_folder_is_locked_while_it_is_written(two: Path) -> None:
    run, other = Run(two), Run(two)
    run.load()
    other.load()
    known = folders.newest_manifest(two)
    writing = folders.Writing.begin(two, 3, known)
    with pytest.raises(rt.ProgramError, match=rf"found another run that does now: process {os.getpid()} on "):
        other.save(3, 3)
    writing.end(failed=True)
    other.save(3, 3)
    assert Run(two).load() == (3, 3)


def test_what_an_earlier_version_wrote_is_read(two: Path) -> None:
    for path in two.glob(f"*/{folders.MANIFEST}"):
        path.unlink()
    run = Run(two)
    assert run.load() == (2, 2)
    run.save(3, 3)
    assert names(two) == ["step_00000002", "step_00000003"]
    assert Run(two).load() == (3, 3)


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_metadata_that_calls_something_is_refused(has_manifest: bool, two: Path, tmp_path: Path) -> None:
    """Also by somebody who writes a manifest that fits."""
    folder = two / "step_00000002"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    shutil.rmtree(two / "step_00000001")
    if has_manifest:
        manifest = folders.newest_manifest(two)
        assert manifest is not None
        files = {name: folders.digest(folder / name) for name in manifest.files}
        folders._write_manifest(folder, folders.replace(manifest, files=files))
    else:
        (folder / folders.MANIFEST).unlink()
    with pytest.raises(rt.ProgramError, match=r"expected a checkpoint's own metadata, found posix.system"):
        Run(two).load()
    assert not (tmp_path / "ran").exists()


class Counter:
    """Something whose state is `held`."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


def test_state_that_is_no_plain_data_is_refused_when_it_is_saved(two: Path) -> None:
    run = Run(two)
    run.load()
    plain = Counter({"seen": [1, 2.5, "x"], "rows": torch.arange(3)})
    rt.save_checkpoint(two, run.rank, step=3, extra={"plain": plain})
    other = Counter({"seen": [0, 0.0, ""], "rows": torch.zeros(3, dtype=torch.int64)})
    rt.load_checkpoint(two, run.rank, extra={"plain": other})
    assert other.held["seen"] == plain.held["seen"]
    with pytest.raises(rt.ProgramError, match=r"in the state of extra.evil.held, found something .*add_safe_globals"):
        rt.save_checkpoint(two, run.rank, step=4, extra={"evil": Counter(Counter(1))})
    assert names(two) == ["step_00000002", "step_00000003"]
    with pytest.raises(rt.ProgramError, match=r"expected extra.other in .*step_00000003, found none"):
        rt.load_checkpoint(two, run.rank, extra={"other": other})


def _on_ranks(rank: int, world: int, folder: str) -> list[str]:
    """Two ranks: the second cannot write, or cannot read, and all hear of it."""
    from tests.runtime.test_checkpoint import LAYOUTS, start

    part = rt.build(LAYOUTS[world])
    part.load_full_state_dict(start())
    path, told = Path(folder), []
    rt.save_checkpoint(path, part, step=1)
    rt.save_checkpoint(path, part, step=2)
    disk = Disk(1 if rank == 1 else 10**9, "full")
    with pytest.raises(rt.ProgramError) as raised, disk():
        rt.save_checkpoint(path, part, step=3)
    told.append(str(raised.value))
    if rank == 0:
        told.append(" ".join(names(path)))
        os.truncate(path / "step_00000002" / "__1_0.distcp", 10)
    torch.distributed.barrier()
    with pytest.warns(UserWarning) as warned:
        assert rt.load_checkpoint(path, part) == 1
    return [*told, str(warned[0].message)]


def test_all_ranks_hear_of_what_one_could_not_write_or_read(
    rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    (first, kept, read), (second, read_too) = rank_pool(2).run(_on_ranks, str(tmp_path))
    assert "saving" in first and "rank 1: OSError(28, 'No space left on device')" in first
    assert first == second and read == read_too
    assert kept == "step_00000001 step_00000002"
    assert "step_00000002: __1_0.distcp has 10 bytes instead of" in read
