"""A pool of gloo ranks that lives as long as the test session: starting takes seconds, a job milliseconds.

A job is a module-level function `fn(rank, world, *args)`, found by module path on the ranks; its results
come back as a list by rank. When ranks fail, the first traceback is raised here; when one does not answer
in time, the pool is stopped and started anew for the next job.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.garbage import collect_seldom

#: what every rank needs and takes seconds to import: a server imports it once, and ranks are forks of that
PRELOADED = ["torch.distributed.tensor", "torch.distributed.pipelining", "torch.distributed.pipelining.schedules",
             "autopar.runtime", "autopar.program", "autopar.driver", "benchmarks.accuracy.memory", "transformers",
             "pytest"]  # fmt: skip
START_S = 200.0  # for the first job: processes start slowly on a busy machine


def server() -> Any:
    """What starts processes that have imported what ranks need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankPool:
    """N processes with one thread each, joined by gloo."""

    def __init__(self, world: int, timeout_s: float = 180.0) -> None:
        self.world, self.timeout_s = world, timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    @property
    def is_running(self) -> bool:
        """Whether the processes have been started: the next job need not wait for that."""
        return bool(self._processes)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `fn(rank, world, *args)` on every rank and returns the results by rank."""
        patience_s = self.timeout_s
        if not self._processes:
            self._start()
            patience_s = max(START_S, self.timeout_s)
        for pipe in self._pipes:
            pipe.send((fn, args))
        results = self._collect(patience_s)
        failures = [(rank, value) for rank, (ok, value) in enumerate(results) if not ok]
        if failures:
            self.stop()  # ranks may disagree now about which collective comes next
            rank, text = failures[0]
            raise AssertionError(f"rank {rank} of {self.world} failed:\n{text}")
        return [value for _, value in results]

    def _start(self) -> None:
        port = _free_port()
        for rank in range(self.world):
            ours, theirs = server().Pipe()
            process = server().Process(target=_serve, args=(rank, self.world, port, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, patience_s: float) -> list[tuple[bool, Any]]:
        """Waits for all ranks; once one has failed, the others get a second: they may wait for it in vain."""
        results: dict[int, tuple[bool, Any]] = {}
        patience = patience_s
        while len(results) < self.world:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(open_pipes, patience)
            if not ready:
                break
            for pipe in ready:
                results[self._pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
            if not all(ok for ok, _ in results.values()):
                patience = 1.0
        silent = [rank for rank in range(self.world) if rank not in results]
        if silent and all(ok for ok, _ in results.values()):
            self.stop()
            raise TimeoutError(f"ranks {silent} gave no answer within {patience_s} s")
        return [results.get(rank, (True, None)) for rank in range(self.world)]

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


@cache
def pool(world: int) -> RankPool:
    """The pool of `world` ranks of this process, started at the first job."""
    shared = RankPool(world)
    atexit.register(shared.stop)
    return shared


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
    )
    from autopar import runtime

    collect_seldom()
    gc.freeze()  # what was imported stays: no collection looks at it again
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        runtime.set_exact_dropout(False)  # whatever the last job left
        torch.manual_seed(rank)  # another one on each rank, so that no job relies on equal ones, nor on the last job
        try:
            pipe.send((True, fn(rank, world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
