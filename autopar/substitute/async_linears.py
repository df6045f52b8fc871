"""Graphs whose linear operators may compute beside what they send (`ops.async_linears`).

    linear(x, V), linear(x, W)  →  gathered_linears(x, [V, W])      rows of x come from other ranks, once for both
    linear(x, W)                →  scattered_linear(x, W, dim=1)    blocks of the sum go to other ranks

Which of them are told is for placements to say (`passes.async_linears`); each computes what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Ref, references, with_nodes
from autopar.ops.async_linears import GATHERED_LINEARS, SCATTERED_LINEAR
from autopar.ops.factors import LINEAR

GATHER_RULE = "gather-beside-products"
GATHER_STATEMENT = "linear(x, V), linear(x, W) => both side by side; rows of x may come block by block"
SCATTER_RULE = "scatter-beside-products"
SCATTER_STATEMENT = "linear(x, W) => the same; blocks of its sum over ranks may go home one by one"


def is_linear(graph: Graph, node: Node) -> bool:
    """Whether it is a linear operator of rows, with its tensors by position."""
    by_position = len(references(node.args)) == len(node.operands)
    return node.op == LINEAR and by_position and len(graph.tensors[node.operands[0]].shape) > 1


def siblings(graph: Graph, name: str) -> tuple[str, ...]:
    """The names of all operators that read what a linear operator does, in order, where they can be told together:
    linear ones with weights that are there before the first of them runs, all with a bias or none; else nothing."""
    source = graph.node_by_name[name].operands[0]
    readers = list(dict.fromkeys(node.name for node, _ in graph.consumers[source]))
    nodes = [graph.node_by_name[reader] for reader in readers]
    if not all(is_linear(graph, node) and node.operands[0] == source for node in nodes):
        return ()
    if len({len(node.operands) for node in nodes}) > 1 or source in graph.outputs:
        return ()
    places = {node.name: place for place, node in enumerate(graph.nodes)}
    readers.sort(key=places.__getitem__)
    made = [graph.producers.get(tensor) for reader in readers for tensor in graph.node_by_name[reader].operands[1:]]
    is_there = all(node is None or places[node.name] < places[readers[0]] for node in made)
    return tuple(readers) if is_there else ()


def with_gathers(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which those of these operators that read one tensor are told together, under the name of the first.
    Raises PlanError where one cannot be."""
    groups = dict.fromkeys(_group(graph, name) for name in names)
    if sorted(name for group in groups for name in group) != sorted(names):
        raise PlanError("expected all linear operators that read one tensor, found a part of them; plan again")
    told = {group[0]: group for group in groups}
    gone = {name for group in groups for name in group[1:]}
    nodes = [_together(graph, told[node.name]) if node.name in told else node for node in graph.nodes]
    return with_nodes(graph, [node for node in nodes if node.name not in gone], graph.tensors)


def with_scatters(graph: Graph, names: Sequence[str], dim: int) -> Graph:
    """The graph in which these operators' sums may go home along a dim. Raises PlanError where one cannot be told."""
    found = {name: graph.node_by_name.get(name) for name in names}
    for name, node in found.items():
        rank = len(graph.tensors[node.operands[0]].shape) if node is not None and is_linear(graph, node) else 0
        if not (type(dim) is int and 0 <= dim < rank - 1):
            raise PlanError(f"expected a linear operator of rows along dim {dim!r} at {name!r}, found none; plan again")
    nodes = [_scattered(node, dim) if node.name in found else node for node in graph.nodes]
    return with_nodes(graph, nodes, graph.tensors)


def _group(graph: Graph, name: str) -> tuple[str, ...]:
    node = graph.node_by_name.get(name)
    found = siblings(graph, name) if node is not None and is_linear(graph, node) else ()
    if not found:
        raise PlanError(f"expected linear operators side by side at {name!r}, found none; plan again")
    return found


def _together(graph: Graph, names: Sequence[str]) -> Node:
    nodes = [graph.node_by_name[name] for name in names]
    x, *_ = nodes[0].operands
    weights = tuple(Ref(node.operands[1]) for node in nodes)
    biases = tuple(Ref(node.operands[2]) for node in nodes if len(node.operands) > 2)
    args = Ref(x), weights, biases
    outputs = tuple(node.results[0] for node in nodes)
    return replace(nodes[0], op=GATHERED_LINEARS, args=args, kwargs=(), outputs=outputs)


def _scattered(node: Node, dim: int) -> Node:
    return replace(node, op=SCATTERED_LINEAR, kwargs=(("dim", dim),))


