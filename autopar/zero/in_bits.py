"""Which operators keep bits for their backward pass, as a ladder from none to all that free memory so.

    group        operators that keep the same tensors, which only all of them together free
    freed(g)     bytes of what the group's operators keep now, that no operator keeps which stays as it is, less what
                 they keep then

A tensor that a convolution or a product keeps anyway stays there whatever its other readers do: an operator that keeps
no more than such tensors gains nothing. Gist: Jain et al., ISCA'18. Where inexact gradients are allowed, products,
norms and curves may keep 8 bits of each activation: after what is exact, with what is exact and gains only then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.cost.eight_bits import may_be_in_eight_bits, runs_by_itself
from autopar.cost.memory import kept_values, saved_values, storage_root
from autopar.ir.graph import Graph, Node, found_once
from autopar.ir.plan import NodePlan, Plan
from autopar.ops.compact import may_be_in_bits
from autopar.ops.saved import Extra, Saved

PARTS = (0.5, 0.75, 1.0)
"""Of the bytes that all free, as much as each rung."""

Names = tuple[str, ...]


class KeptIn(NamedTuple):
    """Operators that keep a few bits of each element, exactly; and those that keep 8 bits of each activation."""

    in_bits: Names = ()
    in_eight_bits: Names = ()


@found_once
def rungs_in_bits(graph: Graph, device_type: str) -> tuple[Names, ...]:
    """Nodes that keep bits, of nothing to all that gain by it: those that free most first. graph: of a microbatch."""
    return _rungs(_freed_bytes(graph, device_type, lambda node: False))


@found_once
def rungs_in_eight_bits(graph: Graph, device_type: str) -> tuple[KeptIn, ...]:
    """The same, then with ever more operators in 8 bits: inexact."""
    exact = [KeptIn(names) for names in rungs_in_bits(graph, device_type)]
    freed = _freed_bytes(graph, device_type, lambda node: may_be_in_eight_bits(graph, node))
    last = exact[-1].in_bits
    for names in _rungs(freed)[1:]:
        bits = [name for name in names if may_be_in_bits(graph, graph.node_by_name[name])]
        eight = tuple(name for name in names if name not in bits)
        if eight:
            exact.append(KeptIn(tuple(dict.fromkeys((*last, *bits))), eight))
    return tuple(exact)


def _rungs(freed: dict[Names, int]) -> tuple[Names, ...]:
    ordered = sorted((group for group, size in freed.items() if size > 0), key=lambda group: -freed[group])
    total, reached, names, rungs = sum(freed[group] for group in ordered), 0, list[str](), [Names()]
    for count, group in enumerate(ordered, 1):
        before, reached = reached, reached + freed[group]
        names += group
        if any(before < part * total <= reached for part in PARTS) or count == len(ordered):
            rungs.append(tuple(names))
    return tuple(rungs)


def _freed_bytes(graph: Graph, device_type: str, in_eight_bits: Callable[[Node], bool]) -> dict[Names, int]:
    """Of each group of operators that may keep bits, what that frees where all of them do."""
    known = {item.tensor for item in graph.stored} | {*graph.inputs}
    staying, may = set[str](), list[tuple[Node, bool]]()
    for node in graph.nodes:
        exact = may_be_in_bits(graph, node)
        if exact or in_eight_bits(node):
            may.append((node, exact))
        else:
            staying.update(_roots(graph, saved_values(node, graph, device_type)))
    keepers, less = defaultdict[str, list[str]](list), dict[str, int]()
    for node, exact in may:
        saved = saved_values(node, graph, device_type)
        kept = kept_values(node, graph, exact, device_type, not exact)
        staying.update(_roots(graph, kept))
        less[node.name] = _extra_bytes(graph, saved) - _extra_bytes(graph, kept)
        for root in dict.fromkeys(_roots(graph, saved)):
            keepers[root].append(node.name)
    freed = {root: names for root, names in keepers.items() if root not in staying | known}
    groups = _joined([[name] for name in less], freed.values())
    found = {group: sum(less[name] for name in group) for group in set(groups.values())}
    for root, names in freed.items():
        found[groups[names[0]]] += graph.tensors[root].num_bytes
    return {group: found[group] for group in dict.fromkeys(groups.values())}


def _joined(alone: Iterable[Sequence[str]], together: Iterable[Sequence[str]]) -> dict[str, Names]:
    """By name the group that it is in: names that are together are in one."""
    groups = {names[0]: tuple(names) for names in alone}
    for names in together:
        joined = tuple(dict.fromkeys(other for name in names for other in groups[name]))
        groups.update(dict.fromkeys(joined, joined))
    return groups


def _roots(graph: Graph, saved: Iterable[Saved]) -> list[str]:
    return [storage_root(one, graph) for one in saved if isinstance(one, str)]


def _extra_bytes(graph: Graph, saved: Iterable[Saved]) -> int:
    extras = (one for one in saved if isinstance(one, Extra) and not one.is_number)
    return sum(one.num_bytes(graph.tensors[one.like].shape) for one in extras)


def with_in_bits(plan: Plan, names: Sequence[str], in_eight_bits: Sequence[str] = ()) -> Plan:
    """The plan with exactly these operators kept in bits, and in 8 bits; placements that were one object are one
    again."""
    wanted, others, known = frozenset(names), frozenset(in_eight_bits), dict[tuple[int, bool, bool], NodePlan]()

    def kept(name: str, placed: NodePlan) -> NodePlan:
        key = id(placed), name in wanted, name in others
        if key not in known:
            is_so = (placed.in_bits, placed.in_eight_bits) == key[1:]
            known[key] = placed if is_so else replace(placed, in_bits=key[1], in_eight_bits=key[2])
        return known[key]

    stages = (
        replace(stage, nodes={name: kept(name, placed) for name, placed in stage.nodes.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def that_run(graph: Graph, plan: Plan, names: Iterable[str]) -> Names:
    """Of operators that may be in 8 bits, those that run by themselves where the plan has them."""
    nodes = [(graph.node_by_name[name], stage) for name in names for stage in plan.stages if name in stage.nodes]
    return tuple(node.name for node, stage in nodes if runs_by_itself(graph, node, stage))


def in_bits(plan: Plan) -> Names:
    """The operators that a plan keeps in bits."""
    return tuple(name for stage in plan.stages for name, placed in stage.nodes.items() if placed.in_bits)


def in_eight_bits(plan: Plan) -> Names:
    """The operators of which a plan keeps activations in 8 bits."""
    return tuple(name for stage in plan.stages for name, placed in stage.nodes.items() if placed.in_eight_bits)
