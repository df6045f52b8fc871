"""How long each rank takes for its own part of a step: by that, a rank that is slower than others is seen."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch
import torch.distributed as dist

from autopar.runtime import comm
from autopar.runtime.watch import Asked


class OwnTime:
    """Counts from when it is made, and from each `restart` on."""

    def __init__(self, rank: Asked) -> None:
        self._rank, self._stack = rank, ExitStack()
        self._waited = self._stack.enter_context(comm.count_waits())
        self.restart()

    def restart(self) -> None:
        """A step begins."""
        self._began, self._waited.seconds = time.perf_counter(), 0.0

    def by_rank(self) -> list[float] | None:
        """Seconds of each rank since then, but for those in which it stood still for others; equal on all ranks, which
        call this together. None on GPUs, where a rank waits in kernels and not in its thread, and for one rank."""
        if self._rank.num_ranks == 1 or self._rank.device.type != "cpu":
            return None
        own = torch.tensor([time.perf_counter() - self._began - self._waited.seconds], dtype=torch.float64)
        every = [torch.zeros_like(own) for _ in range(self._rank.num_ranks)]
        dist.all_gather(every, own)
        return [round(one.item(), 6) for one in every]

    def end(self) -> None:
        """Counts no more."""
        self._stack.close()
