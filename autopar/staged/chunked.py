"""Chunks: stages in turn on each submesh, by schedules that have such. Each number of them is an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from autopar.interop import StageKind, chunk_counts, chunk_sizes
from autopar.ir.constraint import pinned
from autopar.ir.schedule import SCHEDULES, makes_rounds
from autopar.staged.layered import Layered
from autopar.staged.ways import EstimatedStages, StageStrategy, chunked_estimate
from autopar.tunables import LAYER_STEPS, MOST_CHUNKS

CHUNKED = [row.name for row in SCHEDULES.values() if row.has_chunks and not row.splits_backward]


class Chunks:
    """The chunks that stages of a way may be cut into."""

    def __init__(self, layered: Layered) -> None:
        self.layered = layered
        self.counts = cache(self._counts)
        self._of_times = cache(_chunk_of_layer)

    def _counts(self, submeshes: int, microbatches: int) -> list[int]:
        """How many chunks each of so many submeshes may have."""
        if submeshes == 1 or not makes_rounds(microbatches, submeshes):
            return []
        layers, asked = self.layered.layers.count, pinned(self.layered.request.constraints, "chunks")
        found = chunk_counts(layers, submeshes, MOST_CHUNKS) if asked is None else [asked]
        most = layers if self.layered.ends is None else layers + 2
        return [count for count in found if 1 < count <= most // submeshes]

    def of(self, way: StageStrategy) -> Iterator[EstimatedStages]:
        """An estimate of each number of chunks, in each schedule."""
        submeshes, microbatches = way.setting.num_stages, way.setting.microbatches
        for chunks, schedule in product(self.counts(submeshes, microbatches), CHUNKED):
            kind, of_layer = self._cut(way, chunks)
            step, peak = chunked_estimate(kind, of_layer, submeshes, chunks, microbatches, schedule)
            ways, again = (way,) * (submeshes * chunks), (way.recompute,) * self.layered.layers.count
            yield EstimatedStages(ways, schedule, of_layer, again, step, peak, step)

    def _cut(self, way: StageStrategy, chunks: int) -> tuple[StageKind, tuple[int, ...]]:
        """What layers cost, and the chunk of each; the model's ends are layers where they are chunks of their own."""
        kind, ends, times = self.layered.kind(way), self.layered.ends, (0, 0)
        blocks = _in_steps(kind.time_ns)
        if ends is not None:
            before, *blocks, after = _in_steps(ends.kind(kind).time_ns)
            times = before, after
        of_block = self._of_times(tuple(blocks), times, way.setting.num_stages, chunks)
        if len(set(of_block)) == way.setting.num_stages * chunks:
            return kind, of_block
        assert ends is not None, "there are no more chunks than layers"
        return ends.kind(kind), (0, *of_block, way.setting.num_stages * chunks - 1)


def _in_steps(times_ns: npt.NDArray[np.int64]) -> list[int]:
    """Relative to their mean, rounded: what is nearly alike is cut alike."""
    mean = max(1.0, float(np.mean(times_ns)))
    return [max(1, round(LAYER_STEPS * time / mean)) for time in times_ns.tolist()]


def _chunk_of_layer(
    times: tuple[int, ...], ends: tuple[int, int], submeshes: int, chunks: int
) -> tuple[int, ...]:  # fmt: skip
    sizes = chunk_sizes(times, ends, submeshes, chunks)
    return tuple(number for number, size in enumerate(sizes) for _ in range(size))
