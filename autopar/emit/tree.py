"""Cuts the flat statements into regions, one for each call of a module that has modules of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.ir.graph import Scope
from autopar.ir.statements import Statement, Value


@dataclass
class Region:
    """The statements and inner regions of one module call, in order, with the values that cross its border."""

    path: str
    class_name: str
    items: list[Statement | Region]
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    def statements(self) -> Iterator[Statement]:
        for item in self.items:
            if isinstance(item, Region):
                yield from item.statements()
            else:
                yield item

    def regions(self) -> Iterator[Region]:
        return (item for item in self.items if isinstance(item, Region))


def build_tree(statements: tuple[Statement, ...], outputs: list[Value], root_class: str, blocks: set[str]) -> Region:
    """The region of the whole program; `outputs` are the values it must leave, `blocks` the modules that get one."""
    root = Region("", root_class, _cut(list(statements), 0, blocks))
    _mark_borders(root, set(outputs))
    root.outputs = outputs
    return root


def _levels(scope: Scope, inner: set[str]) -> list[tuple[str, str]]:
    return [(path, kind) for path, kind in scope.path if path in inner]


def _cut(statements: list[Statement], depth: int, inner: set[str]) -> list[Statement | Region]:
    items: list[Statement | Region] = []
    start = 0
    while start < len(statements):
        levels = _levels(statements[start].scope, inner)
        if len(levels) <= depth:
            items.append(statements[start])
            start += 1
            continue
        end = start
        while end < len(statements) and _levels(statements[end].scope, inner)[depth : depth + 1] == [levels[depth]]:
            end += 1
        path, kind = levels[depth]
        items.append(Region(path, kind, _cut(statements[start:end], depth + 1, inner)))
        start = end
    return items


def _mark_borders(region: Region, wanted: set[Value]) -> None:
    """Fills in each inner region's inputs and outputs; `wanted`: values read after this region ends."""
    needed = set(wanted)
    for item in reversed(region.items):
        if isinstance(item, Region):
            made = [value for statement in item.statements() for value in statement.makes]
            read = [value for statement in item.statements() for value in statement.reads]
            item.outputs = [value for value in dict.fromkeys(made) if value in needed]
            item.inputs = [value for value in dict.fromkeys(read) if value not in set(made)]
            _mark_borders(item, set(item.outputs))
            needed.update(item.inputs)
        else:
            needed.update(item.reads)
