"""The order in which each submesh makes its forward and backward passes, by schedule.

On submesh p of P, with m microbatches:

| schedule    | order                                                                                  | in flight |
|-------------|----------------------------------------------------------------------------------------|-----------|
| gpipe       | all forward, then all backward (GPipe)                                                 | m         |
| 1f1b        | P − p forward, then one backward and one forward in turn (PipeDream-Flush, DAPPLE)     | P − p     |
| interleaved | 1f1b over the submesh's chunks in turn, each for a round of microbatches (Megatron-LM) | ~P·chunks |
| zero_bubble | 1f1b whose backward pass is cut in two: what earlier stages wait for comes at once, the  | P         |
|             | gradients of stored tensors p microbatches later (ZB-H1 of Zero Bubble, ICLR'24)       |           |

The orders are those of `torch.distributed.pipelining`. Without a backward pass, all of them only go forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.stages import microbatches_a_round
from autopar.runtime.arrivals import BACKWARD as BACKWARD
from autopar.runtime.arrivals import BACKWARD_WEIGHT as BACKWARD_WEIGHT
from autopar.runtime.arrivals import FORWARD as FORWARD
from autopar.runtime.arrivals import Turn as Turn

BACKWARD_INPUT = "backward_input"  # gradients on their way to what the stage received, and nothing else
DIRECTIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


def turns(schedule: str, stages_of: Sequence[Sequence[int]], microbatches: int, trains: bool) -> list[list[Turn]]:
    """The passes of each submesh in order. stages_of: the stages on each, submeshes and stages in order.

    Raises PlanError where the schedule is not possible for so many microbatches.
    """
    if not trains:
        return [[Turn(s, FORWARD, m) for m in range(microbatches) for s in stages] for stages in stages_of]
    order = _ORDERS["1f1b" if len(stages_of) == 1 and len(stages_of[0]) == 1 else schedule]
    return [order(position, len(stages_of), stages, microbatches) for position, stages in enumerate(stages_of)]


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
    microbatches_a_round("zero_bubble", microbatches, count)  # which torch asks for with a single stage a submesh, too
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


_ORDERS: dict[str, Callable[[int, int, Sequence[int], int], list[Turn]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}
