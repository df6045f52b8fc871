"""What ranks exchange for a routing that happened, counted choice by choice: what traffic must equal."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor, nn

from autopar.ir.exchange_table import FLAT, ExchangeTable
from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Axis, Placement, S, local_shape
from autopar.ir.plan import Plan
from autopar.ops.experts import ROUTED_EXPERTS, table_of
from autopar.simulate import traffic
from tests.ops.shards import deal
from tests.trace.interpret import run_graph

Coordinate = tuple[int, ...]
_traffic: Any = importlib.import_module("autopar.simulate.traffic")  # the package has a function of this name


class Bytes(NamedTuple):
    """Of one rank: rows that it sends forward and backward."""

    forward: int
    backward: int


def exchanged_bytes(
    ids: dict[Coordinate, Tensor], num_experts: int, axes: Sequence[Axis], x: Placement, up: Placement,
    row_bytes: tuple[int, int], table: ExchangeTable | None = None,
) -> Bytes:  # fmt: skip
    """Of the first rank. ids: of each rank's tokens; row_bytes: of a token, and of what comes back of it; table: how
    they are exchanged by load."""
    over = [a for a in reversed(range(len(axes))) if x[a] == S(0) == up[a] and axes[a].size > 1]
    if not over:
        return Bytes(0, 0)
    first = (0,) * len(axes)
    homes = {e: _homes(e, num_experts, axes, up) for e in range(num_experts)}
    held, lying = [], {rank: [homes[e] for e in own.flatten().tolist() if e in homes] for rank, own in ids.items()}
    kept = [a for a, type_ in enumerate(up) if type_ == S(0) and a not in over]
    lying = {rank: [h for h in own if all(h[a] == rank[a] for a in kept)] for rank, own in lying.items()}
    for a in (None, *over):
        if a is not None:
            lying = {
                rank: [h for i in range(axes[a].size) for h in lying[*rank[:a], i, *rank[a + 1 :]] if h[a] == rank[a]]
                for rank in lying
            }
        held.append(len(lying[first]))
    if table is not None:
        most = max(len(own) for rank, own in lying.items() if not any(i for a, i in enumerate(rank) if a not in over))
        held = [held[0], held[-1]] if table.at(most).how == FLAT else held
    there, back = sum(held[:-1]), sum(held[1:])
    return Bytes(there * row_bytes[0] + back * row_bytes[1], there * row_bytes[1] + back * row_bytes[0])


def _homes(expert: int, num_experts: int, axes: Sequence[Axis], up: Placement) -> dict[int, int]:
    """The index of the expert's ranks on each axis that splits experts."""
    split = [a for a, type_ in enumerate(up) if type_ == S(0)]
    for index in itertools.product(*(range(axes[a].size) for a in split)):
        part = list(range(num_experts))
        for a, i in zip(split, index, strict=True):
            length = -(-len(part) // axes[a].size)
            part = part[i * length : (i + 1) * length]
        if expert in part:
            return dict(zip(split, index, strict=True))
    raise AssertionError(f"expert {expert} is nowhere")


def bytes_of(
    graph: Graph, plan: Plan, model: nn.Module, batch: Mapping[str, Tensor], traced: Graph | None = None
) -> dict[str, int]:
    """What the first rank of a plan of one stage sends, by collective: as predicted, but for exchanges, which are those
    of the routing that happens. traced: the model's own graph, where that of the plan has been rewritten."""
    predicted = {kind: size for kind, size in plan.predicted.comm_bytes.items() if size}
    if "exchange" not in predicted:
        return predicted
    with as_routed(traced or graph, model, batch):
        found = traffic(graph, plan)
    assert {**found, "exchange": 0} == {**predicted, "exchange": 0}
    return found


@contextmanager
def as_routed(graph: Graph, model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, plans of a graph foretell the bytes of the routing that happens in the model's first step."""
    values = run_graph(graph, model, dict(batch))
    plain = _traffic.inner_collectives

    def inner(part: Graph, node: Node, stage: Any) -> Any:
        forward, backward = plain(part, node, stage)
        if node.op != ROUTED_EXPERTS:
            return forward, backward
        found = _of_node(part, node, stage, values[node.operands[1]])
        return tuple(map(_instead, (forward, backward), found))

    with mock.patch.object(_traffic, "inner_collectives", inner):
        yield


def _instead(sent: list[Any], exchanged: Fraction) -> list[Any]:
    """All exchanges as one, of so many bytes."""
    others = [inner for inner in sent if inner.collective != "exchange"]
    some = [inner for inner in sent if inner.collective == "exchange"]
    return [*others, *(inner._replace(num_bytes=exchanged) for inner in some[:1])]


def _of_node(part: Graph, node: Node, stage: Any, ids: Tensor) -> tuple[Fraction, Fraction]:
    """In the mean of the microbatches."""
    operands, axes = stage.nodes[node.name].operands, stage.axes
    shapes = [part.tensors[name].shape for name in node.operands]
    widths = [local_shape(shapes[at], operands[at], axes)[-1] for at in (0, 4)]
    row_bytes = [width * part.tensors[node.operands[0]].itemsize for width in widths]
    sizes = tuple(axis.size for axis in axes)
    found = [
        exchanged_bytes(
            deal(own, operands[1], sizes),
            node.args[7],
            axes,
            operands[0],
            operands[3],
            (row_bytes[0], row_bytes[1]),
            table_of(node),
        )
        for own in (ids.chunk(stage.microbatches) if shapes[1] != ids.shape else [ids] * stage.microbatches)
    ]
    return tuple(Fraction(sum(one), stage.microbatches) for one in zip(*found, strict=True))  # type: ignore[return-value]
