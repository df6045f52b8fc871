"""What of a model a program was planned by, and must stay: loops, callbacks and hooks may change it in a run.

A program is the model's computation as it was planned. An attribute that forward reads, say the weight of a loss that
is annealed, a rate of dropout or whether a batch norm is in training mode, is a constant in it from then on; so where
any of these is another one later, the next step is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime import ProgramError

Reads = frozenset[tuple[str, str]]
"""Attributes that were read: of modules of which class, and by which name. Blocks that do the same are run once."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DEEPEST = 3  # containers and objects inside of an attribute
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_OF_LOOPS = frozenset({"_trainer", "_fabric", "_current_fx_name", "_metric_attributes", "log", "log_dict"})
_MISSING = "no such attribute"


@contextmanager
def recorded_reads(found: set[tuple[str, str]]) -> Iterator[None]:
    """Adds to `found` what is read of modules while the body runs: attributes that are data, not methods."""
    plain = object.__getattribute__

    def read(self: nn.Module, name: str) -> Any:
        value = plain(self, name)
        if not (name.startswith("__") or name in _OF_ANY_MODULE or name in _OF_LOOPS):
            kind = type(self)
            if name in plain(self, "__dict__") or not hasattr(getattr(kind, name, None), "__get__"):
                found.add((_name(kind), name))
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


def as_text(reads: Iterable[tuple[str, str]]) -> str:
    """Reads as other processes are told of them."""
    return json.dumps(sorted(reads))


def as_reads(text: str) -> Reads:
    """See `as_text`."""
    return frozenset((kind, name) for kind, name in json.loads(text))


class ReadAttributes:
    """The values of what was read of a model, as they are when this is made."""

    def __init__(self, model: nn.Module, reads: Iterable[tuple[str, str]]) -> None:
        self._model, self._reads = model, frozenset(reads)
        self._names: dict[str, list[str]] = {}
        for kind, name in sorted(self._reads):
            self._names.setdefault(kind, []).append(name)
        self.accept()

    def accept(self) -> None:
        """Takes the values of now."""
        self._before = self._values()

    def also(self, reads: Iterable[tuple[str, str]]) -> ReadAttributes:
        """With what was read to plan another program."""
        return ReadAttributes(self._model, self._reads | frozenset(reads))

    def changed(self) -> list[str]:
        """The paths of those that are others now."""
        return [path for path, value in self._values().items() if self._before.get(path, _MISSING) != value]

    def _values(self) -> dict[str, Any]:
        found, known = {}, dict[int, Any]()  # a configuration is an attribute of many modules
        for path, module in self._model.named_modules():
            for name in self._names.get(_name(type(module)), ()):
                value = vars(module).get(name, getattr(type(module), name, _MISSING))
                if id(value) not in known:
                    known[id(value)] = _seen(value, _DEEPEST)
                found[f"{path}.{name}".lstrip(".")] = known[id(value)]
        return found


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _SameObject:
    """Equal to what is the same object, which stays alive so that no other takes its place in memory."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and other.value is self.value

    __hash__ = None  # type: ignore[assignment] # compared alone


def _seen(value: Any, depth: int) -> Any:
    """What is compared of a value: itself, what a container or an object holds, how often a tensor was written to."""
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, float) else value  # not a number is equal to itself here
    if isinstance(value, Tensor):
        return _SameObject(value), 0 if value.is_inference() else value._version
    if not depth or isinstance(value, (nn.Module, type)) or callable(value):
        return _SameObject(value)
    if isinstance(value, Mapping):
        return [(_seen(name, 0), _seen(item, depth - 1)) for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_seen(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return len(value), sorted(map(repr, value))
    held = getattr(value, "__dict__", None)
    return _SameObject(value), {} if held is None else {name: _seen(item, depth - 1) for name, item in held.items()}


class Unchanged:
    """What of a model is changed by hand in a run, and would be of no effect: what is frozen, hooks, attributes that
    forward reads, buffers, and, where asked, modes."""

    def __init__(
        self, model: nn.Module, frozen: bool = True, reads: Iterable[tuple[str, str]] = (), modes: bool = False
    ) -> None:
        """frozen: whether its parameters and buffers are not the rank's own, which may be frozen and written to, but
        not replaced. reads: see `recorded_reads`. modes: whether modules stay in the modes of now, too."""
        self._model, self._frozen, self._modes = model, frozen, modes
        self.attributes = ReadAttributes(model, reads)
        self.accept()

    def add(self, reads: Iterable[tuple[str, str]]) -> None:
        """Takes what is there now, also of what was read to plan another program."""
        self.attributes = self.attributes.also(reads)
        self.accept()

    def accept(self) -> None:
        """Takes what is there now: what planning has put into caches of the model is no change."""
        self.attributes.accept()
        self._before = self._values()

    def check(self) -> None:
        """Raises ProgramError where any is not as it was."""
        changed = [name for name, value in self._values().items() if self._before.get(name) != value]
        changed += self.attributes.changed()
        if changed:
            raise ProgramError(
                f"expected the model to stay as it was planned, found changes of {', '.join(changed)}, of which the "
                "program knows nothing. What changes while training belongs into the batch, or into a buffer that is "
                "written to in place (register_buffer; of the planned model, which callbacks are given); parameters of "
                "the planned model may be frozen; hooks belong onto the model before it is planned"
            )

    def _values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, inner in self._model.named_modules():
            found[f"hooks of {path or 'the model'}"] = (
                len(inner._forward_hooks), len(inner._forward_pre_hooks), len(inner._backward_hooks),
                len(inner._backward_pre_hooks),
            )  # fmt: skip
            if self._modes:
                found[f"mode of {path or 'the model'}"] = inner.training
        for name, parameter in self._model.named_parameters():
            if self._frozen:
                found[f"requires_grad of {name}"] = parameter.requires_grad
            else:
                found[f"parameter {name}"] = _SameObject(parameter)
        for name, buffer in self._model.named_buffers():
            found[f"buffer {name}"] = _seen(buffer, 0) if self._frozen else _SameObject(buffer)
        return found
