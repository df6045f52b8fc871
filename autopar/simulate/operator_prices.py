"""What operators cost on a rank, each once: with the placements that it has, equal blocks and equal plans have it in
common."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.cost.compute import (
    gathered_ns,
    in_bits_ns,
    node_issue_ns,
    node_time_ns,
    split_backward_ns,
    split_norm_backward_ns,
    split_norm_time_ns,
)
from autopar.cost.fusion import Fused, compiled_time_ns
from autopar.cost.memory import lowered_memory, packed_in_eight_bits, workspace_bytes
from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Shape
from autopar.ir.plan import NodePlan, StagePlan
from autopar.ops.communication import gathered_rows, inner_communication, worked_shapes
from autopar.ops.eight_bits import eight_bits_moved, eight_bits_workspace
from autopar.ops.table import operator
from autopar.ops.workspace import Sizes
from autopar.simulate.facts import LocalShapes
from autopar.simulate.program import Split, Transmission, Value
from autopar.simulate.sending import SendPrices
from autopar.simulate.traffic import inner_collectives


class OperatorPrice(NamedTuple):
    """What an operator costs with some placements."""

    forward_ns: int
    backward_ns: int
    issue_ns: tuple[int, int]
    inner: tuple[Transmission, ...]
    inner_backward: tuple[Transmission, ...]
    workspace: tuple[int, int]
    split: Split | None
    lowered_bytes: int | None  # what autograd keeps of the runtime's function that runs instead, if one does
    lowered_keeps: tuple[int, ...] = ()  # and which operands and results it keeps


class SlotPrice(NamedTuple):
    """Bytes of a stored tensor on the way to one of its uses; fields as in `Slot`."""

    stored_bytes: int
    gradient_bytes: int
    is_alias: bool
    sizes: tuple[tuple[int, int], ...]
    gather_bytes: int
    scatter_bytes: int
    cast_bytes: tuple[int, int]
    is_cast: bool


class StoredPrice(NamedTuple):
    """Bytes of a stored tensor, its optimizer state, what its update moves, and takes for a while."""

    stored_bytes: int
    state_bytes: int
    moved_bytes: int
    workspace: tuple[int, int]


@dataclass(slots=True)
class PriceTable:
    """What is known of equal things on equal axes: nodes by their place in a repeated block, stored tensors by form."""

    operators: dict[Hashable, OperatorPrice] = field(default_factory=dict)
    slots: dict[Hashable, SlotPrice] = field(default_factory=dict)
    stored: dict[Hashable, StoredPrice] = field(default_factory=dict)


class OperatorPrices:
    """Prices of a graph's operators on one lane. twins: by node what it has in common with those in its place in equal
    blocks. trains, may_split: whether there is a backward pass, and whether it may come in two parts."""

    def __init__(
        self, graph: Graph, twins: Mapping[str, Hashable], shapes: LocalShapes, table: PriceTable, sending: SendPrices,
        trains: bool, may_split: bool,
    ) -> None:  # fmt: skip
        self.graph, self.twins, self.shapes, self.table, self.sending = graph, twins, shapes, table, sending
        self.trains, self.may_split, self.profile = trains, may_split, sending.profile

    def known(self, node: Node, placed: NodePlan) -> OperatorPrice | None:
        """What is known of an operator that runs by itself, in one backward pass."""
        return self.table.operators.get((self.twins.get(node.name, node.name), placed, ()))

    def price(
        self, plan: StagePlan, node: Node, inputs: Sequence[Value], outputs: Sequence[Value], fused: Fused | None = None
    ) -> OperatorPrice:
        """That of a twin in an equal block with equal placements, whichever plan had it."""
        back = tuple([value.leads_back for value in inputs]) if self.may_split else ()
        key = (self.twins.get(node.name, node.name), plan.nodes[node.name], back, *((fused,) if fused else ()))
        known = self.table.operators.get(key)
        if known is None:
            known = self.table.operators[key] = self._priced(plan, node, inputs, outputs, fused, back)
        return known

    def _priced(
        self, plan: StagePlan, node: Node, inputs: Sequence[Value], outputs: Sequence[Value], fused: Fused | None,
        back: tuple[bool, ...],
    ) -> OperatorPrice:  # fmt: skip
        placements, tensors, profile = plan.nodes[node.name], self.graph.tensors, self.profile
        operands = worked_shapes(node, tuple([value.shape for value in inputs]), placements.operands, plan.axes)
        results = tuple([made_shape(self.graph, value) for value in outputs])
        times = node_time_ns(node, operands, results, tensors, profile)
        issue_ns = node_issue_ns(node, operands, results, tensors, profile)
        if fused:
            times, issue_ns = compiled_time_ns(node, operands, results, tensors, profile, fused)
        if self.trains and (ranks := gathered_rows(node, placements.operands, plan.axes)) > 1:
            times = _sum(times, gathered_ns(node, operands, results, tensors, ranks, profile))
        split = Split(*split_backward_ns(node, operands, results, tensors, back, profile)) if back else None
        inner, inner_backward = self._inside(plan, node, times)
        own, _ = inner_communication(self.graph, node, placements.operands, plan.axes)
        passes = operator(node.op).passes_when_split
        if own and passes and profile.runtime:
            size = inputs[0].num_bytes
            times = split_norm_time_ns(passes, size, profile)
            split = split and split._replace(backward_ns=split_norm_backward_ns(passes, size, profile))
        sizes = self._sizes(plan, node, inputs, outputs, bool(own))
        lowered = lowered_memory(node, sizes, placements.operands)
        priced = OperatorPrice(
            *times, issue_ns, inner, inner_backward,
            workspace_bytes(node.op, sizes) if lowered is None else lowered.workspace,
            split,
            None if lowered is None else lowered.saved_bytes,
            () if lowered is None else lowered.keeps,
        )  # fmt: skip
        if placements.in_bits and self.trains:
            priced = self._in_bits(priced, node, sizes)
        if placements.in_eight_bits and self.trains:
            priced = self._in_eight_bits(priced, node, sizes)
        return priced

    def _in_bits(self, price: OperatorPrice, node: Node, sizes: Sizes) -> OperatorPrice:
        """Of the runtime's function that packs what is kept."""
        rule = operator(node.op).in_bits
        if rule is None:
            return price
        longer, issued = in_bits_ns(rule.moved(node, sizes), self.profile)
        packed = price._replace(workspace=rule.workspace(node, sizes), lowered_bytes=None, lowered_keeps=())
        return _longer(packed, longer, issued, 0)

    def _in_eight_bits(self, price: OperatorPrice, node: Node, sizes: Sizes) -> OperatorPrice:
        """Each half of a backward pass in two unpacks what the operator keeps."""
        packed = packed_in_eight_bits(node, self.graph)
        longer, issued = in_bits_ns(eight_bits_moved(packed, node, self.graph, sizes), self.profile)
        workspace = eight_bits_workspace(packed, node, self.graph, sizes, price.workspace)
        return _longer(price._replace(workspace=workspace), longer, issued, 1)

    def _inside(
        self, plan: StagePlan, node: Node, computes_ns: tuple[int, int]
    ) -> tuple[tuple[Transmission, ...], tuple[Transmission, ...]]:
        """What the operator sends inside its forward and its backward pass, which compute so long."""
        lanes = [plan, *(replace(plan, axes=lane.axes) for lane in self.sending.others)]
        forward, backward = zip(*(inner_collectives(self.graph, node, lane) for lane in lanes), strict=True)
        return self.sending.inside(forward, computes_ns[0]), self.sending.inside(backward, computes_ns[1])

    def _sizes(
        self, plan: StagePlan, node: Node, inputs: Sequence[Value], outputs: Sequence[Value], communicates: bool
    ) -> Sizes:
        """On this rank."""
        return Sizes(
            tuple([value.shape for value in inputs]),
            tuple([made_shape(self.graph, value) for value in outputs]),
            max((self.shapes.itemsize(name) for name in node.results), default=0),
            tuple([value.differentiable for value in inputs]),
            self.profile.device_type,
            communicates,
            tuple([axis.size for axis in plan.axes]),
            tuple([self.shapes.itemsize(name) for name in node.operands]),
        )


def made_parts(graph: Graph, name: str) -> int:
    """How many slices a tensor is made with, of which a microbatch reads one."""
    return math.prod(graph.made_shape(name)) // max(1, math.prod(graph.tensors[name].shape))


def made_shape(graph: Graph, value: Value) -> Shape:
    """The local shape in which an operator makes a value."""
    parts = made_parts(graph, value.tensor) if value.item >= 0 else 1
    return value.shape if parts == 1 else (parts * value.shape[0], *value.shape[1:])


def _longer(price: OperatorPrice, longer: tuple[int, int], issued: tuple[int, int], halves: int) -> OperatorPrice:
    """With so much more work forward and backward, and for the host. halves: how many times the second half of a
    backward pass in two has its part again."""
    split = price.split and Split(
        _sum(price.split.backward_ns, (longer[1], halves * longer[1])),
        _sum(price.split.issue_ns, (issued[1], halves * issued[1])),
    )
    return price._replace(
        forward_ns=price.forward_ns + longer[0],
        backward_ns=price.backward_ns + longer[1],
        issue_ns=_sum(price.issue_ns, issued),
        split=split,
    )


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]
