"""How a CPU rank's C library allocates: what a step frees is taken again by the next one.

By default glibc gives memory back to the system when the end of its heap is free, and takes it again page by page, up
to tens of thousands of them in a training step; whether it happens depends on where unrelated tensors lie. On GPUs
torch's own allocator keeps what is freed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)
_NEVER_TRIM = (1 << 31) - 1  # bytes free at the end of the heap before any are given back: the most that fits
_TOP_PAD = 1 << 26  # bytes that the heap grows by at least
_MAPPED_FROM = 1 << 25  # bytes from which memory is taken from the system for itself alone: the most that glibc allows
CHOICES = ((_M_TRIM_THRESHOLD, _NEVER_TRIM), (_M_TOP_PAD, _TOP_PAD), (_M_MMAP_THRESHOLD, _MAPPED_FROM))
"""What `mallopt` is told, number and value; profiles are measured with the same (`profiler.measure`)."""


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that tensors on the CPU free, for the next ones; train.py calls it.

    Steps on CPUs have far fewer page faults then, and the process stays as large as it was at its peak. Returns False
    where the C library is not glibc and nothing was changed.
    """
    mallopt: Callable[[ctypes.c_int, ctypes.c_int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return sum(mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in CHOICES) == len(CHOICES)
