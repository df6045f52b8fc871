"""What an optimizer keeps of a parameter from step to step: cut into shards, so that no rank has all of it.

    of the parameter's shape    cut like the parameter, also where that is packed with others
    another tensor of size      cut along its first dim over the ranks of the stage (Shampoo's statistics)
    anything else               as it is; of a packed parameter, by the name of each that it is made of

Checkpoints find DTensors, which they write and read under any other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from autopar.runtime.errors import ProgramError
from autopar.runtime.optimizers.entries import WholeParameter
from autopar.runtime.optimizers.memory import Lazy, Residents
from autopar.runtime.placement import AxisType, local_slices
from autopar.runtime.state import whole_tensor
from autopar.runtime.stored import StoredParameter, local_part, wrap

LEAST_CUT = 1024
"""Elements of a tensor of another shape than its parameter's from which on ranks share it. Half as many: more
collectives for little memory."""

Path = tuple[Any, ...]
"""Where a tensor is: number of the optimizer, name of the parameter, keys and positions in its state."""


class KeptElsewhere(NamedTuple):
    """A tensor that another stage keeps; `same` is the first path where it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    same: Path


class Keeper:
    """The state of all parameters of an optimizer, and of those optimizers that it holds."""

    def __init__(
        self, memory: Residents, entries: Mapping[str, WholeParameter], of_stored: Mapping[str, list[str]],
        is_everywhere: bool, optimizer: str,
    ) -> None:  # fmt: skip
        self._memory, self._entries, self._of_stored = memory, entries, of_stored
        self._is_everywhere, self._optimizer = is_everywhere, optimizer
        self._states: list[Any] = []
        self._own: dict[str, StoredParameter] = {}
        self._kept: dict[Path, Tensor] = {}  # what stays between steps
        self._lazy: dict[Path, Lazy] = {}
        self._paths: dict[int, Path] = {}  # of each lazy tensor
        self._packed: dict[tuple[int, str, Any], Tensor] = {}  # cut like a packed parameter: by optimizer, name, key
        self._outside: dict[int, tuple[Tensor, Lazy]] = {}

    def begin(self, optimizers: list[Optimizer], own: Mapping[str, StoredParameter]) -> None:
        """The states that there are, each once."""
        self._states = list({id(optimizer.state): optimizer.state for optimizer in optimizers}.values())
        self._own = dict(own)

    # Before a step ----------------------------------------

    def described(self, name: str) -> list[Any]:
        """What is kept of a parameter, for ranks of other stages: shapes of tensors, and other things as they are."""
        return [_describe(self._held(k, name), (k, name), self._entries[name], {}) for k in range(len(self._states))]

    def _held(self, number: int, name: str) -> Any:
        """What an optimizer's state has of a parameter of the model; None where it has nothing."""
        state, entry = self._states[number], self._entries[name]
        for source in entry.sources:
            stored = self._own.get(source.stored)
            if stored is None or stored.tensor not in state:
                continue
            held = state[stored.tensor]
            if source.part is None or not isinstance(held, dict):
                return held
            return {key: self._of_piece(number, source.stored, key, item, name) for key, item in held.items()}
        return None

    def _of_piece(self, number: int, stored: str, key: Any, item: Any, name: str) -> Any:
        """What is kept of one of the parameters that a packed one is made of."""
        if isinstance(item, dict) and set(item) == set(self._of_stored[stored]):
            return item[name]
        if _is_cut_packed(item, self._entries[name]):
            for source in self._entries[name].sources:
                own = self._own.get(source.stored)
                if own is not None:
                    self._packed[number, source.stored, key] = self._states[number][own.tensor][key]
            return item
        return deepcopy(item)

    def enter(self, stand_ins: Mapping[str, Tensor], told: Mapping[str, list[Any]]) -> None:
        """Gives the stand-ins what is kept of their parameters."""
        numbers = range(len(self._states))
        held = {(k, name): self._held(k, name) for k in numbers for name in stand_ins}
        for k, name in held:
            if not self._entries[name].own:
                held[k, name] = told[name][k] if name in told else None
        for stored in self._own.values():
            for state in self._states:
                state.pop(stored.tensor, None)
        made: dict[Any, Tensor] = {}
        for (k, name), tree in held.items():
            if tree is not None:
                self._states[k][stand_ins[name]] = _changed(tree, (k, name), partial(self._whole, made))

    def _whole(self, made: dict[Any, Tensor], value: Any, path: Path) -> Any:
        """What stands in for a tensor that is kept, or that another stage keeps."""
        entry = self._entries[path[1]]
        if isinstance(value, KeptElsewhere):
            return self._lazy_of(value.same, value.shape, value.dtype).tensor
        if not isinstance(value, DTensor) and not (value.dim() and (self._is_everywhere or entry.is_packed)):
            return value
        if entry.is_packed and not _is_cut_packed(value, entry) and not self._is_everywhere:
            return value
        key = id(value), path[:2] if _is_cut_packed(value, entry) else ()
        if key not in made:
            shape = entry.shape if _is_cut_packed(value, entry) else tuple(value.shape)
            self._kept[path] = value
            made[key] = self._lazy_of(path, shape, value.dtype).tensor
        return made[key]

    def _lazy_of(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Lazy:
        known = self._lazy.get(path)
        if known is None or tuple(known.tensor.shape) != shape or known.tensor.dtype != dtype:
            device = self._entries[path[1]].state.mesh.device
            known = self._add(path, torch.empty(shape, dtype=dtype, device=device))
            known.free()
        return known

    def _add(self, path: Path, tensor: Tensor) -> Lazy:
        old = self._lazy.get(path)
        if old is not None:
            self._memory.drop(old)
        lazy = Lazy(tensor, path[1], partial(self._fetch, path), partial(self._store, path))
        self._lazy[path], self._paths[id(lazy)] = lazy, path
        return self._memory.add(lazy)

    def _fetch(self, path: Path) -> Tensor:
        entry, lazy = self._entries[path[1]], self._lazy[path]
        if self._is_packed(path):
            return entry.read(lambda stored: self._packed[path[0], stored.name, path[2]])
        if entry.speaks:
            whole = whole_tensor(self._kept[path]).contiguous()
        else:
            whole = torch.empty(lazy.tensor.shape, dtype=lazy.tensor.dtype, device=lazy.tensor.device)
        return entry.told(whole, entry.source_rank)

    def _store(self, path: Path, whole: Tensor) -> None:
        entry = self._entries[path[1]]
        if self._is_packed(path):
            entry.write(whole, lambda stored: self._packed_of(path, stored, whole.dtype))
        elif entry.own:
            _cut_into(self._kept[path], whole, entry)

    def _is_packed(self, path: Path) -> bool:
        """Whether what a path leads to is kept cut like a packed parameter."""
        entry = self._entries[path[1]]
        return entry.is_packed and len(path) == 3 and tuple(self._lazy[path].tensor.shape) == entry.shape

    def _packed_of(self, path: Path, stored: StoredParameter, dtype: torch.dtype) -> Tensor:
        key = path[0], stored.name, path[2]
        if key not in self._packed:
            zeros = torch.zeros_like(stored.local, dtype=dtype)
            self._packed[key] = wrap(zeros, stored.declared.shape, stored.types, stored.mesh)
        return self._packed[key]

    # After a step ----------------------------------------

    def adopt(self, name: str, stand_in: Tensor) -> None:
        """Takes care of the tensors that a step has made for a parameter: from then on they come and go."""
        for k, state in enumerate(self._states):
            if stand_in in state:
                state[stand_in] = _changed(state[stand_in], (k, name), self._adopted)

    def _adopted(self, value: Any, path: Path) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        entry, known = self._entries[path[1]], self._memory.of(value)
        if known is not None and id(known) in self._paths:
            return value if value.numel() == known.tensor.numel() else self._copied(value, path, known)
        if known is not None or self._is_of_parameter(value, entry):
            value = self._copied(value, path, known)
        if not value.dim():
            return value
        is_like = tuple(value.shape) == entry.shape and (len(path) == 3 or not entry.is_packed)
        has_mesh = bool(entry.own) and entry.own[0].mesh.device_mesh is not None
        is_cut = (not entry.is_packed) and has_mesh and value.numel() >= LEAST_CUT and not entry.is_local
        if not (self._is_everywhere or (is_like and not entry.is_local) or is_cut):
            return value
        if value.untyped_storage().nbytes() != value.numel() * value.element_size():
            if self._is_shared(value):
                if self._is_everywhere:
                    raise ProgramError(_shares(self._optimizer, path))
                return value
            value = value.clone()
        lazy = self._add(path, value)
        lazy.is_written = True
        if entry.own and not self._is_packed(path):
            self._kept[path] = _room(value, entry, is_like, is_cut)
        return value

    def _is_of_parameter(self, value: Tensor, entry: WholeParameter) -> bool:
        """Whether a tensor has the memory of a parameter that each rank stores whole, or of its gradient."""
        if not entry.is_local:
            return False
        (stored,) = entry.own
        held = [stored.local] + ([local_part(stored.tensor.grad)] if stored.tensor.grad is not None else [])
        return value.untyped_storage()._cdata in {tensor.untyped_storage()._cdata for tensor in held}

    def _copied(self, value: Tensor, path: Path, known: Lazy | None) -> Tensor:
        """A gradient that is kept stays as it is, whatever the next one is. Raises ProgramError for a parameter."""
        entry = self._entries[path[1]]
        storage = value.untyped_storage()._cdata
        is_value = storage == entry.own[0].local.untyped_storage()._cdata if known is None else known.is_value
        if is_value:
            raise ProgramError(
                f"expected state of tensors of its own, found {path[2:]} of {path[1]} in {self._optimizer}, which has "
                "the memory of the parameter itself. Keep a copy: parameter.detach().clone()"
            )
        if known is not None and not known.is_here:
            known.bring()
        return value.clone()

    def _is_shared(self, value: Tensor) -> bool:
        """Whether another tensor in the optimizers' state has the same memory."""
        storage = value.untyped_storage()._cdata
        every = (t for state in self._states for tree in list(state.values()) for t in _tensors(tree))
        return any(
            t is not value and not isinstance(t, DTensor) and t.untyped_storage()._cdata == storage for t in every
        )

    def leave(self, stand_ins: Mapping[str, Tensor]) -> None:
        """Gives what is kept back to the parameters."""
        for k, state in enumerate(self._states):
            trees = {name: state.pop(tensor) for name, tensor in stand_ins.items() if tensor in state}
            back = {n: _changed(t, (k, n), self._back) for n, t in trees.items() if self._entries[n].own}
            for name, tree in back.items():
                if not self._entries[name].is_packed:
                    state[self._entries[name].own[0].tensor] = tree
            for stored in dict.fromkeys(
                s.stored for n in back if self._entries[n].is_packed for s in self._entries[n].sources
            ):
                if stored in self._own:
                    pieces = {n: back[n] for n in self._of_stored[stored] if n in back}
                    state[self._own[stored].tensor] = self._joined(k, stored, pieces)

    def _back(self, value: Any, path: Path) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        lazy = self._memory.of(value)
        known = self._paths.get(id(lazy)) if lazy is not None else None
        if known is None:
            return value
        return _CutPacked if self._is_packed(known) else self._kept[known]

    def _joined(self, number: int, stored: str, pieces: Mapping[str, Any]) -> Any:
        """The state of a packed parameter, of those of the model's that it is made of."""
        keys = dict.fromkeys(key for tree in pieces.values() for key in tree)
        found: dict[Any, Any] = {}
        for key in keys:
            values = {name: tree[key] for name, tree in pieces.items() if key in tree}
            first = next(iter(values.values()))
            if all(value is _CutPacked for value in values.values()):
                found[key] = self._packed[number, stored, key]
            elif all(_is_equal(first, value) for value in values.values()):
                found[key] = first
            else:
                found[key] = values
        return found

    # Beside the state ----------------------------------------

    def outside(self, kept: DTensor) -> Tensor:
        """What stands in for a DTensor that an optimizer has in its own attributes."""
        if id(kept) not in self._outside:
            tensor = torch.empty(kept.shape, dtype=kept.dtype, device=local_part(kept).device)
            lazy = Lazy(tensor, ("outside", id(kept)), lambda: whole_tensor(kept), lambda x: _cut_into(kept, x, None))
            self._memory.add(lazy).free()
            self._outside[id(kept)] = kept, lazy
        return self._outside[id(kept)][1].tensor


class _CutPacked:
    """In place of what is kept cut like a packed parameter."""


def _describe(value: Any, path: Path, entry: WholeParameter, seen: dict[int, Path]) -> Any:
    def describe(item: Any, where: Path) -> Any:
        if not isinstance(item, Tensor) or not item.dim():
            return deepcopy(item)
        shape = entry.shape if _is_cut_packed(item, entry) else tuple(item.shape)
        return KeptElsewhere(shape, item.dtype, seen.setdefault(id(item), where))

    return _mapped(value, path, describe, is_all=True)


def _is_cut_packed(value: Any, entry: WholeParameter) -> bool:
    if not entry.is_packed or not isinstance(value, Tensor) or not value.dim():
        return False
    return any(tuple(value.shape) == source.declared.shape for source in entry.sources)


def _mapped(value: Any, path: Path, change: Callable[[Any, Path], Any], is_all: bool = False) -> Any:
    """A tree of dicts, lists and tuples, with its tensors changed, or all of its leaves."""
    if isinstance(value, KeptElsewhere | Tensor):
        return change(value, path)
    if type(value) is dict:
        return {key: _mapped(item, (*path, key), change, is_all) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, (*path, k), change, is_all) for k, item in enumerate(value))
    return change(value, path) if is_all else value


def _changed(value: Any, path: Path, change: Callable[[Any, Path], Any]) -> Any:
    """As `_mapped`, in place: a step may be in the midst of a list."""
    if type(value) is dict:
        for key in list(value):
            value[key] = _changed(value[key], (*path, key), change)
        return value
    if type(value) is list:
        value[:] = [_changed(item, (*path, k), change) for k, item in enumerate(value)]
        return value
    if type(value) is tuple:
        return tuple(_changed(item, (*path, k), change) for k, item in enumerate(value))
    return change(value, path) if isinstance(value, KeptElsewhere | Tensor) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _room(value: Tensor, entry: WholeParameter, is_like: bool, is_cut: bool) -> Tensor:
    """Where a new tensor is kept from now on, still without its values."""
    stored = entry.own[0]
    mesh = stored.mesh
    if mesh.device_mesh is None or not (is_like or is_cut):
        return torch.empty_like(value, memory_format=torch.contiguous_format)
    types = stored.types if is_like else (AxisType("S", 0),) * len(mesh.axes)
    return wrap(value[local_slices(value.shape, types, mesh.axes)].clone(), value.shape, types, mesh)


def _cut_into(kept: Tensor, whole: Tensor, entry: WholeParameter | None) -> None:
    """This rank's part of what is kept, of the whole."""
    if not isinstance(kept, DTensor):
        kept.copy_(whole)
        return
    mesh = kept.device_mesh
    local, own = kept.to_local(), whole
    for dim, placement in enumerate(kept.placements):
        if isinstance(placement, Shard):
            size, count, place = own.size(placement.dim), mesh.size(dim), mesh.get_local_rank(dim)
            chunk = -(-size // count)
            start, end = min(place * chunk, size), min((place + 1) * chunk, size)
            own = own.narrow(placement.dim, start, end - start)
    local.copy_(own)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and not one.dim() and not other.dim() and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _shares(optimizer: str, path: Path) -> str:
    return (
        f"expected state of tensors of its own, found {path[2:]} of {path[1]} in {optimizer}, which shares its memory "
        'with others. Keep copies, or tell rt.declare_optimizer(…, looks_at="parameters") where no parameter\'s update '
        "depends on another's"
    )
