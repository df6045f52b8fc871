"""Blocks of which some compute a module again that others keep: they share a class, which is told when it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.emit.module import Module
from autopar.emit.names import is_number
from autopar.ir.plan import StagePlan


class ToldAgain:
    """The modules inside of equal blocks that are computed again in some of these, and kept in others.

    Modules of a list are none of them: a list is written with what is computed again in it.
    """

    def __init__(self, stage: StagePlan) -> None:
        groups = {block: number for number, blocks in enumerate(stage.blocks) for block in blocks}
        inside = ((block, path) for path in stage.recompute for block in _around(path) if block in groups)
        counts = Counter((groups[block], path.removeprefix(block)) for block, path in inside)
        self.block_of: dict[str, str] = {
            f"{block}{rest}": block
            for (number, rest), count in counts.items()
            if count < len(stage.blocks[number]) and not is_number(rest.rpartition(".")[2])
            for block in stage.blocks[number]
        }

    def names(self, module: Module) -> dict[str, str]:
        """For each such module that is called in a block, or in what is inside of it, what tells whether it is computed
        again."""
        called = dict.fromkeys(self._called(module)) if self.block_of else ()
        paths = [path for path in called if f"{module.path}.".startswith(f"{self.block_of[path]}.")]
        return {path: "again" + (f"_{number}" if number else "") for number, path in enumerate(paths)}

    def own(self, module: Module) -> set[str]:
        """Those that the module itself calls."""
        regions = (inner for region in module.regions for inner in region.regions() if inner.home is None)
        return {inner.path for inner in regions if inner.path in self.block_of}

    def _called(self, module: Module) -> Iterator[str]:
        yield from sorted(self.own(module))
        for child in module.children.values():
            yield from self._called(child)


def _around(path: str) -> Iterator[str]:
    """The paths of the modules around one."""
    while path := path.rpartition(".")[0]:
        yield path
