"""When a run saves, and when it ends: by its steps, by the clock, and at a signal, alike on all ranks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist


class Due(NamedTuple):
    """What is to be done after a step."""

    save: bool
    stop: bool


class Asked(Protocol):
    """What a watch must know of a rank."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class Watch:
    """Looks for signals from now on, and at the clock; ranks agree after each step.

    every: steps from one checkpoint to the next. minutes: from one to the next by the clock, if any. A signal ends the
    run after the step that is under way, with a checkpoint: those that schedulers send before they kill. Only the main
    thread of a process is told of signals: in another one, such as a Ray worker's, steps and the clock alone count.
    """

    def __init__(
        self, rank: Asked, *, every: int, minutes: float | None = None,
        signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
    ) -> None:  # fmt: skip
        self._rank, self._every, self._minutes = rank, every, minutes
        self._last, self._came = time.monotonic(), False
        for number in signals if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def after(self, step: int, last: int) -> Due:
        """What is due when `step` steps of `last` are done, equal on all ranks: one that saw a signal tells the others,
        as one whose clock says so."""
        is_late = self._minutes is not None and time.monotonic() - self._last > 60 * self._minutes
        came, late = self._agreed([self._came, is_late])
        due = Due(save=came or late or step % self._every == 0 or step >= last, stop=came or step >= last)
        if due.save:
            self._last = time.monotonic()
        return due

    def _agreed(self, wishes: list[bool]) -> list[bool]:
        """What any rank wishes; where steps do not wait for all of them, what the last step has told."""
        told = getattr(self._rank, "agreed_wishes", None)
        if told is not None:
            return list(told(wishes))
        wanted = torch.tensor(wishes, dtype=torch.int32, device=self._rank.device)
        if self._rank.num_ranks > 1:
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        return [bool(one) for one in wanted.tolist()]
