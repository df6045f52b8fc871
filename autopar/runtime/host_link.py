"""The host's memory and the link between it and this rank's device: what is kept there, and copies each way.

    CUDA    pinned memory; a stream for each direction, which the device computes beside
    CPU     the device's memory is the host's: what is kept on the host is mapped beside what torch allocates, and
            copies, made at once, are waited for until a link of the stated rates would have made them (`LinkRates`)

Copies of one direction follow each other; the two directions do not wait for each other.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Tensors of equal shapes and dtypes: what is written, and what is read."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """A simulated link: bytes a second from the device and to it, and nanoseconds that any copy takes beside."""

    down_bandwidth: float
    up_bandwidth: float
    copy_ns: int


@dataclass(slots=True)
class _Direction:
    """When a simulated link has made all copies of a direction that were asked for; CUDA's stream."""

    bandwidth: float
    free_ns: int = 0
    stream: torch.cuda.Stream | None = None


@dataclass(slots=True)
class HostCopy:
    """Copies under way. is_up: to the device."""

    is_up: bool
    end_ns: int = 0
    event: torch.cuda.Event | None = None
    held: list[Tensor] = field(default_factory=list)  # until they are there

    def wait(self) -> None:
        """Until they are there: for the device's stream, of those to the device; for the host, of those to the host."""
        if self.event is not None:
            if self.is_up:
                torch.cuda.current_stream().wait_event(self.event)
            else:
                self.event.synchronize()
        else:
            sleep_until(self.end_ns)
        self.held = []


class HostLink:
    """The link of one rank. rates: of a simulated one; None where the link is the device's own."""

    def __init__(self, device: torch.device, rates: LinkRates | None = None) -> None:
        self.device, self.rates = device, rates
        down, up = (math.inf, math.inf) if rates is None else (rates.down_bandwidth, rates.up_bandwidth)
        self._directions = {False: _Direction(down), True: _Direction(up)}

    def down(self, pairs: Pairs) -> HostCopy:
        """Starts to copy tensors of the device (the second of each pair) to the host."""
        return self._start(pairs, False)

    def up(self, pairs: Pairs) -> HostCopy:
        """Starts to copy tensors of the host (the second of each pair) to the device."""
        return self._start(pairs, True)

    @property
    def up_stream(self) -> torch.cuda.Stream:
        """CUDA's, on which what is made of copies to the device may go on."""
        return self._stream(self._directions[True])

    @torch.no_grad()
    def _start(self, pairs: Pairs, is_up: bool) -> HostCopy:
        direction = self._directions[is_up]
        if self.device.type == "cuda":
            return self._start_on_stream(pairs, is_up, self._stream(direction))
        for target, source in pairs:
            target.copy_(source)
        if self.rates is None:
            return HostCopy(is_up)
        num_bytes = sum(source.numel() * source.element_size() for _, source in pairs)
        taken_ns = self.rates.copy_ns + round(num_bytes * 1e9 / direction.bandwidth)
        direction.free_ns = max(direction.free_ns, time.perf_counter_ns()) + taken_ns
        return HostCopy(is_up, direction.free_ns)

    def _stream(self, direction: _Direction) -> torch.cuda.Stream:
        if direction.stream is None:
            direction.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call] # torch's
        return direction.stream

    def _start_on_stream(self, pairs: Pairs, is_up: bool, stream: torch.cuda.Stream) -> HostCopy:
        """Behind what the device has been asked for so far, and beside what comes."""
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                (target if is_up else source).record_stream(stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's
            event.record(stream)
        return HostCopy(is_up, event=event, held=[x for pair in pairs for x in pair])


def sleep_until(end_ns: int) -> None:
    """Gives the core to others until then, by `time.perf_counter_ns`."""
    while (left_ns := end_ns - time.perf_counter_ns()) > 0:
        time.sleep(left_ns / 1e9)


# Memory ----------------------------------------


_free: dict[int, list[mmap.mmap]] = {}  # by length: mapped memory that no tensor is in
_addresses: set[int] = set()  # of all that is mapped


def mapped_addresses() -> frozenset[int]:
    """Where tensors begin that are kept on the host of CPU ranks: what counts tensors leaves these out."""
    return frozenset(_addresses)


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor in the host's memory, unset: pinned beside a GPU, else mapped beside what torch allocates. Its memory
    serves the next one when nothing refers to it any more."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type != "cpu" and bool(num_bytes))
    length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    known = _free.setdefault(length, [])
    memory = known.pop() if known else mmap.mmap(-1, length)
    lent = (ctypes.c_char * length).from_buffer(memory)
    weakref.finalize(lent, known.append, memory).atexit = False
    found = torch.frombuffer(lent, dtype=dtype, count=math.prod(shape)).view(tuple(shape))
    _addresses.add(found.data_ptr())
    return found
