"""Expert parallelism of a template: which axes share the experts, and what that says of their parameters and tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.errors import MeshError, PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.exchange_table import EXCHANGES, FLAT
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.slice_table import SLICE_WAYS
from autopar.ops.call import call_of
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.sliced import sliced_operands, sliced_rule

ADAPTIVE = "adaptive"
"""As the load of the moment asks for, by a table that the planner prices."""


class ExpertAxes(NamedTuple):
    """sizes: of the axes that dp becomes, the outer one first; sharing: the names of all that share the experts."""

    sizes: tuple[tuple[str, int], ...]
    sharing: tuple[str, ...]


def expert_axes(mesh: Mesh, dp: int, tp: int, cp: int, ep: int, exchange: str) -> ExpertAxes:
    """The axes of `ep` ranks that share the experts: neighbours of dp, or all of dp, and cp or tp or both beside it.
    Raises MeshError where ep is none of these numbers, PlanError where there are no two levels."""
    known = (*EXCHANGES, ADAPTIVE)
    if exchange not in known:
        raise PlanError(f"expected exchange as one of {', '.join(known)}, found {exchange!r}")
    if ep == 1:
        return ExpertAxes((("dp", dp),), ())
    if dp % ep == 0:
        return _of_dp(mesh, dp, tp * cp, ep, exchange)
    _check_one_level(exchange, ep, "are not a part of dp")
    others = {cp: ("cp",), tp: ("tp",), cp * tp: ("cp", "tp")}
    beside = others.get(ep // dp) if ep % dp == 0 else None
    if ep < 1 or beside is None:
        raise MeshError(
            f"expected ep as a divisor of dp={dp}, or dp times cp={cp}, tp={tp} or both, found {ep}: as many ranks "
            "share the experts"
        )
    return ExpertAxes((("dp", dp),), tuple(name for name in ("dp", *beside) if name != "dp" or dp > 1))


def _of_dp(mesh: Mesh, dp: int, within: int, ep: int, exchange: str) -> ExpertAxes:
    near = mesh.groups[0].devices_per_node // within
    has_levels = 1 < near < ep and ep % near == 0
    if exchange == FLAT or (exchange == ADAPTIVE and not has_levels):
        return ExpertAxes((("dp", dp // ep), ("ep", ep)), ("ep",))
    if not has_levels:
        _check_one_level(exchange, ep, f"are not several nodes of {near} such ranks each")
    return ExpertAxes((("dp", dp // ep), ("ep_nodes", ep // near), ("ep", near)), ("ep_nodes", "ep"))


def _check_one_level(exchange: str, ep: int, why: str) -> None:
    if exchange not in (FLAT, ADAPTIVE):
        raise PlanError(
            f'expected ep={ep} as ranks of several nodes with exchange="{exchange}", but they {why}; use "flat"'
        )


def check_adaptive(chunks: int) -> None:
    """That chunks are left to the load. Raises PlanError."""
    if chunks != 1:
        raise PlanError(f'expected exchange_chunks=1 with exchange="{ADAPTIVE}", which says how many, found {chunks}')


def check_alone(mesh: Mesh, hsdp: int, ep: int) -> None:
    """That nothing else divides dp. Raises PlanError."""
    if ep > 1 and hsdp > 1:
        raise PlanError(f"expected hsdp=1 with ep={ep}, both of which divide dp, found {hsdp}")
    if ep > 1 and not mesh.is_homogeneous:
        raise PlanError(f"expected devices of one kind with ep={ep}, found {mesh}; use ep=1")


def check_experts(graph: Graph, ep: int) -> None:
    """That there are experts to share. Raises PlanError."""
    nodes = _routed(graph)
    if ep == 1:
        return
    if not nodes:
        raise PlanError(
            f"expected routed experts with ep={ep}, found none that are known as such; of Hugging Face's models use "
            'experts_implementation="grouped_mm". Or use ep=1.'
        )
    for node in nodes:
        experts = graph.tensors[node.operands[3]].shape[0]
        if experts < ep:
            where = node.source or "an unknown line"
            raise PlanError(f"expected at least ep={ep} experts, found {experts} in {node.name} at {where}")


def _routed(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == ROUTED_EXPERTS]


def expert_parameters(graph: Graph, sliced: bool = False) -> set[str]:
    """The names of the parameters that experts are made of, seen through their views; or of those that have hidden
    values."""
    names = {item.tensor: item.name for item in graph.stored}
    found = set[str]()
    for node in _routed(graph):
        for operand in (
            [node.operands[n] for n in sliced_operands(call_of(graph, node))] if sliced else node.operands[3:]
        ):
            root = operand
            while root not in names and root in graph.producers and graph.producers[root].operands:
                root = graph.producers[root].operands[0]
            found |= {names[root]} if root in names else set()
    return found


def patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Few patterns that match these names, and none of the others: one for all numbers of a block, if it can be."""
    found = dict[str, None]()
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "[0-9]*", name)
        wide = Constraint(pattern)
        if pattern not in found and any(map(wide.matches, others)):
            pattern = name
        found[pattern] = None
    return list(found)


def expert_constraints(graph: Graph, axis: str, first: Collection[str]) -> list[Constraint]:
    """On an axis that shares the experts: each rank has its own tokens and its own experts, and exchanges.

    first: of equal results, the one that stands for all."""
    own = expert_parameters(graph)
    others = sorted({item.name for item in graph.stored} - own)
    found = []
    for pattern in patterns(sorted(own), others):
        found += [Constraint(pattern, ("S(0)",), what=what, axis=axis) for what in ("used", "stored")]
    routed = [node.results[0] for node in _routed(graph) if node.results[0] in first]
    return [*found, *(Constraint(name, ("S(0)",), what="operands", axis=axis) for name in routed)]


def sliced_constraints(graph: Graph, axis: str, first: Collection[str]) -> list[Constraint]:
    """On an axis whose ranks have their own tokens, and slices of the experts. first: as in `expert_constraints`.
    Raises PlanError where hidden values cannot be split."""
    own, stored, found = expert_parameters(graph, sliced=True), graph.stored_by_tensor, dict[Constraint, None]()
    others = sorted({item.name for item in graph.stored} - own)
    for pattern in patterns(sorted(own), others):
        found[Constraint(pattern, ("S",), what="stored", axis=axis)] = None
    for node in (node for node in _routed(graph) if node.results[0] in first):
        rules = sliced_rule(call_of(graph, node))
        if not rules:
            where = f"{node.name} at {node.source or 'an unknown line'}"
            raise PlanError(
                f"expected experts whose hidden values can be split, found {where}, whose gates are halves of one dim; "
                'use experts="whole"'
            )
        for position in sliced_operands(call_of(graph, node)):
            operand, type_ = node.operands[position], (str(rules[0].operands[position]),)
            if operand in stored:
                found[Constraint(stored[operand].name, type_, what="used", axis=axis)] = None
            else:
                found[Constraint(operand, type_, what="tensor", axis=axis)] = None
        found[Constraint(node.results[0], ("S(0)",), what="tensor", axis=axis)] = None
    return list(found)


def check_slices(experts: str, ranks: int) -> None:
    """That there are ranks with tokens of their own which have the same experts. Raises PlanError."""
    known = ("whole", *SLICE_WAYS, ADAPTIVE)
    if experts not in known:
        raise PlanError(f"expected experts as one of {', '.join(known)}, found {experts!r}")
    if experts != "whole" and ranks < 2:
        raise PlanError(
            f'expected dp of at least twice ep with experts="{experts}", which slices them among those ranks'
        )


def check_replicas(replicas: int, ep: int, exchange: str, experts: str) -> None:
    """That there are ranks which share experts, and send them tokens one way at any load. Raises PlanError."""
    if type(replicas) is not int or replicas < 0:
        raise PlanError(f"expected replicas of a number of experts from 0 up, found {replicas!r}")
    if replicas and ep < 2:
        raise PlanError(f"expected ep of at least 2 with replicas={replicas}: with ep=1 every rank has all experts")
    if replicas and (exchange == ADAPTIVE or experts != "whole"):
        found = f'exchange="{ADAPTIVE}"' if exchange == ADAPTIVE else f'experts="{experts}"'
        raise PlanError(
            f'expected exchange="flat" or "two-level" and experts="whole" with replicas={replicas}, found {found}'
        )


def others_on(graph: Graph, rules: Sequence[Constraint], own: Collection[str]) -> list[Constraint]:
    """Rules about all parameters, for those that are not among some."""
    others = [item.name for item in graph.stored if item.name not in own]
    return [replace(rule, pattern=pattern) for rule in rules for pattern in patterns(others, sorted(own))]
