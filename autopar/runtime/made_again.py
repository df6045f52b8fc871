"""Operators whose results are not kept for the backward pass: whoever has saved one of them has it made again.

    forward    of what operators inside of such a run save, and of what others save of its results, autograd keeps a
               `_ToRemake` instead; of the run stays what it reads, unless another run has made that
    backward   the first handle that is asked for runs its run again, as it ran then: the same microbatch, the same
               random numbers. Every handle that is still wanted gets its tensor, and gives it back with its operator

Results are known by their memory: a view of one, such as a linear operator takes of its input, is the same view of what
is made again. A weak reference keeps the address of memory from being used by another tensor while it is looked up.
The second run must save as many tensors as the first, of the same kinds; anything else raises a ProgramError.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.declare import Block
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Progress
from autopar.runtime.pieces import own_memory
from autopar.runtime.recomputing import AsThen

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...]]
Made = tuple[Tensor, ...]


class _ToRemake:
    """What autograd keeps instead of a tensor, which is there from the second run on."""

    __slots__ = ("__weakref__", "run", "tensor")

    def __init__(self, run: _RemadeRun) -> None:
        self.run: _RemadeRun | None = run
        self.tensor: Tensor | None = None


class _RemadeView:
    """A tensor that shares a result's memory. handle: of whoever saved it."""

    def __init__(self, tensor: Tensor, handle: _ToRemake) -> None:
        self._layout, self._handle = (tensor.size(), tensor.stride(), tensor.storage_offset()), weakref.ref(handle)

    def fill(self, made: Tensor) -> None:
        """Hands the same view of what was made again to whoever still wants it."""
        if (handle := self._handle()) is not None:
            handle.tensor = made.detach().as_strided(*self._layout)


class _RemadeRun:
    """One run of such operators, from forward to its second run."""

    def __init__(self, function: Callable[..., Made], inputs: Sequence[Tensor], memory: _RemadeResults) -> None:
        self._function, self._memory = function, memory
        owner = getattr(function, "__self__", None)
        self._then = AsThen(owner.mesh.progress if isinstance(owner, Block) else Progress())
        self._inputs = [(memory.pack(x.detach()), x.requires_grad) for x in inputs]
        self._saved: list[tuple[weakref.ref[_ToRemake], Kind]] = []
        self._kinds: list[Kind] = []
        self._views: list[list[_RemadeView]] = []
        self._count = 0

    def forward(self, inputs: Sequence[Tensor]) -> Made:
        """The first time."""
        with saved_tensors_hooks(self._pack, unpacked), _apart():
            made = self._function(*inputs)
        self._kinds, self._views = [_kind(x) for x in made], [[] for _ in made]
        read = {_address(x) for x in inputs}
        for number, result in enumerate(made):
            if _address(result) not in read:
                self._memory.note(result, self, number)
        return made

    def view(self, number: int, tensor: Tensor) -> _ToRemake:
        """A handle instead of a tensor that shares a result's memory."""
        handle = _ToRemake(self)
        self._views[number].append(_RemadeView(tensor, handle))
        return handle

    def dtype(self, number: int) -> torch.dtype:
        """Of a result."""
        return self._kinds[number][0]

    def again(self) -> None:
        """The second time: fills the handles that are left."""
        inputs = [unpacked(x).detach().requires_grad_(wants_gradient) for x, wants_gradient in self._inputs]
        with self._then, torch.enable_grad(), saved_tensors_hooks(self._refill, unpacked), _apart():
            made = self._function(*inputs)
        if self._count != len(self._saved) or [_kind(x) for x in made] != self._kinds:
            raise ProgramError(
                f"expected {self._name} to save {len(self._saved)} tensors and to return {self._kinds} again, found "
                f"{self._count} tensors and {[_kind(x) for x in made]}"
            )
        for result, views in zip(made, self._views, strict=True):
            for view in views:
                view.fill(result)
        self._inputs, self._views = [], []

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", self._function))

    def _pack(self, tensor: Tensor) -> _ToRemake:
        handle = _ToRemake(self)
        self._saved.append((weakref.ref(handle), _kind(tensor)))
        return handle

    def _refill(self, tensor: Tensor) -> None:
        number, self._count = self._count, self._count + 1
        handle, kind = self._saved[number] if number < len(self._saved) else (None, None)
        if kind != _kind(tensor):
            raise ProgramError(
                f"expected tensor {number} that {self._name} saves as {kind} again, found {_kind(tensor)}"
            )
        if handle is not None and (waiting := handle()) is not None:
            waiting.tensor = tensor


@contextmanager
def _apart() -> Iterator[None]:
    """Inside, what one rank keeps of its input shares no memory with it (`pieces.own_memory`)."""
    before, own_memory.is_wanted = own_memory.is_wanted, True
    try:
        yield
    finally:
        own_memory.is_wanted = before


class _RemadeResults:
    """The results of runs that are still there in a forward pass, by the address of their memory."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[StorageWeakRef, _RemadeRun, int]] = {}

    def note(self, result: Tensor, run: _RemadeRun, number: int) -> None:
        """A result that nobody needs to keep."""
        for address in [address for address, (memory, *_) in self._made.items() if memory.expired()]:  # type: ignore[no-untyped-call] # torch's
            del self._made[address]
        memory = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call] # torch's
        self._made.setdefault(_address(result), (memory, run, number))

    def pack(self, tensor: Tensor) -> Tensor | _ToRemake:
        """What to keep of a tensor that is saved."""
        if tensor.layout is not torch.strided:
            return tensor
        _, run, number = self._made.get(_address(tensor), (None, None, 0))
        if run is None or run.dtype(number) != tensor.dtype:
            return tensor
        return run.view(number, tensor)


class _OpenPasses(threading.local):
    """The results of the forward passes that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[_RemadeResults] = []


_open = _OpenPasses()


def unpacked(kept: Tensor | _ToRemake) -> Tensor:
    """The tensor that was saved."""
    if isinstance(kept, Tensor):
        return kept
    if kept.run is not None:
        if kept.tensor is None:
            kept.run.again()
        kept.run = None
    assert kept.tensor is not None, "a second run fills every handle that is asked for"
    return kept.tensor


def remaking(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A program's forward in which what `remade` operators made is not kept, whoever saves it."""

    @wraps(forward)
    def remembering(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        _open.passes.append(memory := _RemadeResults())
        try:
            with saved_tensors_hooks(memory.pack, unpacked):
                return forward(*args)
        finally:
            _open.passes.pop()

    return remembering


def remade(function: Callable[..., Made], *inputs: Tensor) -> Made:
    """Calls operators of a block, and again in the backward pass instead of keeping what they make."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return _RemadeRun(function, inputs, _open.passes[-1]).forward(inputs)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _kind(tensor: Tensor) -> Kind:
    return tensor.dtype, tensor.size(), tensor.stride()
