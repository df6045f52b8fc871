"""Rows of a table: looked up (`embedding`), or summed or averaged in bags (`_embedding_bag`).

Rows: each rank looks up what it holds, which leaves summands; the number of a bag's rows is known everywhere.
Columns: as they are. Bags: where all have the same length, slices of the bags are slices of the row numbers too. Only
the first result of `_embedding_bag` has a use here.
"""

from __future__ import annotations

from autopar.ir.graph import IDENTITY, Node
from autopar.ir.placement import Axis, P, Placement, R, S, num_shards
from autopar.ops import saved, work, workspace
from autopar.ops.call import Call
from autopar.ops.local import LocalCall, tuple_of
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator

SUM, MEAN = 0, 1  # its modes; the third is a maximum


def embedding(call: Call) -> list[AxisRule]:
    """Columns split as columns; split rows give summands (a masked lookup); ids split as they are."""
    rank = len(call.shape(1))
    rules = [AxisRule((S(1), R), (S(rank),)), AxisRule((P, R), (P,))]
    if call.arguments["scale_grad_by_freq"] or call.arguments["sparse"]:
        return rules  # the gradient of a row needs all ids
    return [*rules, AxisRule((S(0), R), (P,)), *(AxisRule((R, S(dim)), (S(dim),)) for dim in range(rank))]


def _embedding_local(local: LocalCall) -> str | None:
    axes, (table, ids) = local.axes_where(0, lambda type_: type_ == S(0)), local.names
    if not axes:
        return None
    padding = local.call.arguments["padding_idx"]
    return f"rt.embedding({ids}, {table}, {tuple_of(axes)}, {local.call.shape(0)[0]}, padding_idx={padding})"


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
    """The length of every bag, where row numbers came as a matrix; None where bags may differ.

    A microbatch has its slice of the numbers at which the bags of the step begin.
    """
    begin = _source(call, call.node.operands[2])
    if begin is None or begin.op != "aten.arange.start_step" or call.arguments["include_last_offset"]:
        return None
    start, end, step = begin.args[:3]
    count = call.shape(2)[0]
    (in_step,) = call.graph.made_shape(begin.results[0])
    are_all = start == 0 and end == in_step * step and call.shape(1)[0] == count * step
    return int(step) if are_all else None


def _source(call: Call, name: str) -> Node | None:
    node = call.graph.producers.get(name)
    while node is not None and node.op == IDENTITY:
        node = call.graph.producers.get(node.operands[0])
    return node


def _bags_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Every slice of the row numbers must end with a bag."""
    count, shards = call.shape(2)[0], num_shards(operands[2], 0, axes)
    return f"{count} bags do not split evenly in {shards}" if count % shards else None


def _bags_local(local: LocalCall) -> str | None:
    """Split rows: the runtime's lookup. Split bags: they begin at the first row number of the slice."""
    call, (table, numbers, begins, *factors) = local.call, local.names
    axes = local.axes_where(0, lambda type_: type_ == S(0))
    are_split = any(type_ == S(0) for type_ in local.placements[2])
    begins = f"{begins} - {begins}[0]" if are_split else begins
    if not axes:
        return local.plain([table, numbers, begins, *factors], call.node) if are_split else None
    options = {"mode": ("sum", "mean")[call.arguments["mode"]]}
    options |= {key: call.arguments[key] for key in ("include_last_offset", "padding_idx")}
    told = [f"{key}={value!r}" for key, value in options.items()]
    told += [f"per_sample_weights={factor}" for factor in factors]
    where = f"{table}, {numbers}, {begins}, {tuple_of(axes)}, {call.shape(0)[0]}"
    return f"rt.embedding_bag({where}, {', '.join(told)}), None, None, None"  # the others serve its own backward pass


_ROWS = Operator(work=work.ROWS, saved=saved.indices, needs_elements=True)

EMBEDDINGS: dict[str, Operator] = {
    "aten.embedding.default": _ROWS.by(embedding, local=_embedding_local, lowered=workspace.split_lookup),
    "aten._embedding_bag.default": _ROWS.by(
        embedding_bag, local=_bags_local, limits=(_bags_error,), asks_makers=True, saved=saved.bags
    ),
}
