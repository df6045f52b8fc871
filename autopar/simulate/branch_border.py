"""What comes into a branch of operators, and what leaves it."""

from __future__ import annotations

from autopar.ir.branches import Home
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement
from autopar.ir.plan import StagePlan


class BranchBorder:
    """What a branch reads of others and leaves to them, and by node the conversions of its own that come before it.

    first: the number of its first item.
    """

    def __init__(self, graph: Graph, plan: StagePlan, home: Home, first: int) -> None:
        self.first = first
        names = set(plan.forks[home.fork].branches[home.branch].nodes)
        nodes = [node for node in graph.nodes if node.name in names]
        made = {name: p for node in nodes for name, p in zip(node.results, plan.nodes[node.name].results, strict=True)}
        reads, inner = dict[tuple[str, Placement], None](), dict[tuple[str, Placement], str]()
        for node in nodes:
            for value in zip(node.operands, plan.nodes[node.name].operands, strict=True):
                if value[0] not in made:
                    reads[value] = None
                elif made[value[0]] != value[1]:
                    inner.setdefault(value, node.name)
        self.reads = [*reads]
        self.conversions: dict[str, list[str]] = {}
        for (tensor, wanted), name in inner.items():
            self.conversions.setdefault(name, []).append(f"{tensor} → {' '.join(map(str, wanted))}")
        leaves = dict[tuple[str, Placement], None]()
        last = {*graph.outputs, *graph.mutations.values(), *graph.sent}
        for name, placement in made.items():
            outside = [(reader, position) for reader, position in graph.consumers[name] if reader.name not in names]
            wanted_outside = [(name, plan.nodes[reader.name].operands[position]) for reader, position in outside]
            wanted_outside += [(name, placement)] if name in last else []
            leaves.update((value if value in inner else (name, placement), None) for value in wanted_outside)
        self.leaves = [*leaves]
