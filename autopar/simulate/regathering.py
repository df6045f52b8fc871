"""How often a regathered parameter is brought into place in one microbatch, as `runtime.gathering` does it.

A block's parameters come when its forward is called and go when it ends. Whoever reads one at another time (a second
piece of the block that runs apart, another module that shares the parameter) brings it again, and then it stays to the
end; a stage of several keeps nothing between a microbatch's two passes, and brings it once more for the second. The
backward pass brings what is not in place when the first gradient reaches an output of the block's forward, or when the
block runs again. If it comes in two parts, the second brings everything once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from autopar.ir.graph import Graph
from autopar.ir.plan import Redistribute, StagePlan
from autopar.ir.schedule import SCHEDULES
from autopar.ir.statements import Flat, Operate, Statement, Value, flatten
from autopar.ir.structure import block_paths
from autopar.simulate.recomputation import Recomputation
from autopar.simulate.way import tensors_on_the_way


class StatementSpan(NamedTuple):
    """Consecutive statements: the first of them, and the first that is none of them."""

    start: int
    end: int


class Regathering:
    """Counts of one plan. `reached`: the tensors that get a gradient, none in inference."""

    def __init__(self, graph: Graph, plan: StagePlan, reached: set[str], recomputation: Recomputation) -> None:
        self.graph, self.plan, self.reached = graph, plan, reached
        self.recomputation = recomputation

    def count(self, redistribute: Redistribute) -> int:
        """How often a microbatch converts a parameter to one of its uses."""
        return self._count(redistribute) + int(self._has_second_part)

    def _count(self, redistribute: Redistribute) -> int:
        span = self._span_of(self.graph.stored_by_tensor[redistribute.tensor].name)
        goes_and_comes = int(self._is_stage and bool(self.reached))
        if span is None:  # the program keeps its own
            return 1 + goes_and_comes
        reads = self._reads[redistribute.tensor, redistribute.target]
        if any(position < span.start for position in reads):
            return 1 + goes_and_comes
        if any(position >= span.end for position in reads):
            return 2 + goes_and_comes
        return 2 if self._is_visited_again(span) else 1

    @property
    def _has_second_part(self) -> bool:
        """Whether the backward pass comes in two parts, of which the second brings all parameters."""
        return SCHEDULES[self.plan.schedule].splits_backward and not self.reached.isdisjoint(self.graph.received)

    @property
    def _is_stage(self) -> bool:
        return self.graph.ends is not None

    @cached_property
    def _flat(self) -> Flat:
        return flatten(self.graph, self.plan, self.graph.answered)

    @cached_property
    def _reads(self) -> dict[Value, list[int]]:
        """Where each value is read."""
        found: dict[Value, list[int]] = defaultdict(list)
        for position, statement in enumerate(self._flat.statements):
            for value in statement.reads:
                found[value].append(position)
        return found

    @cached_property
    def _spans(self) -> dict[str, StatementSpan]:
        """Where the forward of each block runs: the first of its pieces."""
        blocks, found = block_paths(self.graph, self.plan.recompute), dict[str, StatementSpan]()
        for position, statement in enumerate(self._flat.statements):
            for path in {path for path, _ in statement.scope.path} & blocks:
                start, end = found.get(path, (position, position))
                if end == position:
                    found[path] = StatementSpan(start, position + 1)
        return found

    def _span_of(self, name: str) -> StatementSpan | None:
        """That of the innermost block that a parameter is in."""
        end = name.rfind(".")
        while end > 0:
            if name[:end] in self._spans:
                return self._spans[name[:end]]
            end = name.rfind(".", 0, end)
        return None

    def _is_visited_again(self, span: StatementSpan) -> bool:
        """Whether the backward pass needs the block in place: it runs again, or a gradient reaches its outputs."""
        if span not in self._visits:
            statements = self._flat.statements[slice(*span)]
            runs_again = any(map(self.recomputation.runs_again, statements))
            self._visits[span] = runs_again or self._gets_gradient(span, statements)
        return self._visits[span]

    def _gets_gradient(self, span: StatementSpan, statements: Sequence[Statement]) -> bool:
        """Whether a gradient reaches what the statements leave to others, in the first part if there are two."""
        made = {value for statement in statements for value in statement.makes}
        if self._has_second_part:
            made = {value for value in made if value[0] in self._leading_back}
        return any(
            value in self._losses or any(not span.start <= position < span.end for position in self._handed[value])
            for value in made & self._trained
        )

    @cached_property
    def _visits(self) -> dict[StatementSpan, bool]:
        return {}

    @cached_property
    def _handed(self) -> dict[Value, list[int]]:
        """Where each value is read by a statement that hands it a gradient."""
        found: dict[Value, list[int]] = defaultdict(list)
        for position, statement in enumerate(self._flat.statements):
            if self._hands_back(statement, self._trained):
                for value in statement.reads:
                    found[value].append(position)
        return found

    @cached_property
    def _leading_back(self) -> frozenset[str]:
        """The tensors that the first part of the backward pass makes gradients of."""
        return tensors_on_the_way(self.graph)

    @cached_property
    def _trained(self) -> set[Value]:
        """The values that get a gradient."""
        found = set(self._losses)
        for statement in reversed(self._flat.statements):
            if self._hands_back(statement, found):
                found.update(value for value in statement.reads if value[0] in self.reached)
        return found

    @cached_property
    def _losses(self) -> set[Value]:
        """The values that gradients start from: the loss, and what later stages hand one back for."""
        if not self.reached:
            return set()
        pairs = zip(self.graph.returned, self._flat.outputs, strict=True)
        return {value for name, value in pairs if name == self.graph.loss} | set(self._flat.leaving)

    def _hands_back(self, statement: Statement, trained: set[Value]) -> bool:
        """Whether a statement hands a gradient to what it reads; `trained`: values that get one, those it makes too."""
        if isinstance(statement, Operate) and not self.reached.isdisjoint(statement.node.results):
            return True
        return not trained.isdisjoint(statement.makes)
