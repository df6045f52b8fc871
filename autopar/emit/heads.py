"""Attention whose query heads are split further than the key and value heads that they share.

Each rank of such an axis holds all key and value heads, and takes those that its own query heads belong to.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.emit.plain import PlainCalls
from autopar.ir.placement import S
from autopar.ir.statements import Operate
from autopar.ops.call import Call


def attention(writer: PlainCalls, statement: Operate, call: Call, names: list[str]) -> str | None:
    """The call on one key and one value head for each query head; None where the heads are split together."""
    head = len(call.shape(0)) - 3
    query, key = statement.reads[0][1], statement.reads[1][1]
    axes = [axis for axis, q, k in zip(writer.plan.axes, query, key, strict=True) if q == S(head) != k]
    if not axes or call.shape(1)[head] == 1:
        return None
    together = math.prod(axis.size for axis, k in zip(writer.plan.axes, key, strict=True) if k == S(head))
    count, group = call.shape(0)[head] // together, call.shape(0)[head] // call.shape(1)[head]
    where = f"{head}, {count}, {group}, ({''.join(f'{axis.name}, ' for axis in axes).rstrip(' ')})"
    taken = [names[0], *(f"rt.heads_of({name}, {where})" for name in names[1:3]), *names[3:]]
    kwargs = tuple((name, value) for name, value in statement.node.kwargs if name != "enable_gqa")
    node = replace(statement.node, args=statement.node.args[:7], kwargs=kwargs)
    return writer.plain(replace(statement, node=node), taken)


HEADS = {"aten.scaled_dot_product_attention.default": attention}
