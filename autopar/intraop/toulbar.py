"""Minimises a network by toulbar2, in this process under a backtrack limit or apart under a time limit."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from autopar.intraop import toulbar_worker
from autopar.intraop.network import Network
from autopar.intraop.problem import INFINITE
from autopar.intraop.rows import Row
from autopar.intraop.toulbar_worker import NO_BACKTRACK_LIMIT, Request, Result

_GRACE_S = 3.0
"""What a search may take after its deadline to hand over what it has, before it is killed."""
_LIBRARY_LOCK = threading.Lock()
"""toulbar2 keeps its state in globals."""


def minimise_here(
    network: Network, rows: Sequence[Row], upper_bound: int, backtracks: int, seed: int
) -> Result:
    """Searches in this process for the cheapest choice below `upper_bound`; deterministic."""
    request = _request(network, rows, upper_bound, seed)
    request["backtrack_limit"] = backtracks
    with _LIBRARY_LOCK:
        return toulbar_worker.run(request)


class SearchApart:
    """A search in a process of its own, which leaves this one free and ends when it is told to."""

    def __init__(self, network: Network, rows: Sequence[Row], upper_bound: int, seed: int, *,
                 backtracks: int = NO_BACKTRACK_LIMIT, message_passing: bool = False,
                 virtual_arc_consistency: bool = False) -> None:  # fmt: skip
        request = _request(network, rows, upper_bound, seed)
        request.update(backtrack_limit=backtracks, interruptible=True, message_passing=message_passing,
                       virtual_arc_consistency=virtual_arc_consistency)  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, str(Path(toulbar_worker.__file__))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._output = b""
        self._conversation = threading.Thread(target=self._converse, args=(pickle.dumps(request),), daemon=True)
        self._conversation.start()

    def _converse(self, request: bytes) -> None:
        self._output, _ = self._process.communicate(request)

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return not self._conversation.is_alive()

    def result(self, deadline: float) -> Result:
        """Waits until the search ends or the deadline (of time.monotonic), then returns what it has."""
        self._conversation.join(max(0.0, deadline - time.monotonic()))
        if not self.done:
            self._process.send_signal(signal.SIGVTALRM)
            self._conversation.join(_GRACE_S)
        self.cancel()
        if self._process.returncode != 0 or not self._output:
            return Result(choice=None, lower_bound=0, complete=False)
        result: Result = pickle.loads(self._output)
        return result

    def cancel(self) -> None:
        """Ends the search, whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
        self._conversation.join()


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
        virtual_arc_consistency=False,
        seed=seed,
    )
