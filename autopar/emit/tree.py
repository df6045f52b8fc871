"""Cuts the flat statements into regions, one for each call of a module that has modules of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autopar.ir.branches import Home
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
    home: Home | None = None  # of a branch: a part of a module call, which runs on some ranks alone
    is_again: bool = False  # operators that are computed again by themselves: a part of a module call
    kept: list[Value] = field(default_factory=list)  # what it computes once, of its own parameters
    constants: list[Statement] = field(default_factory=list)  # that make these

    @property
    def is_part(self) -> bool:
        """Whether it is written as a method that its module's forward calls."""
        return self.home is not None or self.is_again

    def statements(self) -> Iterator[Statement]:
        for item in self.items:
            if isinstance(item, Region):
                yield from item.statements()
            else:
                yield item

    def regions(self) -> Iterator[Region]:
        return (item for item in self.items if isinstance(item, Region))


def build_tree(
    statements: tuple[Statement, ...], outputs: list[Value], root_class: str, blocks: set[str],
    hosts: Sequence[Scope] = (), is_again: Callable[[Statement], bool] = lambda statement: False,
) -> Region:  # fmt: skip
    """The region of the whole program; `outputs` are the values it must leave, `blocks` the modules that get one.

    hosts: for each fork, the module call that its branches are written in. is_again: whether a statement is computed
    again by itself; neighbours in a module call are one region.
    """
    depths = [len(_levels(scope, blocks)) for scope in hosts]
    root = Region("", root_class, _Cutter(blocks, depths, is_again).cut(list(statements), 0, ("", root_class)))
    _mark_borders(root, set(outputs))
    root.outputs = outputs
    _dissolve_unread(root)
    return root


def _dissolve_unread(region: Region) -> None:
    """Operators by themselves that nothing reads, in a stage whose readers are in others, are never computed again."""
    for inner in region.regions():
        _dissolve_unread(inner)
    unread = {id(inner) for inner in region.regions() if inner.is_again and not inner.outputs}
    if unread:
        items = [item.items if isinstance(item, Region) and id(item) in unread else [item] for item in region.items]
        region.items = [item for run in items for item in run]


def _levels(scope: Scope, inner: set[str]) -> list[tuple[str, str]]:
    return [(path, kind) for path, kind in scope.path if path in inner]


class _Cutter:
    """Cuts statements by module calls, and by the branches at the depths of their hosts."""

    def __init__(self, blocks: set[str], depths: Sequence[int], is_again: Callable[[Statement], bool]) -> None:
        self.blocks, self.depths, self.is_again = blocks, depths, is_again

    def cut(
        self, statements: list[Statement], depth: int, around: tuple[str, str], branch: Home | None = None
    ) -> list[Statement | Region]:  # fmt: skip
        """The items of a module call (`around`: its path and class) at so many blocks' depth, or of a branch there."""
        items: list[Statement | Region] = []
        start = 0
        while start < len(statements):
            first = statements[start]
            levels = _levels(first.scope, self.blocks)
            if self._begins_branch(first, depth, branch):
                end = _run(statements, start, lambda s: s.home == first.home)  # noqa: B023
                items.append(
                    Region(*around, self.cut(statements[start:end], depth, around, first.home), home=first.home)
                )
            elif len(levels) <= depth and self.is_again(first):
                end = _run(
                    statements, start, lambda s: self.is_again(s) and len(_levels(s.scope, self.blocks)) <= depth
                )
                items.append(Region(*around, [*statements[start:end]], is_again=True))
            elif len(levels) <= depth:
                items.append(first)
                end = start + 1
            else:
                end = _run(statements, start, lambda s: self._is_in(s, depth, levels[depth], branch))  # noqa: B023
                items.append(Region(*levels[depth], self.cut(statements[start:end], depth + 1, levels[depth], branch)))
            start = end
        return items

    def _begins_branch(self, statement: Statement, depth: int, branch: Home | None) -> bool:
        home = statement.home
        return home is not None and home != branch and self.depths[home.fork] == depth

    def _is_in(self, statement: Statement, depth: int, level: tuple[str, str], branch: Home | None) -> bool:
        """Whether a statement is in the module call, and no branch beside it."""
        is_inside = _levels(statement.scope, self.blocks)[depth : depth + 1] == [level]
        return is_inside and not self._begins_branch(statement, depth, branch)


def _run(statements: list[Statement], start: int, belongs: Callable[[Statement], bool]) -> int:
    """The end of the run of statements that belong together."""
    end = start
    while end < len(statements) and belongs(statements[end]):
        end += 1
    return end


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
