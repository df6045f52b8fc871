"""What all processes that run hold together, and which state they go on from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.runtime.checkpoint import last_checkpoint
from autopar.runtime.elastic.held import HeldState, lacking
from autopar.runtime.elastic.reader import Holdings
from autopar.runtime.elastic.snapshots import KeptNote, Label, Snapshots, StepSnapshot
from autopar.runtime.elastic.wire import HostWire


@dataclass(frozen=True, slots=True)
class Agreed:
    """holdings, kept: who holds what of the state to go on from, and what was noted with it; None for the last
    checkpoint. lost: names of what is not whole of a later state. sequence: a number that no state has yet."""

    holdings: Holdings | None
    kept: KeptNote | None
    lost: tuple[str, ...]
    sequence: int


def agree(wire: HostWire, snapshots: Snapshots, checkpoints: Path, node: str) -> Agreed:
    """The newest state that is whole, unless the last checkpoint is of a later step. Equal on all processes."""
    count, number = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    own = list(snapshots.read(number, count))
    every = wire.gather([[one.summary for one in own], _saved_step(checkpoints), node])
    saved_step, nodes = max(step for _, step, _ in every), [node for *_, node in every]
    labels = sorted({label for told, *_ in every for label, *_ in told}, reverse=True)
    sequence, lost = 1 + max((sequence for sequence, _ in labels), default=0), tuple[str, ...]()
    for label in labels:
        holdings, kept = _holdings(label, own, [told for told, *_ in every], nodes)
        lacks = lacking(holdings.whole, {size for known in holdings.every for size in known})
        if not lacks:
            if label[1] < saved_step:
                break
            return Agreed(holdings, kept, (), sequence)
        lost = lost or tuple(lacks)
    return Agreed(None, None, lost, sequence)


def _saved_step(checkpoints: Path) -> int:
    found = last_checkpoint(checkpoints)
    return int(found.name.split("_")[1].split(".")[0]) if found is not None else 0


def _holdings(label: Label, own: list[StepSnapshot], every: list[Any], nodes: list[str]) -> tuple[Holdings, KeptNote]:
    """Of one state. every: the summaries of what each process has."""
    these = [[one for one in told if one[0] == label] for told in every]
    whole = {name: kind for told in these for _, _, known, _ in told for name, kind in known.items()}
    sizes = [[size for _, known, *_ in told for size in known] for told in these]
    held = HeldState()
    for one in own:
        if one.label == label:
            held.pieces.update(one.held.pieces)
    last = max((KeptNote(*kept) for told in these for *_, kept in told), key=lambda kept: kept.at)
    return Holdings(held, sizes, whole, nodes), last
