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
    """A hidden block with these parameters and buffers, by their names in it."""
    held = [(name, module, module._parameters, module._buffers) for name, module in block.named_modules()]
    try:
        for path, module, *stores in held:
            prefix = f"{path}." if path else ""
            for key, store in zip(("_parameters", "_buffers"), stores, strict=True):
                module.__dict__[key] = {
                    name: None if value is None else tensors[prefix + name] for name, value in store.held.items()
                }
        yield
    finally:
        for _, module, parameters, buffers in held:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers
