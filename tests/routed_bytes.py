"""What ranks exchange for a routing that happened, counted choice by choice: what traffic must equal."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor, isin, nn, tensor

from autopar.ir.exchange_table import FLAT, ExchangeTable
from autopar.ir.graph import SLICES, Graph, Node
from autopar.ir.placement import Axis, Placement, S, Type, local_shape
from autopar.ir.plan import Plan
from autopar.ir.slice_table import TENSOR, SliceTable
from autopar.ops.experts import ROUTED_EXPERTS, table_of
from autopar.ops.replicas import replicas_of
from autopar.ops.sliced import slice_table_of, sliced_over
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
    row_bytes: tuple[int, int], table: ExchangeTable | None = None, slices: SliceTable | None = None,
    replicas: int = 0,
) -> Bytes:  # fmt: skip
    """Of the first rank. ids: of each rank's tokens; row_bytes: of a token, and of what comes back of it; table: how
    they are exchanged by load; slices: what travels where experts are sliced; replicas: of how many experts, none of
    whose rows travel."""
    over = [a for a in reversed(range(len(axes))) if x[a] == S(0) == up[a] and axes[a].size > 1]
    first = (0,) * len(axes)
    ids = _without_hottest(ids, over, replicas) if over and replicas else ids
    *held, arrived = [
        {rank: len(own) for rank, own in lying.items()} for lying in _journey(ids, num_experts, axes, up, over)
    ]
    counts = [own[first] for own in (*held, arrived)]
    if table is not None:
        agree = {*over, *(a for a, axis in enumerate(axes) if _is_sliced(x[a], up[a]) and axis.size > 1)}
        most = max(count for rank, count in arrived.items() if not any(i for a, i in enumerate(rank) if a not in agree))
        counts = [counts[0], counts[-1]] if table.at(most).how == FLAT else counts
    there, back = sum(counts[:-1]), sum(counts[1:])
    for group in sliced_groups(arrived, axes, x, up):
        if (slices or SliceTable()).at(max(group)) == TENSOR:
            there, back = there + len(group) * group[0], back + sum(group)
    return Bytes(there * row_bytes[0] + back * row_bytes[1], there * row_bytes[1] + back * row_bytes[0])


def _without_hottest(ids: dict[Coordinate, Tensor], over: Sequence[int], count: int) -> dict[Coordinate, Tensor]:
    """Of the ranks that exchange with the first, without choices of the experts that most of theirs are of."""
    group = {rank for rank in ids if not any(i for a, i in enumerate(rank) if a not in over)}
    counts = Counter(e for rank in group for e in ids[rank].flatten().tolist())
    hottest = sorted(counts, key=lambda e: (-counts[e], e))[:count]
    return {rank: own[~isin(own, tensor(hottest))] if rank in group else own for rank, own in ids.items()}


def _journey(
    ids: dict[Coordinate, Tensor], num_experts: int, axes: Sequence[Axis], up: Placement, over: Sequence[int]
) -> list[dict[Coordinate, list[dict[int, int]]]]:
    """Where the rows of each rank must go, before they travel and after each axis."""
    homes = {e: _homes(e, num_experts, axes, up) for e in range(num_experts)}
    lying = {rank: [homes[e] for e in own.flatten().tolist() if e in homes] for rank, own in ids.items()}
    kept = [a for a, type_ in enumerate(up) if type_ == S(0) and a not in over]
    found = [{rank: [h for h in own if all(h[a] == rank[a] for a in kept)] for rank, own in lying.items()}]
    for a in over:
        before = found[-1]
        found.append({
            rank: [h for i in range(axes[a].size) for h in before[*rank[:a], i, *rank[a + 1 :]] if h[a] == rank[a]]
            for rank in before
        })  # fmt: skip
    return found


def sliced_groups(
    arrived: Mapping[Coordinate, int], axes: Sequence[Axis], x: Placement, up: Placement
) -> list[list[int]]:
    """The rows of the ranks that share slices of experts with the first, one list an axis."""
    first = (0,) * len(axes)
    over = [a for a, axis in enumerate(axes) if _is_sliced(x[a], up[a]) and axis.size > 1]
    return [[arrived[*first[:a], i, *first[a + 1 :]] for i in range(axes[a].size)] for a in over]


def _is_sliced(x: Type, up: Type) -> bool:
    """Whether ranks of an axis that places tokens and experts so have their own tokens, and slices of the experts."""
    return x == S(0) != up and up.kind == "S"


def slices_taken(
    ids: dict[Coordinate, Tensor], num_experts: int, axes: Sequence[Axis], x: Placement, up: Placement,
    slices: SliceTable,
) -> str:  # fmt: skip
    """What the first rank and those that share slices of experts with it send each other."""
    over = [a for a in reversed(range(len(axes))) if x[a] == S(0) == up[a] and axes[a].size > 1]
    arrived = {rank: len(own) for rank, own in _journey(ids, num_experts, axes, up, over)[-1].items()}
    return slices.at(max((max(group) for group in sliced_groups(arrived, axes, x, up)), default=0))


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
    slices = {dict(node.kwargs).get(SLICES, "") for node in graph.nodes if node.op == ROUTED_EXPERTS}
    is_by_load = any(";" in table for table in slices)
    if "exchange" not in predicted and not is_by_load:
        return predicted
    with as_routed(traced or graph, model, batch):
        found = {kind: int(size) for kind, size in traffic(graph, plan).items() if size}
    assert is_by_load or {**found, "exchange": 0} == {**predicted, "exchange": 0}
    return found


@contextmanager
def as_routed(graph: Graph, model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, plans of a graph foretell the bytes of the routing that happens in the model's first step."""
    values = run_graph(graph, model, dict(batch))
    plain = _traffic.inner_collectives

    def inner(part: Graph, node: Node, stage: Any) -> Any:
        if node.op != ROUTED_EXPERTS:
            return plain(part, node, stage)
        declared = _by_microbatch(plain, part, node, stage, values[node.operands[1]])
        found = _of_node(part, node, stage, values[node.operands[1]])
        return tuple(map(_instead, declared, found))

    with mock.patch.object(_traffic, "inner_collectives", inner):
        yield


def _instead(sent: list[Any], exchanged: Fraction) -> list[Any]:
    """All exchanges as one, of so many bytes."""
    others = [inner for inner in sent if inner.collective != "exchange"]
    some = [inner for inner in sent if inner.collective == "exchange"]
    return [*others, *(inner._replace(num_bytes=exchanged) for inner in some[:1])]


def _by_microbatch(plain: Any, part: Graph, node: Node, stage: Any, ids: Tensor) -> tuple[list[Any], list[Any]]:
    """What is declared where experts are sliced, as the first rank does it in each microbatch: in the mean of these."""
    operands, slices = stage.nodes[node.name].operands, slice_table_of(node)
    if not sliced_over(operands):
        found: tuple[list[Any], list[Any]] = plain(part, node, stage)
        return found
    sizes = tuple(axis.size for axis in stage.axes)
    hows = Counter(
        slices_taken(deal(own, operands[1], sizes), node.args[7], stage.axes, operands[0], operands[3], slices)
        for own in _microbatches(part, node, stage, ids)
    )
    both: tuple[list[Any], list[Any]] = [], []
    for how, count in hows.items():
        told = replace(node, kwargs=tuple({**dict(node.kwargs), SLICES: f"0:{how}"}.items()))
        for every, own in zip(both, plain(part, told, stage), strict=True):
            every += [one._replace(num_bytes=Fraction(one.num_bytes * count, stage.microbatches)) for one in own]
    return both


def _microbatches(part: Graph, node: Node, stage: Any, ids: Tensor) -> Sequence[Tensor]:
    is_cut = part.tensors[node.operands[1]].shape != ids.shape
    return ids.chunk(stage.microbatches) if is_cut else [ids] * stage.microbatches


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
            slice_table_of(node),
            replicas_of(node),
        )
        for own in _microbatches(part, node, stage, ids)
    ]
    return tuple(Fraction(sum(one), stage.microbatches) for one in zip(*found, strict=True))  # type: ignore[return-value]
