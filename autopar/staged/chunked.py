"""Chunks: stages in turn on each submesh, by schedules that have such. Each number of them is an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from autopar.interop import StageKind, chunk_counts, chunk_sizes
from autopar.ir.constraint import pinned
from autopar.ir.schedule import SCHEDULES, Schedule, makes_rounds
from autopar.staged.layered import Layered
from autopar.staged.ways import EstimatedStages, StageStrategy, chunked_estimate
from autopar.tunables import LAYER_STEPS, MOST_CHUNKS


class Chunks:
    """The chunks that stages of a way may be cut into."""

    def __init__(self, layered: Layered) -> None:
        self.layered = layered
        self.possible = cache(self._possible)
        self._of_times = cache(_chunk_of_layer)

    def _possible(self, submeshes: int, microbatches: int, may_wait: bool) -> list[tuple[str, int]]:
        """Schedules and numbers of chunks of so many submeshes. may_wait: gradients of stored tensors may."""
        rows = [row for row in SCHEDULES.values() if row.has_chunks and (may_wait or not row.splits_backward)]
        rows = [row for row in rows if not row.makes_rounds or makes_rounds(microbatches, submeshes)]
        return [(row.name, chunks) for row in rows for chunks in self._counts(row, submeshes)]

    def _counts(self, row: Schedule, submeshes: int) -> list[int]:
        """Of chunks on each of several submeshes."""
        layers, asked = self.layered.layers.count, pinned(self.layered.request.constraints, "chunks")
        wanted = asked or row.num_chunks
        found = chunk_counts(layers, submeshes, MOST_CHUNKS) if wanted is None else [wanted]
        most = 0 if submeshes == 1 else layers if self.layered.ends is None else layers + 2
        return [count for count in found if 1 < count <= most // submeshes and row.allows(count)]

    def of(self, way: StageStrategy) -> Iterator[EstimatedStages]:
        """An estimate of each number of chunks, in each schedule."""
        submeshes, microbatches = way.setting.num_stages, way.setting.microbatches
        may_wait = self.layered.may_wait(submeshes, way.recompute)
        for schedule, chunks in self.possible(submeshes, microbatches, may_wait):
            kind, of_layer = self._cut(way, chunks, SCHEDULES[schedule].turns_back)
            step, peak = chunked_estimate(kind, of_layer, submeshes, chunks, microbatches, schedule)
            ways, again = (way,) * (submeshes * chunks), (way.recompute,) * self.layered.layers.count
            yield EstimatedStages(ways, schedule, of_layer, again, step, peak, step)

    def _cut(self, way: StageStrategy, chunks: int, turns_back: bool) -> tuple[StageKind, tuple[int, ...]]:
        """What layers cost, and the chunk of each; the model's ends are layers where they are chunks of their own."""
        kind, ends, times = self.layered.kind(way), self.layered.ends, (0, 0)
        blocks = _in_steps(kind.time_ns)
        if ends is not None:
            before, *blocks, after = _in_steps(ends.kind(kind).time_ns)
            times = before, after
        of_block = self._of_times(tuple(blocks), times, way.setting.num_stages, chunks, turns_back)
        if len(set(of_block)) == way.setting.num_stages * chunks:
            return kind, of_block
        assert ends is not None, "there are no more chunks than layers"
        return ends.kind(kind), (0, *of_block, way.setting.num_stages * chunks - 1)


def _in_steps(times_ns: npt.NDArray[np.int64]) -> list[int]:
    """Relative to their mean, rounded: what is nearly alike is cut alike."""
    mean = max(1.0, float(np.mean(times_ns)))
    return [max(1, round(LAYER_STEPS * time / mean)) for time in times_ns.tolist()]


def _chunk_of_layer(
    times: tuple[int, ...], ends: tuple[int, int], submeshes: int, chunks: int, turns_back: bool
) -> tuple[int, ...]:  # fmt: skip
    sizes = chunk_sizes(times, ends, submeshes, chunks, turns_back)
    return tuple(number for number, size in enumerate(sizes) for _ in range(size))
