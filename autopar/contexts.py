"""Graphs whose sequences may be split, and how attention over them runs: pinned, or each operator as it takes less.

    keys and values gathered    all that a rank's queries read comes at once, before they are computed
    in a ring                   blocks pass from rank to rank beside computing; masks are cut with them

Which takes less depends on an operator's own mask, heads and precision and on the links between ranks, so that layers
of one model may differ. Both leave results where queries are: whatever else is placed is priced the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost import Profile
from autopar.errors import PlanError
from autopar.intraop import ProfiledCosts
from autopar.intraop.strategies import enumerate_strategies
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import LogicalMesh, Mesh, make_axes
from autopar.ir.placement import Placement, R, S, Type
from autopar.ir.plan import Substitution
from autopar.ops import call_key
from autopar.positions import attention_nodes
from autopar.profiler import profile_of
from autopar.request import Request
from autopar.substitute import bands, rows, sequences, sinks
from autopar.substitute.masks import RULE, STATEMENT, under_causal_masks, without_masks

Steps = tuple[Substitution, ...]


def for_sequences(graph: Graph, ring: bool = False) -> tuple[Graph, Steps]:
    """The graph whose sequences may be split, and the substitutions that make it of a traced model's. ring: attention
    over a split sequence has keys and values pass from rank to rank, wherever it can."""
    steps = list[Substitution]()
    for rule, statement, find, tell in (
        (rows.RULE, rows.STATEMENT, rows.over_rows, rows.with_rows),
        (RULE, STATEMENT, under_causal_masks, without_masks),
        (bands.RULE, bands.STATEMENT, bands.over_windows, bands.with_windows),
        (sinks.RULE, sinks.STATEMENT, sinks.over_sinks, sinks.with_sinks),
        (sequences.RULE, sequences.STATEMENT, sequences.over_sequences, sequences.with_sequences),
    ):
        names = find(graph)
        if names:
            modules = tuple(graph.node_by_name[name].scope.module for name in names)
            steps.append(Substitution(rule, statement, "proved", "", modules, tuple(names), {}))
            graph = tell(graph, names)
    graph, rings = in_rings(graph, sequences.over_rings(graph) if ring else ())
    return graph, (*steps, *rings)


def in_rings(graph: Graph, names: Sequence[str]) -> tuple[Graph, Steps]:
    """The graph in which keys and values of these operators pass from rank to rank, and the substitution, if any."""
    told = _told(graph, sequences.RING_RULE, sequences.RING_STATEMENT, names)
    return (sequences.with_rings(graph, names) if names else graph), told


def gathered(graph: Graph, names: Sequence[str]) -> tuple[Graph, Steps]:
    """The graph in which they do so no more, and the substitution, if any."""
    told = _told(graph, sequences.GATHER_RULE, sequences.GATHER_STATEMENT, names)
    return (sequences.with_gathers(graph, names) if names else graph), told


def _told(graph: Graph, rule: str, statement: str, names: Sequence[str]) -> Steps:
    modules = tuple(graph.node_by_name[name].scope.module for name in names)
    return (Substitution(rule, statement, "proved", "", modules, tuple(names), {}),) if names else ()


# By price ----------------------------------------


def by_price(graph: Graph, request: Request, axes: LogicalMesh | None = None) -> tuple[Graph, Steps]:
    """A graph whose sequences may be split (`for_sequences`), with each attention operator as it takes less where they
    are on the axis cp of some; without such, among the devices of a node. The substitutions say what was changed."""
    axes = axes or _inside_a_node(request.mesh)
    now, every = sequences.in_rings(graph), sequences.over_rings(graph)
    plain, rings = gathered(graph, now)[0], in_rings(graph, every)[0]
    faster = {name for name in every if _takes_less(name, rings, plain, axes, request)}
    graph, less = gathered(graph, [name for name in now if name not in faster])
    graph, more = in_rings(graph, [name for name in every if name in faster and name not in now])
    return graph, (*less, *more)


def _takes_less(name: str, rings: Graph, plain: Graph, axes: LogicalMesh, request: Request) -> bool:
    """Whether an operator does so in a ring; found once for operators that are alike."""
    node = plain.node_by_name[name]
    known = plain.found.setdefault(("in a ring", str(axes)), {})
    key = call_key(plain, node), call_key(rings, rings.node_by_name[name]), request.mesh.profile, request.mode
    if key not in known:
        profile = profile_of(request.mesh)
        own, other = (_home_ns(one, one.node_by_name[name], axes, request, profile) for one in (rings, plain))
        known[key] = own <= other
    return bool(known[key])


def _inside_a_node(mesh: Mesh) -> LogicalMesh:
    return make_axes(("cp",), (mesh.devices_per_node if mesh.devices_per_node > 1 else mesh.num_devices,))


def _home_ns(graph: Graph, node: Node, axes: LogicalMesh, request: Request, profile: Profile) -> float:
    """What attention takes forward and backward, with all that is sent for it, where queries, keys, values and the
    result are split by positions."""
    costs = ProfiledCosts(graph, axes, request.mesh.devices_per_node, profile, request.mode, request.optimizer)
    home: Placement = tuple(_at_home(axis.name, len(graph.tensors[node.results[0]].shape)) for axis in axes)
    found = [one for one in enumerate_strategies(graph, node, axes) if one.results == (home,)]
    computes = costs.compute_ns(node, tuple(found))
    total = (
        own + sum(_sent_ns(costs, name, home, to) for name, to in zip(node.operands[:3], one.operands[:3], strict=True))
        for own, one in zip(computes, found, strict=True)
    )
    return min(total, default=math.inf)


def _at_home(axis: str, rank: int) -> Type:
    return {"cp": S(rank - 2), "dp": S(0)}.get(axis, R)


def _sent_ns(costs: ProfiledCosts, name: str, source: Placement, target: Placement) -> int:
    return int(costs.convert_ns(costs.graph.tensors[name], [source], [target])[0, 0])


# Pinned ----------------------------------------


def with_contexts(
    graph: Graph, rules: Sequence[Constraint]
) -> tuple[Graph, tuple[Substitution, ...], tuple[Constraint, ...]]:
    """Where rules pin how attention runs over split sequences, the graph that does so with the substitutions that make
    it, and the constraints that leave nothing else. Raises PlanError for a rule about no attention."""
    pinned = [rule for rule in rules if rule.context is not None]
    if not pinned:
        return graph, (), ()
    told, steps = for_sequences(graph)
    ways = dict[str, str]()
    for rule in pinned:
        found = [node for node in attention_nodes(told) if rule.matches(node.name, node.scope.module)]
        if not found:
            raise PlanError(
                f"expected attention for context={rule.context!r}, found none that {rule.pattern!r} matches"
            )
        ways.update((node.name, str(rule.context)) for node in found)
    rings = tuple(name for name in sequences.over_rings(told) if ways.get(name) == "ring")
    told, passed = in_rings(told, rings)
    results = (told.node_by_name[name].results[0] for name, way in ways.items() if way == "heads")
    return told, (*steps, *passed), tuple(_by_heads(name, len(told.tensors[name].shape)) for name in results)


def _by_heads(name: str, rank: int) -> Constraint:
    """A result of attention, which is not split along its sequence."""
    dims = (f"S({dim})" for dim in range(rank) if dim != rank - 2)
    return Constraint(name, (*dims, "R", "I", "P"), what="tensor")
