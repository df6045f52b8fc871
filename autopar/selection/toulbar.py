"""Minimises a network by toulbar2: in this process under a backtrack limit, or in one of its own.

Without memory rows, what bucket elimination leaves is all that toulbar2 gets to see (`elimination`).
"""

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

from autopar.clock import Clock, is_interrupted, work_done_s, worked, worked_beside
from autopar.selection import toulbar_worker
from autopar.selection.elimination import Core
from autopar.selection.network import Network
from autopar.selection.problem import INFINITE
from autopar.selection.toulbar_worker import NO_BACKTRACK_LIMIT, NetworkRequest, Result
from autopar.selection.usage import Row
from autopar.tunables import MESSAGE_PASSES, NODE_S, ROW_NODE_S, TABLE_S

_GRACE_S = 0.5
"""What a search may take after its deadline to hand over what it has, before it is killed."""
_LOOK_S = 0.1
"""How often a wait looks for interrupts."""
_LIBRARY_LOCK = threading.Lock()
"""toulbar2 keeps its state in globals."""


def backtracks_within(clock: Clock, network: Network, rows: Sequence[Row]) -> int:
    """How many a search may take by what is left of a clock that counts work; any number by one that shows the time."""
    if not clock.is_counted:
        return NO_BACKTRACK_LIMIT
    node_s = network.num_entries * NODE_S + sum(row.num_usages for row in rows) * ROW_NODE_S
    return max(1, min(NO_BACKTRACK_LIMIT, int(max(0.0, clock.left_s) / node_s)))


def _work_s(request: NetworkRequest, result: Result) -> float:
    """What a search took, by what it read and the nodes of its tree."""
    entries = sum(table.size for table in (*request["unary"], *(matrix for _, _, matrix in request["pairs"])))
    usages = sum(len(usage) for _, row in request["rows"] for usage in row.values())
    passes = MESSAGE_PASSES if request["message_passing"] else 1
    return (entries + usages) * passes * TABLE_S + result["nodes"] * (entries * NODE_S + usages * ROW_NODE_S)


def minimise_here(network: Network, rows: Sequence[Row], upper_bound: int, backtracks: int, seed: int) -> Result:
    """Searches in this process for the cheapest choice below `upper_bound`; deterministic."""
    request, core = _request(network, rows, upper_bound, seed)
    request["backtrack_limit"] = backtracks
    settled = _settled(core, upper_bound)
    if settled is not None:
        return settled
    with _LIBRARY_LOCK:
        result = toulbar_worker.run(request)
    worked(_work_s(request, result))
    return _restored(result, core)


class SearchHere:
    """A search that has been done in this process, to be used like one apart."""

    done = True

    def __init__(self, network: Network, rows: Sequence[Row], upper_bound: int, backtracks: int, seed: int) -> None:
        before = work_done_s()
        self._result = minimise_here(network, rows, upper_bound, backtracks, seed)
        self.work_s = work_done_s() - before

    def result(self, wait_until: float) -> Result:
        """Returns what was found."""
        return self._result

    def interrupt(self) -> None:
        """Does nothing: the search has ended."""

    def cancel(self) -> None:
        """Does nothing: the search has ended."""


class SearchApart:
    """A search in a process of its own, which leaves this one free and ends when it is told to.

    Request and result go through files: a pipe would want a thread here, which a search of this process
    starves, since toulbar2 does not let go of the interpreter.
    """

    def __init__(self, network: Network, rows: Sequence[Row], upper_bound: int, seed: int, *,
                 backtracks: int = NO_BACKTRACK_LIMIT, message_passing: bool = False) -> None:  # fmt: skip
        request, self._core = _request(network, rows, upper_bound, seed)
        request["backtrack_limit"], request["interruptible"] = backtracks, True
        request["message_passing"] = message_passing
        self._request, self._began, self.work_s = request, work_done_s(), 0.0
        self._settled = _settled(self._core, upper_bound)
        if self._settled is not None:
            return
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
        return self._settled is not None or self._process.poll() is not None

    def result(self, wait_until: float) -> Result:
        """Waits until the search ends, or until then (of time.monotonic), and returns what it has."""
        if self._settled is not None:
            return self._settled
        if not self._ended_within(max(0.0, wait_until - time.monotonic())):
            self.interrupt()
            self._ended_within(_GRACE_S)
        if self._process.poll() != 0:
            self.cancel()
            return Result(choice=None, lower_bound=0, complete=False, nodes=0)
        with self._output as file:
            file.seek(0)
            result: Result = pickle.load(file)
        self.work_s = _work_s(self._request, result)
        worked_beside(self.work_s, self._began)
        return _restored(result, self._core)

    def interrupt(self) -> None:
        """Asks the search to end with what it has."""
        if self._settled is None:
            self._process.send_signal(signal.SIGVTALRM)

    def cancel(self) -> None:
        """Ends the search, whatever it is doing."""
        if self._settled is not None:
            return
        if not self.done:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _ended_within(self, seconds: float) -> bool:
        """Whether it ends in time, or before an interrupt."""
        deadline = time.monotonic() + seconds
        while not is_interrupted() or seconds <= _GRACE_S:
            try:
                self._process.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
                return False
            return True
        return self._process.poll() is not None


def _request(network: Network, rows: Sequence[Row], upper_bound: int, seed: int) -> tuple[NetworkRequest, Core | None]:
    core = None if rows else network.core
    pairs = network.pairs if core is None else core.pairs
    if core is not None and upper_bound < INFINITE:
        upper_bound = max(0, upper_bound - core.constant)
    request = NetworkRequest(
        unary=list(network.unary if core is None else core.unary),
        pairs=[(i, j, matrix) for (i, j), matrix in pairs.items()],
        rows=[(row.slack, row.usages) for row in rows],
        infinite=INFINITE,
        upper_bound=upper_bound,
        backtrack_limit=NO_BACKTRACK_LIMIT,
        interruptible=False,
        message_passing=False,
        seed=seed,
    )
    return request, core


def _settled(core: Core | None, upper_bound: int) -> Result | None:
    """What elimination alone has found, when it has left nothing to search."""
    if core is None or (core.unary and core.constant < upper_bound):
        return None
    if core.constant >= upper_bound:
        return Result(choice=None, lower_bound=upper_bound, complete=True, nodes=0)
    return Result(choice=core.expand([]), lower_bound=core.constant, complete=True, nodes=0)


def _restored(result: Result, core: Core | None) -> Result:
    """The result for the whole network, from that for its core."""
    if core is None:
        return result
    choice = None if result["choice"] is None else core.expand(result["choice"])
    bound = min(INFINITE, result["lower_bound"] + core.constant)
    return Result(choice=choice, lower_bound=bound, complete=result["complete"], nodes=result["nodes"])
