"""Parameters and buffers that export does not see, in modules that stay as they are otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_Tensors = Mapping[str, Tensor | None]


class _Hidden(dict[str, Any]):
    """An empty dict in place of a module's. noticed: called when anyone looks for what it held."""

    def __init__(self, held: _Tensors, noticed: Callable[[], None]) -> None:
        super().__init__()
        self.held, self.noticed = held, noticed

    def _look(self) -> None:
        if self.held:
            self.noticed()

    def __contains__(self, name: object) -> bool:
        if name in self.held:
            self.noticed()
        return False

    def __iter__(self) -> Iterator[str]:
        self._look()
        return super().__iter__()

    def __len__(self) -> int:
        self._look()
        return 0

    def items(self) -> Any:
        self._look()
        return super().items()

    def values(self) -> Any:
        self._look()
        return super().values()

    def keys(self) -> Any:
        self._look()
        return super().keys()


def seen_stores(module: nn.Module) -> list[dict[str, Any]]:
    """The dicts of a module's parameters and buffers, unless they are hidden: looked at like that, nobody notices."""
    return [store for store in (module._parameters, module._buffers) if not isinstance(store, _Hidden)]


@contextmanager
def hidden(block: nn.Module, noticed: Callable[[], None]) -> Iterator[None]:
    """The block without its parameters and buffers; `shown` puts others in their place for a while."""
    held = [(module, module._parameters, module._buffers) for module in block.modules()]
    try:
        for module, parameters, buffers in held:
            module.__dict__["_parameters"] = _Hidden(parameters, noticed)
            module.__dict__["_buffers"] = _Hidden(buffers, noticed)
        yield
    finally:
        for module, parameters, buffers in held:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers


@contextmanager
def shown(block: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """A hidden block with these parameters and buffers, by their names in it. Raises RuntimeError where others are put
    in their place: that would be lost."""
    placed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    held = [(name, module, module._parameters, module._buffers) for name, module in block.named_modules()]
    try:
        for path, module, *stores in held:
            prefix = f"{path}." if path else ""
            for key, store in zip(("_parameters", "_buffers"), stores, strict=True):
                own = {name: None if value is None else tensors[prefix + name] for name, value in store.held.items()}
                module.__dict__[key] = own
                placed.append((own, dict(own)))
        yield
        if any(now.keys() != own.keys() or any(now[name] is not own[name] for name in own) for now, own in placed):
            raise RuntimeError("a block that is watched has other parameters or buffers now: it has to be exported")
    finally:
        for _, module, parameters, buffers in held:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers
