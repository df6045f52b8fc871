"""Which operators of a block to compute again by themselves: bytes kept against time, as a minimum cut.

    again(n)     whether operator n is computed again
    kept bytes = Σ b(m) of memory m that is saved, and not again(its maker)
               + Σ b(m) of memory m that nobody saves, of a maker that is kept, where something that reads it is again
               + Σ e(n) of what autograd saves beside tensors, of operators n that are kept
    cost       = kept bytes · price + Σ time(n) of operators n that are computed again

Each term is an edge of a graph between "computed again" and "kept", so that for each price of a byte the best choice of
all subsets is a minimum cut; prices from low to high lead along the lower hull of all (bytes, time). To make an
operator again its operands must be there: one that somebody keeps anyway costs nothing, another is kept for that, or is
made again too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from autopar.cost.compute import forward_work
from autopar.cost.memory import saved_values, storage_root
from autopar.ir.graph import IDENTITY, Graph, Node
from autopar.ir.recompute import operator_call, refusal_again
from autopar.ir.structure import block_paths, constant_tensors
from autopar.ops.saved import Extra
from autopar.tunables import CHEAP_FLOPS, CHEAP_MOVES, LEVEL_PRICES

if TYPE_CHECKING:
    import networkx as nx

AGAIN, KEPT = "computed again", "kept"
Time = Callable[[Node], int | None]
"""What one forward of an operator costs; None of one that is not to be computed again."""


@dataclass(frozen=True)
class Remakable:
    """An operator that may be computed again: what that costs, and bytes that it saves beside tensors."""

    name: str
    time: int
    extra_bytes: int


@dataclass(frozen=True)
class BlockMemory:
    """Memory of a block's activations. maker: among those that may be computed again, or None for one that is kept;
    readers: those that read it; is_saved: whether autograd saves it, for whichever operator."""

    num_bytes: int
    maker: str | None
    readers: frozenset[str]
    is_saved: bool


@dataclass(frozen=True)
class BlockTrade:
    """What may be computed again of a block."""

    operators: tuple[Remakable, ...]
    memory: tuple[BlockMemory, ...]

    def kept_bytes(self, again: Iterable[str]) -> int:
        """What is kept where these are computed again."""
        chosen = set(again)
        extras = sum(operator.extra_bytes for operator in self.operators if operator.name not in chosen)
        held = (one for one in self.memory if one.maker not in chosen)
        return extras + sum(one.num_bytes for one in held if one.is_saved or not one.readers.isdisjoint(chosen))

    def time(self, again: Iterable[str]) -> int:
        """What it takes to compute these again."""
        chosen = set(again)
        return sum(operator.time for operator in self.operators if operator.name in chosen)

    @property
    def average(self) -> Fraction:
        """What a byte costs that is freed by computing everything again."""
        return Fraction(sum(operator.time for operator in self.operators), max(1, self.kept_bytes(())))

    def best(self, price: Fraction) -> frozenset[str]:
        """What to compute again where a byte that is kept costs so much; the fewest of equal choices."""
        import networkx as nx  # a seventh of a second, for plans that compute some operators again alone

        network, (per_byte, per_time) = nx.DiGraph(), price.as_integer_ratio()
        network.add_nodes_from((AGAIN, KEPT))
        for operator in self.operators:
            _add(network, AGAIN, operator.name, operator.extra_bytes * per_byte)
            _add(network, operator.name, KEPT, operator.time * per_time)
        for number, one in enumerate(self.memory):
            maker = KEPT if one.maker is None else one.maker
            if one.is_saved:
                _add(network, AGAIN, maker, one.num_bytes * per_byte)
            else:
                for reader in one.readers - {one.maker}:
                    network.add_edge(reader, number)  # of unlimited capacity
                _add(network, number, maker, one.num_bytes * per_byte)
        residual = nx.algorithms.flow.preflow_push(network, AGAIN, KEPT)
        return _reached(residual) & {operator.name for operator in self.operators}


def _add(network: nx.DiGraph, source: object, target: object, capacity: int) -> None:
    known = network.edges[source, target]["capacity"] if network.has_edge(source, target) else 0
    network.add_edge(source, target, capacity=known + capacity)


def _reached(residual: nx.DiGraph) -> frozenset[str]:
    """What "computed again" still leads to when the flow is at its largest: the smallest of all minimum cuts."""
    found, pending = {AGAIN}, [AGAIN]
    while pending:
        for other, edge in residual[pending.pop()].items():
            if other not in found and edge["flow"] < edge["capacity"]:
                found.add(other)
                pending.append(other)
    return frozenset(name for name in found if isinstance(name, str))


def block_trade(graph: Graph, nodes: Sequence[Node], time: Time, device: str) -> BlockTrade:
    """What may be computed again of a block's nodes. time: of one forward."""
    blocks = block_paths(graph)
    asked = ((node.name, time(node)) for node in nodes if refusal_again(graph, node, blocks) is None)
    times = {name: taken for name, taken in asked if taken is not None}
    saved = {node.name: saved_values(node, graph, device) for node in nodes if _trains(graph, node)}
    operators = (
        Remakable(name, taken, sum(_extra_bytes(graph, one) for one in saved.get(name, ())))
        for name, taken in times.items()
    )
    roots = {storage_root(one, graph) for kept in saved.values() for one in kept if isinstance(one, str)}
    readers: dict[str, set[str]] = {}
    for node in nodes:
        for name in (*node.operands, *node.results):
            readers.setdefault(storage_root(name, graph), set()).update({node.name} & times.keys())
    constant = constant_tensors(graph)
    memory = (
        BlockMemory(graph.tensors[root].num_bytes, _maker(graph, root, times), frozenset(names), root in roots)
        for root, names in readers.items()
        if root in graph.producers and root not in constant
    )
    return BlockTrade(tuple(operators), tuple(memory))


def _trains(graph: Graph, node: Node) -> bool:
    return node.op != IDENTITY and any(graph.tensors[name].differentiable for name in node.results)


def _extra_bytes(graph: Graph, saved: object) -> int:
    if not isinstance(saved, Extra) or saved.is_number:
        return 0
    return saved.num_bytes(graph.tensors[saved.like].shape)


def _maker(graph: Graph, root: str, times: dict[str, int]) -> str | None:
    name = graph.producers[root].name
    return name if name in times else None


# Of a whole model ----------------------------------------


def selective(graph: Graph, paths: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Of each block, the operators that are cheap to compute again for what that frees: norms, activations, elementwise
    products, copies; no matrix products and no attention."""
    return chosen_operators(graph, paths, partial(_moved_bytes, graph), lambda trade: [Fraction(CHEAP_MOVES)])[0]


def selective_levels(
    graph: Graph, paths: Sequence[str], time: Time, device: str
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Of each block, choices on the hull, by name, the one that computes least again first; those that are equal once.

    Their prices are parts of what a byte costs on average that is freed by computing all of a block again. time: of one
    forward, in ns.
    """
    chosen = chosen_operators(
        graph, paths, time, lambda trade: [part * trade.average for part in LEVEL_PRICES.values()]
    )
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    for name, operators in zip(LEVEL_PRICES, chosen, strict=True):
        if any(operators) and operators not in found.values():
            found[name] = operators
    return found


def chosen_operators(
    graph: Graph, paths: Sequence[str], time: Time, prices: Callable[[BlockTrade], Sequence[Fraction]],
    device: str = "cuda",
) -> list[tuple[tuple[str, ...], ...]]:  # fmt: skip
    """For each price of a byte, and each block, what to compute again, as a plan names it. paths: of the blocks."""
    inside: dict[str, list[Node]] = {path: [] for path in paths}
    for node in graph.nodes:
        if (path := node.scope.outermost(inside)) is not None:
            inside[path].append(node)
    known: dict[Hashable, list[list[int]]] = {}
    found: list[list[tuple[str, ...]]] = []
    for nodes in inside.values():
        trade = block_trade(graph, nodes, time, device)
        form = _form(trade, nodes)
        if form not in known:
            best = [trade.best(price) for price in prices(trade)]
            known[form] = [[n for n, node in enumerate(nodes) if node.name in names] for names in best]
        found.append([tuple(operator_call(nodes[n]) for n in numbers) for numbers in known[form]])
    return list(zip(*found, strict=True)) or [(), ()]


def _form(trade: BlockTrade, nodes: Sequence[Node]) -> Hashable:
    """Equal of blocks of which the same is best."""
    place: dict[str | None, int] = {node.name: number for number, node in enumerate(nodes)}
    operators = tuple((place[one.name], one.time, one.extra_bytes) for one in trade.operators)
    memory = (
        (one.num_bytes, place.get(one.maker), tuple(sorted(place[name] for name in one.readers)), one.is_saved)
        for one in trade.memory
    )
    return operators, tuple(memory)


def _moved_bytes(graph: Graph, node: Node) -> int | None:
    """What an operator reads and writes; None of one that computes more than that, such as products and attention."""
    operands, results = (tuple(graph.tensors[n].shape for n in names) for names in (node.operands, node.results))
    work = forward_work(node, operands, results, graph.tensors)
    is_large = work.flops > CHEAP_FLOPS * math.prod(results[0]) or "attention" in node.op
    return None if is_large else work.num_bytes
