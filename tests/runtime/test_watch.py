"""A run saves by its steps, by the clock, and at a signal, after which it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from autopar import runtime as rt
from autopar.runtime import watch


class Alone:
    """A rank by itself."""

    num_ranks = 1
    device = torch.device("cpu")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As they were before."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_steps_and_the_last_one() -> None:
    own = rt.Watch(Alone(), every=3)
    assert [own.after(step, 7) for step in range(1, 8)] == [
        (False, False), (False, False), (True, False), (False, False), (False, False), (True, False), (True, True),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_with_a_checkpoint(number: signal.Signals) -> None:
    own = rt.Watch(Alone(), every=100)
    assert own.after(1, 50) == (False, False)
    os.kill(os.getpid(), number)
    assert own.after(2, 50) == (True, True)


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    own = rt.Watch(Alone(), every=100, minutes=10)
    seen = []
    for step in range(1, 6):
        now[0] += 5 * 60 + 1
        seen.append(own.after(step, 50).save)
    assert seen == [False, True, False, True, False]


def test_a_thread_is_not_told_of_signals_and_watches_all_the_same() -> None:
    """As in Ray's workers, which train in a thread: what the main thread does at a signal stays."""
    before, made = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: made.append(rt.Watch(Alone(), every=2)))
    thread.start()
    thread.join()
    assert [made[0].after(step, 9).save for step in (1, 2)] == [False, True]
    assert signal.getsignal(signal.SIGTERM) is before
