"""Constants that are the same are made once: what each layer makes anew of the same positions, all layers read.

What is sent for them is left as it is predicted: collectives are not merged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, map_references
from autopar.ir.plan import StagePlan
from autopar.ir.statements import Flat, Operate, Statement, Value
from autopar.ir.structure import is_random
from autopar.ops.communication import inner_communication


def made_once(graph: Graph, stage: StagePlan, flat: Flat) -> Flat:
    """The program without those constants that an earlier statement makes too, of the same values."""
    same: dict[Value, Value] = {}
    first: dict[Any, tuple[Value, ...]] = {}
    constants: list[Statement] = []
    for statement in flat.constants:
        statement = _of(statement, same)
        does = id(statement) if _sends(graph, stage, statement) else _does(statement)
        made = first.setdefault(does, statement.makes)
        if made is statement.makes:
            constants.append(statement)
        else:
            same.update(zip(statement.makes, made, strict=True))
    if not same:
        return flat
    return replace(
        flat,
        constants=tuple(constants),
        statements=tuple(_of(statement, same) for statement in flat.statements),
        outputs=_now(flat.outputs, same),
        mutations={name: same.get(value, value) for name, value in flat.mutations.items()},
        leaving=_now(flat.leaving, same),
        values={name: same.get(value, value) for name, value in flat.values.items()},
    )


def _of(statement: Statement, same: dict[Value, Value]) -> Statement:
    return (
        statement if same.keys().isdisjoint(statement.reads) else replace(statement, reads=_now(statement.reads, same))
    )


def _now(values: tuple[Value, ...], same: dict[Value, Value]) -> tuple[Value, ...]:
    return tuple(same.get(value, value) for value in values)


def _sends(graph: Graph, stage: StagePlan, statement: Statement) -> bool:
    """Whether ranks communicate for it."""
    if isinstance(statement, Operate):
        operands = tuple(placement for _, placement in statement.reads)
        return any(inner_communication(graph, statement.node, operands, stage.axes))
    return any(sent.collective for step in statement.redistribute.steps for sent in step.transfers)


def _does(statement: Statement) -> Any:
    """What two statements have in common that make the same."""
    placements = tuple(placement for _, placement in statement.makes)
    if not isinstance(statement, Operate):
        return "convert", statement.reads, placements, statement.redistribute.steps, statement.home
    node = statement.node
    if is_random(node):
        return id(statement)
    operands = list(node.operands)
    arguments = repr(map_references((node.args, dict(node.kwargs)), operands.index))
    return node.op, arguments, tuple(name is None for name in node.outputs), statement.reads, placements, statement.home
