"""Of a traced program: what names each statement's event in a profiler's trace (`runtime.tracing`)."""

from __future__ import annotations

from collections import defaultdict

from autopar.ir.graph import Graph
from autopar.ir.mesh import MICROBATCH, LogicalMesh
from autopar.ir.statements import Operate, Statement
from autopar.runtime.ranges import in_ascii


class StatementRanges:
    """The statements of one program, numbered in each module; equal blocks number theirs alike, and share a class."""

    def __init__(self, graph: Graph, axes: LogicalMesh) -> None:
        self._graph = graph
        self._real = [number for number, axis in enumerate(axes) if axis.name != MICROBATCH]
        self._told: dict[str, list[str]] = defaultdict(list)

    def opening(self, statement: Statement, path: str) -> str:
        """What stands before a statement on its line, in the module at the path."""
        told = self._told[path]
        told.append(in_ascii(f"{self._name(statement)} | {' | '.join(_where(self._graph, statement))}"))
        return f"with rt.ran(self, {len(told) - 1}): "

    def _name(self, statement: Statement) -> str:
        """As in the simulated step: an operator's own, a redistribution's by its tensor and placement."""
        if isinstance(statement, Operate):
            return statement.node.name
        moved = statement.redistribute
        return f"{moved.tensor} → {' '.join(str(moved.target[number]) for number in self._real)}"

    def declaration(self, indent: str) -> list[str]:
        """The program's table of what its statements are, by the paths of their modules."""
        rows = [f"{indent * 2}{path!r}: {tuple(told)!r}," for path, told in self._told.items()]
        return ["", f"{indent}RAN = {{", *rows, f"{indent}}}"]


def _where(graph: Graph, statement: Statement) -> tuple[str, str]:
    """Module and source line: of a redistribution, those of what makes the tensor."""
    node = statement.node if isinstance(statement, Operate) else graph.producers.get(statement.redistribute.tensor)
    found = ("", "") if node is None else (node.scope.module, node.source)
    return found[0].replace("|", "¦"), found[1].replace("|", "¦")
