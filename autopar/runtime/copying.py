"""Activations that wait in the host's memory: what a call's operators save goes there, and comes back in time.

    forward    `copied_out` calls a block. Of what is saved in it, autograd keeps a handle each. When the call ends, the
               memory of these goes to the host, beside what runs next; when the next such call ends, it has arrived
               there, and the device's is given back
    backward   the last call's comes back when the pass begins, and each other one when the pass reaches the call after
               it, beside what runs there; whoever needs it first waits

Memory is known by its storage: what several operators save goes once, whole, with all views of it. What several such
calls save is the last one's to bring back. What something else saves as well, stays; so does what a step keeps anyway:
parameters, buffers, inputs, constants. So do pieces of few bytes, for which a copy of their own would not pay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.constants import is_constant
from autopar.runtime.host_link import HostCopy, HostLink, host_tensor

LEAST_COPIED_BYTES = 1 << 12
"""Pieces of memory with fewer bytes stay on the device."""
ALIGNED_BYTES = 64
"""Of the host's memory, of which a call has one tensor for all that it copies out, each piece begins at a multiple."""

Layout = tuple[torch.Size, tuple[int, ...], int]


class _SavedMemory:
    """A piece of memory that operators save. storage: where it is on the device, if a call needs it there; host: its
    bytes there, until they have come back; call: that brings it back, none where it stays."""

    __slots__ = ("call", "device", "host", "known", "num_bytes", "storage")

    def __init__(self, storage: UntypedStorage, call: _OffloadedCall | None) -> None:
        self.storage = None if call is None else storage
        self.known: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # torch's
        self.num_bytes, self.device, self.call = storage.nbytes(), storage.device, call
        self.host: Tensor | None = None

    def stay(self, storage: UntypedStorage) -> None:
        """It is kept on the device by something else."""
        assert self.call is not None
        self.call.memories.pop(self)
        self.call, self.storage, self.host = None, storage, None

    def arrived(self) -> None:
        """It is on the host, and no more on the device."""
        if self.call is not None:
            self.storage = None


class _SavedHandle:
    """What autograd keeps instead of a tensor."""

    __slots__ = ("dtype", "layout", "memory")

    def __init__(self, tensor: Tensor, memory: _SavedMemory) -> None:
        self.memory, self.dtype = memory, tensor.dtype
        self.layout: Layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def tensor(self) -> Tensor:
        """The same view of the memory, which has come back."""
        storage = self.memory.storage
        assert storage is not None, "what is needed has been brought back"
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.layout[2], *self.layout[:2])


class _OffloadedCall:
    """One call of a block, from forward to backward. before: the call before it in the same pass."""

    def __init__(self, run: _OffloadedPass, before: _OffloadedCall | None) -> None:
        self.run, self.before = run, before
        self.memories: dict[_SavedMemory, None] = {}
        self._out: list[_SavedMemory] = []
        self._down: HostCopy | None = None
        self._up: HostCopy | None = None
        self._is_fetched = self._is_reached = False

    def add(self, memory: _SavedMemory) -> None:
        """It is this call's to bring back, whoever copied it out."""
        if memory.call is not self and memory.call is not None:
            memory.call.memories.pop(memory)
        memory.call = self
        self.memories[memory] = None

    def leave(self) -> None:
        """What it saves, and nobody has copied out yet, goes to the host."""
        self._out = [memory for memory in self.memories if memory.host is None]
        if not self._out:
            return
        sizes = [aligned(memory.num_bytes) for memory in self._out]
        whole, begin, pairs = host_tensor((sum(sizes),), torch.uint8, self.run.link.device), 0, []
        for memory, size in zip(self._out, sizes, strict=True):
            assert memory.storage is not None
            memory.host = whole[begin : begin + memory.num_bytes]
            pairs.append((memory.host, _bytes_of(memory.storage)))
            begin += size
        self._down = self.run.link.down(pairs)

    def arrive(self) -> None:
        """Waits until it is there."""
        if self._down is not None:
            _wait(self._down)
            for memory in self._out:
                memory.arrived()
        self._down, self._out = None, []

    def fetch(self) -> None:
        """Begins to bring back what is not on the device."""
        if self._is_fetched:
            return
        self.arrive()
        self._is_fetched, pairs = True, []
        for memory in self.memories:
            if memory.storage is None:
                assert memory.host is not None
                found = torch.empty(memory.num_bytes, dtype=torch.uint8, device=memory.device)
                memory.storage = found.untyped_storage()
                pairs.append((found, memory.host))
        self._up = self.run.link.up(pairs) if pairs else None

    def reach(self) -> None:
        """The backward pass needs something of it: waits for it, and begins to bring back what is needed next."""
        if self._is_reached:
            return
        self.fetch()
        if (before := self._next()) is not None:
            before.fetch()
        if self._up is not None:
            _wait(self._up)
        self._is_reached, self._up, self.before = True, None, None
        for memory in self.memories:
            memory.host = None
        self.memories = {}

    def _next(self) -> _OffloadedCall | None:
        """The call before it that has something to bring back."""
        before = self.before
        while before is not None and not before.memories:
            before = before.before
        return before


class _OffloadedPass:
    """One forward pass of a program, with the calls whose memory goes to the host. own: storages of what is stored."""

    def __init__(self, link: HostLink, own: Collection[int], inputs: tuple[Any, ...]) -> None:
        self.link, self._own = link, own
        self._inputs = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
        self._known: dict[int, _SavedMemory] = {}
        self._last: _OffloadedCall | None = None  # the latest call
        self._open: _OffloadedCall | None = None

    def call(self, block: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Calls a block."""
        assert self._open is None, "no call that is copied out is in another"
        self._open = call = _OffloadedCall(self, self._last)
        try:
            with saved_tensors_hooks(self._pack, _unpacked):
                made = block(*inputs)
        finally:
            self._open = None
        call.leave()
        if self._last is not None:
            self._last.arrive()
        self._last = call
        return made

    def begin_backward(self) -> None:
        """Brings back what the backward pass needs first."""
        last = self._last
        while last is not None and not last.memories:
            last = last.before
        if last is not None:
            last.fetch()
        self._known.clear()

    def end_forward(self) -> None:
        """What is on its way to the host, arrives there."""
        if self._last is not None:
            self._last.arrive()

    def _pack(self, tensor: Tensor) -> Tensor | _SavedHandle:
        """Of what is saved in a call."""
        assert self._open is not None
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        address = storage._cdata
        memory = self._memory(address)
        if memory is None:
            if storage.nbytes() < LEAST_COPIED_BYTES or self._stays(address):
                return tensor
            memory = self._known[address] = _SavedMemory(storage, self._open)
        elif memory.call is None:
            return tensor
        self._open.add(memory)
        return _SavedHandle(tensor, memory)

    def pack_outside(self, tensor: Tensor) -> Tensor:
        """Of what is saved elsewhere: that memory stays."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            memory = self._memory(storage._cdata)
            if memory is None:
                self._known[storage._cdata] = _SavedMemory(storage, None)
            elif memory.call is not None:
                memory.stay(storage)
        return tensor

    def _memory(self, address: int) -> _SavedMemory | None:
        """What is known of the memory at an address, if it is still that."""
        memory = self._known.get(address)
        if memory is not None and memory.known.expired():
            del self._known[address]
            return None
        return memory

    def _stays(self, address: int) -> bool:
        return address in self._own or address in self._inputs or is_constant(address)


def aligned(num_bytes: int) -> int:
    """Of the host's memory, for so many bytes."""
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _wait(copy: HostCopy) -> None:
    """What the device runs next comes after the copy; the host waits where that is what computes."""
    if copy.event is None:
        copy.wait()
        return
    torch.cuda.current_stream().wait_event(copy.event)
    copy.held = []


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unpacked(kept: Tensor | _SavedHandle) -> Tensor:
    """The tensor that was saved."""
    if isinstance(kept, Tensor):
        return kept
    if kept.memory.call is not None:
        kept.memory.call.reach()
    return kept.tensor()


class _OpenRuns(threading.local):
    """The forward passes that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[_OffloadedPass] = []


_open = _OpenRuns()
_RUNS, _OWN, _COPIES = "copying_runs", "stored_memory", "copies_out"


def offloading(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A program's forward in which what `copied_out` blocks save goes to the host."""

    @wraps(forward)
    def watched(program: Any, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(program, *inputs)
        kept = program.__dict__
        run = _OffloadedPass(program.mesh.host_link, kept.get(_OWN, ()), inputs)
        kept.setdefault(_RUNS, {})[program.microbatch] = run
        _open.runs.append(run)
        try:
            with saved_tensors_hooks(run.pack_outside, _unpacked):
                made = forward(program, *inputs)
        finally:
            _open.runs.pop()
        run.end_forward()
        return made

    watched.__dict__[_COPIES] = True
    return watched


def copies_out(program: Any) -> bool:
    """Whether something that a program saves goes to the host."""
    return _COPIES in getattr(type(program).forward, "__dict__", {})


def copied_out(block: Callable[..., Any], *inputs: Any) -> Any:
    """Calls a block (or a method of one); what its operators save waits in the host's memory for the backward pass.

    Without gradients, and outside of a program's forward, it is a plain call.
    """
    if not torch.is_grad_enabled() or not _open.runs:
        return block(*inputs)
    return _open.runs[-1].call(block, inputs)


def note_stored(program: Any, memory: Collection[int]) -> None:
    """The storages of what is stored, which stay on the device."""
    program.__dict__[_OWN] = memory


def begin_backward(program: Any, microbatch: int) -> None:
    """The backward pass of a microbatch begins: what it needs first comes back, if anything is on the host."""
    if (run := _ended(program, microbatch)) is not None:
        run.begin_backward()


def forget(program: Any, microbatch: int) -> None:
    """No backward pass of a microbatch will be."""
    _ended(program, microbatch)


def _ended(program: Any, microbatch: int) -> _OffloadedPass | None:
    found: _OffloadedPass | None = program.__dict__.get(_RUNS, {}).pop(microbatch, None)
    return found
