"""Chunks: stages in turn on each submesh, by schedules that have such. Each number of them is an estimate."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.collector import cached_method
from autopar.interop import StageKind, chunk_counts, chunk_sizes
from autopar.ir.constraint import pinned
from autopar.ir.schedule import PLAIN, SCHEDULES, Schedule
from autopar.staged.layered import Layered
from autopar.staged.ways import EstimatedStages, StageStrategy, chunked_estimate
from autopar.tunables import LAYER_STEPS, MOST_CHUNKS


class Chunks:
    """The chunks that stages of a way may be cut into."""

    def __init__(self, layered: Layered) -> None:
        self.layered = layered

    @cached_method
    def possible(self, submeshes: int, microbatches: int, may_wait: bool) -> list[tuple[str, int]]:
        """Schedules and numbers of chunks of so many submeshes. may_wait: gradients of stored tensors may."""
        rows = [row for row in SCHEDULES.values() if row.has_chunks and (may_wait or not row.splits_backward)]
        rows = [row for row in rows if row.takes(microbatches, submeshes)]
        return [(row.name, chunks) for row in rows for chunks in self._counts(row, submeshes)]

    def _counts(self, row: Schedule, submeshes: int) -> list[int]:
        """Of chunks on each of several submeshes."""
        layers, asked = self.layered.layers.count, pinned(self.layered.request.constraints, "chunks")
        wanted = asked or row.num_chunks
        found = chunk_counts(layers, submeshes, MOST_CHUNKS) if wanted is None else [wanted]
        most = 0 if submeshes == 1 else layers if self.layered.ends is None else layers + 2
        return [count for count in found if 1 < count <= most // submeshes and row.allows(count)]

    def of(self, way: StageStrategy, own: StageKind) -> Iterator[EstimatedStages]:
        """An estimate of each number of chunks, in each schedule. own: what layers cost."""
        submeshes, microbatches = way.setting.num_stages, way.setting.microbatches
        may_wait = self.layered.may_wait(submeshes, way.recompute)
        for schedule, chunks in self.possible(submeshes, microbatches, may_wait):
            yield self._estimated(way, own, schedule, chunks)

    def whole(self, way: StageStrategy, own: StageKind) -> EstimatedStages:
        """An estimate of stages that are submeshes, layers shared out to them as evenly."""
        return self._estimated(way, own, PLAIN, 1)

    def equal(self, way: StageStrategy, own: StageKind) -> Iterator[EstimatedStages]:
        """The same with as many layers each, where the ends of the model make other shares better by estimate."""
        layers, submeshes = self.layered.layers.count, way.setting.num_stages
        may_wait = self.layered.may_wait(submeshes, way.recompute)
        for schedule, chunks in self.possible(submeshes, way.setting.microbatches, may_wait):
            if layers % (submeshes * chunks) == 0 and not SCHEDULES[schedule].splits_backward:
                each = layers // (submeshes * chunks)
                equal = tuple(number for number in range(submeshes * chunks) for _ in range(each))
                found = self._estimated(way, own, schedule, chunks, (own, equal))
                if found.stage_of_layer != self._cut(own, submeshes, chunks, SCHEDULES[schedule].turns_back)[1]:
                    yield found

    def _estimated(
        self, way: StageStrategy, own: StageKind, schedule: str, chunks: int,
        given: tuple[StageKind, tuple[int, ...]] | None = None,
    ) -> EstimatedStages:  # fmt: skip
        """given: what layers cost, and the chunk of each, where these are given."""
        submeshes, microbatches = way.setting.num_stages, way.setting.microbatches
        kind, of_layer = given or self._cut(own, submeshes, chunks, SCHEDULES[schedule].turns_back)
        step, peak, last = chunked_estimate(kind, of_layer, submeshes, chunks, microbatches, schedule)
        ways, again = (way,) * (submeshes * chunks), (way.recompute,) * self.layered.layers.count
        return EstimatedStages(ways, schedule, of_layer, again, step, peak, step, last)

    def _cut(self, kind: StageKind, submeshes: int, chunks: int, turns_back: bool) -> tuple[StageKind, tuple[int, ...]]:
        """What layers cost, and the chunk of each; the model's ends are layers where they are chunks of their own."""
        ends, times = self.layered.ends, (0, 0)
        blocks = _in_steps(kind.time_ns)
        if ends is not None:
            before, *blocks, after = _in_steps(ends.kind(kind).time_ns)
            times = before, after
        of_block = _chunk_of_layer(tuple(blocks), times, submeshes, chunks, turns_back)
        if len(set(of_block)) == submeshes * chunks:
            return kind, of_block
        assert ends is not None, "there are no more chunks than layers"
        return ends.kind(kind), (0, *of_block, submeshes * chunks - 1)


def _in_steps(times_ns: npt.NDArray[np.int64]) -> list[int]:
    """Relative to their mean, rounded: what is nearly alike is cut alike."""
    mean = max(1.0, float(np.mean(times_ns)))
    return [max(1, round(LAYER_STEPS * time / mean)) for time in times_ns.tolist()]


@lru_cache(maxsize=1 << 12)
def _chunk_of_layer(
    times: tuple[int, ...], ends: tuple[int, int], submeshes: int, chunks: int, turns_back: bool
) -> tuple[int, ...]:  # fmt: skip
    sizes = chunk_sizes(times, ends, submeshes, chunks, turns_back)
    return tuple(number for number, size in enumerate(sizes) for _ in range(size))


def chunks_keeping_more(layered: Layered, candidate: EstimatedStages, admitted: int) -> EstimatedStages | None:
    """The candidate with as few layers computed again as estimates of so many bytes allow, the last of each submesh
    first; None where it has none less."""
    way, submeshes = candidate.ways[0], candidate.num_submeshes
    _, kind_of = layered.layers_of(candidate)
    again, plain = kind_of(way), kind_of(replace(way, recompute="none"))
    behind, again_now = _number_behind(candidate, submeshes), np.array(candidate.recompute) != "none"
    ends = (len(behind) - len(again_now)) // 2  # layers, where they are
    is_again = np.pad(again_now, ends)

    def keeping(number: int) -> EstimatedStages:
        is_kept = ~is_again | (behind < number)
        kind, chunks = _mixed(plain, again, is_kept), len(candidate.ways) // submeshes
        step, peak, _ = chunked_estimate(
            kind, candidate.stage_of_layer, submeshes, chunks, candidate.microbatches, candidate.schedule
        )
        names = tuple(np.where(is_kept, "none", way.recompute)[ends : len(behind) - ends].tolist())
        kept = replace(candidate, recompute=names, step_ns=step, peak_bytes=peak, lower_bound_ns=step)
        return layered.in_time(kept)

    fewest = int(behind[is_again].min(initial=len(behind)))
    numbers = range(fewest + 1, int(behind.max()) + 2)
    fitting = bisect_right(numbers, admitted, key=lambda number: keeping(number).peak_bytes)
    return keeping(numbers[fitting - 1]) if fitting else None


def _mixed(kept: StageKind, again: StageKind, is_kept: npt.NDArray[np.bool_]) -> StageKind:
    """Of some layers what they cost in one way, of others in another."""
    columns = {name: values for name, values in vars(kept).items() if isinstance(values, np.ndarray)}
    mixed: dict[str, Any] = {
        name: np.where(is_kept, values, getattr(again, name)) for name, values in columns.items()
    }  # fmt: skip
    return replace(again, **mixed)


def _number_behind(candidate: EstimatedStages, submeshes: int) -> npt.NDArray[np.int64]:
    """Of each layer how many later ones its submesh has."""
    on = SCHEDULES[candidate.schedule].in_turn(range(submeshes), len(candidate.ways) // submeshes)
    found, seen = np.zeros(len(candidate.stage_of_layer), np.int64), Counter[int]()
    for layer in reversed(range(len(found))):
        place = on[candidate.stage_of_layer[layer]]
        found[layer] = seen[place]
        seen[place] += 1
    return found
