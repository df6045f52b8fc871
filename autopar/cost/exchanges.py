"""Which way tokens best travel to experts at which load: the table that a layer reads when it runs.

Of rows of the busiest rank, each way (flat or two-level, in 1, 2, 4 or 8 chunks) has a price: what the operator
computes and sends in its forward and its backward pass. Loads from an even one up to all tokens on one rank are gone
through; where another way is cheaper by more than `EXCHANGE_GAIN`, a row begins, at the load from which it is so.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost.compute import node_time_ns
from autopar.cost.inside import inner_time_ns
from autopar.cost.profile import Profile
from autopar.ir.exchange_table import FLAT, TWO_LEVEL, ExchangeTable, ExchangeWay
from autopar.ir.graph import BY_LOAD, EXPECTED, REPLICAS, Graph, Node
from autopar.ir.mesh import LogicalMesh, Mesh
from autopar.ir.placement import Placement, R, S, local_shape
from autopar.ir.plan import Plan
from autopar.ir.routing import BALANCED, P99, Routing
from autopar.ops.call import call_of
from autopar.ops.communication import inner_communication, worked_shapes
from autopar.ops.experts import ROUTED_EXPERTS, are_neighbours, exchanged_over, routed_experts
from autopar.ops.loads import quantiles
from autopar.ops.lookup import call_key
from autopar.ops.notation import AxisRule
from autopar.ops.replicas import replicas_of
from autopar.tunables import EXCHANGE_GAIN

CHUNKS = (1, 2, 4, 8)
REPLICATED = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of experts that have replicas: more of them come close to gathering all."""
LOADS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0)
"""Times the rows that each rank would have, were all as busy: where ways are compared. Between two of them, a change is
found by halving; two changes between the same two are seen as one."""


@dataclass(frozen=True, eq=False)
class PlacedExperts:
    """An operator that routes tokens to experts, of the graph of one microbatch, and how it is placed."""

    graph: Graph
    node: Node
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    axes: LogicalMesh
    devices_per_node: int
    profile: Profile
    trains: bool

    @cached_property
    def over(self) -> list[int]:
        """The axes, by position, over which ranks exchange."""
        return [axis for axis in exchanged_over(self.operands) if self.axes[axis].size > 1]

    @property
    def can_choose(self) -> bool:
        """Whether ranks exchange, over axes that they can take as one."""
        return bool(self.over) and are_neighbours([self.axes[axis] for axis in self.over])

    @property
    def along_axes(self) -> str:
        """How they exchange where no table says how: along one axis after the other."""
        return TWO_LEVEL if len(self.over) > 1 else FLAT

    @cached_property
    def even_rows(self) -> int:
        """The rows of each rank, were all as busy."""
        return max(
            1, math.prod(local_shape(self.graph.tensors[self.node.operands[1]].shape, self.operands[1], self.axes))
        )

    def price_ns(self, rows: int, how: str, chunks: int) -> int:
        """What the operator takes, both passes, where the busiest rank has so many rows, exchanged so."""
        table, routing = ExchangeTable((ExchangeWay(0, how, chunks),)), Routing(rows=rows)
        told = {**dict(self.node.kwargs), BY_LOAD: table.text, EXPECTED: routing.text}
        return self._time_ns(replace(self.node, kwargs=tuple(told.items())))

    def replicated_ns(self, replicas: int) -> int:
        """What the operator takes, both passes, with replicas of so many experts, at the 99th percentile of routings;
        exchanged as it is."""
        given = dict(self.node.kwargs)
        told = {**given, REPLICAS: replicas, EXPECTED: given.get(EXPECTED, BALANCED).removesuffix(P99) + P99}
        return self._time_ns(replace(self.node, kwargs=tuple(told.items())))

    def _time_ns(self, node: Node) -> int:
        shapes, results = (
            tuple(
                local_shape(self.graph.tensors[name].shape, types, self.axes)
                for name, types in zip(names, placed, strict=True)
            )
            for names, placed in ((node.operands, self.operands), (node.results, self.results))
        )
        worked = worked_shapes(node, shapes, self.operands, self.axes)
        computes_ns = node_time_ns(node, worked, results, self.graph.tensors, self.profile)
        sent = inner_communication(self.graph, node, self.operands, self.axes, self.trains)
        passes = list(zip(computes_ns, sent, strict=True))[: 2 if self.trains else 1]
        return sum(
            own + sum(inner_time_ns(one, own, self.axes, self.devices_per_node, self.profile) for one in some)
            for own, some in passes
        )

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Rows of the busiest rank, evenly among those that the routing draws."""
        ids, ranks = self.graph.tensors[self.node.operands[1]], math.prod(self.axes[axis].size for axis in self.over)
        tokens = self.even_rows // max(1, ids.shape[1]) * ranks
        routing = Routing.parse(dict(self.node.kwargs).get(EXPECTED, ""))
        return quantiles(routing, tokens, ids.shape[1], int(self.node.args[7]), ranks, replicas_of(self.node))

    @cached_property
    def table(self) -> ExchangeTable:
        """The ways that are cheapest, by load."""
        ranks = math.prod(self.axes[axis].size for axis in self.over)
        loads = [math.ceil(self.even_rows * times) for times in LOADS if times <= ranks]
        best = [self._cheapest(loads[0], None)]
        for rows in loads[1:]:
            best.append(self._cheapest(rows, best[-1]))
        ways = [ExchangeWay(0, *best[0])]
        for (low, before), (high, after) in itertools.pairwise(zip(loads, best, strict=True)):
            if after != before:
                ways.append(ExchangeWay(self._change(low, high, before, after), *after))
        return ExchangeTable(tuple(ways))

    def _cheapest(self, rows: int, known: tuple[str, int] | None) -> tuple[str, int]:
        """The way that is cheapest with so many rows; the one that is known, where none is cheaper by enough."""
        hows = (FLAT, TWO_LEVEL) if len(self.over) > 1 else (FLAT,)
        prices = {way: self.price_ns(rows, *way) for way in itertools.product(hows, CHUNKS)}
        best = min(prices, key=prices.__getitem__)
        return best if known is None or prices[best] * (1 + EXCHANGE_GAIN) < prices[known] else known

    def _change(self, low: int, high: int, before: tuple[str, int], after: tuple[str, int]) -> int:
        """The rows from which on the second way is as cheap as the first, or cheaper."""
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            is_after = self.price_ns(middle, *after) <= self.price_ns(middle, *before)
            low, high = (low, middle) if is_after else (middle, high)
        return high


def placed_experts(
    part: Graph, plan: Plan, profiles: Mapping[str, Profile], kind: type[PlacedExperts] = PlacedExperts
) -> dict[str, PlacedExperts]:
    """The operators of a plan whose ranks can choose how they do what a kind is about, by name. part: of one
    microbatch."""
    found = dict[str, PlacedExperts]()
    for node in part.nodes:
        for stage in plan.stages if node.op == ROUTED_EXPERTS else ():
            if node.name in stage.nodes and node.name not in found:
                own = stage.nodes[node.name]
                one = kind(
                    part, node, own.operands, own.results, stage.axes,
                    *_device(plan.mesh, stage.ranks, profiles), plan.mode == "train",
                )  # fmt: skip
                found |= {node.name: one} if one.can_choose else {}
    return found


def _device(mesh: Mesh, ranks: range, profiles: Mapping[str, Profile]) -> tuple[int, Profile]:
    """How many share a node, and what each of them takes."""
    group = mesh.group_of(ranks)
    return group.devices_per_node, profiles[group.profile].shared_by(group.devices_per_node)


def priced_tables(placed: Mapping[str, PlacedExperts]) -> dict[str, ExchangeTable]:
    """The table of each of some operators; of those that are alike, it is found once."""
    known = dict[Hashable, ExchangeTable]()
    for one in placed.values():
        key = _likeness(one)
        if key not in known:
            known[key] = one.table
    return {name: known[_likeness(one)] for name, one in placed.items()}


def prices_in_chunks(placed: Collection[PlacedExperts]) -> dict[int, int]:
    """By number of chunks, what some operators together take at the mean of the loads that the routing draws."""
    count = Counter(map(_likeness, placed))
    alike = {_likeness(one): one for one in placed}
    rows = {key: round(sum(one.loads) / len(one.loads)) for key, one in alike.items()}
    return {
        chunks: sum(count[key] * one.price_ns(rows[key], one.along_axes, chunks) for key, one in alike.items())
        for chunks in CHUNKS
    }  # fmt: skip


def chunks_where_shared(
    part: Graph, axes: LogicalMesh, sharing: Collection[str], split: Collection[str], devices_per_node: int,
    profile: Profile, trains: bool,
) -> int:  # fmt: skip
    """The number of chunks in which tokens travel in least time where ranks of the axes with these names share the
    experts; they and those of axes in `split` have tokens of their own. part: the graph of one microbatch."""
    placed = [
        PlacedExperts(
            part, node, *_where_shared(part, node, axes, sharing, split), axes, devices_per_node, profile, trains
        )
        for node in part.nodes
        if node.op == ROUTED_EXPERTS
    ]
    if not placed or not all(one.can_choose for one in placed):
        return 1
    prices = prices_in_chunks(placed)
    return min(prices, key=prices.__getitem__)


def _where_shared(
    part: Graph, node: Node, axes: LogicalMesh, sharing: Collection[str], split: Collection[str]
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Placements of operands and results; along other axes hidden values are split, where they can be."""
    count = len(node.operands)
    rules = [rule for rule in routed_experts(call_of(part, node)) if rule.operands[0] == R != rule.operands[3] != S(0)]
    inside = rules[0] if rules else AxisRule((R,) * count, (R,))
    exchanging, own = (AxisRule((S(0),) * 3 + (one,) * (count - 3), (S(0),)) for one in (S(0), R))
    of_axis = [exchanging if a.name in sharing else own if a.name in split else inside for a in axes]
    operands = tuple(tuple(rule.operands[position] for rule in of_axis) for position in range(count))
    return operands, (tuple(rule.results[0] for rule in of_axis),)


def cheapest_replicas(placed: Collection[PlacedExperts]) -> int:
    """Of how many experts replicas make some operators together take least at the 99th percentile of routings."""
    count = Counter(map(_likeness, placed))
    alike = {_likeness(one): one for one in placed}
    fewest = min((int(one.node.args[7]) for one in placed), default=1)

    def price_ns(replicas: int) -> int:
        return sum(count[key] * one.replicated_ns(replicas) for key, one in alike.items())

    return min((0, *(number for number in REPLICATED if number < fewest)), key=price_ns)


def _likeness(one: PlacedExperts) -> Hashable:
    return call_key(one.graph, one.node), one.operands, one.results, one.axes, one.profile.name


def beyond_mean_ns(one: PlacedExperts, table: ExchangeTable, loads: Sequence[int]) -> int:
    """How much longer the operator takes in the mean of loads than at their mean, exchanged by a table: less than
    nothing, where ways that are faster at some of them are taken there."""

    def price_ns(rows: int) -> int:
        return one.price_ns(rows, *table.at(rows)[1:])

    return round(sum(map(price_ns, loads)) / len(loads)) - price_ns(round(sum(loads) / len(loads)))
