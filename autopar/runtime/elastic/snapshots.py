"""Files in a host's memory that outlive the processes: what each rank held after its last steps.

A file has its name only when it is whole, so that a rank that is killed while it writes leaves the one before. Which
belong together is told by a sequence number, which grows with each start of the processes, and the step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from autopar.runtime.elastic.held import HeldState, Sizes, Whole
from autopar.runtime.errors import ProgramError

Label = tuple[int, int]
"""Sequence number and step."""


class KeptNote(NamedTuple):
    """What is noted with a state. at: seconds since 1970. size: processes that ran then. starts: by number of
    processes, what starting so many took last, to their first step, without what it took to agree and to load. saved_s:
    what the last checkpoint took; None where none was written since."""

    at: float
    size: int
    starts: tuple[tuple[int, float], ...] = ()
    saved_s: float | None = None

    def start_s(self, size: int) -> float:
        """What starting so many processes is likely to take: as last time, or as of the next number of them."""
        near = sorted(self.starts, key=lambda known: (abs(known[0] - size), -known[0]))
        return near[0][1] if near else 0.0


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """What one rank held. whole: of all that any rank held then."""

    label: Label
    held: HeldState
    whole: dict[str, Whole]
    kept: KeptNote

    @property
    def summary(self) -> tuple[Label, list[Sizes], dict[str, Whole], tuple[object, ...]]:
        """What others must know of it."""
        return self.label, self.held.sizes, self.whole, tuple(self.kept)


class Snapshots:
    """Those of one host, in a folder that only this user may enter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid():
            raise ProgramError(f"expected a folder of this user for what is kept, found {folder} of another; name one")
        for part in folder.glob("kept_*.part"):  # of ranks that were killed; none is written before all have met
            part.unlink(missing_ok=True)

    def write(self, rank: int, snapshot: StepSnapshot) -> None:
        """Keeps it. Raises ProgramError where there is no room."""
        sequence, step = snapshot.label
        path = self.folder / f"kept_{sequence:06d}_{step:010d}_{rank:06d}.pt"
        part, free = path.with_suffix(".part"), shutil.disk_usage(self.folder).free
        if free < snapshot.held.num_bytes:
            raise ProgramError(
                f"expected room for {snapshot.held.num_bytes:,} bytes that a rank keeps of a step in {self.folder}, "
                f"found {free:,}; make it larger (of a container: --shm-size), or name another by --snapshots"
            )
        data = {
            "label": snapshot.label, "pieces": snapshot.held.pieces, "whole": snapshot.whole,
            "kept": tuple(snapshot.kept),
        }  # fmt: skip
        torch.save(data, part)
        part.replace(path)

    def drop_before(self, label: Label) -> None:
        """Lets go of what is older, of all ranks; others of this host may do so at the same time."""
        for path in self._files():
            if _label(path) < label:
                path.unlink(missing_ok=True)

    def read(self, number: int, count: int) -> Iterator[StepSnapshot]:
        """The share of process `number` of the `count` of this host in all that is kept on it."""
        for path in self._files()[number::count]:
            try:
                data = torch.load(path, weights_only=True, mmap=True)
            except (OSError, RuntimeError, EOFError):
                continue  # removed by now, or damaged: then it is not there
            label = (int(data["label"][0]), int(data["label"][1]))
            yield StepSnapshot(label, HeldState(data["pieces"], data["whole"]), data["whole"], KeptNote(*data["kept"]))

    def remove(self) -> None:
        """At the end of training: the memory is the host's again."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("kept_*.pt"))


def _label(path: Path) -> Label:
    _, sequence, step, _ = path.stem.split("_")
    return int(sequence), int(step)
