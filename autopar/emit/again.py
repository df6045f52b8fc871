"""What the backward pass computes again, as the emitter sees it.

Blocks of which some compute a module again that others keep share a class, which is told when it is made. Operators
that are computed again by themselves are methods; blocks of which other operators are have other classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from autopar.emit.module import Module
from autopar.emit.names import is_number
from autopar.ir.graph import Graph
from autopar.ir.plan import StagePlan
from autopar.ir.recompute import makes_memory, modules_again, operators_again, tensors_again
from autopar.ir.statements import Operate, Statement


def made_again(graph: Graph, recompute: tuple[str, ...]) -> Callable[[Statement], bool]:
    """Whether a statement is computed again by itself, and not with a module around it."""
    operators, tensors = operators_again(recompute), tensors_again(graph, recompute)
    modules = frozenset(modules_again(recompute))

    def is_again(statement: Statement) -> bool:
        if isinstance(statement, Operate):
            return statement.node.name in operators
        if statement.redistribute.tensor not in tensors or statement.scope.outermost(modules) is not None:
            return False
        return makes_memory(statement.redistribute.steps)

    return is_again


class ToldAgain:
    """The modules inside of equal blocks that are computed again in some of these, and kept in others.

    Modules of a list are none of them: a list is written with what is computed again in it.
    """

    def __init__(self, stage: StagePlan) -> None:
        groups = {block: number for number, blocks in enumerate(stage.blocks) for block in blocks}
        inside = (
            (block, path) for path in modules_again(stage.recompute) for block in _around(path) if block in groups
        )
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
        regions = (inner for region in module.regions for inner in region.regions() if not inner.is_part)
        return {inner.path for inner in regions if inner.path in self.block_of}

    def _called(self, module: Module) -> Iterator[str]:
        yield from sorted(self.own(module))
        for child in module.children.values():
            yield from self._called(child)


def _around(path: str) -> Iterator[str]:
    """The paths of the modules around one."""
    while path := path.rpartition(".")[0]:
        yield path
