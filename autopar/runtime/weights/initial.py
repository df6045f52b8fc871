"""A model's own first values, on shards: its own code runs over the model on the meta device, a tensor at a time.

What that code does to a tensor without memory is done to a real one of the same shape, whole, in its place, which then
gives this rank its slices and is gone. So random numbers are drawn in the order in which one device draws them, and no
rank ever holds more than the few tensors that were touched last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autopar.runtime.errors import ProgramError
from autopar.runtime.state import ProgramState
from autopar.runtime.weights.loading import unset, wanted_shapes
from autopar.runtime.weights.own import OwnSlice, own_slices

HELD_BYTES = 64 << 20
"""Tensors that were touched last stay whole as long as they are smaller together: a norm's weight and bias, say."""

#: what leaves nothing of a tensor as it was, so that nobody need bring it together again
OVERWRITING = {"normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_", "bernoulli_", "random_"}

Initialise = Callable[[Any], object]


def initialise(state: ProgramState, model: nn.Module, seed: int, init: Initialise | None) -> None:
    """Sets parameters and buffers as `init(model)` does on the CPU after `model.to_empty(device="cpu")`, when random
    numbers begin at `seed`.

    Raises ProgramError for a model that is not on the meta device, for initialisation that needs values which the meta
    device has none of, and for parameters that nobody sets; all weights are NaN then.
    """
    held = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in held):
        raise ProgramError(
            "expected a model on the meta device, found one with values: start from these with init_from(model), or "
            'build it under torch.device("meta")'
        )
    model = deepcopy(model)  # initialisation marks modules as done
    if hasattr(model, "tie_weights"):  # `transformers` ties what was set apart
        _untie(model, state.tied)
    shards = _TouchedTensors(state, model)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            with _OnShards(shards):
                (init or usual_initialisation(model))(model)
            shards.take_replaced(model)
            shards.put_all()
    except (RuntimeError, NotImplementedError) as error:
        unset(state)
        raise ProgramError(
            f"expected the model's initialisation to work on each tensor by itself, found {error!r}; give init=, a "
            "function of the model that does so, or load weights"
        ) from error
    lacking = sorted(name for name in set(wanted_shapes(state)) - shards.done - set(state.initial()))
    if lacking:
        unset(state)
        raise ProgramError(
            f"expected each parameter to be given a value by the model's own initialisation, found none for "
            f"{', '.join(lacking[:8])}{' and more' if len(lacking) > 8 else ''}; give its module a reset_parameters() "
            "method, or give init=, a function of the model"
        )


def usual_initialisation(model: nn.Module) -> Initialise:
    """How models say it: `transformers` by initialize_weights(), torchtitan by init_weights(), and torch's own modules
    by reset_parameters(), from the inside out."""
    for name in ("initialize_weights", "init_weights"):
        method = getattr(model, name, None)
        if callable(method):
            return lambda _: method()
    return lambda given: given.apply(_reset)


def _untie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Gives further names of tensors tensors of their own."""
    for name in tied:
        owner, _, last = name.rpartition(".")
        parameters = model.get_submodule(owner)._parameters
        own = parameters.get(last)
        if own is not None:
            parameters[last] = nn.Parameter(torch.empty_like(own))


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


class _TouchedTensors:
    """The model's tensors by their memory on the meta device: real while they are touched, else in slices."""

    def __init__(self, state: ProgramState, model: nn.Module) -> None:
        self._state = state
        self._model = {
            name: tensor
            for found in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
            for name, tensor in found
        }
        self._storages = {name: tensor.untyped_storage() for name, tensor in self._model.items()}  # kept alive
        self._names: dict[int, str] = {}
        known = {item.name for item in own_slices(state, unsaved=True)} | set(wanted_shapes(state))
        for name, storage in self._storages.items():  # of tied names, the one that is stored
            if storage._cdata not in self._names or name in known:
                self._names[storage._cdata] = name
        self._slices: dict[str, list[OwnSlice]] = {}
        for own in own_slices(state, unsaved=True):
            self._slices.setdefault(own.name, []).append(own)
        self._real: dict[str, Tensor] = {}  # the one touched last at the end
        self.done: set[str] = set()

    def name_of(self, tensor: Tensor) -> str | None:
        """The model's tensor that a meta tensor is, or is a view of."""
        return self._names.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None

    def real(self, view: Tensor, name: str, is_overwritten: bool) -> Tensor:
        """The real tensor in the place of a meta one, which may be a view."""
        own = self._real.pop(name, None)
        if own is None:
            is_whole = is_overwritten and view.shape == self._model[name].shape
            own = self._made(name, is_empty=is_whole or name not in self.done)
        self._real[name] = own
        self._put_old()
        return own.as_strided(view.shape, view.stride(), view.storage_offset())

    def _made(self, name: str, is_empty: bool) -> Tensor:
        like = self._model[name]
        values = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if not is_empty:
            values.copy_(self._state.whole(name))
        return values

    def _put_old(self) -> None:
        while len(self._real) > 1 and sum(tensor.nbytes for tensor in self._real.values()) > HELD_BYTES:
            self._put(next(iter(self._real)))

    def _put(self, name: str) -> None:
        """Gives this rank its slices of a tensor, and lets go of it."""
        values = self._real.pop(name)
        if name in self.done:
            for own in self._slices.get(name, ()):
                own.values.copy_(values[own.region])

    def put_all(self) -> None:
        """Lets go of all tensors."""
        for name in list(self._real):
            self._put(name)

    def take_replaced(self, model: nn.Module) -> None:
        """Parameters in whose place others were set."""
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            if tensor is not self._model.get(name) and not tensor.is_meta:
                self._real[name] = tensor.detach()
                self.done.add(name)


class _OnShards(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Runs what is done to the model's meta tensors on real ones."""

    def __init__(self, shards: _TouchedTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._shards = shards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """See torch's; views of a meta tensor stay meta tensors, which share its memory by name."""
        kwargs = dict(kwargs or {})
        if func.is_view:
            return func(*args, **kwargs)
        originals: dict[int, Tensor] = {}
        written = set(map(id, _written(func, args, kwargs)))

        def replaced(value: Any) -> Any:
            name = self._shards.name_of(value) if isinstance(value, Tensor) else None
            if name is None:
                return value
            is_overwritten = id(value) in written and func.overloadpacket.__name__ in OVERWRITING
            real = self._shards.real(value, name, is_overwritten)
            if id(value) in written:
                self._shards.done.add(name)
            originals[id(real)] = value
            return real

        given, named = tree_map(replaced, args), tree_map(replaced, kwargs)
        return tree_map(lambda value: originals.get(id(value), value), func(*given, **named))


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator changes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)
