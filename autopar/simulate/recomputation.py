"""What the backward pass runs again: the recomputed modules' statements, in pieces, one for each call of a module.

A call runs again, as a whole, when autograd asks for the first thing that an operator in it has saved. One in which
nothing is saved for the backward pass does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory import saved_values
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.statements import Operate, Statement, Value, flatten


class Recomputation:
    """The pieces of one plan. `reached`: the tensors that get a gradient, none in inference."""

    def __init__(self, graph: Graph, plan: Plan, reached: set[str]) -> None:
        statements = flatten(graph, plan).statements if plan.recompute and reached else ()
        pieces = call_numbers(statements, plan.recompute)
        again = {
            piece for piece, statement in zip(pieces, statements, strict=True)
            if piece >= 0 and _saves(graph, statement, reached)
        }  # fmt: skip
        self._of_node: dict[str, int] = {}
        self._of_value: dict[Value, int] = {}
        for piece, statement in zip(pieces, statements, strict=True):
            if piece not in again:
                continue
            if isinstance(statement, Operate):
                self._of_node[statement.node.name] = piece
            else:
                self._of_value[statement.makes[0]] = piece

    def of_node(self, name: str) -> int:
        """The number of the piece that an operator runs again in; −1 for one that does not."""
        return self._of_node.get(name, -1)

    def of_conversion(self, value: Value) -> int:
        """The number of the piece that a tensor is brought to a placement in again; −1 for one that is not."""
        return self._of_value.get(value, -1)

    def runs_again(self, statement: Statement) -> bool:
        """Whether the backward pass runs the statement once more."""
        if isinstance(statement, Operate):
            return statement.node.name in self._of_node
        return statement.makes[0] in self._of_value


def call_numbers(statements: Sequence[Statement], recompute: Sequence[str]) -> list[int]:
    """For each statement, the number of the recomputed call that it is in, −1 for none.

    A call is a run of consecutive statements in one recomputed module, as the emitter cuts them.
    """
    paths, found, count, last = set(recompute), [], -1, None
    for statement in statements:
        levels = statement.scope.path
        depth = next((number for number, (path, _) in enumerate(levels) if path in paths), None)
        call = None if depth is None else levels[: depth + 1]
        if call is not None and call != last:
            count += 1
        found.append(-1 if call is None else count)
        last = call
    return found


def _saves(graph: Graph, statement: Statement, reached: set[str]) -> bool:
    """Whether a statement's own backward pass reads something that was saved."""
    return (
        isinstance(statement, Operate)
        and not reached.isdisjoint(statement.node.results)
        and bool(saved_values(statement.node, graph))
    )
