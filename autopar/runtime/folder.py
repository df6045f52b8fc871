"""A folder of checkpoints on disk: at every instant the last or the last but one is whole under its name.

A checkpoint is written as `step_00000012.part`: data, then the manifest `autopar.json` (what each file holds, and the
sequence number of the save), each brought to disk (fsync) before one rename gives the folder its name. Only then do
older ones go, renamed first, so that nothing half removed has a checkpoint's name. Their order is that of saving:
steps may begin anew and clocks go back. One that is saved again at a step which stands already comes beside it
(`step_00000012.again`) and takes its name once that is gone.

The newest manifest says which save the folder has come to. A run goes on only from one that it has written or seen
when it loaded; so two runs never take turns in a folder, nor does one begin where another's checkpoints lie.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from autopar.runtime.errors import ProgramError

MANIFEST = "autopar.json"
_NAME = re.compile(r"step_(\d+)(\.again)?")
_PART, _AGAIN, _OLD = ".part", ".again", ".old"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is written last into a checkpoint.

    save: names this save. run: the first save of the run. writer: where that runs. files: length and SHA-256 by name.
    """

    sequence: int
    save: str
    run: str
    writer: str
    step: int
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint by its name. Without a manifest that can be read, it was not written by this, or is damaged."""

    path: Path
    manifest: Manifest | None

    @property
    def step(self) -> int:
        match = _NAME.fullmatch(self.path.name)
        assert match is not None, "listed by name"
        return int(match[1])

    @property
    def order(self) -> tuple[int, int]:
        """By saving; those without a manifest come before all others, by step."""
        return (self.manifest.sequence if self.manifest else -1, self.step)

    @property
    def stands(self) -> bool:
        """Whether all files are there, each as long as it was written. Contents are compared when it is read."""
        if self.manifest is None:
            return (self.path / ".metadata").is_file()
        return all(_length(self.path / name) == length for name, (length, _) in self.manifest.files.items())


def checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Those that have a checkpoint's name, in the order in which they were saved."""
    paths = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted((FoundCheckpoint(path, _read_manifest(path)) for path in paths), key=lambda found: found.order)


def digest(path: Path) -> tuple[int, str]:
    """Length and SHA-256 of a file."""
    with path.open("rb") as file:
        return _length(path), hashlib.file_digest(file, "sha256").hexdigest()


def damage(found: FoundCheckpoint, names: Iterable[str]) -> list[str]:
    """What of these files is not as it was written."""
    files = found.manifest.files if found.manifest else {}
    return [problem for name in names if (problem := _damage(found.path / name, files[name]))]


def _damage(path: Path, expected: tuple[int, str]) -> str:
    try:
        length, hashed = digest(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror or error})"
    if length != expected[0]:
        return f"{path.name} has {length:,} bytes instead of {expected[0]:,}"
    return "" if hashed == expected[1] else f"{path.name} holds other bytes than were written"


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


@dataclass(slots=True)
class Writing:
    """A checkpoint under way, by the one process that holds the folder."""

    folder: Path
    manifest: Manifest
    part: Path
    lock: int

    @classmethod
    def begin(cls, folder: Path, step: int, known: Manifest | None) -> Writing:
        """Takes the folder and makes room in it. known: the manifest that this run has written or seen last.

        Raises ProgramError when another run writes to the folder, or has written to it since.
        """
        _make(folder)
        lock = _take(folder)
        try:
            newest = newest_manifest(folder)
            _check_owner(folder, newest, known)
            for left in (*folder.glob(f"step_*{_PART}"), *folder.glob(f"step_*{_OLD}")):  # of saves that were cut off
                shutil.rmtree(left)
            _settle(folder)
            sequence = 1 + max(manifest.sequence if manifest else 0 for manifest in (newest, known))
            save = uuid.uuid4().hex
            manifest = Manifest(sequence, save, known.run if known else save, _own(), step)
            part = folder / f"step_{step:08d}{_PART}"
            part.mkdir()
            _write_manifest(part, manifest)  # says who is at it, to whoever comes meanwhile
        except BaseException:
            _release(lock)
            raise
        return cls(folder, manifest, part, lock)

    def publish(self, files: Mapping[str, tuple[int, str]], keep: int) -> tuple[Path, Manifest]:
        """Gives the checkpoint its name once all is on disk, then drops all but the last `keep`."""
        for name, (length, _) in files.items():
            if _length(self.part / name) != length:
                raise ProgramError(
                    f"expected {name} of another rank in {self.part}, found none: all ranks must share the folder of "
                    "checkpoints, such as a network file system; give a path there"
                )
        manifest = replace(self.manifest, files=dict(files))
        _write_manifest(self.part, manifest)
        path = self.folder / self.part.name.removesuffix(_PART)
        beside = path.with_name(f"{path.name}{_AGAIN}") if path.exists() else path
        self.part.rename(beside)
        sync(self.folder)
        _settle(self.folder)
        found = checkpoints(self.folder)
        kept = [item.path for item in found if item.stands][-max(keep, 1) :]
        _drop(item.path for item in found if item.path not in kept)
        return beside if beside.exists() else path, manifest

    def end(self, *, failed: bool) -> None:
        """Lets go of the folder; what was written in vain goes, so that its room is free."""
        try:
            if failed:
                shutil.rmtree(self.part, ignore_errors=True)
        finally:
            _release(self.lock)


def _settle(folder: Path) -> None:
    """Gives each that came beside one of the same step its name; the older of the two goes, unless it alone stands."""
    for path in folder.glob(f"step_*{_AGAIN}"):
        older = path.with_suffix("")
        if older.exists():
            _drop([older if FoundCheckpoint(path, _read_manifest(path)).stands else path])
        if path.exists() and not older.exists():
            path.rename(older)


def _drop(paths: Iterable[Path]) -> None:
    """Removes checkpoints. What cannot be removed now is tried again by the next save."""
    for path in paths:
        with suppress(OSError):
            old = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{_OLD}")
            path.rename(old)
            shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that does not know it for folders
            raise
    finally:
        os.close(handle)


# Who writes ----------------------------------------


def _check_owner(folder: Path, newest: Manifest | None, known: Manifest | None) -> None:
    is_same = newest is not None and known is not None and newest.run == known.run
    if newest is None or (is_same and known is not None and newest.sequence <= known.sequence):
        return
    if is_same:
        what = f"another process goes on with this run: it has saved step {newest.step} since"
    else:
        what = "the folder belongs to another run"
    raise ProgramError(
        f"expected checkpoints of this run in {folder}, found step {newest.step} saved by {newest.writer}: {what}. "
        "Give this run a folder of its own, or go on from what lies there with load_checkpoint before you save"
    )


def newest_manifest(folder: Path) -> Manifest | None:
    """What the folder has come to; None where nothing was saved in it."""
    manifests = [found.manifest for found in checkpoints(folder) if found.manifest is not None]
    return manifests[-1] if manifests else None


def _own() -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"process {os.getpid()} on {socket.gethostname()} at {now}"


def _take(folder: Path) -> int:
    """Locks the folder for this process; the system unlocks it when the process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        writers = [m.writer for part in folder.glob(f"step_*{_PART}") if (m := _read_manifest(part)) is not None]
        raise ProgramError(
            f"expected to write to {folder} alone, found another run that does now: {', '.join(writers) or 'unknown'}. "
            "Give each run a folder of its own, or end the other"
        ) from None
    except OSError:
        pass  # a file system without locks: the manifests still tell runs apart
    return handle


def _release(handle: int) -> None:
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)  # also for children that have inherited it
    os.close(handle)


def _make(folder: Path) -> None:
    """Makes the folder, and its name last."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing[::-1]:
        sync(path.parent)


# The manifest ----------------------------------------


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    fields = asdict(manifest)
    beside = folder / f"{MANIFEST}.new"
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps({**fields, "sha256": _sealed(fields)}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / MANIFEST)
    sync(folder)


def _read_manifest(folder: Path) -> Manifest | None:
    """None where there is none, or it is not as it was written."""
    try:
        fields = json.loads((folder / MANIFEST).read_text("utf-8"))
        if fields.pop("sha256") != _sealed(fields):
            return None
        fields["files"] = {name: (int(length), str(hashed)) for name, (length, hashed) in fields["files"].items()}
        return Manifest(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _sealed(fields: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
