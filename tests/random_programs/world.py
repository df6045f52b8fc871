"""Ranks as threads of this process: the real runtime and torch's own process groups, without sockets.

Each thread is one rank with its own default process group (torch's thread-local world, which torch tests DTensor
with), whose collectives go through an `Exchange`. A job takes milliseconds; the threads and their device meshes stay.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from autopar import runtime as rt
from autopar.runtime import comm, mesh, randomness
from tests.random_programs.exchange import Channel, Combine, Exchange, Meeting, MeetingError

PATIENCE_S = 60.0
OBJECTS = "gathering objects"
REDUCTIONS: dict[Any, tuple[str, Callable[[Tensor], Tensor]]] = {  # of what the ranks bring, stacked
    dist.ReduceOp.SUM: ("sum", lambda parts: parts.sum(0)),
    dist.ReduceOp.AVG: ("avg", lambda parts: parts.sum(0) / len(parts)),
    dist.ReduceOp.MAX: ("max", lambda parts: parts.amax(0)),
    dist.ReduceOp.MIN: ("min", lambda parts: parts.amin(0)),
    dist.ReduceOp.PRODUCT: ("product", lambda parts: parts.prod(0)),
}


def _reduction(options: Any) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Its name and what it makes of the ranks' tensors; one of bits, say, is never taken for a sum."""
    asked = dist.ReduceOp.SUM if options is None else options.reduceOp
    for operation, how in REDUCTIONS.items():
        if asked == operation:
            return how
    raise NotImplementedError(f"expected one of {[name for name, _ in REDUCTIONS.values()]}, found {asked}")


class _Here(threading.local):
    """What a thread knows of itself."""

    rank: int = 0
    exchange: Exchange | None = None


_here = _Here()


class _Work(dist.Work):
    """A collective under way: its result is written when it is waited for."""

    def __init__(self, meeting: Meeting, output: Tensor) -> None:
        super().__init__()
        self._meeting, self._output = meeting, output
        self._done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            self._done = True
            assert _here.exchange is not None
            result = _here.exchange.take(_here.rank, self._meeting)
            with torch.no_grad():
                self._output.detach().view(-1).copy_(result.view(-1))
        return True

    def is_completed(self) -> bool:
        return self._done


class _Sent(dist.Work):
    """A tensor that is with the exchange: whoever waits for it to leave, in whichever thread, need not."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ThreadGroup(dist.ProcessGroup):
    """A process group of threads. `members` are the ranks, in order."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.members = _members(store, rank, size)

    def getBackendName(self) -> str:
        return "threads"

    @property
    def group_name(self) -> str:
        """As registered in this thread's world."""
        name: str = distributed_c10d._world.pg_names[self]
        return name

    def _start(
        self, what: str, output: Tensor, part: Tensor, combine: Combine, sizes: list[int] | None = None
    ) -> _Work:
        """With `sizes`, these go along, and ranks may hold parts of other shapes."""
        exchange = _here.exchange
        assert exchange is not None, "a collective outside of a job"
        call = f"{what} {tuple(part.shape) if sizes is None else ''} {part.dtype}"
        if what != OBJECTS:
            exchange.sent[_here.rank][what.split(" ")[0]] += part.nbytes if sizes else max(part.nbytes, output.nbytes)
        snapshot: Any = part.detach().clone(memory_format=torch.contiguous_format)
        if sizes is not None:
            snapshot = snapshot, sizes
        meeting = exchange.post(_here.rank, self.members, call, snapshot, combine)
        with torch.no_grad():  # nobody may read it before
            output.detach().fill_(float("nan") if output.is_floating_point() else 0)
        return _Work(meeting, output)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        name, reduced = _reduction(opts)

        def combine(parts: list[Tensor]) -> list[Tensor]:
            return [reduced(torch.stack(parts))] * len(parts)

        return self._start(f"all_reduce {name}", tensor, tensor, combine)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        def combine(parts: list[Tensor]) -> list[Tensor]:
            return [torch.cat([part.view(-1) for part in parts])] * len(parts)

        return self._start("all_gather", output, tensor, combine)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        name, reduced = _reduction(opts)

        def combine(parts: list[Tensor]) -> list[Tensor]:
            return list(reduced(torch.stack(parts)).view(-1).chunk(len(parts)))

        return self._start(f"reduce_scatter {name}", output, tensor, combine)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> dist.Work:
        count = len(self.members)
        sizes = sizes or [tensor.numel() // count] * count

        def combine(parts: list[Any]) -> list[Tensor]:
            pieces = [torch.split(part.view(-1), lengths) for part, lengths in parts]
            return [torch.cat([piece[index] for piece in pieces]) for index in range(count)]

        return self._start("all_to_all", output, tensor, combine, sizes)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        exchange = _here.exchange
        assert exchange is not None, "a send outside of a job"
        exchange.sent[_here.rank]["send"] += tensor.nbytes
        channel = Channel(self.members, _here.rank, self.members[target], tag)
        exchange.send(channel, f"{tuple(tensor.shape)} {tensor.dtype}", tensor.detach().clone())
        return _Sent()

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        exchange = _here.exchange
        assert exchange is not None, "a receive outside of a job"
        channel = Channel(self.members, self.members[source], _here.rank, tag)
        meeting = exchange.receive(channel, f"{tuple(tensor.shape)} {tensor.dtype}")
        with torch.no_grad():  # nobody may read it before
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 0)
        return _Work(meeting, tensor)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        root = opts.rootRank

        def combine(parts: list[Tensor]) -> list[Tensor]:
            return [parts[root]] * len(parts)

        return self._start("broadcast", tensor, tensor, combine)

    # what torch's functional collectives, and so DTensors, call: always with one tensor here

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """What objects are gathered by, which is none of a step's traffic: done when it returns."""
        (parts,), (tensor,) = outputs, tensors
        whole = tensor.new_empty(len(parts) * tensor.numel())

        def combine(found: list[Tensor]) -> list[Tensor]:
            return [torch.cat([part.view(-1) for part in found])] * len(found)

        self._start(OBJECTS, whole, tensor, combine).wait()
        for part, found in zip(parts, whole.chunk(len(parts)), strict=True):
            part.copy_(found.view_as(part))
        return _Sent()

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (output,), (tensor,) = outputs, tensors
        return self.all_gather_single(output, tensor)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        (output,), (tensor,) = outputs, tensors
        return self.reduce_scatter_single(output, tensor)


def _members(store: Any, rank: int, size: int) -> tuple[int, ...]:
    """Every member tells the others its rank in the world."""
    store.set(f"world rank of {rank}", str(_here.rank))
    return tuple(int(store.get(f"world rank of {index}")) for index in range(size))


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> ThreadGroup:
    return ThreadGroup(store, rank, size, timeout)


dist.Backend.register_backend("threads", _make_group, devices=["cpu"])


class _OwnStream(threading.local):
    """The stream of dropout masks, which a process has one of: here each thread has."""

    def __init__(self) -> None:
        self.__dict__["own"] = randomness._Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["own"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["own"], name, value)


class _OwnGroups(threading.local):
    """The groups that programs of a process share: here those of a thread do."""

    def __init__(self) -> None:
        self.own: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        return self.own.get(key)

    def items(self) -> Any:
        return self.own.items()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.own[key] = value


class _OwnCounters(threading.local):
    """Who counts the bytes of collectives: in a process everybody's, here those of a thread."""

    def __init__(self) -> None:
        self.own: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.own)

    def append(self, counter: Any) -> None:
        self.own.append(counter)

    def __delitem__(self, index: int) -> None:
        del self.own[index]


_groups, _counters = _OwnGroups(), _OwnCounters()
_drawing = threading.Lock()


def _draw_alone(*args: Any, **kwargs: Any) -> Any:
    """Torch's generators, which `draw` sets for as long as an operator runs, are the process's."""
    with _drawing:
        return randomness.draw(*args, **kwargs)


@contextmanager
def _threads_as_ranks() -> Iterator[None]:
    """While jobs run, what torch and the runtime keep for the process is each thread's own.

    Whether recomputation stops early is torch's for the process, and the runtime never wants it to. How DTensors are
    gathered is remembered by torch for the process, and depends on the rank where slices are uneven.
    """
    held_hook = sys.excepthook
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with (
            mock.patch.object(distributed_c10d, "_world", ThreadLocalWorld()),
            mock.patch.object(randomness, "_stream", _OwnStream()),
            mock.patch.object(rt, "draw", _draw_alone),
            mock.patch.object(_redistribute, "_gen_transform_infos", _redistribute._gen_transform_infos_non_cached),
            mock.patch.object(mesh, "_groups", _groups),
            mock.patch.object(comm, "_counters", _counters),
            mock.patch.object(torch.utils.checkpoint, "_enable_checkpoint_early_stop", False),
        ):
            yield
    finally:
        sys.excepthook = held_hook
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


class ThreadWorld:
    """A world of threads that live as long as the process. One job at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: list[dict[str, int]] = []
        self._store = dist.HashStore()
        self._jobs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self._results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for rank in range(size):
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `fn(rank, *args)` on every rank; results by rank. Raises MeetingError with the first rank's failure.

        `sent` then holds the bytes that each rank has handed to each collective.
        """
        exchange = Exchange(self.size)
        with _threads_as_ranks():
            for jobs in self._jobs:
                jobs.put((exchange, fn, args))
            results = self._collect(exchange)
        self.sent = [dict(counter) for counter in exchange.sent]
        if exchange.error is not None:
            raise MeetingError(exchange.error)
        return [results[rank] for rank in range(self.size)]

    def _collect(self, exchange: Exchange) -> dict[int, Any]:
        try:
            return dict(self._results.get(timeout=PATIENCE_S) for _ in range(self.size))
        except queue.Empty:
            thread_world.cache_clear()  # the next job has other threads
            exchange.give_up(f"not all ranks have answered within {PATIENCE_S} s")
            raise MeetingError(exchange.error) from None

    def _serve(self, rank: int) -> None:
        _here.rank = rank
        started = False
        while True:
            _here.exchange, fn, args = self._jobs[rank].get()
            result, error = None, None
            try:
                if not started:
                    started = True
                    dist.init_process_group("threads", rank=rank, world_size=self.size, store=self._store)
                result = fn(rank, *args)
            except MeetingError as failure:
                error = str(failure)
            except BaseException:
                error = traceback.format_exc()
            _here.exchange.leave(rank, error)
            _here.exchange = None
            self._results.put((rank, result))


@cache
def thread_world(size: int) -> ThreadWorld:
    """The world of that many threads of this process."""
    return ThreadWorld(size)


_meshes = threading.local()


def device_mesh(axes: tuple[tuple[str, int], ...]) -> DeviceMesh | None:
    """This thread's device mesh with the named axes, made once; None for a world of one."""
    known = _meshes.__dict__.setdefault("known", {})
    if axes not in known:
        names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
        known[axes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    found: DeviceMesh = known[axes]
    return found


def sent_so_far() -> dict[str, int]:
    """The bytes that this thread's rank has handed to each collective in this job."""
    return dict(_here.exchange.sent[_here.rank]) if _here.exchange is not None else {}
