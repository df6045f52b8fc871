"""Reads a solved problem back as placements: every node, parameter and input of the whole graph, conversions listed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.intraop.builder import Built, Representatives
from autopar.intraop.strategies import Strategy
from autopar.ir.conversions import needed_conversions
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import I, Placement, R, of_new_value
from autopar.ir.plan import NodePlan, Redistribute, Storage
from autopar.ir.redistribution import Path


def extract(
    graph: Graph, blocks: Representatives, built: Built, choice: Sequence[int], path: Path, axes: LogicalMesh
) -> tuple[dict[str, Placement], dict[str, Storage], dict[str, NodePlan], tuple[Redistribute, ...]]:
    """Inputs, storage, nodes and redistributions of the chosen plan. `path` gives a redistribution's steps."""

    def chosen(kind: str, name: str) -> Any:
        variable = built.index[kind, name]
        return built.variables[variable].options[choice[variable]]

    inputs: dict[str, Placement] = {name: chosen("input", name) for name in graph.inputs}
    storage: dict[str, Storage] = {
        s.tensor: chosen("stored", blocks.representative_tensor(s.tensor)).storage for s in graph.stored
    }
    nodes: dict[str, NodePlan] = {}
    for node in graph.nodes:
        strategy = chosen("node", blocks.representative_node(node.name))
        assert isinstance(strategy, Strategy)
        nodes[node.name] = NodePlan(strategy.operands, strategy.results)
    ends: list[tuple[str, Placement]] = [(name, chosen("output", name)) for name in graph.outputs]
    for stored, name in graph.mutations.items():  # a deeper graph has more of them than the problem's
        whole = (I if graph.tensors[name].differentiable else R,) * len(axes)
        own = graph.kept_in_parts.get(stored)
        ends.append((name, whole if own is None else of_new_value(storage[own.tensor].placement, axes)))
    return inputs, storage, nodes, _redistributes(graph, inputs, storage, nodes, ends, path)


def _redistributes(
    graph: Graph, inputs: dict[str, Placement], storage: dict[str, Storage], nodes: dict[str, NodePlan],
    ends: Sequence[tuple[str, Placement]], path: Path,
) -> tuple[Redistribute, ...]:  # fmt: skip
    entering = dict(inputs) | {name: kept.placement for name, kept in storage.items()}
    found = []
    for name, source, target in needed_conversions(graph.nodes, nodes, entering, ends):
        steps = path(graph.tensors[name], source, target)
        assert steps is not None, f"no redistribution of {name} from {source} to {target}"
        found.append(Redistribute(name, target, steps))
    return tuple(found)
