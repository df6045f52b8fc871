"""What a setting is likely to take once it fits, by what its fastest placements take, and what else computes again.

Of stages of some schedule, with p bytes at their peak, of which p0 are there whatever is saved, and a recomputation
that keeps a share k of what is saved, has w times more beside that than a layer saves, a, and takes t times as long:

    peak = p0 + k · (p − p0) + w · a        step = t · step        so that the fastest of those that fit is likely

Shares are those of the first placements that were looked at with that recomputation: of a model's layers they are much
alike. Where none fits, placements must save the rest; where p0 alone does not fit, all depends on these, and nothing
is told of what is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.interop import StageKind
from autopar.ir.schedule import SCHEDULES
from autopar.staged.layered import Layered, RecomputationLevel
from autopar.staged.ways import EstimatedStages, chunked_estimate, largest_peak
from autopar.tunables import RELIEF, RELIEF_ROOM


def likely_ns(layered: Layered, kind: StageKind, found: Sequence[EstimatedStages]) -> int:
    """What the fastest of some stages that fits is likely to take.

    kind: what their layers cost. found: stages of such layers, of which least is computed again.
    """
    least, floor_ns = min(found, key=lambda one: one.peak_bytes), min(one.step_ns - one.last_ns for one in found)
    if _peak_without(layered, kind, least) > layered.admitted:
        return round(floor_ns * _relief(layered, least.peak_bytes))
    likely, beyond = math.inf, math.inf
    levels = sorted(layered.levels.values(), key=lambda level: level.times)
    for one in sorted(found, key=lambda candidate: candidate.step_ns):
        if one.step_ns >= likely:
            break
        splits = SCHEDULES[one.schedule].splits_backward  # which goes with nothing that is computed again
        for level in [level for level in levels if level.times == 1 or not splits]:
            step_ns, peak_bytes = relieved(layered, kind, one, level)
            if peak_bytes <= RELIEF_ROOM * layered.admitted:
                likely = min(likely, step_ns)
                break
            beyond = min(beyond, step_ns * _relief(layered, peak_bytes))
    return round(likely if likely < math.inf else beyond)


def _relief(layered: Layered, peak_bytes: int) -> float:
    """Times what it takes where placements must save what is beyond the memory there is."""
    return 1 + RELIEF * math.log2(max(1.0, peak_bytes / layered.admitted)) ** 2


def relieved(layered: Layered, kind: StageKind, one: EstimatedStages, level: RecomputationLevel) -> tuple[int, int]:
    """Step and peak, in ns and bytes a device, of stages as far as they are likely with something computed again."""
    stays = _peak_without(layered, kind, one)
    beside = level.beside * int(kind.activation_bytes.max())
    return round(level.times * one.step_ns), round(stays + level.kept * (one.peak_bytes - stays) + beside)


def _peak_without(layered: Layered, kind: StageKind, one: EstimatedStages) -> int:
    """The peak of stages that save nothing."""
    nothing = np.zeros_like(kind.activation_bytes)
    bare = replace(kind, activation_bytes=nothing, waiting_bytes=nothing)
    count, submeshes = one.microbatches, one.num_submeshes
    if len(one.ways) > submeshes:
        ends = layered.ends
        own = bare if ends is None or len(one.stage_of_layer) < ends.layers.count else ends.kind(bare)
        chunks = len(one.ways) // submeshes
        return chunked_estimate(own, one.stage_of_layer, submeshes, chunks, count, one.schedule)[1]
    return largest_peak([bare] * submeshes, one.stage_of_layer, count, one.schedule)
