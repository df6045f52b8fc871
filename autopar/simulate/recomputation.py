"""What the backward pass runs again: the recomputed modules' statements, in pieces, one for each call of a module.

A call runs again, as a whole, when autograd asks for the first thing that an operator in it has saved. One in which
nothing is saved for the backward pass does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from autopar.cost.memory import saved_values
from autopar.ir.graph import Graph, Scope
from autopar.ir.plan import StagePlan
from autopar.ir.statements import Operate, Statement, Value, flatten

Call = tuple[tuple[str, str], ...]
"""A recomputed module with those around it, as in `Scope.path`."""


class Recomputation:
    """The pieces of one plan. `reached`: the tensors that get a gradient, none in inference."""

    def __init__(self, graph: Graph, plan: StagePlan, reached: set[str]) -> None:
        statements = flatten(graph, plan).statements if plan.recompute and reached else ()
        paths = frozenset(plan.recompute)
        pieces = number_calls(call_of(statement.scope, paths) for statement in statements)
        again = {
            piece for piece, statement in zip(pieces, statements, strict=True) if _saves(graph, statement, reached)
        }  # fmt: skip
        known = zip(pieces, statements, strict=True)
        self._again: set[str | Value] = {_key(s) for piece, s in known if piece >= 0 and piece in again}

    def runs_again(self, statement: Statement) -> bool:
        """Whether the backward pass runs the statement once more."""
        return _key(statement) in self._again

    def computes_again(self, node: str) -> bool:
        """Whether an operator runs again."""
        return node in self._again

    def converts_again(self, value: Value) -> bool:
        """Whether a tensor is brought to a placement again."""
        return value in self._again


def call_of(scope: Scope, recompute: Set[str]) -> Call | None:
    """The call of a recomputed module that a statement is in."""
    for depth, (path, _) in enumerate(scope.path):
        if path in recompute:
            return scope.path[: depth + 1]
    return None


def number_calls(calls: Iterable[Call | None]) -> list[int]:
    """For each of consecutive statements, the number of the piece that it is in, −1 for none.

    A call that something else interrupts goes on in a piece of its own, as the emitter cuts it.
    """
    found, count, last = list[int](), -1, None
    for call in calls:
        count += call is not None and call != last
        found.append(-1 if call is None else count)
        last = call
    return found


def _key(statement: Statement) -> str | Value:
    return statement.node.name if isinstance(statement, Operate) else statement.makes[0]


def _saves(graph: Graph, statement: Statement, reached: set[str]) -> bool:
    """Whether a statement's own backward pass reads something that was saved."""
    return (
        isinstance(statement, Operate)
        and not reached.isdisjoint(statement.node.results)
        and bool(saved_values(statement.node, graph))
    )
