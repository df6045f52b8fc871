"""When a rank starts to receive: one pass ahead, so that tensors travel while it computes.

    pass k      starts to receive what pass k + 1 reads, waits for what it reads itself, computes, sends
    pass k + 1  finds most of it there

Nothing waits for ever, whatever the backend. On gloo a receive waits for its tag alone. On NCCL, what two ranks send
each other over one group is done in the order in which they started it; so

    order   A group carries tensors of one direction, between stages equally far apart, up or down the ranks alone
            (`transport.group_name`). Both ends pass through the microbatches and chunks of such stages in the same
            order, and through the tensors of a pass in the order of their numbers: the n-th that one rank sends
            another is the n-th that the other receives from it, and neither sends before it receives.
    cycles  A receive that is started ahead comes before what pass k sends. Of passes in one direction, it waits for
            another microbatch of the same stage, which does not come of what pass k sends. The next chunk's may, by way
            of the other ranks: that is received once pass k has sent.

Where the process group is bound to its device (`init_process_group(device_id=…)`), NCCL does everything of a group in
order, whoever the other rank is. That is enough unless chunks in turn send to stages more than two apart, or, where
their backward passes come in two parts, more than one (`reach_when_bound`): such programs are refused there.

A pass that was not foreseen receives when it begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

Wait = Callable[[], Tensor]

FORWARD, BACKWARD, BACKWARD_WEIGHT = "forward", "backward", "backward_weight"


class Turn(NamedTuple):
    """One pass of a stage over a microbatch. The second part of a backward pass receives nothing."""

    stage: int
    direction: str
    microbatch: int


def may_come_early(turn: Turn, following: Turn) -> bool:
    """Whether what the following pass of the rank reads may be received from the begin of this pass on."""
    return turn.direction != following.direction or turn.stage == following.stage


def reach_when_bound(has_chunks: bool, in_two_parts: bool) -> float:
    """How many stages further a tensor may be sent where the process group is bound to its device.

    in_two_parts: whether backward passes are.
    """
    if not has_chunks:
        return math.inf
    return 1 if in_two_parts else 2


class Arrivals:
    """What is under way to this rank. start: starts to receive what a pass reads; returns what waits for each."""

    def __init__(self, order: Sequence[Turn], start: Callable[[Turn], dict[int, Wait]]) -> None:
        self._next = dict(itertools.pairwise(order))
        self._start = start
        self._waiting: dict[Turn, dict[int, Wait]] = {}

    def begin(self, turn: Turn) -> dict[int, Wait]:
        """A pass begins: what waits for each tensor that it reads, by the number of its channel."""
        own = self._waiting.pop(turn, None)
        if own is None:
            own = self._start(turn)
        following = self._next.get(turn)
        if following is not None and may_come_early(turn, following):
            self._waiting[following] = self._start(following)
        return own
