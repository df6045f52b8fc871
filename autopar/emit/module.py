"""The modules of a program as a tree: what each stores, and which of its calls are written out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.emit.tree import Region
from autopar.ir.graph import Stored


@dataclass
class Module:
    """A module path with its parameters, its inner modules and the regions that run in it."""

    path: str
    stored: dict[str, Stored] = field(default_factory=dict)
    children: dict[str, Module] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)

    def descend(self, parts: Iterable[str]) -> Module:
        """The module at a path below, made where there is none."""
        module = self
        for part in parts:
            path = f"{module.path}.{part}" if module.path else part
            module = module.children.setdefault(part, Module(path))
        return module

    def with_regions(self) -> list[Module]:
        """The nearest modules below that run code themselves."""
        found: list[Module] = []
        for child in self.children.values():
            found += [child] if child.regions else child.with_regions()
        return found
