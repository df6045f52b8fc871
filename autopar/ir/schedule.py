"""Pipeline schedules, one row each: the order in which a submesh makes its forward and backward passes, and what that
order means for memory and time.

On submesh p of P, with m microbatches and c chunks (stages) a submesh:

| schedule    | order                                                                                    | in flight   |
|-------------|------------------------------------------------------------------------------------------|-------------|
| gpipe       | all forward, then all backward (GPipe)                                                   | m           |
| 1f1b        | P − p forward, then one backward and one forward in turn (PipeDream-Flush, DAPPLE)       | P − p       |
| interleaved | 1f1b over the submesh's chunks in turn, each for a round of microbatches (Megatron-LM)   | ~P·c chunks |
| zero_bubble | 1f1b whose backward pass is cut in two: what earlier stages wait for comes at once, the  | P           |
|             | gradients of stored tensors p microbatches later (ZB-H1 of Zero Bubble, ICLR'24)         |             |

The orders are those of `torch.distributed.pipelining`, whose classes `runtime.scheduled` names. A new schedule is a row
here and its class there: nothing else asks for a schedule's name. What it is asked for is in the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from autopar.errors import PlanError
from autopar.runtime.arrivals import BACKWARD as BACKWARD
from autopar.runtime.arrivals import BACKWARD_WEIGHT as BACKWARD_WEIGHT
from autopar.runtime.arrivals import FORWARD as FORWARD
from autopar.runtime.arrivals import Turn as Turn

BACKWARD_INPUT = "backward_input"  # gradients on their way to what the stage received, and nothing else
DIRECTIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

#: the schedule of a single stage, where all are the same, and from which others are told apart
PLAIN = "1f1b"


@dataclass(frozen=True)
class Schedule:
    """What there is to know of a schedule.

    order: of the passes of submesh `position` of `count`, whose stages are given, over so many microbatches.
    in_flight: of how many microbatches a submesh holds the activations at once, times the chunks that hold them; by
    how many submeshes are left from this one to the last (itself included), microbatches, chunks a submesh, submeshes.
    bubble: how many passes of a submesh, both ways, a step of equal stages is longer than its microbatches; by
    submeshes, microbatches and chunks. waiting: of the microbatches in flight, the most that are between the two parts
    of their backward pass; by submeshes left, microbatches, submeshes.
    makes_rounds: microbatches go round the submeshes in equal rounds. has_chunks: a submesh has several stages in turn.
    splits_backward: gradients of stored tensors come later than those of what was received; what is recomputed would be
    so for each part, so that nothing may be.
    """

    name: str
    order: Callable[[int, int, Sequence[int], int], list[Turn]]
    in_flight: Callable[[int, int, int, int], int]
    bubble: Callable[[int, int, int], Fraction]
    makes_rounds: bool = False
    has_chunks: bool = False
    splits_backward: bool = False
    waiting: Callable[[int, int, int], int] = lambda left, microbatches, submeshes: 0


# Orders ----------------------------------------


def turns(schedule: str, stages_of: Sequence[Sequence[int]], microbatches: int, trains: bool) -> list[list[Turn]]:
    """The passes of each submesh in order. stages_of: the stages on each, submeshes and stages in order.

    Without a backward pass, every schedule only goes forward. Raises PlanError where the schedule is not possible for
    so many microbatches.
    """
    if not trains:
        return [[Turn(s, FORWARD, m) for m in range(microbatches) for s in stages] for stages in stages_of]
    row = SCHEDULES[PLAIN if len(stages_of) == 1 and len(stages_of[0]) == 1 else schedule]
    if row.makes_rounds:
        microbatches_a_round(schedule, microbatches, len(stages_of))
    return [row.order(position, len(stages_of), stages, microbatches) for position, stages in enumerate(stages_of)]


def _gpipe(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    return [Turn(stages[0], direction, m) for direction in (FORWARD, BACKWARD) for m in range(microbatches)]


def _1f1b(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    forward = [Turn(stages[0], FORWARD, m) for m in range(microbatches)]
    backward = [Turn(stages[0], BACKWARD, m) for m in range(microbatches)]
    return _alternating(forward, backward, min(microbatches, count - position))


def _interleaved(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    a_round = microbatches_a_round("interleaved", microbatches, count)
    chunks = len(stages)
    visits = [
        (n // (a_round * chunks) * a_round + n % a_round, n // a_round % chunks) for n in range(microbatches * chunks)
    ]
    forward = [Turn(stages[chunk], FORWARD, m) for m, chunk in visits]
    backward = [Turn(stages[chunks - 1 - chunk], BACKWARD, m) for m, chunk in visits]
    ahead = (chunks - 1) * a_round + 2 * (count - 1 - position)
    return _alternating(forward, backward, min(len(forward), ahead + 1))


def _zero_bubble(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    """Forward passes as far ahead as in 1f1b; on submesh p, gradients of stored tensors p microbatches behind."""
    forward, inputs, weights = (
        [Turn(stages[0], direction, m) for m in range(microbatches)]
        for direction in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    warm_up = min(microbatches, count - 1 - position)
    order = forward[:warm_up]
    for n in range(microbatches):
        behind = n - position
        order += [*forward[warm_up + n :][:1], inputs[n], *(weights[behind : behind + 1] if behind >= 0 else ())]
    return [*order, *weights[max(0, microbatches - position) :]]


def _alternating(forward: list[Turn], backward: list[Turn], warm_up: int) -> list[Turn]:
    """So many forward; then a backward and a forward in turn while there are any; then the rest backward."""
    pairs = zip(backward, forward[warm_up:], strict=False)
    steady = [turn for pair in pairs for turn in pair]
    return [*forward[:warm_up], *steady, *backward[len(forward) - warm_up :]]


# Rounds ----------------------------------------


def num_rounds(microbatches: int, num_submeshes: int) -> int:
    """How often all submeshes are gone over; in a round, each takes as many microbatches as there are submeshes."""
    return max(1, microbatches // num_submeshes)


def makes_rounds(microbatches: int, num_submeshes: int) -> bool:
    """Whether microbatches make equal rounds over the submeshes."""
    return microbatches % num_rounds(microbatches, num_submeshes) == 0


def microbatches_a_round(schedule: str, microbatches: int, num_submeshes: int) -> int:
    """Of equal rounds. Raises PlanError where microbatches do not make such."""
    rounds = num_rounds(microbatches, num_submeshes)
    if not makes_rounds(microbatches, num_submeshes):
        raise PlanError(
            f"expected a number of microbatches that makes {rounds} equal rounds over {num_submeshes} submeshes with "
            f"schedule {schedule!r}, found {microbatches}; take a multiple of {num_submeshes}"
        )
    return microbatches // rounds


# Memory and time ----------------------------------------


def in_flight(schedule: str, remaining: int, microbatches: int, chunks: int = 1, num_submeshes: int = 1) -> int:
    """Microbatches in flight, times the chunks of a submesh that hold them (`Schedule.in_flight`)."""
    return SCHEDULES[schedule].in_flight(remaining, microbatches, chunks, num_submeshes)


def _chunks_in_flight(remaining: int, microbatches: int, chunks: int, submeshes: int) -> int:
    """Over all chunks, the first passes forward before a backward one: (c − 1) · (microbatches a round)
    + 2 · (remaining − 1) + 1 (Megatron-LM, SC'21)."""
    a_round = math.ceil(microbatches / num_rounds(microbatches, submeshes))
    return min(microbatches * chunks, (chunks - 1) * a_round + 2 * (remaining - 1) + 1)


def _waiting(remaining: int, microbatches: int, submeshes: int) -> int:
    """Submesh p makes gradients of stored tensors p microbatches behind, the first one at once and in one part."""
    behind = submeshes - remaining
    return min(behind + 1, submeshes, microbatches) if behind else 0


def _plain_bubble(submeshes: int, microbatches: int, chunks: int) -> Fraction:
    """The first microbatch's way through the other stages, there and back; with chunks (P − 1) / c, and what a round of
    fewer microbatches than submeshes leaves idle in each chunk."""
    return Fraction(submeshes - 1, chunks) + max(0, submeshes - microbatches) * (1 - Fraction(1, chunks))


def _hidden_bubble(submeshes: int, microbatches: int, chunks: int) -> Fraction:
    """1f1b's less what gradients of stored tensors hide by waiting, each a third of a pass, as with matrices:

        P − 1 − (P − 1 + min(m, P) − 1) / 3

    The first microbatch's way to the last stage and back is shorter by them on all stages but one, and what it waits
    for on its way is, too. With m ≥ P, (P − 1) / 3, as ZB-H1 has it (Zero Bubble, ICLR'24, table 1).
    """
    return submeshes - 1 - Fraction(submeshes - 1 + min(microbatches, submeshes) - 1, 3)


SCHEDULES: dict[str, Schedule] = {
    row.name: row
    for row in (
        Schedule("gpipe", _gpipe, lambda left, m, c, p: m, _plain_bubble),
        Schedule("1f1b", _1f1b, lambda left, m, c, p: min(left, m), _plain_bubble),
        Schedule("interleaved", _interleaved, _chunks_in_flight, _plain_bubble, makes_rounds=True, has_chunks=True),
        Schedule(
            "zero_bubble", _zero_bubble, lambda left, m, c, p: min(p, m), _hidden_bubble,
            makes_rounds=True, splits_backward=True, waiting=_waiting,
        ),
    )
}  # fmt: skip
"""By the name that a plan has."""
