"""The order in which each submesh makes its forward and backward passes, by schedule.

On submesh p of P, with m microbatches:

| schedule    | order                                                                                  | in flight |
|-------------|----------------------------------------------------------------------------------------|-----------|
| gpipe       | all forward, then all backward (GPipe)                                                 | m         |
| 1f1b        | P − p forward, then one backward and one forward in turn (PipeDream-Flush, DAPPLE)     | P − p     |
| interleaved | 1f1b over the submesh's chunks in turn, each for a round of microbatches (Megatron-LM) | ~P·chunks |

The orders are those of `torch.distributed.pipelining`. Without a backward pass, all of them only go forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.errors import PlanError


class Turn(NamedTuple):
    """One pass: of which stage, forward or backward, of which microbatch."""

    stage: int
    is_forward: bool
    microbatch: int


def turns(schedule: str, stages_of: Sequence[Sequence[int]], microbatches: int, trains: bool) -> list[list[Turn]]:
    """The passes of each submesh in order. stages_of: the stages on each, submeshes and stages in order.

    Raises PlanError where the schedule is not possible for so many microbatches.
    """
    if not trains:
        return [[Turn(s, True, m) for m in range(microbatches) for s in stages] for stages in stages_of]
    order = _ORDERS["1f1b" if len(stages_of) == 1 and len(stages_of[0]) == 1 else schedule]
    return [order(position, len(stages_of), stages, microbatches) for position, stages in enumerate(stages_of)]


def _gpipe(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    return [Turn(stages[0], is_forward, m) for is_forward in (True, False) for m in range(microbatches)]


def _1f1b(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    forward = [Turn(stages[0], True, m) for m in range(microbatches)]
    backward = [Turn(stages[0], False, m) for m in range(microbatches)]
    return _alternating(forward, backward, min(microbatches, count - position))


def _interleaved(position: int, count: int, stages: Sequence[int], microbatches: int) -> list[Turn]:
    rounds = max(1, microbatches // count)
    if microbatches % rounds:
        raise PlanError(
            f"expected a number of microbatches that makes {rounds} equal rounds over {count} submeshes, "
            f"found {microbatches}; take a multiple of {count}"
        )
    a_round = microbatches // rounds
    chunks = len(stages)
    visits = [
        (n // (a_round * chunks) * a_round + n % a_round, n // a_round % chunks) for n in range(microbatches * chunks)
    ]
    forward = [Turn(stages[chunk], True, m) for m, chunk in visits]
    backward = [Turn(stages[chunks - 1 - chunk], False, m) for m, chunk in visits]
    ahead = (chunks - 1) * a_round + 2 * (count - 1 - position)
    return _alternating(forward, backward, min(len(forward), ahead + 1))


def _alternating(forward: list[Turn], backward: list[Turn], warm_up: int) -> list[Turn]:
    """So many forward; then a backward and a forward in turn while there are any; then the rest backward."""
    pairs = zip(backward, forward[warm_up:], strict=False)
    steady = [turn for pair in pairs for turn in pair]
    return [*forward[:warm_up], *steady, *backward[len(forward) - warm_up :]]


_ORDERS: dict[str, Callable[[int, int, Sequence[int], int], list[Turn]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
}
