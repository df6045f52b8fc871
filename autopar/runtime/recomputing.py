"""Blocks that keep nothing but what enters them: the backward pass runs them again for what it needs.

    forward    `torch.utils.checkpoint` drops what autograd saves inside the block, but not the block's inputs
    backward   the first gradient that needs something of it runs the whole block again, as the block ran then: the
               same microbatch, the same random numbers. What the block returns this time is not used

The second run always goes to the block's end. Torch could stop it at the last tensor that autograd has saved on this
rank; then it would depend on the rank which collectives run again. The states of torch's own generators are not kept:
programs do not draw from them (`randomness`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from autopar.runtime import randomness
from autopar.runtime.declare import Block
from autopar.runtime.mesh import Progress

_State = tuple[int, torch.Tensor | float | None, bool, randomness.Position]


def recomputed(block: Callable[..., Any], *inputs: Any) -> Any:
    """Calls a block (or a method of one), and again in the backward pass instead of keeping what it computes.

    What it computes may depend on its inputs, parameters and buffers, the microbatch and random numbers of programs
    alone. Without gradients, it is a plain call.
    """
    if not torch.is_grad_enabled():
        return block(*inputs)
    owner = getattr(block, "__self__", block)
    progress = owner.mesh.progress if isinstance(owner, Block) else Progress()
    with set_checkpoint_early_stop(False):
        return checkpoint(
            block, *inputs, use_reentrant=False, context_fn=partial(_contexts, progress), preserve_rng_state=False
        )


def _contexts(progress: Progress) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What the first and the second run of a block are under."""
    return FirstRun(progress), AsThen(progress)


class FirstRun(AbstractContextManager[None]):
    """The run in the forward pass of a call that keeps nothing; those inside of another belong to that."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __enter__(self) -> None:
        self.around = self.progress.kept_call
        self.progress.kept_call = self.around or self

    def __exit__(self, *error: object) -> None:
        self.progress.kept_call = self.around


class AsThen(AbstractContextManager[None]):
    """Everything as it was when this was made, until it ends; any number of times, since each call has its own."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.then = progress.microbatch, progress.count, True, randomness.position()

    def __enter__(self) -> None:
        self.now = self._go_to(self.then)

    def __exit__(self, *error: object) -> None:
        self._go_to(self.now)

    def _go_to(self, then: _State) -> _State:
        progress = self.progress
        now = progress.microbatch, progress.count, progress.is_again, randomness.position()
        progress.microbatch, progress.count, progress.is_again, place = then
        randomness.go_to(place)
        return now
