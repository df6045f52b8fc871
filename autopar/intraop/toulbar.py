"""Minimises a network by toulbar2: in this process under a backtrack limit, or in one of its own."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from autopar.intraop import toulbar_worker
from autopar.intraop.network import Network
from autopar.intraop.problem import INFINITE
from autopar.intraop.timeline import Row
from autopar.intraop.toulbar_worker import NO_BACKTRACK_LIMIT, Request, Result

_GRACE_S = 1.0
"""What a search may take after its deadline to hand over what it has, before it is killed."""
_LIBRARY_LOCK = threading.Lock()
"""toulbar2 keeps its state in globals."""


def minimise_here(network: Network, rows: Sequence[Row], upper_bound: int, backtracks: int, seed: int) -> Result:
    """Searches in this process for the cheapest choice below `upper_bound`; deterministic."""
    request = _request(network, rows, upper_bound, seed)
    request["backtrack_limit"] = backtracks
    with _LIBRARY_LOCK:
        return toulbar_worker.run(request)


class SearchApart:
    """A search in a process of its own, which leaves this one free and ends when it is told to.

    Request and result go through files: a pipe would want a thread here, which a search of this process
    starves, since toulbar2 does not let go of the interpreter.
    """

    def __init__(self, network: Network, rows: Sequence[Row], upper_bound: int, seed: int, *,
                 backtracks: int = NO_BACKTRACK_LIMIT, message_passing: bool = False) -> None:  # fmt: skip
        request = _request(network, rows, upper_bound, seed)
        request["backtrack_limit"], request["interruptible"] = backtracks, True
        request["message_passing"] = message_passing
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # outlives this call; result or cancel closes it
        with tempfile.TemporaryFile() as file:
            pickle.dump(request, file)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, str(Path(toulbar_worker.__file__))],
                stdin=file, stdout=self._output, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return self._process.poll() is not None

    def result(self, deadline: float) -> Result:
        """Waits until the search ends or the deadline (of time.monotonic), then returns what it has."""
        if not self._ended_within(max(0.0, deadline - time.monotonic())):
            self._process.send_signal(signal.SIGVTALRM)
            self._ended_within(_GRACE_S)
        if self._process.poll() != 0:
            self.cancel()
            return Result(choice=None, lower_bound=0, complete=False)
        with self._output as file:
            file.seek(0)
            result: Result = pickle.load(file)
        return result

    def cancel(self) -> None:
        """Ends the search, whatever it is doing."""
        if not self.done:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _request(network: Network, rows: Sequence[Row], upper_bound: int, seed: int) -> Request:
    return Request(
        unary=list(network.unary),
        pairs=[(i, j, matrix) for (i, j), matrix in network.pairs.items()],
        rows=[(row.slack, row.usages) for row in rows],
        infinite=INFINITE,
        upper_bound=upper_bound,
        backtrack_limit=NO_BACKTRACK_LIMIT,
        interruptible=False,
        message_passing=False,
        seed=seed,
    )
