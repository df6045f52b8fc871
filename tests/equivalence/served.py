"""Workers and servers of a program, each a process of its own: as torchrun starts them, since servers are no part of
the workers' world."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

from autopar.program import load_source
from autopar.runtime.servers import SummingGroup
from benchmarks.accuracy.memory import measure_rank
from tests.equivalence.harness import run_rank
from tests.rank_pool import _free_port, server


def run_served(workers: int, servers: int, source: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn(rank, workers, source, *args)` returns on each worker, while servers serve; then what they ended with:
    None, or the text of their error. Raises AssertionError where a worker fails."""
    world, port, found = workers + servers, _free_port(), []
    pipes = [server().Pipe() for _ in range(world)]
    processes = [
        server().Process(target=_run, args=(rank, workers, world, port, theirs, source, fn, args), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        for rank, (ours, _) in enumerate(pipes):
            assert ours.poll(120.0), f"rank {rank} of {world} gave no answer"
            is_well, value = _answer(ours)
            assert is_well or rank >= workers, f"rank {rank} of {world} failed:\n{value}"
            found.append(value)
            processes[rank].join(60.0)
    finally:
        for process in processes:
            process.kill()
    return found


def _answer(pipe: Any) -> tuple[bool, Any]:
    """What a process sends; nothing of one that ended without a word."""
    try:
        found: tuple[bool, Any] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        return True, None
    return found


def _send(pipe: Any, is_well: bool, value: Any) -> None:
    """As bytes: the memory of tensors would end with the process."""
    whole = io.BytesIO()
    torch.save((is_well, value), whole)
    pipe.send_bytes(whole.getvalue())


def run_lost(workers: int, servers: int, source: str, batch: Any) -> str:
    """What the first server says when the last worker ends in the middle."""
    return str(run_served(workers, servers, source, lose_one, batch)[workers])


def _run(
    rank: int,
    workers: int,
    world: int,
    port: int,
    pipe: Any,
    source: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    from autopar import runtime as rt

    try:
        if rt.is_server(load_source(source).Program):
            rt.serve(load_source(source).Program, timeout_s=30)
            _send(pipe, True, None)
        else:
            _send(pipe, True, fn(rank, workers, source, *args))
    except BaseException:
        _send(pipe, False, traceback.format_exc())


def train(rank: int, workers: int, source: str, state: Any, batch: Any, optimizers: tuple[str, ...]) -> Any:
    """What `run_rank` returns."""
    return run_rank(rank, workers, source, state, batch, optimizers)


def peak(rank: int, workers: int, source: str, state: Any, batch: Any) -> int:
    """The most memory that this worker takes in a step."""
    return measure_rank(rank, workers, source, state, batch)[0].peak_bytes


def gradients(rank: int, workers: int, source: str, state: Any, batch: Any) -> list[torch.Tensor]:
    """This worker's gradients after a step, as they are stored."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    built.train_step(**batch)
    return [parameter.grad.to_local() for parameter in built.parameters() if parameter.grad is not None]


def lose_one(rank: int, workers: int, source: str, batch: Any) -> None:
    """The last worker ends in the middle of a step, without a word, when its first sum begins."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program, timeout_s=20)
    for parameter in built.parameters():
        torch.nn.init.zeros_(parameter)
    for _ in range(3):  # in the first, ranks compare batches
        built.train_step(**batch)
    if rank == workers - 1:
        SummingGroup._exchange = lambda *ignored: os._exit(3)  # type: ignore[method-assign] # before anything is sent
    try:
        built.train_step(**batch)
    except rt.CollectiveError:
        return
    raise AssertionError("expected an error where a worker is lost")
