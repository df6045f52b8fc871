"""The end of a rank's process: Python waits for gloo's threads to let go of what they hold.

A collective over gloo has ended for its caller a moment before the thread that did it lets go of its tensors. Where
that moment falls into the end of Python, the thread asks for an interpreter that is no more, and the process aborts
after its last step ("terminate called without an active exception"; pytorch/pytorch issue 190489, seen with torch
2.13). `torch.distributed.destroy_process_group` ends these threads only when nobody else refers to their group, and the
caches of DTensor do so to the end.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

_THREADS = "pt_gloo_runloop"  # as torch names those that do gloo's collectives
_LOOKS, _PAUSE_S = 3, 2e-3  # idle as often in a row, so far apart: a thread may sleep for a lock in between
_AT_MOST_S = 5.0  # and no longer, for a thread that waits for a rank that is lost may work on its own error


@cache
def await_gloo_at_exit() -> None:
    """From now on, this process waits at its end until gloo's threads are idle. Once is enough."""
    atexit.register(await_gloo)


def await_gloo() -> None:
    """Returns when gloo's threads of this process are idle: they hold no tensors then, unless a rank is lost.

    Looks at what Linux says of each thread; on other systems it only gives them a moment.
    """
    until, idle = time.monotonic() + _AT_MOST_S, 0
    while idle < _LOOKS and time.monotonic() < until:
        time.sleep(_PAUSE_S)  # other threads have the interpreter meanwhile
        idle = 0 if any(map(_is_running, Path("/proc/self/task").glob("*/stat"))) else idle + 1


def _is_running(stat: Path) -> bool:
    """Whether it is one of gloo's threads and neither sleeps nor has ended, by its line `number (name) state …`."""
    try:
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name.startswith(_THREADS) and rest.split()[0] not in "SZX"
