"""Which blocks look alike: candidates for doing the same (`trace.repeats` sees whether they do)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_CONTENTS = (bool, str, float, type(None))


def alike(model: nn.Module, tied: Mapping[str, str], fewest: int) -> list[list[str]]:
    """Paths of numbered children of one container that look alike, at least `fewest` of them; no one inside another.

    tied: later names of parameters and buffers → the first. A model that has a module by two names has none: its
    module paths then depend on the way that a module was reached.
    """
    if len(list(model.named_modules(remove_duplicate=False))) > len(list(model.modules())):
        return []
    return list(_alike(model, "", tied, fewest))


def _alike(module: nn.Module, prefix: str, tied: Mapping[str, str], fewest: int) -> Iterator[list[str]]:
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, child in module.named_children():
        if name.isdigit() and _is_plain(child):
            groups[_look(child, prefix + name, tied)].append(prefix + name)
    found = [paths for paths in groups.values() if len(paths) >= fewest]
    yield from found
    inside = {path for paths in found for path in paths}
    for name, child in module.named_children():
        if prefix + name not in inside:
            yield from _alike(child, f"{prefix}{name}.", tied, fewest)


def _is_plain(block: nn.Module) -> bool:
    """Whether all that it holds are parameters and tensors of no class of their own."""
    return all(type(p) is nn.Parameter and not p.__dict__ for p in block.parameters()) and all(
        type(b) is Tensor for b in block.buffers()
    )


def _look(block: nn.Module, path: str, tied: Mapping[str, str]) -> Any:
    modules = tuple(
        (name, type(module), module.training, *_attributes(module)) for name, module in block.named_modules()
    )
    state = [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]
    return modules, tuple((name, _origin(path, name, tied), *_tensor(value)) for name, value in state)


def _origin(path: str, name: str, tied: Mapping[str, str]) -> str:
    """The first name of a stored tensor, from the block if it lies in there."""
    first = tied.get(f"{path}.{name}", f"{path}.{name}")
    return first.removeprefix(path) if first.startswith(path + ".") else first


def _tensor(value: Tensor) -> tuple[Any, ...]:
    kind = isinstance(value, nn.Parameter)
    return kind, tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad


def _attributes(module: nn.Module) -> Iterator[Any]:
    """What it is set to, but for integers, which often count the blocks."""
    for name, value in module.__dict__.items():
        if not name.startswith("_"):
            yield name, value if isinstance(value, _CONTENTS) else type(value)
