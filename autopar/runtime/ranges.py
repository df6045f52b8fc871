"""The names of ranges in a profiler's trace, by which `Plan.compare` reads it; and those beside statements.

autopar: linear_2 | layers.1.mlp.up | model.py:12     a statement of a traced program (`tracing`)
autopar again: linear_2 | …                           the same, as it runs again for the backward pass
autopar: start all_reduce | 16384 | tp                a rank starts one, and goes on
autopar: collective all_reduce | 16384 | tp           a rank stands still for one, until it has ended
autopar: gradient | 16384                             what is done with a parameter's gradient when autograd has it
autopar: step                                         and the other parts of a step
autopar: spent 81000                                  nanoseconds of a processor that the range around it took
"""

from __future__ import annotations

import re
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

MARK = "autopar: "
AGAIN = "autopar again: "
COLLECTIVE, STARTED = "collective ", "start "
SPENT = "spent "
STEP, OPTIMIZER, BEGIN, END, RECEIVE = "step", "optimizer", "begin of step", "end of step", "receive"
"""A whole step, the update, what starts before the first microbatch, what is waited for after the last, and messages of
other stages."""
GRADIENT = "gradient | "


class Range:
    """A range that says at its end what its thread spent of a processor: on a host that others use, too, less time than
    has passed."""

    __slots__ = ("_began_ns", "_range")

    def __init__(self, name: str) -> None:
        self._range = torch.profiler.record_function(name)

    def __enter__(self) -> None:
        self._range.__enter__()  # type: ignore[no-untyped-call] # torch's
        self._began_ns = time.thread_time_ns()

    def __exit__(self, *error: Any) -> None:
        spent = time.thread_time_ns() - self._began_ns
        with torch.profiler.record_function(f"{MARK}{SPENT}{spent}"):
            pass
        self._range.__exit__(*error)


def _records() -> bool:
    """Whether a profiler does."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined] # torch lists no exports


def part(name: str) -> AbstractContextManager[object]:
    """A range while a profiler records; else nothing, at next to no cost."""
    if not _records():
        return nullcontext()
    return Range(MARK + name)


def collective(kind: str, num_bytes: int, axis: str, starts: bool = False) -> AbstractContextManager[object]:
    """The range of a collective, or of waiting for one. starts: of starting one that is waited for later."""
    if not _records():
        return nullcontext()
    return Range(f"{MARK}{STARTED if starts else COLLECTIVE}{kind} | {num_bytes} | {axis}")


def gradient(num_bytes: int) -> AbstractContextManager[object]:
    """The range in which a parameter's gradient is taken, and sent home with others."""
    if not _records():
        return nullcontext()
    return Range(f"{MARK}{GRADIENT}{num_bytes}")


def in_ascii(text: str) -> str:
    """A name as it may stand in a trace: profilers lose names with other characters."""
    return text.replace(" → ", " -> ").encode("ascii", "backslashreplace").decode()


def from_ascii(text: str) -> str:
    """The inverse of `in_ascii`."""
    plain = re.sub(r"\\(x..|u....|U.{8})", lambda match: chr(int(match[1][1:], 16)), text)
    return plain.replace(" -> ", " → ")
