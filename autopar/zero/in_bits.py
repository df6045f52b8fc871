"""Which operators keep bits for their backward pass, as a ladder from none to all that free memory so.

    freed(n)     bytes of what operator n keeps now, that no operator keeps which stays as it is, less its bits

A tensor that a convolution or a product keeps anyway stays there whatever its other readers do: an operator that keeps
no more than such tensors gains nothing. Gist: Jain et al., ISCA'18.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.cost.memory import kept_values, saved_values, storage_root
from autopar.ir.graph import Graph, Node, found_once
from autopar.ir.plan import NodePlan, Plan
from autopar.ops.compact import may_be_in_bits
from autopar.ops.saved import Extra, Saved

PARTS = (0.5, 0.75, 1.0)
"""Of the bytes that all free, as much as each rung."""

Names = tuple[str, ...]


@found_once
def rungs_in_bits(graph: Graph, device_type: str) -> tuple[Names, ...]:
    """Nodes that keep bits, of nothing to all that gain by it: those that free most first. graph: of a microbatch."""
    freed = _freed_bytes(graph, device_type)
    ordered = sorted((name for name, size in freed.items() if size > 0), key=lambda name: -freed[name])
    total, reached, rungs = sum(freed[name] for name in ordered), 0, [Names()]
    for count, name in enumerate(ordered, 1):
        before, reached = reached, reached + freed[name]
        if any(before < part * total <= reached for part in PARTS) or count == len(ordered):
            rungs.append(tuple(ordered[:count]))
    return tuple(rungs)


def _freed_bytes(graph: Graph, device_type: str) -> dict[str, int]:
    """Of each operator that may keep bits, what that frees where all others that may do, too; a tensor that several of
    them keep counts at the first."""
    stored = {item.tensor for item in graph.stored} | {*graph.inputs}
    staying, may = set[str](), list[Node]()
    for node in graph.nodes:
        if may_be_in_bits(graph, node):
            may.append(node)
        else:
            staying.update(_roots(graph, saved_values(node, graph, device_type)))
    freed, counted = defaultdict[str, int](int), staying | stored
    for node in may:
        saved = saved_values(node, graph, device_type)
        own = [root for root in dict.fromkeys(_roots(graph, saved)) if root not in counted]
        counted.update(own)
        freed[node.name] += sum(graph.tensors[root].num_bytes for root in own) + _extra_bytes(graph, saved)
        freed[node.name] -= _extra_bytes(graph, kept_values(node, graph, True, device_type))
    return dict(freed)


def _roots(graph: Graph, saved: Iterable[Saved]) -> list[str]:
    return [storage_root(one, graph) for one in saved if isinstance(one, str)]


def _extra_bytes(graph: Graph, saved: Iterable[Saved]) -> int:
    extras = (one for one in saved if isinstance(one, Extra) and not one.is_number)
    return sum(one.num_bytes(graph.tensors[one.like].shape) for one in extras)


def with_in_bits(plan: Plan, names: Sequence[str]) -> Plan:
    """The plan with exactly these operators kept in bits; placements that were one object are one again."""
    wanted, known = frozenset(names), dict[tuple[int, bool], NodePlan]()

    def kept(name: str, placed: NodePlan) -> NodePlan:
        key = id(placed), name in wanted
        if key not in known:
            known[key] = placed if placed.in_bits == key[1] else replace(placed, in_bits=key[1])
        return known[key]

    stages = (
        replace(stage, nodes={name: kept(name, placed) for name, placed in stage.nodes.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def in_bits(plan: Plan) -> Names:
    """The operators that a plan keeps in bits."""
    return tuple(name for stage in plan.stages for name, placed in stage.nodes.items() if placed.in_bits)
