"""The collectives, in one place: what is called on which backend, and how their bytes are counted.

Bytes of a collective (those of one rank's largest buffer):
    all_reduce      the buffer
    all_gather      the whole output, n × the shard
    reduce_scatter  the whole input, n × the shard
    all_to_all      the local buffer
    exchange        the local buffer, of an all-to-all whose sizes are known when it runs
    broadcast       the buffer
    servers         the buffer
    ring            what goes to the next rank of the axis
Buffers include the padding that uneven dims need: ceil(size / n) × n elements along the dim that is cut. A
tensor's bytes do not depend on which bucket it travels in.

Gloo has no reduce-scatter of its own (it all-reduces and throws most of the result away): there, an all-to-
all and a local sum move the bytes that a reduce-scatter should. It is counted as the reduce-scatter that it
is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.errors import CollectiveError
from autopar.runtime.mesh import Axis, SumsElsewhere, timeout_of
from autopar.runtime.ranges import collective

Wait = Callable[[], None]

# torch 2.13 renames two collectives and deprecates the old names; 2.10 has the old names only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_counters: list[Counter[tuple[str, str]]] = []


@contextmanager
def count_bytes() -> Iterator[Counter[tuple[str, str]]]:
    """Counts the bytes of every collective inside the block, by (collective, axis name)."""
    counter: Counter[tuple[str, str]] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        del _counters[next(n for n, other in enumerate(_counters) if other is counter)]  # counters may be equal


class Waited:
    """Seconds that a rank stood still for others, so far."""

    def __init__(self) -> None:
        self.seconds = 0.0


_waits: list[Waited] = []


@contextmanager
def count_waits() -> Iterator[Waited]:
    """Sums up how long this rank's thread stands still for collectives inside the block: on gloo, for all of what they
    take; on NCCL, a collective goes on behind the thread, and next to nothing."""
    waited = Waited()
    _waits.append(waited)
    try:
        yield waited
    finally:
        _waits.remove(waited)


@contextmanager
def _standing() -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        spent = time.perf_counter() - began
        for waited in _waits:
            waited.seconds += spent


def _count(kind: str, axis: Axis, buffer: Tensor) -> None:
    for counter in _counters:
        counter[kind, axis.name] += buffer.nbytes


@contextmanager
def explained(kind: str, axis: Axis, num_bytes: int, starts: bool = False) -> Iterator[None]:
    """Raises CollectiveError in place of torch's error, which names neither the collective nor who is missing. In a
    profiler's trace, a range: what the rank stands still for, or what it starts."""
    try:
        with collective(kind, num_bytes, axis.name, starts), _standing():
            yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(_lost(f"{kind} of {num_bytes:,} bytes over axis {axis.name}", axis, error)) from error


def _lost(what: str, axis: Axis, error: RuntimeError) -> str:
    assert axis.group is not None, "an axis of one rank has no collectives"
    ranks = dist.get_process_group_ranks(axis.group)
    others = [rank for rank in ranks if rank != dist.get_rank()]
    return _advice(what, others, axis.timeout_s, error)


def _advice(what: str, others: Sequence[int], timeout_s: float | None, error: RuntimeError) -> str:
    waited = f"within {timeout_s:g} s " if timeout_s is not None else ""
    who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(map(str, others))}"
    text = " ".join(str(error).split())
    return (
        f"rank {dist.get_rank()} of {dist.get_world_size()}: {what} did not come to its end. Most likely {who} ended, "
        f"or did not answer {waited}(`rt.build(..., timeout_s=...)` sets how long is waited for a slow one). Look for "
        "the first error in that rank's log, then start all ranks again: train.py goes on from its last checkpoint, "
        f"and `torchrun --max-restarts` starts it anew by itself. torch says: {text[:300]}"
    )


@contextmanager
def explained_group(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Like `explained`, for what all ranks of a group do together."""
    try:
        with _standing():
            yield
    except RuntimeError as error:
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        raise CollectiveError(_advice(what, others, timeout_of(group), error)) from error


def broadcast(whole: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Gives all ranks of a group what the source (a global rank) has, in place. Raises CollectiveError."""
    with explained_group(f"broadcast of {whole.nbytes:,} bytes from rank {source}", group):
        dist.broadcast(whole.view(torch.uint8) if whole.dtype == torch.bool else whole, source, group=group)
    return whole


def broadcast_over(whole: Tensor, axis: Axis) -> None:
    """Gives all ranks of an axis what its first has, in place. Counted, as the whole. Raises CollectiveError."""
    if axis.group is not None:
        _count("broadcast", axis, whole)
        broadcast(whole, dist.get_global_rank(axis.group, 0), axis.group)


def broadcast_any(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Gives all ranks of a group what the source has: a tensor, of which the others need not know the shape, or
    something else. Raises CollectiveError."""
    is_source = dist.get_rank() == source
    told: list[Any] = [None, None]
    if is_source:
        told = [True, (value.shape, value.dtype)] if isinstance(value, Tensor) else [False, value]
    with explained_group(f"broadcast from rank {source}", group):
        dist.broadcast_object_list(told, source, group=group, device=device)
    if not told[0]:
        return told[1]
    shape, dtype = told[1]
    whole = value.contiguous() if is_source else torch.empty(shape, dtype=dtype, device=device)
    return broadcast(whole, source, group)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What each rank of a group has, on all of them. Raises CollectiveError."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with explained_group("gathering what each rank has", group):
        dist.all_gather_object(found, value, group=group)
    return found


def reduce_over(buffer: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Reduces the buffer over all ranks of a group, in place; a few bytes that are not counted. Raises
    CollectiveError."""
    with explained_group(f"all_reduce of {buffer.nbytes:,} bytes", group):
        dist.all_reduce(buffer, op=op, group=group)


class Sending:
    """A tensor that is under way to, or from, one other rank."""

    def __init__(self, work: Any, what: str, peer: int, timeout_s: float) -> None:
        self._work, self._what, self._peer, self._timeout_s = work, what, peer, timeout_s

    def wait(self) -> None:
        """Waits until it has left, or has come. Raises CollectiveError when the other rank does not answer."""
        with _explained_peer(self._what, self._peer, self._timeout_s):
            self._work.wait()


def start_send(
    part: Tensor, peer: int, group: dist.ProcessGroup, tag: int, what: str, timeout_s: float, axis: str = "stages"
) -> Sending:  # fmt: skip
    """Starts to send a contiguous tensor, which must stay as it is until then. axis: for which its bytes count."""
    for counter in _counters:
        counter["send", axis] += part.nbytes
    with _explained_peer(what, peer, timeout_s):
        return Sending(dist.isend(_flat(part), peer, group=group, tag=tag), what, peer, timeout_s)


def start_receive(
    part: Tensor, peer: int, group: dist.ProcessGroup, tag: int, what: str, timeout_s: float
) -> Sending:  # fmt: skip
    """Starts to receive into a contiguous tensor."""
    with _explained_peer(what, peer, timeout_s):
        return Sending(dist.irecv(_flat(part), peer, group=group, tag=tag), what, peer, timeout_s)


@contextmanager
def _explained_peer(what: str, peer: int, timeout_s: float) -> Iterator[None]:
    try:
        with _standing():
            yield
    except RuntimeError as error:
        raise CollectiveError(_advice(f"sending {what}", [peer], timeout_s, error)) from error


def _start(kind: str, axis: Axis, buffer: Tensor, start: Callable[[], Any]) -> Wait:
    """Starts an asynchronous collective; its bytes are those of `buffer`."""
    num_bytes = buffer.nbytes
    with explained(kind, axis, num_bytes, starts=True):
        work = start()

    def wait() -> None:
        with explained(kind, axis, num_bytes):
            work.wait()

    return wait


def all_reduce(buffer: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> None:
    """Sums (or reduces by `op`) the buffer over the axis, in place."""
    if axis.size > 1 and alone_on(axis) is None:
        _count("all_reduce", axis, buffer)
        with explained("all_reduce", axis, buffer.nbytes):
            dist.all_reduce(buffer, op=op, group=axis.group)


def start_all_reduce(buffer: Tensor, axis: Axis) -> Wait:
    """Starts an in-place sum over the axis; the buffer is whole once the returned function was called."""
    if alone_on(axis) is not None:
        return lambda: None
    _count("all_reduce", axis, buffer)
    return _start("all_reduce", axis, buffer, lambda: dist.all_reduce(buffer, group=axis.group, async_op=True))


def start_sum_over_servers(buffer: Tensor, axis: Axis, group: SumsElsewhere) -> Wait:
    """Starts an in-place sum over the axis by servers; it is whole once the returned function was called."""
    _count("servers", axis, buffer)
    future, num_bytes = group.start(buffer), buffer.nbytes

    def wait() -> None:
        with explained("servers", axis, num_bytes):
            future.result()

    return wait


def finish_late(axes: Iterable[Axis]) -> None:
    """Waits for the collectives that `add_late` was told of."""
    for axis in axes:
        while axis.late:
            axis.late.pop(0)()


class OwnSummands:
    """What a rank computes by itself of a sum over ranks that it does not wait for. counts: of its own samples, which
    the sum is not divided by yet."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.counts: list[Tensor] = []


_alone: list[OwnSummands] = []


@contextmanager
def alone(group: dist.ProcessGroup) -> Iterator[OwnSummands]:
    """Inside, sums over the group's axis are this rank's summands, and nothing is divided by a count over it."""
    found = OwnSummands(group)
    _alone.append(found)
    try:
        yield found
    finally:
        _alone.remove(found)


def alone_on(axis: Axis) -> OwnSummands | None:
    """What is noted of a step in which ranks along the axis do not wait for each other; None in others."""
    return next((found for found in _alone if found.group is axis.group), None)


def add_late(wait: Wait, axis: Axis) -> None:
    """Leaves a collective under way until the end of the step: nothing reads its result before."""
    axis.late.append(wait)


def all_gather(output: Tensor, shard: Tensor, axis: Axis) -> None:
    """Writes the shards of all ranks of the axis one after the other into `output` (both contiguous)."""
    _count("all_gather", axis, output)
    with explained("all_gather", axis, output.nbytes):
        _all_gather(_flat(output), _flat(shard), group=axis.group)


def start_all_gather(output: Tensor, shard: Tensor, axis: Axis) -> Wait:
    """Starts `all_gather`; `output` may be read once the returned function was called."""
    _count("all_gather", axis, output)
    into, own = _flat(output), _flat(shard)
    return _start("all_gather", axis, output, lambda: _all_gather(into, own, group=axis.group, async_op=True))


def reduce_scatter(output: Tensor, buffer: Tensor, axis: Axis) -> None:
    """Sums the buffers of all ranks; rank k of the axis gets the k-th of n equal parts (both contiguous)."""
    start_reduce_scatter(output, buffer, axis)()


def start_reduce_scatter(output: Tensor, buffer: Tensor, axis: Axis) -> Wait:
    """Starts `reduce_scatter`; `output` may be read once the returned function was called."""
    _count("reduce_scatter", axis, buffer)
    group, into, whole = axis.group, _flat(output), _flat(buffer)
    if not axis.is_gloo:
        return _start("reduce_scatter", axis, buffer, lambda: _reduce_scatter(into, whole, group=group, async_op=True))
    parts = torch.empty_like(whole)
    finish = _start(
        "reduce_scatter", axis, buffer, lambda: dist.all_to_all_single(parts, whole, group=group, async_op=True)
    )

    def wait() -> None:
        finish()
        _sum_parts(into, parts.view(axis.size, -1))

    return wait


def all_to_all(output: Tensor, buffer: Tensor, axis: Axis) -> None:
    """Sends the k-th of n equal parts of `buffer` to rank k of the axis (both contiguous)."""
    _count("all_to_all", axis, buffer)
    with explained("all_to_all", axis, buffer.nbytes):
        dist.all_to_all_single(_flat(output), _flat(buffer), group=axis.group)


def exchange(output: Tensor, received: list[int], buffer: Tensor, sent: list[int], axis: Axis) -> None:
    """Sends `sent[k]` elements of `buffer` to rank k of the axis, in order; `received[k]` come from it (both flat)."""
    _count("all_to_all", axis, buffer)
    with explained("all_to_all", axis, buffer.nbytes):
        dist.all_to_all_single(output, buffer, received, sent, group=axis.group)


def start_pass_on(output: Tensor, buffer: Tensor, axis: Axis, distance: int = 1) -> Wait:
    """Starts to send a buffer to the next rank of the axis, or so many further, and to receive that of as many before
    (both flat); they stay as they are until the returned function was called. Nothing is sent of an empty one."""
    _count("ring", axis, buffer)
    group = axis.group
    assert group is not None, "an axis of one rank has no ring"
    peers = [dist.get_global_rank(group, (axis.index + step) % axis.size) for step in (distance, -distance)]
    ways = ((dist.isend, buffer, peers[0]), (dist.irecv, output, peers[1]))
    started = [dist.P2POp(start, x, peer, group) for start, x, peer in ways if x.numel()]
    with explained("ring", axis, buffer.nbytes):
        works = dist.batch_isend_irecv(started) if started else []

    def wait() -> None:
        with explained("ring", axis, buffer.nbytes):
            for work in works:
                work.wait()

    return wait


def start_exchange(output: Tensor, received: list[int], buffer: Tensor, sent: list[int], axis: Axis) -> Wait:
    """Starts an exchange whose sizes no plan knows; `output` may be read once the returned function was called."""
    _count("exchange", axis, buffer)
    group = axis.group
    return _start(
        "exchange",
        axis,
        buffer,
        lambda: dist.all_to_all_single(output, buffer, received, sent, group=group, async_op=True),
    )


def _sum_parts(output: Tensor, parts: Tensor) -> None:
    """Adds in rank order, so that every split of the same data is summed alike (both flat)."""
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


def _flat(buffer: Tensor) -> Tensor:
    """The contiguous buffer as one row; gloo knows no bool."""
    return (buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer).view(-1)
