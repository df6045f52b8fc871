"""Runs an operator on virtual ranks as the emitted program calls it: the emitter's text, the runtime's functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from autopar import runtime as rt
from autopar.emit.calls import CallWriter
from autopar.ir.graph import SLICES, Node
from autopar.ir.placement import local_shape
from autopar.ir.plan import NodePlan
from autopar.ir.statements import Operate
from autopar.ops.call import Call
from autopar.ops.communication import count_of_targets, inner_communication
from autopar.ops.experts import ROUTED_EXPERTS, table_of
from autopar.ops.replicas import replicas_of
from autopar.ops.sliced import slice_table_of
from autopar.runtime.mesh import RankMesh
from tests.ops import ranks
from tests.ops.interpreter import Case, Layout, backward, gradient_type
from tests.ops.shards import Shards, deal
from tests.routed_bytes import exchanged_bytes, slices_taken

Sent = tuple[Counter[str], Counter[str]]
"""Bytes by collective, forward and backward."""

_AS_TORCH_SEES = {"ring": "send"}


def call_text(case: Case, layout: Layout) -> str:
    """The call in an emitted program; operands are x0, x1, …, axes have their names."""
    nodes = {case.node.name: NodePlan(tuple(layout.operands), tuple(layout.results))}
    plan: Any = SimpleNamespace(axes=layout.axes, nodes=nodes)
    reads = tuple(zip(case.node.operands, layout.operands, strict=True))
    makes = tuple(zip(case.node.results, layout.results, strict=True))
    statement = Operate(case.node, reads, makes, case.node.scope)
    return CallWriter(case.graph, plan).write(statement, [f"operands[{i}]" for i in range(len(reads))])


def run_emitted(case: Case, layout: Layout, operands: list[Shards]) -> tuple[list[Shards], list[Shards], Sent]:
    """Results, gradients of the operands, and what the first rank sends."""
    code = compile(call_text(case, layout), "emitted", "eval")
    seeds = [
        {} if whole is None else deal(whole, tuple(map(gradient_type, types)), layout.sizes)
        for whole, types in zip(case.result_gradients, layout.results, strict=True)
    ]

    def job(coordinate: ranks.Coordinate, mesh: RankMesh) -> tuple[list[Tensor], list[Tensor | None], Sent]:
        own = [shards[coordinate] for shards in operands]
        found = _call(code, own, mesh)
        results = [result for result, name in zip(found, case.node.outputs, strict=True) if name is not None]
        forward = ranks.sent()
        gradients = backward(results, [shards.get(coordinate) for shards in seeds], own)
        return results, gradients, (forward, ranks.sent() - forward)

    made = ranks.run(layout.axes, job)
    results = [{c: made[c][0][i] for c in made} for i in range(len(case.results))]
    gradients = [{c: made[c][1][i] for c in made} for i in range(len(operands))]
    return results, gradients, made[next(iter(made))][2]


def _call(code: Any, operands: list[Tensor], mesh: RankMesh) -> list[Tensor]:
    names: dict[str, Any] = {"rt": rt, "aten": torch.ops.aten, "torch": torch, "operands": operands}
    names.update({axis.name: axis for axis in mesh.axes}, self=SimpleNamespace(mesh=mesh))
    found = eval(code, names)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def bytes_difference(case: Case, layout: Layout, sent: Sent) -> str | None:
    """Where the operator's declaration differs from what was sent; None where it does not."""
    declared = inner_communication(case.graph, _as_routed(case, layout), layout.operands, layout.axes)
    counts = count_of_targets(Call(case.graph, case.node), layout.operands)
    for what, found, told in zip(("forward", "backward"), sent, ([*declared[0], *counts], declared[1]), strict=True):
        expected: Counter[str] = Counter()
        for inner in told:
            expected[_AS_TORCH_SEES.get(inner.collective, inner.collective)] += inner.num_bytes
        if expected.pop("exchange", 0):  # as many as were routed, among the all-to-alls here
            expected["all_to_all"] += _exchanged(case, layout, what)
        if +expected != +found:
            return f"{what} bytes: declared {dict(expected)}, sent {dict(found)}"
    return None


def _as_routed(case: Case, layout: Layout) -> Node:
    """The call, which declares what its first rank does with the load that it sees."""
    if case.node.op != ROUTED_EXPERTS:
        return case.node
    _, ids, _, up, _ = layout.operands[:5]
    own, slices = deal(case.operands[1], ids, layout.sizes), slice_table_of(case.node)
    how = slices_taken(own, case.node.args[7], layout.axes, layout.operands[0], up, slices)
    return replace(case.node, kwargs=tuple({**dict(case.node.kwargs), SLICES: f"0:{how}"}.items()))


def _exchanged(case: Case, layout: Layout, what: str) -> int:
    """What the first rank sends of tokens for the choices that they made."""
    x, ids, _, up, down = layout.operands[:5]
    sizes = local_shape(case.operands[0].shape, x, layout.axes), local_shape(case.operands[4].shape, down, layout.axes)
    row_bytes = [size[-1] * case.operands[0].itemsize for size in sizes]
    own = deal(case.operands[1], ids, layout.sizes)
    table, slices, replicas = table_of(case.node), slice_table_of(case.node), replicas_of(case.node)
    sizes = row_bytes[0], row_bytes[1]
    found = exchanged_bytes(own, case.node.args[7], layout.axes, x, up, sizes, table, slices, replicas)
    return found.forward if what == "forward" else found.backward
