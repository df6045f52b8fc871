"""How many microbatches' activations a stage holds at once, by schedule and by how many stages are behind it."""

from __future__ import annotations

import math

from autopar.ir.stages import num_rounds


def in_flight(schedule: str, remaining: int, microbatches: int, chunks: int = 1, num_submeshes: int = 1) -> int:
    """Microbatches in flight, times the chunks of a submesh that hold them.

    remaining: submeshes from this one to the last, itself included. gpipe: all microbatches. 1f1b: `remaining` of them
    (PipeDream-Flush). zero_bubble: one for each submesh (ZB-H1 of Zero Bubble, ICLR'24). interleaved, over all chunks
    of a submesh together: its first passes forward before a backward one, (chunks − 1) · (microbatches a round)
    + 2 · (remaining − 1) + 1 (Megatron-LM, SC'21).
    """
    if schedule == "gpipe":
        return microbatches
    if schedule == "interleaved":
        a_round = math.ceil(microbatches / num_rounds(microbatches, num_submeshes))
        return min(microbatches * chunks, (chunks - 1) * a_round + 2 * (remaining - 1) + 1)
    return min(num_submeshes if schedule == "zero_bubble" else remaining, microbatches)


def waiting(remaining: int, microbatches: int, num_submeshes: int) -> int:
    """Of the microbatches in flight under zero_bubble, the most that are between the two parts of their backward pass:
    submesh p makes gradients of stored tensors p microbatches behind, the first one at once and in one part.
    """
    behind = num_submeshes - remaining
    return min(behind + 1, num_submeshes, microbatches) if behind else 0
