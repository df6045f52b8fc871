"""The strategies of each node: every product over the mesh axes of its one-axis rules that its shapes allow.

Dims need not divide: a dim of 250 on 4 ranks is 63, 63, 63, 61, and costs and memory are those of the largest slice.
What leaves a rank without a row is no strategy: 6 on 4 would be 2, 2, 2, 0, as slow as 8 and no faster than on 3. So
the largest slice is at most a third longer than an equal share on one axis, and there are never more strategies than
for the next length that divides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import I, P, Placement, R, leaves_none_empty
from autopar.ops import axis_rules, shape_error
from autopar.ops.factors import without_factors
from autopar.ops.notation import AxisRule


@dataclass(frozen=True)
class Strategy:
    """Placements of each operand and result of a node."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

    def __str__(self) -> str:
        left = ", ".join(" ".join(map(str, placement)) for placement in self.operands)
        return f"{left} -> {', '.join(' '.join(map(str, placement)) for placement in self.results)}"


Strategies = tuple[Strategy, ...]


def enumerate_strategies(
    graph: Graph, node: Node, axes: LogicalMesh, whole: Graph | None = None, by_factors: bool = False
) -> list[Strategy]:
    """All strategies of a node whose local shapes exist. `whole`: the graph of the step, when this is a microbatch's.
    by_factors: with those whose weight's gradient meets as factors (`ops.factors`).

    Rules are those of the whole: a microbatch of one sample would let a reshape move slices that others forbid.
    """
    per_axis = [_useful_rules(whole or graph, node, by_factors) for _ in axes]
    found = []
    shapes = [graph.tensors[name].shape for name in (*node.operands, *node.results)]
    long_enough = cache(lambda shape, placement: leaves_none_empty(shape, placement, axes))
    for combination in itertools.product(*per_axis):
        operands = tuple(
            tuple(rule.operands[position] for rule in combination) for position in range(len(node.operands))
        )
        results = tuple(tuple(rule.results[position] for rule in combination) for position in range(len(node.results)))
        are_long_enough = all(map(long_enough, shapes, (*operands, *results)))
        if are_long_enough and not shape_error(graph, node, operands, axes):
            found.append(Strategy(operands, results))
    return found


def _useful_rules(graph: Graph, node: Node, by_factors: bool) -> Sequence[AxisRule]:
    """The node's rules but those that hold a weight as summands, which nothing can gain from."""
    if not node.operands:
        return [AxisRule((), (R,) * len(node.results))]
    every = axis_rules(graph, node)
    rules = every if by_factors else without_factors(node, every)
    return [rule for rule in rules if not _sums_weight(graph, node, rule)]


def _sums_weight(graph: Graph, node: Node, rule: AxisRule) -> bool:
    return any(
        type_ == P and name in graph.stored_by_tensor and len(graph.tensors[name].shape) > 1
        for type_, name in zip(rule.operands, node.operands, strict=True)
    )


def permitted(constraint: Constraint, placement: Placement, axes: LogicalMesh, differentiable: bool = True) -> bool:
    """Whether the types on the constrained axis (or all axes) are allowed; without gradient R is I as well."""
    return all(
        constraint.permits(type_) or (type_ == R and not differentiable and constraint.permits(I))
        for type_, axis in zip(placement, axes, strict=True)
        if constraint.axis in (None, axis.name) and axis.name != "microbatch"
    )
