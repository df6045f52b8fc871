"""What an optimizer holds besides its state: other optimizers, groups, and parameters in attributes of its own.

A dict by parameter, a list of matrices, a set of `id(parameter)`: all of them are changed to what stands in for the
parameters while the optimizer steps, and changed back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer


def held_by(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and those that it holds, such as the one that SAM steps with."""
    found: list[Optimizer] = []
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found.append(value)
            for key, item in vars(value).items():
                if key not in ("state", "param_groups"):
                    walk(item)
        elif isinstance(value, dict | list | tuple):
            for item in list(value.values()) if isinstance(value, dict) else value:
                walk(item)

    walk(optimizer)
    return found


def groups_of(optimizers: Sequence[Optimizer]) -> list[list[Any]]:
    """The lists of parameters, each once: an optimizer may share its groups with the one that it steps with."""
    found = {id(group["params"]): group["params"] for item in optimizers for group in item.param_groups}
    return list(found.values())


class Swap:
    """Changes what `instead` changes, in all dicts, lists, sets and tuples of some optimizers, but for their states and
    their groups' parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], instead: Callable[[Any], Any]) -> None:
        self._instead = instead
        self._changed: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self._seen = {id(optimizer.state) for optimizer in optimizers} | {id(p) for p in groups_of(optimizers)}
        try:
            for optimizer in optimizers:
                self._walk(vars(optimizer))
        except BaseException:
            self.undo()
            raise

    def _walk(self, held: Any) -> None:
        if id(held) in self._seen:
            return
        self._seen.add(id(held))
        inside = [*held, *held.values()] if isinstance(held, dict) else list(held)
        for item in inside:
            if isinstance(item, dict | list | set):
                self._walk(item)
        pairs = [(item, self._of(item)) for item in inside]
        changed = [(item, new) for item, new in pairs if new is not item]
        if changed:
            _exchange(held, changed)
            self._changed.append((held, changed))

    def _of(self, item: Any) -> Any:
        if type(item) is not tuple:
            return self._instead(item)
        found = tuple(self._of(part) for part in item)
        return item if all(new is old for new, old in zip(found, item, strict=True)) else found

    def undo(self) -> None:
        """Changes all of it back, but for what was put in or taken away since."""
        for held, changed in reversed(self._changed):
            _exchange(held, [(new, old) for old, new in changed])
        self._changed = []


def _exchange(held: Any, changed: Sequence[tuple[Any, Any]]) -> None:
    """Puts the second of each pair in the place of the first."""
    new = {_key(old): item for old, item in changed}
    if isinstance(held, dict):
        found = {new.get(_key(k), k): new.get(_key(v), v) for k, v in held.items()}
        held.clear()
        held.update(found)
        return
    items = [new.get(_key(item), item) for item in held]
    held.clear()
    if isinstance(held, set):
        held.update(items)
    else:
        held.extend(items)


def _key(item: Any) -> Any:
    return ("id", item) if type(item) is int else id(item)
