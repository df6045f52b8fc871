"""An optimizer that computes each element by itself, on this rank's plain parts of parameters.

Torch's own are known to. What else is said to is watched: an operator that joins elements, or takes some of a tensor,
is refused, since of a shard it would give something else than of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.errors import ProgramError
from autopar.runtime.optimizers.attributes import Swap, groups_of, held_by
from autopar.runtime.stored import StoredParameter, local_part, wrap

_ALLOWED = {
    f"aten::{name}"
    for name in ("detach", "alias", "clone", "copy_", "_to_copy", "lift_fresh", "empty_like", "zeros_like", "ones_like",
                 "full_like", "new_zeros", "new_empty", "new_ones", "new_full", "zero_", "fill_", "_local_scalar_dense",
                 "scalar_tensor", "item", "sym_size", "sym_numel", "is_same_size", "zeros", "ones", "full", "empty",
                 "_foreach_copy_", "_foreach_zero_", "empty.memory_format", "resolve_conj", "resolve_neg")
}  # fmt: skip
_JOINING = ("norm", "max", "sum", "powsum")


class Elementwise(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Raises ProgramError for an operator that is not elementwise."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._name = name
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator, if it is elementwise."""
        if not self.is_paused and not _is_elementwise(func):
            raise ProgramError(
                f"expected {self._name} to compute each element by itself, as rt.declare_optimizer was told, found "
                f'{func._schema.name}, which gives something else of a shard. Declare it with looks_at="parameters", '
                'or "everything" where it joins those. Some parameters have been stepped already'
            )
        return func(*args, **(kwargs or {}))


def _is_elementwise(func: Any) -> bool:
    name: str = func._schema.name
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace == "profiler":
        return bool(func.namespace == "profiler")
    if name.startswith("aten::_foreach_"):
        return not any(name.removesuffix("_").endswith(word) for word in _JOINING) or "maximum" in name
    return torch.Tag.pointwise in func.tags or name in _ALLOWED


class Shards:
    """An optimizer on a rank, of which it changes the parameters of `own` for the time of a step."""

    def __init__(self, optimizer: Optimizer, own: Mapping[int, StoredParameter], is_watched: bool) -> None:
        self._optimizer, self._own = optimizer, own
        self._watch = Elementwise(type(optimizer).__name__) if is_watched else None
        self._stand_ins = {key: nn.Parameter(stored.local.detach()) for key, stored in own.items()}
        self._held: list[tuple[list[Any], list[Any]]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the optimizer has this rank's parts."""
        with self._watch or nullcontext():
            self._enter()
            try:
                yield
            finally:
                self._leave()

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that trains the parameters themselves."""

        def call(*args: Any) -> Any:
            self._leave()
            with torch.enable_grad():
                found = closure(*args)
            self._enter()
            return found

        return call

    @torch.no_grad()
    def _enter(self) -> None:
        optimizers = held_by(self._optimizer)
        self._states = list({id(item.state): item.state for item in optimizers}.values())
        for key, stand_in in self._stand_ins.items():
            stored = self._own[key]
            stand_in.requires_grad_(stored.tensor.requires_grad)
            stand_in.grad = None if stored.tensor.grad is None else local_part(stored.tensor.grad).detach()
            for state in self._states:
                if stored.tensor in state:
                    state[stand_in] = _mapped(state.pop(stored.tensor), local_part)
        self._held = [(params, list(params)) for params in groups_of(optimizers)]
        for params, before in self._held:
            params[:] = [self._stand_ins.get(id(p), p) for p in before]
        self._swap = Swap(optimizers, self._instead)
        if self._watch is not None:
            self._watch.is_paused = False

    def _instead(self, item: Any) -> Any:
        stand_in = self._stand_ins.get(item if type(item) is int else id(item))
        if stand_in is not None:
            return id(stand_in) if type(item) is int else stand_in
        return item.to_local() if isinstance(item, DTensor) else item

    @torch.no_grad()
    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.is_paused = True
        self._swap.undo()
        for params, before in self._held:
            params[:] = before
        for key, stand_in in self._stand_ins.items():
            self._store(self._own[key], stand_in)

    def _store(self, stored: StoredParameter, stand_in: nn.Parameter) -> None:
        if stand_in.untyped_storage()._cdata != stored.local.untyped_storage()._cdata:  # `data` set to another tensor
            stored.local.copy_(stand_in)
            stand_in.data = stored.local.detach()
        held = None if stored.tensor.grad is None else local_part(stored.tensor.grad)
        if stand_in.grad is None:
            stored.tensor.grad = None
        elif held is None or stand_in.grad.data_ptr() != held.data_ptr():
            stored.tensor.grad = wrap(stand_in.grad, stored.declared.shape, stored.types, stored.mesh)

        def kept(value: Tensor) -> Tensor:
            is_cut = value.dim() > 0 and value.shape == stored.local.shape
            return wrap(value, stored.declared.shape, stored.types, stored.mesh) if is_cut else value

        for state in self._states:
            if stand_in in state:
                state[stored.tensor] = _mapped(state.pop(stand_in), kept)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree of dicts, lists and tuples with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return type(value)(_mapped(item, change) for item in value) if type(value) in (list, tuple) else value
