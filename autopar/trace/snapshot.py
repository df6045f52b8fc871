"""What a model holds beside tensors, so that it can be told what forward changed, and be put back.

Looked at are attributes of modules, of the objects, lists, dicts, sets and arrays that they hold, what their functions
close over, remember in defaults and caches, or name as global variables (plain values, classes and modules of the
user's, and what these hold), generators of random numbers, and iterators, which cannot be put back.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import random
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from autopar.trace.lines import is_own
from autopar.trace.settings import names_in

_DEEPEST = 4  # objects inside objects inside a module
_LONGEST = 100_000  # of a list that is looked at
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LEAVES = (*_PLAIN, type, types.ModuleType, types.BuiltinFunctionType, Tensor)
_LEAF_KINDS = {kind for kind in _LEAVES if kind is not Tensor}
"""Of what most things in a model are: to ask each whether it is one of many kinds takes a while."""
_CONTAINERS = (dict, list, set, deque)
_CONTAINER_KINDS = {dict, list, set, OrderedDict}
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
"""Such as dicts of hooks, which have no attributes of their own, as other dicts with an order may."""
_ITERABLES: tuple[Iterable[Any], ...] = ([], (), "", b"", set(), {}, {}.values(), {}.items(), range(0), deque())
_ITERATORS: tuple[type, ...] = (
    *(type(iter(x)) for x in _ITERABLES),
    type(reversed([])), types.GeneratorType, enumerate, zip, map, filter, reversed, itertools.chain, itertools.count,
    itertools.cycle, itertools.islice, itertools.repeat, itertools.product, itertools.starmap, itertools.accumulate,
)  # fmt: skip
_HOLDERS = (functools._lru_cache_wrapper, types.SimpleNamespace, threading.local, ContextVar,
            weakref.WeakKeyDictionary, weakref.WeakValueDictionary)  # fmt: skip
"""Of Python's library, what is made to keep things."""
MISSING = object()


@dataclass(frozen=True)
class StateChange:
    """path: "layers.0.count". holder: the object whose attribute, item or state `key` changed, as it was before."""

    path: str
    holder: Any
    key: Any
    before: Any
    after: Any
    put: Callable[[Any], None]  # another value there

    @property
    def is_of_iterator(self) -> bool:
        """Whether it is that something was taken from one."""
        return isinstance(self.holder, _ITERATORS)


class _StatePlace(NamedTuple):
    """One place that holds values. read: what it holds now, by key, perhaps itself; write: puts `before` back."""

    path: str
    holder: Any
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], None]
    before: dict[Any, Any]


class _DictPlace:
    """The same of a dict that is read as it is: most of what a model is made of."""

    __slots__ = ("before", "holder", "path", "value")

    def __init__(self, path: str, holder: Any, value: dict[Any, Any]) -> None:
        self.path, self.holder, self.value, self.before = path, holder, value, dict(value)

    def read(self) -> dict[Any, Any]:
        return self.value

    def write(self, old: dict[Any, Any]) -> None:
        _refill(self.value, old)


class Snapshot:
    """Taken when made. roots: a model, and what else runs with it, such as a loss function."""

    def __init__(self, *roots: Any) -> None:
        self.kept: list[_StatePlace | _DictPlace] = []
        self.tensors: list[Tensor] = []  # of modules and what they hold, parameters too
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # so that no id is given twice
        for root in roots:
            if isinstance(root, nn.Module):
                for name, module in root.named_modules():
                    self._module(module, name)
            else:
                self._walk(root, getattr(root, "__name__", type(root).__name__), 0)

    def changes(self) -> list[StateChange]:
        """Where something else is held now."""
        found = []
        for kept in self.kept:
            now = kept.read()
            for key in () if _is_untouched(kept.before, now) else dict.fromkeys((*kept.before, *now)):
                before, after = kept.before.get(key, MISSING), now.get(key, MISSING)
                if not _same(before, after):
                    path = (
                        kept.path
                        if key == "" or isinstance(kept.holder, (list, deque))
                        else f"{kept.path}.{key}".lstrip(".")
                    )
                    found.append(StateChange(path, kept.holder, key, before, after, functools.partial(_put, kept, key)))
        return found

    def restore(self) -> None:
        """Puts everything back that is not a tensor's value."""
        for kept in self.kept:
            now = kept.read()
            if _is_untouched(kept.before, now):
                continue
            if now.keys() != kept.before.keys() or any(now[key] is not kept.before[key] for key in now):
                kept.write(kept.before)

    # What is looked at ----------------------------------------

    def _module(self, module: nn.Module, path: str) -> None:
        if self._is_new(module):
            self._object(module, path, 0)
            for kind in type(module).__mro__:
                if kind is not object and kind is not nn.Module:
                    self._class(kind, path)

    def _walk(self, value: Any, path: str, depth: int) -> None:
        if type(value) in _LEAF_KINDS:
            return
        if isinstance(value, Tensor):
            if self._is_new(value):
                self.tensors.append(value)
            return
        if isinstance(value, (*_LEAVES, nn.Module)) or depth > _DEEPEST or not self._is_new(value):
            return
        state = None if type(value) in _CONTAINER_KINDS else _generator_state(value)
        if state is not None:
            self._keep(path, value, *state)
        elif type(value) not in _CONTAINER_KINDS and isinstance(value, _ITERATORS):
            self._keep(path, value, lambda: {"": _place_in(value)}, lambda _: None)
        elif type(value) in _CONTAINER_KINDS and isinstance(value, dict):
            self._dict(value, value, path, depth)
        elif isinstance(value, dict):  # not what a class of one's own does
            read = functools.partial(_items_of, value)
            self._contents(value, path, read, functools.partial(_refill, value), depth)
        elif isinstance(value, (list, deque)) and len(value) <= _LONGEST:
            self._contents(value, path, lambda: dict(enumerate(value)), functools.partial(_relist, value), depth)
        elif isinstance(value, set) and len(value) <= _LONGEST:
            self._keep(path, value, lambda: dict.fromkeys(value, True), functools.partial(_reset, value))
        elif isinstance(value, np.ndarray):
            if value.size <= _LONGEST and not value.dtype.hasobject:
                own = value.copy()
                self._keep(path, value, lambda: {"": value.tobytes()}, lambda _: np.copyto(value, own))
        elif isinstance(value, tuple):
            self._all(value, path, depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, path, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._keep(path, None, lambda: {"": str(value.cache_info().misses)}, functools.partial(_forget, value))
            self._walk(value.__wrapped__, path, depth)
        elif isinstance(value, types.MethodType):
            self._all((value.__self__, value.__func__), path, depth - 1)
        elif isinstance(value, ContextVar):
            self._keep(path, value, lambda: {"": value.get(None)}, lambda old: value.set(old[""]) and None)
            self._walk(value.get(None), path, depth)
        elif isinstance(value, functools.partial):
            self._all((value.func, value.args, value.keywords), path, depth - 1)
        if type(value) is OrderedDict and path.rpartition(".")[2] in _OF_ANY_MODULE:
            return
        if isinstance(getattr(value, "__dict__", None), dict):
            self._object(value, path, depth)
            if state is None:
                self._class(type(value), path)
        if type(value) in _CONTAINER_KINDS:
            return
        slots = [n for kind in type(value).__mro__ for n in _words(vars(kind).get("__slots__")) if n[:2] != "__"]
        if slots and not _is_library(type(value).__module__):
            read = functools.partial(_slots, value, slots)
            self._contents(value, path, read, functools.partial(_set_all, value), depth)

    def _object(self, value: Any, path: str, depth: int) -> None:
        self._dict(value, value.__dict__, path, depth)

    def _dict(self, holder: Any, own: dict[Any, Any], path: str, depth: int) -> None:
        place = _DictPlace(path, holder, own)
        self.kept.append(place)
        self._items(place.before, path, depth)

    def _contents(self, holder: Any, path: str, read: Any, write: Any, depth: int) -> None:
        self._items(self._keep(path, holder, read, write), path, depth)

    def _items(self, held: dict[Any, Any], path: str, depth: int) -> None:
        start = f"{path}." if path else ""
        for key, value in held.items():
            kind = type(value)
            if kind in _LEAF_KINDS:
                continue
            if kind is OrderedDict and not value and key in _OF_ANY_MODULE and depth < _DEEPEST:  # most of them
                if self._is_new(value):
                    self.kept.append(_DictPlace(start + key, value, value))
            else:
                self._walk(value, f"{start}{key}", depth + 1)

    def _all(self, values: Iterable[Any], path: str, depth: int) -> None:
        for value in values:
            self._walk(value, path, depth + 1)

    def _class(self, kind: type, path: str) -> None:
        """Plain attributes of a user's class, and the functions in it."""
        if not self._is_new(kind):
            return
        functions = [f for f in map(_function_of, vars(kind).values()) if f is not None]
        if not any(is_own(inspect.unwrap(f).__code__.co_filename) for f in functions):
            return
        self._attributes(kind)
        for function in functions:
            self._walk(function, f"{kind.__name__}.{getattr(function, '__name__', '')}", 0)

    def _attributes(self, kind: type) -> None:
        """What a class itself keeps."""
        if not self._is_new(("attributes", id(kind))):
            return
        plain = [name for name, value in vars(kind).items() if isinstance(value, _PLAIN) and not name.startswith("__")]
        if plain:
            self._keep(
                kind.__name__, kind, lambda: {n: vars(kind)[n] for n in plain if n in vars(kind)},
                functools.partial(_set_all, kind),
            )  # fmt: skip
        for name, value in list(vars(kind).items()):
            if isinstance(value, (*_CONTAINERS, *_ITERATORS)) and not name.startswith("__"):
                self._walk(value, f"{kind.__name__}.{name}", 1)

    def _function(self, function: types.FunctionType, path: str, depth: int) -> None:
        """What it closes over and remembers, and the global variables and functions that it names."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._keep(path, cell, functools.partial(_cell, name, cell), functools.partial(_recell, name, cell))
            self._walk(_cell(name, cell).get(name), f"{path}.{name}", depth + 1)
        if is_own(function.__code__.co_filename):
            self._all((function.__defaults__, function.__kwdefaults__), path, depth - 1)
            self._named(dict.fromkeys(names_in(function.__code__)), function.__globals__, function, depth)

    def _named(
        self, names: Iterable[str], everything: dict[str, Any], function: types.FunctionType, depth: int
    ) -> None:
        """Of the variables of a module, those that a function names."""
        for name in names:
            value = everything.get(name, MISSING)
            if isinstance(value, _PLAIN):
                if self._is_new((name, id(everything))):
                    self._keep("", None, functools.partial(_global, name, everything), everything.update)
            elif isinstance(value, types.ModuleType):
                if not _is_library(value.__name__) and everything is function.__globals__:
                    self._named(names, vars(value), function, depth)
            elif isinstance(value, type):
                if _is_the_users(value.__module__, function):
                    self._attributes(value)
            elif (
                isinstance(value, (*_CONTAINERS, *_ITERATORS, *_HOLDERS, np.ndarray, types.FunctionType))
                or _generator_state(value) is not None
                or (not isinstance(value, _LEAVES) and _is_the_users(type(value).__module__, function))
            ):
                self._walk(value, name, depth + 1)

    def _keep(self, path: str, holder: Any, read: Any, write: Any) -> dict[Any, Any]:
        before = dict(read())
        self.kept.append(_StatePlace(path, holder, read, write, before))
        return before

    def _is_new(self, value: Any) -> bool:
        is_key = type(value) is tuple and list(map(type, value)) == [str, int]  # what is no object, by its owner
        key = hash(value) if is_key else id(value)
        if key in self._seen:
            return False
        self._seen.add(key)
        self._alive.append(value)
        return True


def _is_untouched(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    """Whether all that is held now are the same objects as before, in the same order."""
    if not before or not now:
        return not before and not now
    same = operator.is_
    return len(now) == len(before) and all(map(same, now.values(), before.values())) and all(map(same, now, before))


def _is_the_users(module: str, function: types.FunctionType) -> bool:
    """Whether what is of a module may be what a model keeps between its steps, or what its forward calls."""
    return module == function.__module__ or not _is_library(module)


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module is Python's or an installed one."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__":
        return False
    paths = sysconfig.get_paths()
    return file is None or file.startswith((paths["stdlib"], paths["platlib"])) or "site-packages" in file


def _function_of(value: Any) -> Any:
    """The function of a class's attribute, if it is one."""
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", value)
    return value if isinstance(value, (types.FunctionType, functools._lru_cache_wrapper)) else None


def _place_in(value: Any) -> Any:
    """How far an iterator has come, without taking anything from it."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, *map(_place_in, frame.f_locals.values()))
    if isinstance(value, _ITERATORS):
        left = operator.length_hint(value, -1)
        if left >= 0:
            return left
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reduced: Any = value.__reduce__()
        return _place_in(tuple(reduced[1:]))
    if isinstance(value, tuple):
        return tuple(map(_place_in, value))
    return value if isinstance(value, _PLAIN) else id(value)


def _forget(cached: Any, old: dict[str, str]) -> None:
    """Empties a cache in which something was put."""
    if str(cached.cache_info().misses) != old[""]:
        cached.cache_clear()


def _words(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots or ())


def _slots(value: Any, names: list[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _put(kept: _StatePlace | _DictPlace, key: Any, value: Any) -> None:
    kept.write({**kept.read(), key: value})


def _global(name: str, everything: dict[str, Any]) -> dict[str, Any]:
    return {name: everything[name]} if name in everything else {}


def _cell(name: str, cell: types.CellType) -> dict[str, Any]:
    try:
        return {name: cell.cell_contents}
    except ValueError:  # an empty cell
        return {}


def _recell(name: str, cell: types.CellType, old: dict[str, Any]) -> None:
    if name in old:
        cell.cell_contents = old[name]


def _set_all(kind: type, old: dict[str, Any]) -> None:
    for name, value in old.items():
        setattr(kind, name, value)


def _items_of(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(value))


def _refill(value: dict[Any, Any], old: dict[Any, Any]) -> None:
    kind = OrderedDict if isinstance(value, OrderedDict) else dict  # not what a class of one's own does
    kind.clear(value)
    for key, item in old.items():
        kind.__setitem__(value, key, item)


def _relist(value: list[Any] | deque[Any], old: dict[Any, Any]) -> None:
    value.clear()
    value.extend(old.values())


def _reset(value: set[Any], old: dict[Any, Any]) -> None:
    value.clear()
    value.update(old)


def _generator_state(value: Any) -> tuple[Any, Any] | None:
    """How to read and write the state of a generator of random numbers; None for anything else."""
    if isinstance(value, torch.Generator):
        return lambda: {"": _state(value)}, lambda old: value.set_state(
            torch.frombuffer(bytearray(old[""]), dtype=torch.uint8)
        )
    if isinstance(value, random.Random):
        return lambda: {"": value.getstate()}, lambda old: value.setstate(old[""])
    if isinstance(value, np.random.RandomState):
        state = value.get_state()
        return lambda: {"": str(value.get_state())}, lambda old: value.set_state(state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        bit_state = bits.state
        return lambda: {"": str(bits.state)}, lambda old: setattr(bits, "state", bit_state)
    return None


def _state(generator: torch.Generator) -> bytes:
    with no_dispatch():  # also while a model is exported
        return generator.get_state().numpy().tobytes()


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, (tuple, list)):
        return len(before) == len(after) and all(map(_same, before, after))
    return isinstance(before, (*_PLAIN, set, frozenset)) and (before == after or repr(before) == repr(after))
