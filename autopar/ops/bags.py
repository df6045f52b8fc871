"""Bags of rows of a table, summed or averaged: `_embedding_bag`, of which only the first result has a use here.

Rows: each rank looks up what it holds, which leaves summands; the number of a bag's rows is known everywhere.
Columns: as they are. Bags: where all have the same length, slices of the bags are slices of the row numbers too.
"""

from __future__ import annotations

from autopar.ir.graph import IDENTITY, Node
from autopar.ir.placement import Axis, P, Placement, R, S, num_shards
from autopar.ops.call import Call
from autopar.ops.notation import AxisRule

EMBEDDING_BAG = "aten._embedding_bag.default"
SUM, MEAN = 0, 1  # its modes; the third is a maximum


def embedding_bag(call: Call) -> list[AxisRule]:
    """Operands: table, row numbers, where each bag begins, and perhaps a factor for each row."""
    arguments, others = call.arguments, len(call.node.operands) - 1
    if call.result_positions() != [0] or arguments["scale_grad_by_freq"] or arguments["sparse"]:
        return []
    rules = [AxisRule((S(1),) + (R,) * others, (S(1),))]
    if arguments["mode"] in (SUM, MEAN):
        rules.append(AxisRule((S(0),) + (R,) * others, (P,)))
        rules.append(AxisRule((P,) + (R,) * others, (P,)))
        if others == 3:
            rules.append(AxisRule((R, R, R, P), (P,)))
    if bag_length(call):
        rules.append(AxisRule((R,) + (S(0),) * others, (S(0),)))
    return rules


def bag_length(call: Call) -> int | None:
    """The length of every bag, where row numbers came as a matrix; None where bags may differ."""
    begin = _source(call, call.node.operands[2])
    if begin is None or begin.op != "aten.arange.start_step" or call.arguments["include_last_offset"]:
        return None
    start, end, step = begin.args[:3]
    whole = start == 0 and end == call.shape(1)[0] == call.shape(2)[0] * step
    return int(step) if whole else None


def _source(call: Call, name: str) -> Node | None:
    node = call.graph.producers.get(name)
    while node is not None and node.op == IDENTITY:
        node = call.graph.producers.get(node.operands[0])
    return node


def bags_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Why bags cannot be split so, or None: every slice of the row numbers must end with a bag."""
    count, shards = call.shape(2)[0], num_shards(operands[2], 0, axes)
    return f"{count} bags do not split evenly in {shards}" if count % shards else None
