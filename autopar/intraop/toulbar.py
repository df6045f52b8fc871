"""Solves a network with memory rows by toulbar2, under a time limit that holds."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from autopar.intraop import toulbar_worker
from autopar.intraop.network import Network
from autopar.intraop.problem import INFINITE
from autopar.intraop.rows import Row
from autopar.intraop.toulbar_worker import Request, Result

_SMALL_ENTRIES = 300_000
"""Networks up to this size are first tried in this process, which saves starting another (0.2 s)."""
_SMALL_BACKTRACKS = 2_000
_GRACE_S = 2.0
_LIBRARY_LOCK = threading.Lock()
"""toulbar2 keeps its state in globals."""


def minimise(network: Network, rows: Sequence[Row], upper_bound: int, time_limit_s: float, seed: int) -> Result:
    """Searches for the cheapest choice below `upper_bound` that keeps the rows.

    Small networks are searched in this process under a backtrack limit, so that the outcome does not
    depend on the clock; what that leaves open goes to a process of its own, ended at the time limit.
    """
    request = _request(network, rows, upper_bound, seed)
    if network.num_entries <= _SMALL_ENTRIES:
        request["backtrack_limit"] = _SMALL_BACKTRACKS
        with _LIBRARY_LOCK:
            result = toulbar_worker.run(request)
        if result["complete"]:
            return result
    return _minimise_apart(request, time_limit_s)


def _request(network: Network, rows: Sequence[Row], upper_bound: int, seed: int) -> Request:
    return Request(
        unary=list(network.unary),
        pairs=[(i, j, matrix) for (i, j), matrix in network.pairs.items()],
        rows=[(row.slack, row.usages) for row in rows],
        infinite=INFINITE,
        upper_bound=upper_bound,
        time_limit_s=0,
        backtrack_limit=0,
        seed=seed,
    )


def _minimise_apart(request: Request, time_limit_s: float) -> Result:
    request["backtrack_limit"] = 2**62
    request["time_limit_s"] = max(1, int(time_limit_s))
    command = [sys.executable, str(Path(toulbar_worker.__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as process:  # fmt: skip
        try:
            output, _ = process.communicate(pickle.dumps(request), timeout=time_limit_s + _GRACE_S)
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                return Result(choice=None, lower_bound=0, complete=False)
            raise
    if process.returncode != 0 or not output:
        return Result(choice=None, lower_bound=0, complete=False)
    result: Result = pickle.loads(output)
    return result
