"""Graphs whose linear operators may compute beside what they send (`ops.async_linears`).

    linear(x, V), linear(x, W)  →  gathered_linears(x, [V, W])      rows of x come from other ranks, once for both
    linear(x, W)                →  scattered_linear(x, W, dim=1)    blocks of the sum go to other ranks

Which of them are told is for placements to say (`passes.async_linears`); each computes what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Ref, common_scope, found_once, references, with_nodes
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
    """The names of all operators that read what a linear operator does, in order, where all are linear in it."""
    source = graph.node_by_name[name].operands[0]
    readers = {node.name for node, _ in graph.consumers[source]}
    nodes = [graph.node_by_name[reader] for reader in readers]
    if source in graph.outputs or not all(
        is_linear(graph, node) and node.operands.count(source) == 1 for node in nodes
    ):
        return ()
    return tuple(node.name for node in graph.nodes if node.name in readers)


def together(graph: Graph, names: Sequence[str], apart: bool) -> list[tuple[str, ...]]:
    """Siblings in groups that may be told together: with weights that are there before the first of a group runs, all
    with a bias or none. apart: each large one by itself, so that its weight's gradient is there before others'; with
    those that are less than half as large as the largest, which could not hide that rows come for them alone."""
    features = {name: graph.tensors[graph.node_by_name[name].operands[1]].shape[0] for name in names}
    groups = list[tuple[str, ...]]()
    for name in sorted(names, key=names.index):
        is_large = apart and 2 * features[name] >= max(features.values())
        place = next((n for n, group in enumerate(groups) if not is_large and _may_join(graph, group, name)), None)
        if place is None:
            groups.append((name,))
        else:
            groups[place] = (*groups[place], name)
    return groups


def _may_join(graph: Graph, group: tuple[str, ...], name: str) -> bool:
    first, node = graph.node_by_name[group[0]], graph.node_by_name[name]
    made = [graph.producers.get(tensor) for tensor in node.operands[1:]]
    order = _places(graph)
    is_there = all(maker is None or order[maker.name] < order[first.name] for maker in made)
    return is_there and order[first.name] < order[name] and len(first.operands) == len(node.operands)


@found_once
def _places(graph: Graph) -> dict[str, int]:
    return {node.name: place for place, node in enumerate(graph.nodes)}


def with_gathers(graph: Graph, names: Sequence[str], groups: str) -> Graph:
    """The graph in which these operators are told, so many of them together at a time ("3 1"), under the name of the
    first of them. Raises PlanError where that cannot be."""
    told = dict[str, tuple[str, ...]]()
    counts = [int(word) if word.isdecimal() else 0 for word in str(groups).split()]
    if 0 in counts or sum(counts) != len(names):
        raise PlanError(f"expected groups of {len(names)} operators in all, found {groups!r}; plan again")
    begin = 0
    for count in counts:
        group, begin = tuple(names[begin : begin + count]), begin + count
        _check_group(graph, group)
        told[group[0]] = group
    gone = {name for group in told.values() for name in group[1:]}
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


def _check_group(graph: Graph, names: tuple[str, ...]) -> None:
    nodes = [graph.node_by_name.get(name) for name in names]
    linear = [node for node in nodes if node is not None and is_linear(graph, node)]
    is_one = len({node.operands[0] for node in linear}) == 1 and len(set(names)) == len(names)
    if len(linear) < len(names) or not is_one or not all(_may_join(graph, names[:1], name) for name in names[1:]):
        raise PlanError(f"expected linear operators of one input at {', '.join(names)}, found others; plan again")


def _together(graph: Graph, names: Sequence[str]) -> Node:
    nodes = [graph.node_by_name[name] for name in names]
    x, *_ = nodes[0].operands
    weights = tuple(Ref(node.operands[1]) for node in nodes)
    biases = tuple(Ref(node.operands[2]) for node in nodes if len(node.operands) > 2)
    args = Ref(x), weights, biases
    outputs = tuple(node.results[0] for node in nodes)
    scope = common_scope([node.scope for node in nodes])
    return replace(nodes[0], op=GATHERED_LINEARS, args=args, kwargs=(), outputs=outputs, scope=scope)


def _scattered(node: Node, dim: int) -> Node:
    return replace(node, op=SCATTERED_LINEAR, kwargs=(("dim", dim),))
