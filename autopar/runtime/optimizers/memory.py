"""Whole tensors whose memory is there only while somebody looks at them.

An optimizer gets plain tensors of whole parameters, gradients and state, which have no memory. Every operator of its
step passes by here first: what it reads is gathered, what it writes is marked, and what was not looked at for a while
is cut into shards again and freed. A step that goes from parameter to parameter takes the memory of a few, and one that
joins them all has them all; either way it computes what it would on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.errors import ProgramError

RESIDENT_BYTES = 2**28
"""Bytes of whole tensors that stay for what the step does next. Half as many are gathered more often where a step
comes back to a parameter; twice as many take that much more memory while the optimizer steps."""

_SHAPES_ONLY = {
    f"aten::{name}"
    for name in ("detach", "alias", "empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty",
                 "new_ones", "new_full", "new_empty_strided", "is_same_size", "sym_size", "sym_stride", "sym_numel")
}  # fmt: skip
_READ_UNSEEN = {"numpy", "tolist", "data_ptr", "__array__", "__dlpack__"}


class Lazy:
    """One tensor: `fetch` gives its values, on all ranks that have a part of it at the same time; `store` takes them
    back, cut. unit: the parameter that it belongs to; it comes and goes with the other tensors of that. is_value: it is
    the parameter itself."""

    def __init__(
        self, tensor: Tensor, unit: Hashable, fetch: Callable[[], Tensor], store: Callable[[Tensor], None],
        is_value: bool = False,
    ) -> None:  # fmt: skip
        self.is_value = is_value
        self.tensor, self.unit, self.fetch, self.store = tensor, unit, fetch, store
        self.storage = tensor.untyped_storage()
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.is_here = True
        self.is_written = False

    def bring(self) -> None:
        """Fetches the values, where they are not here."""
        if self.storage.nbytes() != self.num_bytes:
            self.storage.resize_(self.num_bytes)
        self.is_here = True
        with torch.no_grad():
            self.tensor.detach().copy_(self.fetch())

    def free(self) -> None:
        """Takes the memory away; what is not stored is lost."""
        self.is_here = self.is_written = False
        if self.storage.resizable():  # not where numpy has it
            self.storage.resize_(0)


class Residents:
    """All lazy tensors of an optimizer, by storage. before_leaving: told of a unit before it goes."""

    def __init__(self, on_random: Callable[[], None]) -> None:
        self._lazy: dict[int, Lazy] = {}
        self._order: dict[Hashable, None] = {}  # units, the one looked at last at the end
        self._members: dict[Hashable, list[Lazy]] = {}
        self._on_random = on_random
        self.before_leaving: Callable[[Hashable], None] = lambda unit: None
        self.is_busy = True  # nobody's step runs, or we bring and store ourselves

    def add(self, lazy: Lazy) -> Lazy:
        """Takes care of a tensor from now on."""
        self._lazy[lazy.storage._cdata] = lazy
        self._members.setdefault(lazy.unit, []).append(lazy)
        if lazy.is_here:
            self._order[lazy.unit] = None
        return lazy

    def drop(self, lazy: Lazy) -> None:
        """Takes care of it no more."""
        self._lazy.pop(lazy.storage._cdata, None)
        self._members[lazy.unit].remove(lazy)

    def of(self, tensor: Tensor) -> Lazy | None:
        """The lazy tensor whose memory a tensor has."""
        if type(tensor) is DTensor or tensor.layout != torch.strided:
            return None
        return self._lazy.get(tensor.untyped_storage()._cdata)

    def look(self, reads: Iterable[Tensor], writes: Iterable[Tensor] = ()) -> None:
        """Brings what is read, and marks what is written."""
        found = [lazy for tensor in reads if (lazy := self.of(tensor)) is not None]
        if found:
            self.is_busy = True
            try:
                self._bring(list(dict.fromkeys(found)))
            finally:
                self.is_busy = False
        for tensor in writes:
            lazy = self.of(tensor)
            if lazy is not None:
                lazy.is_written = True

    def _bring(self, needed: list[Lazy]) -> None:
        missing = [lazy for lazy in needed if not lazy.is_here]
        units = dict.fromkeys(lazy.unit for lazy in needed)
        if missing:
            last = next(reversed(self._order), None)
            if last is not None and last not in units:  # the step goes on to another: what it made of this one counts
                self.before_leaving(last)
            self._make_room(sum(lazy.num_bytes for lazy in missing), units)
            for lazy in missing:
                lazy.bring()
        for unit in units:
            self._order.pop(unit, None)
            self._order[unit] = None

    def _make_room(self, num_bytes: int, needed: dict[Hashable, None]) -> None:
        held = num_bytes + sum(lazy.num_bytes for lazy in self._lazy.values() if lazy.is_here)
        for unit in [unit for unit in self._order if unit not in needed]:
            if held <= RESIDENT_BYTES:
                return
            held -= self.leave(unit)

    def leave(self, unit: Hashable) -> int:
        """Stores what was written of a unit and frees all of it. Returns the bytes that are free again."""
        self.before_leaving(unit)
        freed = 0
        for lazy in self._members.get(unit, ()):
            if lazy.is_here:
                if lazy.is_written:
                    lazy.store(lazy.tensor.detach())
                lazy.free()
                freed += lazy.num_bytes
        self._order.pop(unit, None)
        return freed

    def leave_all(self) -> None:
        """As if something else needed all the memory."""
        for unit in list(self._order):
            self.leave(unit)

    def forget(self) -> None:
        """Frees everything, without storing."""
        for lazy in self._lazy.values():
            if lazy.is_here:
                lazy.free()
        self._order.clear()

    def draw(self) -> None:
        """Told of an operator that draws random numbers."""
        self._on_random()


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Sees every operator of a step before it runs. Raises ProgramError for communication of its own."""

    def __init__(self, memory: Residents, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._memory, self._name = memory, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator, once what it reads is here."""
        kwargs, memory = kwargs or {}, self._memory
        if not memory.is_busy:
            if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
                raise ProgramError(_communicates(self._name))
            if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
                memory.draw()
            if func._schema.name not in _SHAPES_ONLY:
                memory.look(_tensors([*args, *kwargs.values()]), _written(func, args, kwargs))
        return func(*args, **kwargs)


class WatchingReads(TorchFunctionMode):
    """Sees what reads a tensor's memory without an operator."""

    def __init__(self, memory: Residents) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function, once what it reads is here; whoever gets an address may write there."""
        if not self._memory.is_busy and getattr(func, "__name__", "") in _READ_UNSEEN:
            found = list(_tensors(args))
            self._memory.look(found, found)
        return func(*args, **(kwargs or {}))


def _communicates(name: str) -> str:
    return (
        f"expected an optimizer that computes, found {name}, whose step communicates by itself: it takes each rank for "
        "one that has all parameters. Take its variant for one device; a program's ranks are brought together here"
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@cache
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and names of the arguments that an operator writes to."""
    found = [
        (number, item.name)
        for number, item in enumerate(func._schema.arguments)
        if item.alias_info is not None and item.alias_info.is_write
    ]
    return tuple(number for number, _ in found), tuple(name for _, name in found)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    numbers, names = _writes(func)
    yield from _tensors(args[number] for number in numbers if number < len(args))
    yield from _tensors(kwargs[name] for name in names if name in kwargs)
