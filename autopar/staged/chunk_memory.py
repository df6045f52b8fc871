"""What a submesh holds of its chunks, where they take turns in rounds, pass by pass.

    held(j) = stays + Σ_c  n_c(j) · kept_c  +  Σ_{c begun(j)} gradient_c  +  workspace of the chunks that run then

At backward pass j, n_c(j) microbatches of chunk c are in flight: not equally many of each. The last chunk's, of which
the head of a model may be one, go back as soon as they came; the first chunk's stay the longest. Gradients of a chunk
are there from its first backward pass on. The order of passes is that of the schedule's row (`ir.schedule`).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, SCHEDULES

Int64Array = npt.NDArray[np.int64]
_ROUNDS = 3
"""Rounds of microbatches after which what is in flight repeats itself."""


class _Passes(NamedTuple):
    """Of a submesh at each backward pass, by chunk: microbatches in flight, whether gradients are there; and the chunks
    that run then: this pass, and the forward pass before it."""

    in_flight: Int64Array
    has_gradients: npt.NDArray[np.bool_]
    backward: Int64Array
    forward: Int64Array


def most_held(
    schedule: str, submeshes: int, microbatches: int, kept: Int64Array, gradients: Int64Array, workspace: Int64Array
) -> Int64Array:
    """The most bytes a device that each submesh holds beside what stays. All arrays: a row a chunk, a column a submesh.

    kept: of a microbatch in flight; workspace: of a pass.
    """
    chunks, found = len(kept), []
    for position in range(submeshes):
        passes = _passes(schedule, position, submeshes, chunks, _fewest_alike(schedule, submeshes, microbatches))
        held = passes.in_flight @ kept[:, position] + passes.has_gradients @ gradients[:, position]
        own = workspace[:, position]
        found.append(int((held + np.maximum(own[passes.backward], own[passes.forward])).max()))
    return np.array(found)


def _fewest_alike(schedule: str, submeshes: int, microbatches: int) -> int:
    """The fewest microbatches, in rounds of the same size, of which as much is in flight as of so many."""
    rounds = max(1, microbatches // submeshes)
    a_round = microbatches // rounds if SCHEDULES[schedule].makes_rounds else submeshes
    return min(microbatches, a_round * _ROUNDS)


@cache
def _passes(schedule: str, position: int, submeshes: int, chunks: int, microbatches: int) -> _Passes:
    """Of a schedule whose backward passes come in one part."""
    order = SCHEDULES[schedule].order(position, submeshes, range(chunks), microbatches)
    is_back = np.array([turn.direction == BACKWARD for turn in order])
    runs = np.array([turn.stage for turn in order])[:, None] == np.arange(chunks)
    forward = np.cumsum(runs & ~is_back[:, None], axis=0)
    backward = np.cumsum(runs & is_back[:, None], axis=0)
    at = np.flatnonzero(is_back)
    last_forward = np.maximum.accumulate(np.where(is_back, -1, np.arange(len(order))))[at]
    chunk_of = runs.argmax(axis=1)
    in_flight = (forward - backward)[at] + runs[at]  # what this pass frees is there until it ends
    rows = np.concatenate([in_flight, backward[at] > 0, chunk_of[at, None], chunk_of[last_forward, None]], axis=1)
    rows = np.unique(rows, axis=0)
    return _Passes(rows[:, :chunks], rows[:, chunks : 2 * chunks] > 0, rows[:, -2], rows[:, -1])


# Backward passes of which some come in two parts ----------------------------------------


class Chunked(NamedTuple):
    """What chunks take in bytes a device: a row a chunk, a column a submesh. kept: of a microbatch in flight; waits: of
    one between the two parts of its backward pass; workspace: of a pass; second: of a second part."""

    kept: Int64Array
    waits: Int64Array
    workspace: Int64Array
    second: Int64Array


def most_held_between(schedule: str, submeshes: int, microbatches: int, of: Chunked) -> Int64Array:
    """The most bytes a device that each submesh holds beside what stays, pass by pass, gradients of stored tensors
    among that."""
    chunks, found = len(of.kept), []
    alike = min(microbatches, max(SCHEDULES[schedule].fewest(submeshes), _ROUNDS * submeshes))
    for position in range(submeshes):
        in_flight, waiting, runs, is_second = _parts(schedule, position, submeshes, chunks, alike)
        held = in_flight @ of.kept[:, position] + waiting @ of.waits[:, position]
        found.append(int((held + np.where(is_second, of.second[runs, position], of.workspace[runs, position])).max()))
    return np.array(found)


@cache
def _parts(
    schedule: str, position: int, submeshes: int, chunks: int, microbatches: int
) -> tuple[Int64Array, Int64Array, Int64Array, npt.NDArray[np.bool_]]:
    """While each pass runs, what it begins and ends among that: by chunk, microbatches in flight, and those that wait
    for their second part or are in it; the chunk that runs; and whether it is a second part."""
    order = SCHEDULES[schedule].order(position, submeshes, range(chunks), microbatches)
    runs = np.array([turn.stage for turn in order])
    of_chunk = runs[:, None] == np.arange(chunks)
    forward, whole, first, second = (
        of_chunk & np.array([turn.direction == name for turn in order])[:, None]
        for name in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    in_flight = np.cumsum(forward.astype(np.int64) - whole - first, axis=0) + whole + first
    waiting = np.cumsum(first.astype(np.int64) - second, axis=0) - first + second
    rows = np.unique(np.column_stack([in_flight, waiting, runs, second.any(axis=1)]), axis=0)
    return rows[:, :chunks], rows[:, chunks : 2 * chunks], rows[:, -2], rows[:, -1] > 0
