"""Sums of gradients over servers: spare ranks that have no parameters, and sum what the workers of an axis send them.

A buffer goes in pieces. Of each piece, a worker sends every rank that sums its part ("push"); that rank adds up the
parts in the order of the workers, so that all of them get the same bits, and sends the sum back to each ("pull"), while
the next piece is on its way there. Workers may sum parts, too, where servers alone would take longer.

Workers do so in a thread of their own, buffer after buffer, while the backward pass goes on. They are the world of
`torch.distributed`; servers are no part of that, and share groups with the workers of each axis alone. The first worker
of a group tells the servers of each buffer what comes, and when nothing comes any more, at the end of its process.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # torch lists no exports
from torch.distributed.rendezvous import rendezvous

from autopar.runtime.declare import Program, Servers
from autopar.runtime.errors import CollectiveError, ProgramError, WorldError
from autopar.runtime.mesh import TIMEOUT_S
from autopar.runtime.packing import PIECE_BYTES

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_END, _SUM = range(2)
_WORDS = 5  # of what the first worker tells servers: end or sum, elements, dtype, parts of a worker and of a server
_IDLE = timedelta(days=30)  # between two steps: workers evaluate, save, wait for data; lost ones end their connection
_stores: dict[Any, Store] = {}  # of the world whose workers have servers


def is_server(program: type[Program]) -> bool:
    """Whether this process, started by torchrun, is a server of the program: to call `serve`."""
    servers = getattr(program, "SERVERS", None)
    return servers is not None and int(os.environ.get("RANK", "0")) >= math.prod(program.AXES.values())


def start_workers(program: type[Program], backend: str, timeout_s: float) -> None:
    """Makes the world of the workers, which servers are no part of. Raises WorldError."""
    if dist.is_initialized() and dist.group.WORLD not in _stores:
        raise WorldError(
            "expected to make the process group of a program with servers, of which workers alone are a part, found "
            "one; leave torch.distributed.init_process_group to rt.build"
        )
    if dist.is_initialized():
        return
    if _stores:
        raise WorldError("expected one process group for all programs with servers, which serve until it ends, found "
                         "another to be made; start the script again")  # fmt: skip
    store, count = _store_of(program, timeout_s), math.prod(program.AXES.values())
    rank = int(os.environ["RANK"])
    if rank >= count:
        raise WorldError(f"expected rank {rank} of {count} workers to serve them, found it to build a program; call "
                         "rt.serve(program.Program) where rt.is_server(program.Program)")  # fmt: skip
    dist.init_process_group(
        backend, store=PrefixStore("workers", store), rank=rank, world_size=count, timeout=timedelta(seconds=timeout_s)
    )
    _stores[dist.group.WORLD] = store


def _store_of(program: type[Program], timeout_s: float) -> Store:
    """Of all processes. Raises WorldError where they are not as many as workers and servers."""
    assert program.SERVERS is not None, "asked for of programs with servers"
    workers, servers = math.prod(program.AXES.values()), program.SERVERS.count
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != workers + servers:
        raise WorldError(
            f"the program needs {workers} ranks and {servers} servers, found {found} processes running; start it with "
            f"`torchrun --nproc-per-node {workers + servers} …`, servers last, or plan again"
        )
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class SummingGroup:
    """The workers along an axis and all servers, as one of them sees the group. index: workers first."""

    def __init__(
        self, store: Store, name: str, index: int, workers: int, servers: int, parts: tuple[int, int], timeout_s: float
    ) -> None:
        self.name, self.index, self.workers, self.servers, self.parts = name, index, workers, servers, parts
        timeout = timedelta(seconds=timeout_s)
        size = workers + servers
        self._group: Any = dist.ProcessGroupGloo(PrefixStore(name, store), index, size, timeout)
        self._thread: ThreadPoolExecutor | None = None
        if index == 0:
            Finalize(None, self._end, exitpriority=0)  # when the process ends, whoever started it

    # of workers

    def start(self, flat: Tensor) -> Future[None]:
        """Sums a flat buffer over the workers, in place, after those that were started before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "autopar-servers")
        return self._thread.submit(self._sum, flat)

    def _sum(self, flat: Tensor) -> None:
        if self.index == 0:
            self._tell(_SUM, flat.numel(), _DTYPES.index(flat.dtype), *self.parts)
        self._exchange(flat.numel(), flat.dtype, flat)

    def _tell(self, *words: int) -> None:
        told = torch.tensor([*words, *[0] * (_WORDS - len(words))])
        servers = range(self.workers, self.workers + self.servers)
        for work in [self._group.send([told], server, 0) for server in servers]:
            work.wait()

    def _end(self) -> None:
        with suppress(RuntimeError):  # of a server that is lost, and has said why
            self._tell(_END)

    # of servers

    def serve(self) -> None:
        """Sums whatever workers send, until they end. Raises RuntimeError where a rank is lost, ProgramError where
        workers run another program."""
        while True:
            told = torch.empty(_WORDS, dtype=torch.int64)
            self._group.recv([told], 0, 0).wait(_IDLE)
            op, count, dtype, *parts = told.tolist()
            if op == _END:
                return
            if tuple(parts) != self.parts:
                raise ProgramError(f"expected workers of the same program, found {parts} parts, not {self.parts}")
            self._exchange(count, _DTYPES[dtype], None)

    # of both

    def _exchange(self, count: int, dtype: torch.dtype, flat: Tensor | None) -> None:
        """All pieces of a buffer: what is pushed, summed and pulled."""
        step, pulls = max(1, PIECE_BYTES // dtype.itemsize), list[Any]()
        pushed: tuple[Any, Tensor, Tensor | None, list[int]] | None = None
        for start in [*range(0, count, step), count]:
            data = None if flat is None else flat[start : start + step]
            lengths = self._lengths(min(step, count - start))
            arriving = None if start == count else self._push(data, lengths, dtype)
            if pushed is not None:
                work, received, before, sizes = pushed
                work.wait()
                pulls.append(self._pull(before, received, sizes))
            pushed = None if arriving is None else (*arriving, data, lengths)
            while len(pulls) > 1 or (pulls and start == count):
                pulls.pop(0)[0].wait()

    def _push(self, data: Tensor | None, lengths: list[int], dtype: torch.dtype) -> tuple[Any, Tensor]:
        own = lengths[self.index]
        received = torch.empty(self.workers * own, dtype=dtype)
        sent = received.new_empty(0) if data is None else data
        return self._all_to_all(received, sent, own, [0] * len(lengths) if data is None else lengths), received

    def _all_to_all(self, received: Tensor, sent: Tensor, own: int, lengths: list[int]) -> Any:
        each = [own] * self.workers + [0] * self.servers
        return self._group.alltoall_base(received, sent, each, lengths, dist.AllToAllOptions())

    def _pull(self, data: Tensor | None, received: Tensor, lengths: list[int]) -> tuple[Any, Tensor]:
        """The sum of what has come goes to each worker. Returns what is sent, which must stay until then, as well."""
        own = lengths[self.index]
        parts = received.view(self.workers, own)
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        sent = total.repeat(self.workers)
        each = [own] * self.workers + [0] * self.servers
        back = lengths if data is not None else [0] * len(lengths)
        into = received.new_empty(0) if data is None else data
        return self._group.alltoall_base(into, sent, back, each, dist.AllToAllOptions()), sent

    def _lengths(self, count: int) -> list[int]:
        """How many of so many elements each member sums."""
        shares = [self.parts[0]] * self.workers + [self.parts[1]] * self.servers
        ends = [count * end // sum(shares) for end in accumulate(shares, initial=0)]
        return [stop - start for start, stop in pairwise(ends)]


def summing_groups(program: type[Program], timeout_s: float) -> Mapping[str, SummingGroup]:
    """By axis, this worker's group with the servers; all workers and servers make theirs at the same time."""
    assert program.SERVERS is not None, "asked for of programs with servers"
    known = _made.get((id(dist.group.WORLD), program.SERVERS, tuple(program.AXES.items())))
    if known is None:
        known = _groups(program, program.SERVERS, _stores[dist.group.WORLD], dist.get_rank(), timeout_s)
        _made[id(dist.group.WORLD), program.SERVERS, tuple(program.AXES.items())] = known
    return {name: group for (name, _), group in known.items()}


_made: dict[Any, dict[tuple[str, int], SummingGroup]] = {}


def _groups(
    program: type[Program], servers: Servers, store: Store, rank: int, timeout_s: float
) -> dict[tuple[str, int], SummingGroup]:
    """The groups that a rank is in, by axis and row."""
    found, count = {}, math.prod(program.AXES.values())
    for name, parts in servers.parts:
        for row, ranks in enumerate(_rows(program.AXES, name)):
            index = len(ranks) + rank - count if rank >= count else ranks.index(rank) if rank in ranks else None
            if index is not None:
                found[name, row] = SummingGroup(
                    store, f"servers/{name}/{row}", index, len(ranks), servers.count, parts, timeout_s
                )
    return found


def _rows(sizes: Mapping[str, int], name: str) -> list[list[int]]:
    """The ranks along an axis, of each coordinate of the others."""
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    rows: list[list[int]] = grid.movedim([*sizes].index(name), -1).reshape(-1, sizes[name]).tolist()
    return rows


def serve(program: type[Program], timeout_s: float = TIMEOUT_S) -> None:
    """Sums gradients for the workers of a program until they end, in a process that `is_server` says is one.

    A worker that does not answer for `timeout_s` seconds while a sum is under way is given up (CollectiveError).
    Raises WorldError when the processes that run are not the workers and servers of the program.
    """
    assert program.SERVERS is not None, "asked of programs with servers"
    store, rank = _store_of(program, timeout_s), int(os.environ["RANK"])
    groups = _groups(program, program.SERVERS, store, rank, timeout_s)
    ends = queue.Queue[tuple[str, Exception | None]]()
    for group in groups.values():
        threading.Thread(target=_told, args=(group, ends.put), daemon=True).start()
    for _ in groups:
        name, error = ends.get()
        if error is not None:
            raise CollectiveError(
                f"server rank {rank}: a sum of {name} did not come to its end; most likely a worker ended, or did not "
                f"answer within {timeout_s:g} s. Look for the first error in the workers' logs, then start all ranks "
                f"again: train.py goes on from its last checkpoint. torch says: {' '.join(str(error).split())[:300]}"
            ) from error


def _told(group: SummingGroup, tell: Callable[[tuple[str, Exception | None]], None]) -> None:
    """Serves one group, and tells how that ended."""
    try:
        group.serve()
        tell((group.name, None))
    except Exception as error:  # whatever it is ends the process, loudly
        tell((group.name, error))
