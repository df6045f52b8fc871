"""What the search is about: settings, the ways that stages may run in them, and candidates for the whole model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.interop import StageKind
from autopar.intraop import TradeOff
from autopar.ir.mesh import LogicalMesh
from autopar.ir.outline import Outline, sizes_text
from autopar.ir.schedule import PLAIN, SCHEDULES, Schedule, in_flight, microbatches_a_round, num_in_two_parts
from autopar.ir.tried import Tried
from autopar.staged.chunk_memory import Chunked, most_held, most_held_between

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """Equal submeshes of one logical shape, and the number of microbatches.

    zero: placements are found around a template's constraints with this ZeRO stage; None leaves them free.
    splits_sequence: so that activations between blocks prefer to be split, which is what stages send. sharing: the
    names of the axes whose ranks share the experts.
    """

    axes: LogicalMesh
    num_devices: int
    num_stages: int
    microbatches: int
    zero: int | None = None
    splits_sequence: bool = False
    sharing: tuple[str, ...] = ()

    @property
    def template(self) -> str | None:
        """As `template_plan` is asked for it; None where placements are free."""
        if self.zero is None:
            return None
        said = {axis.name: axis.size for axis in self.axes} | {"pp": self.num_stages}
        said |= {"dp": said.get("dp", 1) * said["ep"]} if "ep" in said else {}
        shared = math.prod(axis.size for axis in self.axes if axis.name in self.sharing)
        said |= {"ep": shared} if shared > 1 else {}
        said |= {"zero": self.zero} if self.zero else {}
        named = [f"{name}={value}" for name, value in said.items()]
        return ", ".join([*named, "sequence_parallel=True"] if self.splits_sequence else named)


@dataclass(frozen=True)
class StageStrategy:
    """How a stage runs: placements on a submesh, and what of its layers is computed again (a name)."""

    setting: Setting
    choice: TradeOff
    recompute: str


@dataclass(frozen=True, eq=False)
class EstimatedStages:
    """One way to run the model, with its estimates: ns a step and the largest peak in bytes a device.

    ways: of each stage. recompute: of each layer, what is computed again (a name). last_ns: of the step, what the last
    backward passes wait for gradients on their way, as other placements of the setting need not.
    """

    ways: tuple[StageStrategy, ...]
    schedule: str
    stage_of_layer: tuple[int, ...]
    recompute: tuple[str, ...]
    step_ns: int
    peak_bytes: int
    lower_bound_ns: int
    last_ns: int = 0

    @property
    def microbatches(self) -> int:
        return self.ways[0].setting.microbatches

    @property
    def num_submeshes(self) -> int:
        """Submeshes; with chunks they are fewer than stages."""
        return self.ways[0].setting.num_stages if SCHEDULES[self.schedule].has_chunks else len(self.ways)

    @property
    def is_mixed(self) -> bool:
        """Whether stages differ in their axes or placements."""
        return len({(way.setting, way.choice) for way in self.ways}) > 1

    @property
    def outline(self) -> Outline:
        """What is decided of it before its placements, but for where its stages begin."""
        submeshes = tuple(way.setting.axes for way in self.ways[: self.num_submeshes])
        return Outline(submeshes, self.microbatches, schedule=self.schedule)

    @property
    def row(self) -> Tried:
        """What the report says of it."""
        return Tried(
            template=None if self.is_mixed else self.ways[0].setting.template,
            mesh=" + ".join(dict.fromkeys(sizes_text(way.setting.axes) for way in self.ways)),
            stages=self.num_submeshes,
            microbatches=self.microbatches,
            schedule=self.schedule,
            recompute=_counted(self.recompute),
            estimated_ns=self.step_ns,
            estimated_bytes=self.peak_bytes,
        )


def _counted(recompute: Sequence[str]) -> str:
    """ "none", "full", or "full ×4, none ×44" where layers differ."""
    counts = Counter(recompute)
    if len(counts) < 2:
        return next(iter(counts), "none")
    return ", ".join(f"{name} ×{count}" for name, count in counts.most_common())


# Estimates ----------------------------------------


def peak_of(kind: StageKind, begin: int, end: int, in_flight: int, waiting: int = 0) -> int:
    """Of a stage of neighbouring layers in bytes a device, with so many microbatches in flight, of which some wait
    between the two parts of their backward pass: in a pass of the others, or in the second part of one of these.
    """
    stays = int(kind.resident_bytes[begin:end].sum())
    stays += min(int(kind.travelling_bytes[begin:end].sum()), kind.most_travelling)
    workspace = int(kind.workspace_bytes[begin:end].max())
    kept, waits = (int(sizes[begin:end].sum()) for sizes in (kind.activation_bytes, kind.waiting_bytes))
    fewest = max(0, waiting - 1)
    peak = stays + (in_flight - fewest) * kept + fewest * waits + workspace
    second = stays + (in_flight - waiting) * kept + waiting * waits + int(kind.second_bytes[begin:end].sum())
    return max(peak, second if waiting else 0, int(kind.begin_bytes[begin:end].sum()) + workspace)


def largest_peak(kinds: Sequence[StageKind], stage_of_layer: Sequence[int], microbatches: int, schedule: str) -> int:
    """Of stages that are submeshes, the largest peak in bytes a device."""
    of_layer, stages = np.array(stage_of_layer), len(kinds)
    peaks = []
    for number, kind in enumerate(kinds):
        own, left = np.flatnonzero(of_layer == number), stages - number
        flying = in_flight(schedule, left, microbatches, num_submeshes=stages)
        waits = SCHEDULES[schedule].waiting(left, microbatches, 1, stages)
        peaks.append(peak_of(kind, int(own[0]), int(own[-1]) + 1, flying, waits))
    return max(peaks)


def in_two_parts(microbatches: int, stages: int) -> list[str]:
    """Schedules of whole stages whose backward pass comes in two parts, that are possible."""
    rows = [row for row in SCHEDULES.values() if row.splits_backward and not row.has_chunks]
    return [row.name for row in rows if row.takes(microbatches, stages)]


def hidden_bubble(kinds: Sequence[StageKind], stage_of_layer: Sequence[int], microbatches: int, schedule: str) -> int:
    """By how many ns a schedule's bubble is shorter than 1f1b's, less what the slowest stage takes longer in two parts.

    Unequal stages wait for that one, which is busy all the time: it counts as none of the others, for which their mean
    does.

    The first stage takes no longer: it has received nothing, so its second part is the whole pass.
    """
    of_layer, count = np.array(stage_of_layer), len(kinds)
    times = [int(kind.time_ns[of_layer == number].sum()) for number, kind in enumerate(kinds)]
    added = [int(kind.split_ns[of_layer == number].sum()) if number else 0 for number, kind in enumerate(kinds)]
    longer = [time + more for time, more in zip(times, added, strict=True)]
    plain, own = (SCHEDULES[name].bubble(count, microbatches, 1) for name in (PLAIN, schedule))
    hidden = (plain - own) * (sum(times) - max(times)) / max(1, count - 1)
    return round(hidden) - microbatches * (max(longer) - max(times))


def chunked_estimate(
    kind: StageKind, chunk_of_layer: Sequence[int], stages: int, chunks: int, microbatches: int, schedule: str
) -> tuple[int, int, int]:
    """Step time and peak of chunks in turn; and l, of the step.

    T = max (B · t + e) + b · c · r + a · x + w + l   with t, e of a submesh; b the schedule's bubble (interleaved:
    (P − 1) / c, Megatron-LM, SC'21, section 2.2.2) in passes of c chunks, each as long as most are in the longest
    round, r; a how many tensors on their way between stages are waited for, one after the other, each for x, which
    others travel while a pass is made; w what
    is waited for where rounds of forward passes meet longer ones of backward passes: for each P microbatches, about a
    quarter of the difference on each submesh; and l by how much the last microbatch's backward passes are longer: one
    waits for the other through all stages, but for what a round has more microbatches than submeshes.
    """
    row, of = SCHEDULES[schedule], _Rounds(chunk_of_layer, stages, chunks, SCHEDULES[schedule].turns_back)
    times = of.sums(kind.time_ns) + of.firsts(kind.receive_ns)
    if row.splits_backward:
        times += np.rint(of.sums(kind.split_ns) * _share_in_two(row, stages, chunks, microbatches)).astype(np.int64)
    hidden = np.minimum(of.firsts(kind.travel_ns), of.sums(kind.time_ns) // 2) * (row.awaited is not None)
    times -= hidden
    exposed = np.maximum(0, of.sums(kind.reduce_ns - kind.hide_ns).sum(axis=0))
    busiest = (microbatches * times.sum(axis=0) + of.sums(kind.once_ns).sum(axis=0) + exposed).max()
    rounds = np.sort(times, axis=1)[:, (stages - 1) // 2]
    filling = row.bubble(stages, microbatches, chunks) * chunks * int(rounds.max())
    meeting = microbatches // stages * stages * int(np.abs(rounds - rounds[::-1]).sum()) // 8
    slack = max(0, microbatches_a_round(schedule, microbatches, stages) - stages) if row.makes_rounds else 0
    last = int(np.maximum(0, of.sums(kind.last_ns).sum(axis=1) - slack * rounds).sum())
    awaited = row.awaited(stages, microbatches, chunks) * int(hidden.max()) // 2 if row.awaited is not None else 0
    return int(busiest) + int(filling) + awaited + meeting + last, _chunked_peak(kind, of, row, microbatches), last


def _share_in_two(row: Schedule, submeshes: int, chunks: int, microbatches: int) -> npt.NDArray[np.float64]:
    """How many of the backward passes of each chunk, by round and submesh, come in two parts."""
    if not row.splits_some:
        return np.ones((chunks, submeshes))
    on = row.in_turn(range(submeshes), chunks)
    stages_of = [tuple(n for n, place in enumerate(on) if place == submesh) for submesh in range(submeshes)]
    counts = num_in_two_parts(row.name, tuple(stages_of), row.fewest(submeshes))  # as many of more microbatches
    return np.array([[counts[stage] for stage in own] for own in stages_of]).T / microbatches


def _chunked_peak(kind: StageKind, of: _Rounds, row: Schedule, microbatches: int) -> int:
    """The largest of a submesh in bytes a device; of backward passes in two parts as in `peak_of`."""
    stages, chunks = of.stages, of.chunks
    flying, waiting = (
        np.array([count(left, microbatches, chunks, stages) for left in range(stages, 0, -1)])
        for count in (row.in_flight, row.waiting)
    )
    kept, waits = (of.sums(sizes).sum(axis=0) for sizes in (kind.activation_bytes, kind.waiting_bytes))
    stays, workspace = of.sums(kind.resident_bytes).sum(axis=0), of.most(kind.workspace_bytes).max(axis=0)
    at_begin = of.sums(kind.begin_bytes).sum(axis=0) + of.most(kind.workspace_bytes)[0]
    stays += np.minimum(of.sums(kind.travelling_bytes).sum(axis=0), kind.most_travelling)
    if not row.splits_backward:
        gradients = of.sums(kind.gradient_bytes)
        held = most_held(
            row.name, stages, microbatches, of.sums(kind.activation_bytes), gradients, of.most(kind.workspace_bytes)
        )  # fmt: skip
        return int(np.maximum(at_begin, stays - gradients.sum(axis=0) + held).max())
    if row.splits_some:
        sums, most = of.sums, of.most
        own = Chunked(
            sums(kind.activation_bytes), sums(kind.waiting_bytes), most(kind.workspace_bytes), sums(kind.second_bytes)
        )
        return int(np.maximum(at_begin, stays + most_held_between(row.name, stages, microbatches, own)).max())
    fewest = np.maximum(0, waiting - 1)
    peak = stays + ((flying - fewest) * kept + fewest * waits) // chunks + workspace
    second = stays + ((flying - waiting) * kept + waiting * waits) // chunks
    second += of.sums(kind.second_bytes).max(axis=0)
    return int(np.maximum(np.maximum(peak, at_begin), np.where(waiting > 0, second, 0)).max())


class _Rounds:
    """Columns of layers as those of chunks, by round and submesh."""

    def __init__(self, chunk_of_layer: Sequence[int], stages: int, chunks: int, turns_back: bool) -> None:
        self.stages, self.chunks, self._turns_back = stages, chunks, turns_back
        self._begins = np.flatnonzero(np.diff(chunk_of_layer, prepend=-1))

    def sums(self, column: Int64Array) -> Int64Array:
        return self._in_rounds(np.add.reduceat(column, self._begins))

    def most(self, column: Int64Array) -> Int64Array:
        return self._in_rounds(np.maximum.reduceat(column, self._begins))

    def firsts(self, column: Int64Array) -> Int64Array:
        """Of the first layer of each."""
        return self._in_rounds(column[self._begins])

    def _in_rounds(self, values: Int64Array) -> Int64Array:
        found = values.reshape(self.chunks, self.stages)
        if self._turns_back:
            found = found.copy()
            found[1::2] = found[1::2, ::-1]
        return found
