"""Ranks as threads of one process: the runtime's own collectives run, over mailboxes in place of a network."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.placement import Axis
from autopar.runtime import comm
from autopar.runtime import mesh as runtime_mesh

Coordinate = tuple[int, ...]
TIMEOUT_S = 20.0


class Group:
    """The ranks that differ in one axis: everyone posts something, then reads what all posted."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.posted: list[Any] = [None] * size

    def trade(self, index: int, value: Any) -> list[Any]:
        self.posted[index] = value
        self.barrier.wait(TIMEOUT_S)
        found = list(self.posted)
        self.barrier.wait(TIMEOUT_S)
        return found


class Member:
    """A group as one of its ranks knows it."""

    def __init__(self, group: Group, index: int) -> None:
        self.group, self.index = group, index

    def trade(self, value: Any) -> list[Any]:
        return self.group.trade(self.index, value)


class _Done:
    def wait(self) -> None:
        """Nothing is left to wait for."""


def all_reduce(buffer: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> _Done:
    parts = torch.stack(group.trade(buffer.clone()))
    buffer.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))
    return _Done()


def all_to_all_single(
    output: Tensor, buffer: Tensor, received: Any = None, sent: Any = None, group: Any = None, async_op: bool = False
) -> _Done:
    size = len(group.group.posted)
    parts = buffer.clone().split(sent if sent is not None else buffer.numel() // size)
    found = [row[group.index] for row in group.trade(parts)]
    assert received is None or [part.numel() for part in found] == list(received)
    output.copy_(torch.cat(found))
    return _Done()


def all_gather(output: Tensor, shard: Tensor, group: Any, async_op: bool = False) -> _Done:
    output.copy_(torch.cat(group.trade(shard.clone())))
    return _Done()


_own = threading.local()


def sent() -> Counter[str]:
    """Bytes that this rank has handed to each collective since its job began."""
    return Counter(_own.sent)


def _count(kind: str, axis: runtime_mesh.Axis, buffer: Tensor) -> None:
    _own.sent[kind] += buffer.numel() * buffer.element_size()


_FAKE = SimpleNamespace(all_reduce=all_reduce, all_to_all_single=all_to_all_single, ReduceOp=dist.ReduceOp)


@contextmanager
def _mailboxes() -> Any:
    with (
        mock.patch.object(comm, "dist", _FAKE),
        mock.patch.object(comm, "_all_gather", all_gather),
        mock.patch.object(comm, "_count", _count),
    ):
        yield


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


def run(axes: Sequence[Axis], job: Callable[[Coordinate, runtime_mesh.RankMesh], Any]) -> dict[Coordinate, Any]:
    """The results of `job(coordinate, mesh)` on every rank of the axes; the first rank's error is raised."""
    sizes = [axis.size for axis in axes]
    groups: dict[tuple[int, Coordinate], Group] = {}
    coordinates = list(itertools.product(*map(range, sizes)))
    meshes = {coordinate: _mesh(axes, coordinate, groups) for coordinate in coordinates}
    with _mailboxes():
        futures = {c: _threads(len(coordinates)).submit(partial(_guard, groups, job), c, meshes[c]) for c in meshes}
        errors = [error for future in futures.values() if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
    return {coordinate: future.result() for coordinate, future in futures.items()}


def _guard(groups: dict[Any, Group], job: Callable[..., Any], *args: Any) -> Any:
    """Runs the job; when it fails, the others are told, so that they don't wait for it."""
    _own.sent = Counter()
    try:
        return job(*args)
    except BaseException:
        for group in groups.values():
            group.barrier.abort()
        raise


def _mesh(axes: Sequence[Axis], coordinate: Coordinate, groups: dict[Any, Group]) -> runtime_mesh.RankMesh:
    made = []
    for position, (axis, index) in enumerate(zip(axes, coordinate, strict=True)):
        others = (*coordinate[:position], -1, *coordinate[position + 1 :])
        group = groups.setdefault((position, others), Group(axis.size))
        made.append(runtime_mesh.Axis(axis.name, axis.size, index, Member(group, index), True))  # type: ignore[arg-type]
    return runtime_mesh.RankMesh(tuple(made), None, torch.device("cpu"))
