"""What `train.py --elastic` asks: which program to run, where to go on from, and to keep what each step has made."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch lists no exports

from autopar.runtime import comm
from autopar.runtime.checkpoint import load_checkpoint, load_state, note_seen, whole_state
from autopar.runtime.elastic.agreeing import agree
from autopar.runtime.elastic.held import HeldState, Sizes, Whole, held_of
from autopar.runtime.elastic.joining import (
    default_folder,
    program_of,
    read_steps,
    rung_for,
    start_program_group,
    store_of_round,
)
from autopar.runtime.elastic.mirrors import Mirrored, mirrored, send_mirrored
from autopar.runtime.elastic.reader import HeldReader
from autopar.runtime.elastic.snapshots import KeptNote, Label, Snapshots, StepSnapshot
from autopar.runtime.elastic.wire import HostWire

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from autopar.runtime.rank import Rank

Extra = Mapping[str, Any] | None
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training goes on from. step: how many are done. source: "start", "ranks" or "checkpoint". moved_bytes: of
    state, what all ranks together received from others (`HeldReader.state_bytes`). seconds: to agree and to load.
    kept: what was noted with the state that is gone on from; None from a checkpoint."""

    step: int
    source: str
    moved_bytes: int
    seconds: float
    kept: KeptNote | None


class Elastic:
    """Of one process. folder: what `autopar ladder --elastic` wrote. every: steps from one that is kept to the next.
    mirrors: to how many other nodes goes what one node alone has. snapshots: the folder of what is kept, in the host's
    memory by default; each host has its own.

    kept_s, kept_bytes, mirrored_bytes: of the last that was kept: seconds, all that this rank has of it, and what it
    sent to other nodes. saved_s: to be set to what a checkpoint took. Raises WorldError where too few processes run.
    """

    def __init__(
        self, folder: Path, checkpoints: Path, *, every: int = 1, mirrors: int = 1, snapshots: Path | None = None,
        timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        self.steps = read_steps(folder)
        self.number, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.rung = rung_for(self.steps.rungs, self.size)
        self._every, self._mirrors, self._checkpoints = every, mirrors, checkpoints
        self._snapshots = Snapshots(snapshots or default_folder(checkpoints))
        self._store = store_of_round(self.number, self.size, timeout_s)
        self._node = os.environ.get("GROUP_RANK", "0")
        between = PrefixStore("wire", self._store) if self._store is not None else None
        self._wire = HostWire(between, self.number, self.size, timeout_s)
        if not self.is_spare and self.rung.ranks > 1:
            assert self._store is not None, "there are several processes"
            start_program_group(self._store, self.number, self.rung.ranks, timeout_s)
        self._sequence, self._last = 0, (0, 0)
        self._starts: dict[int, float] = {}
        self.saved_s: float | None = None
        self._sizes: list[Sizes] = []
        self._sent: Mirrored = {}
        self._shapes: list[dict[Any, tuple[int, ...]]] = []
        self._whole: dict[str, Whole] = {}
        self.kept_s, self.kept_bytes, self.mirrored_bytes = 0.0, 0, 0

    _last: Label

    @property
    def is_spare(self) -> bool:
        """Whether there is no place for this process in the program."""
        return self.number >= self.rung.ranks

    @property
    def program(self) -> Any:
        """The program to build."""
        return program_of(self.rung)

    def restore(self, rank: Rank, optimizer: Optimizer, extra: Extra = None) -> Resumed:
        """Loads the last step that is kept, or else the last checkpoint, on every rank. Spare processes `serve`."""
        began = time.monotonic()
        agreed = agree(self._wire, self._snapshots, self._checkpoints, self._node)
        self._sequence = agreed.sequence
        if agreed.holdings is None:
            step = load_checkpoint(self._checkpoints, rank, optimizer, extra=extra)
            if agreed.lost and rank.number == 0:
                _warn_lost(agreed.lost, self._mirrors, step)
            found = Resumed(step, "checkpoint" if step else "start", 0, time.monotonic() - began, None)
        else:
            reader = HeldReader(self._wire, agreed.holdings)
            step = load_state(reader, self._snapshots.folder, rank, optimizer, extra)
            moved = sum(self._wire.gather(reader.state_bytes))
            note_seen(self._checkpoints, rank)
            found = Resumed(step, "ranks", moved, time.monotonic() - began, agreed.kept)
        self._starts = {} if found.kept is None else dict(found.kept.starts)
        self._starts[self.size] = time.time() - _process_began() - found.seconds
        return found

    def serve(self) -> None:
        """What a spare process does: it gives what it holds, and waits until training has ended."""
        agreed = agree(self._wire, self._snapshots, self._checkpoints, self._node)
        if agreed.holdings is not None:
            HeldReader(self._wire, agreed.holdings).serve()
            self._wire.gather(0)
        assert self._store is not None, "there are several processes"
        while not self._store.check(["ended"]):
            time.sleep(_POLL_S)
        self._store.add("seen", 1)

    def told(self, resumed: Resumed) -> dict[str, Any]:
        """Of going on: figures for the log, the pause and what was predicted of it among them."""
        figures: dict[str, Any] = {
            "goes_on_after": resumed.step - 1, "ranks": self.rung.ranks, "processes": self.size, "from": resumed.source,
            "moved_bytes": resumed.moved_bytes, "load_s": resumed.seconds,
        }  # fmt: skip
        if resumed.kept is not None:
            figures["pause_s"] = time.time() - resumed.kept.at
            figures["predicted_pause_s"] = self._predicted_s(resumed, resumed.kept)
        return figures

    def _predicted_s(self, resumed: Resumed, kept: KeptNote) -> float:
        """Processes end, after a checkpoint where nodes come, or while lost nodes are missed; they meet, for a last
        call where nodes are fewer than torchrun would take; they start as long as so many did before, and state
        moves."""
        steps = self.steps
        found = kept.start_s(self.size) + steps.polled_s + resumed.moved_bytes / self.rung.ranks / steps.wire_bytes_s
        found += steps.met_s if self.size < steps.rungs[0].ranks else 0.0
        if self.size >= kept.size:
            written_s = rung_for(steps.rungs, kept.size).written_s if kept.saved_s is None else kept.saved_s
            return found + written_s + steps.ended_s
        return found + max(steps.ended_s, steps.noticed_s)

    def keep(self, rank: Rank, optimizer: Optimizer, step: int, extra: Extra = None) -> None:
        """After a step: keeps the state of this rank in the host's memory, and on other nodes what is on one alone.
        All ranks of the program call this together. Raises CollectiveError."""
        if step % self._every:
            return
        began = time.perf_counter()
        held = held_of(*whole_state(rank, optimizer, step, extra))
        self._note_sizes(held, rank)
        if self._sent:
            came = send_mirrored(held, self._sent, self._shapes, self._whole, self._wire)
            held.pieces.update(came.pieces)
        label = (self._sequence, step)
        kept = KeptNote(time.time(), self.size, tuple(self._starts.items()), self.saved_s)
        self._snapshots.write(self.number, StepSnapshot(label, held, self._whole, kept))
        self._snapshots.drop_before(self._last)  # all have written that, as they have met since
        self._last = label
        self.kept_s, self.kept_bytes = time.perf_counter() - began, held.num_bytes

    def _note_sizes(self, held: HeldState, rank: Rank) -> None:
        """Who sends what, found anew when ranks hold other pieces than before; on all, as each is to know."""
        sizes = held.sizes
        changed = torch.tensor([int(sizes != self._sizes)], dtype=torch.int32, device=rank.device)
        world = dist.group.WORLD if rank.num_ranks > 1 else None
        if world is not None:
            comm.reduce_over(changed, dist.ReduceOp.MAX, world)
        if not changed.item():
            return
        own: Any = (sizes, held.whole, self._node)
        every: list[Any] = comm.gather_objects(own, world) if world is not None else [own]
        self._sizes, self._shapes = sizes, [dict(known) for known, *_ in every]
        self._whole = {name: kind for _, whole, _ in every for name, kind in whole.items()}
        self._sent = mirrored([known for known, *_ in every], [node for *_, node in every], self._mirrors)
        self.mirrored_bytes = sum(
            held.pieces[key].nbytes for (source, _), keys in self._sent.items() if source == self.number for key in keys
        )

    def end(self) -> None:
        """Training is done: what was kept goes, and spare processes end."""
        if self.rung.ranks > 1:
            dist.barrier()
        self._snapshots.remove()
        if self.number == 0 and self._store is not None:
            self._store.set("ended", "1")
            until = time.monotonic() + 10.0
            while self._store.add("seen", 0) < self.size - self.rung.ranks and time.monotonic() < until:
                time.sleep(_POLL_S)


def _process_began() -> float:
    """Seconds since 1970 when this process was started; on other systems than Linux, now."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return time.time()
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")


def _warn_lost(lost: tuple[str, ...], mirrors: int, step: int) -> None:
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    print(
        f"the processes that are left do not hold all of the last steps: {lost[0]}{more} was lost with all that had it "
        f"(--mirrors {mirrors}); goes on from the last checkpoint, after {step} steps",
        file=sys.stderr, flush=True,
    )  # fmt: skip
