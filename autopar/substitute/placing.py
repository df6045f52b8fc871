"""Experts placed by how often they are chosen: ranks have slices of the experts, and these are to have as much to do.

    routed_experts(x, ids, weights, up, down)  →  routed_experts(x, positions[ids], weights, up′, down′)

up′ and down′ are stored with the experts in another order, each expert as a piece of the model's parameter: names,
shapes and values of a state dict stay those of the model. One order serves any number of ranks: of experts in halves,
halves of these and so on (or thirds, where their number asks for it), each part has as nearly the same sum of counts as
the others. They are dealt out the largest first, each to the part with the least so far that is not full: Graham's LPT,
which leaves the fullest of n parts at most a third above the best where parts may be of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Packing, Piece, Ref, Stored, Tensor
from autopar.ir.plan import Substitution
from autopar.ir.routing import HISTOGRAM, Routing
from autopar.ops.call import base_name
from autopar.ops.experts import POSITIONS, ROUTED_EXPERTS, counts_of

RULE = "place-experts"
STATEMENT = "experts in the order of the model => experts in an order whose slices are chosen as often"
_KEEPS_DIM_0 = ("view", "reshape", "alias", "_to_copy", "unflatten", "clone", "detach")  # where its length stays


def placements(graph: Graph, routing: Routing | None) -> tuple[Substitution, ...]:
    """For each layer whose counts are known, the order of its experts; none where that is the model's, or where other
    operators read the parameters, too."""
    if routing is None or routing.kind != HISTOGRAM:
        return ()
    layers = [node for node in graph.nodes if node.op == ROUTED_EXPERTS and _parameters(graph, node)]
    orders = {node.name: balanced_order(counts_of(routing, node)) for node in layers}
    return tuple(
        Substitution(
            RULE, STATEMENT, "proved", "", (node.scope.module,), (node.name,),
            {"order": " ".join(map(str, orders[node.name]))},
        )
        for node in layers
        if orders[node.name] != tuple(range(len(orders[node.name])))
    )  # fmt: skip


def with_placed(graph: Graph, steps: Sequence[Substitution]) -> Graph:
    """The graph with experts in these orders. Raises PlanError where there are none."""
    for step in steps:
        node = graph.node_by_name.get(step.roots[0]) if step.roots else None
        order = _order(str(step.binding.get("order", "")))
        if node is None or node.op != ROUTED_EXPERTS or sorted(order) != list(range(node.args[7])):
            raise PlanError(f"expected an order of the experts at {step.roots!r}, found {step.binding!r}; plan again")
        graph = _placed(graph, node, order)
    return graph


def _order(text: str) -> tuple[int, ...]:
    words = text.split()
    return tuple(map(int, words)) if all(word.isdecimal() and len(word) < 8 for word in words) else ()


# The graph ----------------------------------------


def _placed(graph: Graph, node: Node, order: Sequence[int]) -> Graph:
    own = _parameters(graph, node)
    if not own:
        raise PlanError(f"expected parameters that only the experts at {node.name!r} read, found others; plan again")
    module = node.scope.module
    table = _fresh(graph, f"{module}.{POSITIONS}" if module else POSITIONS)
    ids = graph.tensors[node.args[1].tensor]
    placed_ids = f"{node.name}_placed_ids"
    lookup = Node(
        placed_ids, "aten.index.Tensor", (Ref(table), (Ref(ids.name),)), (), (placed_ids,), node.scope, node.source
    )
    routed = replace(node, args=(node.args[0], Ref(placed_ids), *node.args[2:]))
    nodes = [made for one in graph.nodes for made in ((lookup, routed) if one.name == node.name else (one,))]
    tensors = {
        **graph.tensors,
        table: Tensor(table, (len(order),), "int64"),
        placed_ids: replace(ids, name=placed_ids, dtype="int64"),
    }
    graph = replace(
        graph,
        nodes=tuple(nodes),
        tensors=tensors,
        stored=(*graph.stored, Stored(table, table, "constant")),
        values={**graph.values, table: torch.tensor([order.index(expert) for expert in range(len(order))])},
    )
    for item in own:
        graph = _in_order(graph, item, order)
    return graph


def _parameters(graph: Graph, node: Node) -> list[Stored]:
    """What the experts of a layer are made of, if it is theirs alone and lies as the model has it; else nothing."""
    found = []
    for name in node.operands[3:]:
        while name in graph.producers and _keeps_experts_first(graph, graph.producers[name]):
            name = _read_once(graph, name) and graph.producers[name].operands[0]
        item = graph.stored_by_tensor.get(_read_once(graph, name))
        if item is None or item.kind != "parameter" or item.name in graph.packed or item.name in graph.mutations:
            return []
        if item.name in graph.tied.values() or graph.tensors[item.tensor].shape[0] != node.args[7]:
            return []
        found.append(item)
    return found


def _read_once(graph: Graph, name: str) -> str:
    """The tensor's name, if one operator reads it, once, and the model does not return it."""
    is_own = len(graph.consumers.get(name, ())) == 1 and name not in graph.outputs
    return name if is_own and name not in graph.mutations.values() else ""


def _keeps_experts_first(graph: Graph, node: Node) -> bool:
    """Whether a node's result has the experts of its one operand, each as a whole, in the same order."""
    if len(node.operands) != 1 or len(node.results) != 1:
        return False
    before, after = (graph.tensors[name].shape for name in (node.operands[0], node.results[0]))
    name = base_name(node.op)
    if name == "transpose":
        return all(dim % len(before) for dim in node.args[1:3])
    return before[:1] == after[:1] and (name in _KEEPS_DIM_0 or (name == "permute" and node.args[1][0] == 0))


def _in_order(graph: Graph, item: Stored, order: Sequence[int]) -> Graph:
    """The graph whose stored parameter has the experts of the model's in this order."""
    name = _fresh(graph, f"{item.name}_by_load")
    kept = graph.kept(item.tensor)
    return replace(
        graph,
        stored=tuple(replace(one, name=name) if one is item else one for one in graph.stored),
        packed={**graph.packed, name: Packing(0, tuple(Piece(item.name, 0, start, n) for start, n in _runs(order)))},
        unpacked={**graph.unpacked, item.name: replace(kept, name=item.name, differentiable=item.requires_grad)},
    )


def _runs(order: Sequence[int]) -> list[tuple[int, int]]:
    """Experts that follow each other, as (first, how many)."""
    runs: list[tuple[int, int]] = []
    for expert in order:
        if runs and sum(runs[-1]) == expert:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((expert, 1))
    return runs


def _fresh(graph: Graph, name: str) -> str:
    taken = {*graph.tensors, *(item.name for item in graph.stored), *graph.unpacked, *graph.tied}
    while name in taken:
        name = f"{name}_"
    return name


# The order ----------------------------------------


def balanced_order(counts: Sequence[float]) -> tuple[int, ...]:
    """The experts in an order whose slices have nearly the same sum of counts."""
    return tuple(_dealt(sorted(range(len(counts)), key=lambda expert: -counts[expert]), counts))


def _dealt(experts: list[int], counts: Sequence[float]) -> list[int]:
    """experts: of one part, the largest first."""
    num_parts = next((n for n in range(2, len(experts)) if len(experts) % n == 0), 1)
    if num_parts == 1:
        return experts
    length = len(experts) // num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for expert in experts:
        free = [part for part in parts if len(part) < length]
        min(free, key=lambda part: sum(counts[one] for one in part)).append(expert)
    return [expert for part in parts for expert in _dealt(part, counts)]
