"""Pipeline schedules, one row each: the order in which a submesh makes its forward and backward passes, and what that
order means for memory and time.

On submesh p of P, with m microbatches and c chunks (stages) a submesh:

| schedule                | order                                                                        | in flight   |
|-------------------------|------------------------------------------------------------------------------|-------------|
| gpipe                   | all forward, then all backward (GPipe)                                       | m           |
| 1f1b                    | P − p forward, then one backward and one forward in turn (PipeDream-Flush,   | P − p       |
|                         | DAPPLE)                                                                      |             |
| interleaved             | 1f1b over the submesh's chunks in turn, each for a round of microbatches     | ~P·c chunks |
|                         | (Megatron-LM)                                                                |             |
| zero_bubble             | 1f1b whose backward pass is cut in two: what earlier stages wait for comes   | P           |
|                         | at once, the gradients of stored tensors p microbatches later (ZB-H1 of Zero |             |
|                         | Bubble, ICLR'24)                                                             |             |
| interleaved_zero_bubble | the same over the submesh's chunks in turn                                   | ~P·c chunks |
| zero_bubble_v           | two chunks, in a V: the second ones in turn from the last submesh to the     | 2·P chunks  |
|                         | first, so that the loss comes where microbatches come in (ZB-V)              |             |
| dualpipev               | the same two chunks; between the ends, forward passes of one and backward    | 2·P + 1     |
|                         | passes of the other in pairs, each backward pass in one part (DualPipeV, of  | chunks      |
|                         | DeepSeek-V3's DualPipe, arXiv:2412.19437)                                    |             |

The orders are those of `torch.distributed.pipelining`, whose classes `runtime.scheduled` names. A new schedule is a row
here and its class there: nothing else asks for a schedule's name. What it is asked for is in the row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

from autopar.errors import PlanError
from autopar.runtime.arrivals import BACKWARD as BACKWARD
from autopar.runtime.arrivals import BACKWARD_WEIGHT as BACKWARD_WEIGHT
from autopar.runtime.arrivals import FORWARD as FORWARD
from autopar.runtime.arrivals import Turn as Turn

BACKWARD_INPUT = "backward_input"  # gradients on their way to what the stage received, and nothing else
DIRECTIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

#: the schedule of a single stage, where all are the same, and from which others are told apart
PLAIN = "1f1b"


_Submesh = TypeVar("_Submesh")


@dataclass(frozen=True)
class Schedule:
    """What there is to know of a schedule.

    order: of the passes of submesh `position` of `count`, whose stages are given, over so many microbatches.
    in_flight: of how many microbatches a submesh holds the activations at once, times the chunks that hold them; by
    how many submeshes are left from this one to the last (itself included), microbatches, chunks a submesh, submeshes.
    bubble: how many passes of a submesh, both ways, a step of equal stages is longer than its microbatches; by
    submeshes, microbatches and chunks. waiting: of what is in flight, the most that is between the two parts of its
    backward pass; as in_flight.
    makes_rounds: microbatches go round the submeshes in equal rounds. has_chunks: a submesh has several stages in turn;
    num_chunks: so many, if it must be. turns_back: every other round of stages is from the last submesh to the first.
    splits_backward: gradients of stored tensors come later than those of what was received; what is recomputed would be
    so for each part, so that nothing may be. splits_some: of other backward passes both come at once.
    fewest: the fewest microbatches that it is made for, by submeshes. awaited: of tensors on their way between stages,
    one after the other, for how many a step stands still where each is received from the begin of the pass before
    (`runtime.arrivals`); by submeshes, microbatches and chunks; None where that is not known, and may be all.
    """

    name: str
    order: Callable[[int, int, Sequence[int], int], list[Turn]]
    in_flight: Callable[[int, int, int, int], int]
    bubble: Callable[[int, int, int], Fraction]
    makes_rounds: bool = False
    has_chunks: bool = False
    num_chunks: int | None = None
    turns_back: bool = False
    splits_backward: bool = False
    splits_some: bool = False
    fewest: Callable[[int], int] = lambda submeshes: 1
    waiting: Callable[[int, int, int, int], int] = lambda left, microbatches, chunks, submeshes: 0
    awaited: Callable[[int, int, int], int] | None = None

    def in_turn(self, submeshes: Sequence[_Submesh], chunks: int) -> list[_Submesh]:
        """Of each stage the submesh, when each has so many stages."""
        back = [*submeshes][::-1] if self.turns_back else submeshes
        return [submesh for chunk in range(chunks) for submesh in (back if chunk % 2 else submeshes)]

    def allows(self, chunks: int) -> bool:
        """Whether a submesh may have so many stages."""
        return chunks == (self.num_chunks or chunks) if self.has_chunks and chunks > 1 else chunks == 1

    def takes(self, microbatches: int, submeshes: int) -> bool:
        """Whether so many microbatches may run on so many submeshes."""
        fits_rounds = not self.makes_rounds or makes_rounds(microbatches, submeshes)
        return fits_rounds and microbatches >= self.fewest(submeshes)


# Orders ----------------------------------------


def turns(schedule: str, stages_of: Sequence[Sequence[int]], microbatches: int, trains: bool) -> list[list[Turn]]:
    """The passes of each submesh in order. stages_of: the stages on each, submeshes and stages in order.

    Without a backward pass, every schedule only goes forward. Raises PlanError where the schedule is not possible for
    so many microbatches.
    """
    if not trains:
        return [[Turn(s, FORWARD, m) for m in range(microbatches) for s in stages] for stages in stages_of]
    row = SCHEDULES[PLAIN if len(stages_of) == 1 and len(stages_of[0]) == 1 else schedule]
    check_microbatches(row.name, microbatches, len(stages_of))
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
    visits = _visits(microbatches, chunks, a_round)
    forward = [Turn(stages[chunk], FORWARD, m) for m, chunk in visits]
    backward = [Turn(stages[chunks - 1 - chunk], BACKWARD, m) for m, chunk in visits]
    ahead = (chunks - 1) * a_round + 2 * (count - 1 - position)
    return _alternating(forward, backward, min(len(forward), ahead + 1))


def _zero_bubble(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    """Forward passes as far ahead as in 1f1b; on submesh p, gradients of stored tensors p passes behind."""
    a_round = microbatches_a_round("zero_bubble", microbatches, count)
    visits = _visits(microbatches, len(stages), a_round)
    forward = [Turn(stages[chunk], FORWARD, m) for m, chunk in visits]
    inputs, weights = (
        [Turn(stages[-1 - chunk], direction, m) for m, chunk in visits]
        for direction in (BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    warm_up = min(len(forward), (len(stages) - 1) * a_round + count - 1 - position)
    order = forward[:warm_up]
    for n in range(len(inputs)):
        behind = n - position
        order += [*forward[warm_up + n :][:1], inputs[n], *(weights[behind : behind + 1] if behind >= 0 else ())]
    return [*order, *weights[max(0, len(weights) - position) :]]


def _zero_bubble_v(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    """Down the submeshes and up again: on all, the first loss comes when the way down has filled them.

    The order is that of 2P − 1 microbatches or more, less those that there are not.
    """
    left, steps = count - position, max(microbatches, 2 * count - 1) - count
    down, up = 0, 1
    order = [(down, FORWARD)] * (2 * left - 1) + [(up, FORWARD), (down, FORWARD)] * position
    order += [(up, FORWARD), (up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT)] * left
    for step in range(steps):
        order += [(down, FORWARD)] * (step <= steps - left)
        order += [(down, BACKWARD_INPUT), (down, BACKWARD_WEIGHT)]
        order += [(up, FORWARD), (up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT)]
    order += [(down, BACKWARD_INPUT), (up, BACKWARD_INPUT)] * position
    order += [(down, BACKWARD_INPUT), (down, BACKWARD_WEIGHT)] * left
    order += [(up, BACKWARD_WEIGHT)] * position + [(down, BACKWARD_WEIGHT)] * position
    return [turn for turn in _numbered(order, stages) if turn.microbatch < microbatches]


def _dualpipev(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    """Down the submeshes and up again; while both ways are full, a forward pass of one chunk beside a backward pass of
    the other.

    Torch has such a pair as one action, whose passes are made one after the other. Backward passes come in two parts
    where other submeshes would wait for them: the first ones of the way up, and the last ones of both ways.
    """
    left, down, up = count - position - 1, 0, 1
    order = [(down, FORWARD)] * (2 * left) + [(down, FORWARD), (up, FORWARD)] * (position + 1)
    order += [(up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT), (up, FORWARD)] * left
    order += [(down, FORWARD), (up, BACKWARD), (up, FORWARD), (down, BACKWARD)] * (microbatches - count - left)
    order += [(up, BACKWARD), (up, FORWARD), (down, BACKWARD)] * left
    last = [up, down] * (position + 1)
    order += [(chunk, BACKWARD) for chunk in last[: position + 1]]
    in_two = last[position + 1 :]
    order += [(chunk, BACKWARD_INPUT) for chunk in in_two]
    in_two += [down] * left
    for chunk in in_two[:left]:
        order += [(chunk, BACKWARD_WEIGHT), (down, BACKWARD_INPUT)]
    return _numbered([*order, *((chunk, BACKWARD_WEIGHT) for chunk in in_two[left:])], stages)


def _numbered(order: Sequence[tuple[int, str]], stages: Sequence[int]) -> list[Turn]:
    """Passes of chunks as those of microbatches, each chunk's in their order; a whole pass is both parts at once."""
    done: Counter[tuple[int, str]] = Counter()
    found = []
    for chunk, direction in order:
        parts = (BACKWARD_INPUT, BACKWARD_WEIGHT) if direction == BACKWARD else (direction,)
        found.append(Turn(stages[chunk], direction, done[chunk, parts[0]]))
        done.update((chunk, part) for part in parts)
    return found


def _visits(microbatches: int, chunks: int, a_round: int) -> list[tuple[int, int]]:
    """Microbatches and chunks in turn, each for a round."""
    return [
        (n // (a_round * chunks) * a_round + n % a_round, n // a_round % chunks) for n in range(microbatches * chunks)
    ]


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


def check_microbatches(schedule: str, microbatches: int, num_submeshes: int) -> None:
    """Raises PlanError where a schedule isn't made for so many microbatches."""
    row = SCHEDULES[schedule]
    if row.makes_rounds:
        microbatches_a_round(schedule, microbatches, num_submeshes)
    fewest = row.fewest(num_submeshes)
    if microbatches < fewest:
        raise PlanError(
            f"expected at least {fewest} microbatches over {num_submeshes} submeshes with schedule {schedule!r}, found "
            f"{microbatches}; take more, or another schedule"
        )


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


@lru_cache(maxsize=1 << 8)
def num_in_two_parts(schedule: str, stages_of: tuple[tuple[int, ...], ...], microbatches: int) -> Mapping[int, int]:
    """By stage, of how many microbatches the backward pass comes in two parts. stages_of: as in `turns`."""
    orders = turns(schedule, stages_of, microbatches, True) if SCHEDULES[schedule].splits_backward else ()
    return Counter(turn.stage for order in orders for turn in order if turn.direction == BACKWARD_INPUT)


def in_flight(schedule: str, remaining: int, microbatches: int, chunks: int = 1, num_submeshes: int = 1) -> int:
    """Microbatches in flight, times the chunks of a submesh that hold them (`Schedule.in_flight`)."""
    return SCHEDULES[schedule].in_flight(remaining, microbatches, chunks, num_submeshes)


def _chunks_in_flight(remaining: int, microbatches: int, chunks: int, submeshes: int) -> int:
    """Over all chunks, the first passes forward before a backward one: (c − 1) · (microbatches a round)
    + 2 · (remaining − 1) + 1 (Megatron-LM, SC'21)."""
    a_round = math.ceil(microbatches / num_rounds(microbatches, submeshes))
    return min(microbatches * chunks, (chunks - 1) * a_round + 2 * (remaining - 1) + 1)


def _chunks_ahead(remaining: int, microbatches: int, chunks: int, submeshes: int) -> int:
    """Where gradients of stored tensors wait: (c − 1) · (microbatches a round) + P."""
    a_round = math.ceil(microbatches / num_rounds(microbatches, submeshes))
    return min(microbatches * chunks, (chunks - 1) * a_round + submeshes)


def _waiting(remaining: int, microbatches: int, chunks: int, submeshes: int) -> int:
    """Submesh p makes gradients of stored tensors p passes behind, the first stage at once and in one part."""
    behind = submeshes - remaining
    return min(behind + 1, microbatches * chunks) if behind or chunks > 1 else 0


def _v_in_flight(remaining: int, microbatches: int, chunks: int, submeshes: int) -> int:
    """Everywhere two chunks of as many microbatches as there are submeshes: what the first holds in 1f1b."""
    return min(2 * submeshes, microbatches + 1 + submeshes - remaining, 2 * microbatches)


def _v_waiting(remaining: int, microbatches: int, chunks: int, submeshes: int) -> int:
    """At most: at the end, of both chunks of p microbatches."""
    return max(1, min(2 * (submeshes - remaining) + 1, 2 * (microbatches - submeshes) + 1))


def _plain_bubble(submeshes: int, microbatches: int, chunks: int) -> Fraction:
    """The first microbatch's way through the other stages, there and back; with chunks (P − 1) / c, and what a round of
    fewer microbatches than submeshes leaves idle in each chunk."""
    return Fraction(submeshes - 1, chunks) + max(0, submeshes - microbatches) * (1 - Fraction(1, chunks))


def _hidden_bubble(submeshes: int, microbatches: int, chunks: int) -> Fraction:
    """With passes of a chunk in three equal parts, as those of matrices are, forward and to each of two gradients:

        (c · P + m − 1) + (c − 1) · max(P, 2 · m) + (P + m) − 3 · c · m parts,     m ≤ P microbatches in a round

    All forward passes in a row; backward passes of all rounds but the last, in whose gaps gradients of stored tensors
    are made; those of the last. With m = P they are P − 1, a third of 1f1b's, as ZB-H1 has it (Zero Bubble, ICLR'24,
    table 1).
    """
    count = min(microbatches, submeshes)
    parts = chunks * submeshes + count - 1 + (chunks - 1) * max(submeshes, 2 * count) + submeshes + count
    return Fraction(parts - 3 * chunks * count, 3 * chunks)


def _v_bubble(submeshes: int, microbatches: int, chunks: int) -> Fraction:
    """Of passes of one chunk, each in three equal parts, P − 1 parts: the way to the last submesh. More where there are
    too few microbatches to fill both ways: 4 · (P − 1) for one, two less for each more."""
    return Fraction(max(submeshes - 1, 4 * (submeshes - 1) - 2 * (microbatches - 1)), 6)


SCHEDULES: dict[str, Schedule] = {
    row.name: row
    for row in (
        Schedule("gpipe", _gpipe, lambda left, m, c, p: m, _plain_bubble),
        Schedule("1f1b", _1f1b, lambda left, m, c, p: min(left, m), _plain_bubble),
        Schedule(
            "interleaved", _interleaved, _chunks_in_flight, _plain_bubble, makes_rounds=True, has_chunks=True,
            awaited=lambda p, m, c: 2 * (p * c - 1),
        ),
        Schedule(
            "zero_bubble", _zero_bubble, lambda left, m, c, p: min(p, m), _hidden_bubble,
            makes_rounds=True, splits_backward=True, waiting=_waiting,
        ),
        Schedule(
            "interleaved_zero_bubble", _zero_bubble, _chunks_ahead, _hidden_bubble,
            makes_rounds=True, has_chunks=True, splits_backward=True, waiting=_waiting,
            awaited=lambda p, m, c: p * c + 3 * p - 4,
        ),
        Schedule(
            "zero_bubble_v", _zero_bubble_v, _v_in_flight, _v_bubble,
            has_chunks=True, num_chunks=2, turns_back=True, splits_backward=True, waiting=_v_waiting,
            awaited=lambda p, m, c: 5 * p - 6,
        ),
        Schedule(
            "dualpipev", _dualpipev, lambda left, m, c, p: 2 * p + 1, _v_bubble, has_chunks=True, num_chunks=2,
            turns_back=True, splits_backward=True, splits_some=True, fewest=lambda submeshes: 2 * submeshes,
            waiting=lambda left, m, c, p: p - left + 1, awaited=lambda p, m, c: 5 * p - 4,
        ),
    )
}  # fmt: skip
"""By the name that a plan has."""
