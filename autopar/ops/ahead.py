"""What several microbatches are told of the whole batch before the first: counts that means divide by, and other sums.

    loss = Σ_microbatches Σ_samples loss_i / count        count = targets of all microbatches that are not ignored

Whatever follows from inputs alone can be summed so (P → R over microbatches): the count of a mask, a sum of weights.
Each is made in every microbatch, by itself, of all that it takes; sums that are there already are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from autopar.ir.graph import Graph
from autopar.ir.mesh import MICROBATCH
from autopar.ir.plan import Stage
from autopar.ir.statements import Convert, Flat, Operate, Statement, Value, with_read_constants
from autopar.ops.call import call_of
from autopar.ops.communication import is_mean_over_samples
from autopar.ops.local import is_microbatched


class Told(NamedTuple):
    """The mean whose samples are counted, or the conversion that brings a sum, the values that are counted or summed,
    and in the order of the program what makes them of the inputs; None where other things are needed for that."""

    statement: Operate | Convert
    values: tuple[Value, ...]
    makers: tuple[Statement, ...] | None


class ToldAhead:
    """What a stage's microbatches are told. flat: all that it does, stated on the axis of microbatches."""

    def __init__(self, graph: Graph, stage: Stage, flat: Flat) -> None:
        self._graph, self._stage, self._flat = graph, stage, flat

    @cached_property
    def told(self) -> tuple[Told, ...]:
        """Each of it, in its order; of a sum in several placements once."""
        sums, found = set[str](), list[Told]()
        for statement in self._flat.statements:
            if isinstance(statement, Operate):
                found += [self._of(statement, statement.reads[1:])] if self._is_mean(statement) else []
            elif is_sum_ahead(statement, self._stage) and statement.redistribute.tensor not in sums:
                sums.add(statement.redistribute.tensor)
                found.append(self._of(statement, statement.reads[:1]))
        return tuple(found)

    @cached_property
    def left(self) -> Flat:
        """What each microbatch runs: not what only serves such sums."""
        flat, stage = self._flat, self._stage
        if not any(is_sum_ahead(statement, stage) for statement in flat.statements):
            return flat
        needed = {*flat.outputs, *flat.mutations.values(), *flat.leaving}
        kept: list[Statement] = []
        for statement in reversed(flat.statements):
            if needed.isdisjoint(statement.makes):
                continue
            if isinstance(statement, Convert) and is_sum_ahead(statement, stage):
                statement = replace(statement, reads=())
            needed.update(statement.reads)
            kept.append(statement)
        return with_read_constants(replace(flat, statements=tuple(reversed(kept))))

    def _is_mean(self, statement: Operate) -> bool:
        if not is_mean_over_samples(call_of(self._graph, statement.node)):
            return False
        logits = self._stage.nodes[statement.node.name].operands[0]
        return is_microbatched(self._stage.axes, logits)

    def _of(self, statement: Operate | Convert, values: tuple[Value, ...]) -> Told:
        chains = [chain(value, self._known, self._made_by, self._is_there) for value in values]
        if any(made is None for made in chains):
            return Told(statement, values, None)
        needed = {id(one) for made in chains for one in made or ()}
        running = (one for one in self._statements if id(one) in needed)
        return Told(statement, values, tuple(replace(s, reads=()) if self._is_there(s) else s for s in running))

    def _is_there(self, statement: Statement) -> bool:
        """Whether it only reads a sum that was made before."""
        return is_sum_ahead(statement, self._stage)

    @cached_property
    def _statements(self) -> tuple[Statement, ...]:
        return (*self._flat.constants, *self._flat.statements)

    @cached_property
    def _made_by(self) -> dict[Value, Statement]:
        return makers(self._statements)

    @cached_property
    def _known(self) -> set[Value]:
        """Inputs, and what is stored that no step changes, as it is stored."""
        graph, stage = self._graph, self._stage
        stored = (s.tensor for s in graph.stored if s.kind != "parameter" and s.name not in graph.mutations)
        inputs = ((name, stage.inputs[name]) for name in graph.inputs if name not in graph.received)
        return {*inputs, *((name, stage.storage[name].placement) for name in stored)}


def is_sum_ahead(statement: Statement, stage: Stage) -> bool:
    """Whether a conversion brings the sum over all microbatches."""
    steps = statement.redistribute.steps if isinstance(statement, Convert) else ()
    return bool(steps) and stage.axes[steps[0].axis].name == MICROBATCH and steps[0].before.kind == "P"


def makers(statements: Sequence[Statement]) -> dict[Value, Statement]:
    """The statement that makes each value."""
    return {made: statement for statement in statements for made in statement.makes}


def chain(
    value: Value, known: set[Value], made_by: dict[Value, Statement], ends: Callable[[Statement], bool] | None = None
) -> list[Statement] | None:
    """The statements that lead from known values to this one; None where something else is needed.

    ends: whether a statement needs nothing that is made before it.
    """
    if value in known:
        return []
    if value not in made_by:
        return None
    found = [made_by[value]]
    if ends is not None and ends(found[0]):
        return found
    for read in made_by[value].reads:
        before = chain(read, known, made_by, ends)
        if before is None:
            return None
        found += before
    return found
