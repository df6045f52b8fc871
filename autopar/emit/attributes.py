"""The attributes that a program's modules have for the model's own: of the same name, where that is free.

The runtime's blocks have attributes themselves, and every further use of a parameter is one (`weight_1`). A parameter,
buffer or module of the model that is called so gets underscores behind its name, and `rt.renamed` says its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from autopar.emit.module import Module
from autopar.ir.graph import Stored
from autopar.runtime import Pipeline, Program, Stage
from autopar.runtime.stored import slot_names

#: methods that are emitted, what a call that makes a module names its own, and names that Python mangles in a class
_EMITTED = re.compile(r"(constants|forward|branch|prepare|targets|summand|again)(_\d+)?|self|mesh|__.*")


def _attributes_of(kinds: Iterable[type]) -> frozenset[str]:
    bases = [base for kind in kinds for base in kind.__mro__]
    return frozenset(name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ())))


RESERVED = _attributes_of((Program, Stage, Pipeline))


class Attributes:
    """By dotted path in the model: the attribute of each module, and of each stored tensor. num_uses: of a tensor."""

    def __init__(self, tree: Module, num_uses: Callable[[Stored], int]) -> None:
        self.names: dict[str, str] = {}
        self._add(tree, num_uses)

    def _add(self, module: Module, num_uses: Callable[[Stored], int]) -> None:
        counts = {name: num_uses(stored) for name, stored in module.stored.items()}
        own = [*module.stored, *module.children]
        taken: set[str] = set()
        for name in own:
            others = {*taken, *own} - {name}
            attribute = name
            while not _is_free(slot_names(attribute, counts.get(name, 1)), others):
                attribute = f"{attribute.lstrip('_')}_" if attribute.startswith("__") else f"{attribute}_"
            taken.update(slot_names(attribute, counts.get(name, 1)))
            self.names[_joined(module.path, name)] = attribute
        for child in module.children.values():
            self._add(child, num_uses)

    def path(self, path: str) -> str:
        """The dotted path of attributes to a module or a stored tensor; of the root, nothing."""
        parts = path.split(".") if path else []
        return ".".join(self.names[".".join(parts[: count + 1])] for count in range(len(parts)))

    def renamed(self, module: Module) -> dict[str, str]:
        """Names in the model, by attribute, where they differ."""
        own = ((self.names[_joined(module.path, name)], name) for name in (*module.stored, *module.children))
        return {attribute: name for attribute, name in own if attribute != name}


def _is_free(attributes: Iterable[str], others: set[str]) -> bool:
    return not any(name in RESERVED or name in others or _EMITTED.fullmatch(name) for name in attributes)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
