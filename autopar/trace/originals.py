"""What tensors held before a model ran: small ones are copied at once, large ones when they are about to be written.

So a model's weights are in memory once, as long as it leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_SMALL_BYTES = 1 << 18
"""What is written to past torch's operators, such as through numpy, is only put back of tensors up to this size."""


class Originals(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Of the tensors that it is made with. While it is entered, it sees each operator that writes to one of them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tensors = list(tensors)
        self.aliases: dict[int, Tensor] = {}  # by id: the memory that a tensor had, which `.data = …` leaves as it is
        self.copies: dict[int, Tensor] = {}
        self.by_memory: dict[int, list[Tensor]] = {}
        self.written: set[int] = set()  # since they were restored, by the model
        self.touched: set[int] = set()  # by anybody
        self._is_ours = False
        for x in self.tensors:
            if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta:
                self.aliases[id(x)] = x.detach()
                self.by_memory.setdefault(memory_of(x), []).append(x)
            if id(x) not in self.aliases or x.nbytes <= _SMALL_BYTES:
                self.copies[id(x)] = x.detach().clone()

    @contextmanager
    def unchanging(self) -> Iterator[None]:
        """While inside, what is written is nothing that the model changes."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Entered, unless there is a copy of each: then nobody need look at each operator."""
        with nullcontext() if all(id(x) in self.copies for x in self.tensors) else self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for x in _written(func._schema, args, kwargs):
                for stored in self.by_memory.get(memory_of(x), ()):
                    if id(stored) not in self.copies:
                        self.copies[id(stored)] = self.aliases[id(stored)].clone()
                    self.touched.add(id(stored))
                    if not self._is_ours:
                        self.written.add(id(stored))
        return func(*args, **kwargs)

    def before(self, x: Tensor) -> Tensor:
        """What one of the tensors held at first."""
        return self.copies[id(x)] if id(x) in self.copies else self.aliases[id(x)]

    def changed(self, x: Tensor) -> bool:
        """Whether it holds something else now, by what the model wrote."""
        if not self._has_moved(x) and not self._is_small(x) and id(x) not in self.written:
            return False
        return not same_bits(x, self.before(x))

    def restore(self) -> None:
        """All tensors hold what they did at first, and where they did."""
        with torch.no_grad():
            for x in self.tensors:
                if self._has_moved(x):
                    x.data = self.aliases[id(x)]
                if id(x) in self.touched or (self._is_small(x) and not same_bits(x, self.copies[id(x)])):
                    x.copy_(self.copies[id(x)])
        self.written.clear()
        self.touched.clear()

    def _is_small(self, x: Tensor) -> bool:
        """Whether it was copied at once."""
        return id(x) not in self.aliases or x.nbytes <= _SMALL_BYTES

    def _has_moved(self, x: Tensor) -> bool:
        own = self.aliases.get(id(x))
        return own is not None and (
            x.data_ptr() != own.data_ptr() or x.shape != own.shape or x.stride() != own.stride() or x.dtype != own.dtype
        )


def _written(schema: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor))


def memory_of(x: Tensor) -> int:
    """What tells a tensor's memory from other memory."""
    try:
        return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)
    except NotImplementedError:  # one that torch.func wraps
        return id(x)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal, NaN where NaN is."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())
