"""intraop: a graph on one logical mesh -> the placements of every tensor (Alpa's intra-operator pass)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost import Profile
from autopar.intraop.alternatives import explain_choices
from autopar.intraop.builder import Built, Representatives, StorageOptions, build
from autopar.intraop.costs import ProfiledCosts
from autopar.intraop.extract import extract
from autopar.intraop.problem import INFINITE, NO_PATH_NS, Problem
from autopar.intraop.solver import solve
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, SearchReport


@dataclass(frozen=True)
class LeastMemory:
    """The least usage of any choice, in bytes a device; its largest parts as (tensor or node, kind, bytes)."""

    usage_bytes: int
    largest: tuple[tuple[str, str, int], ...]


def plan_placements(
    graph: Graph,
    blocks: Representatives,
    draft: Plan,
    profile: Profile,
    storage_options: StorageOptions,
    constraints: Sequence[Constraint] = (),
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> Plan:
    """The draft (mesh, axes, mode, optimizer, memory limit) with every placement chosen, and the search's report.

    Raises InfeasibleError when the constraints leave no strategy, or no choice meets the memory limit.
    """
    costs = _costs(graph, draft, profile)
    built = _build(graph, blocks, draft, costs, storage_options, constraints)
    solution = solve(built.problem, time_limit_s, seed)

    inputs, storage, nodes, redistributes = extract(graph, blocks, built, solution.choice, costs.steps)
    report = SearchReport(
        method=f"intra-op ILP by {solution.method}",
        cost_ns=int(solution.cost),
        lower_bound_ns=int(solution.lower_bound),
        stop_reason=solution.stop_reason,
        seconds=round(solution.seconds, 3),
        seed=seed,
    )
    choices = explain_choices(built, solution.choice)
    return replace(
        draft, inputs=inputs, storage=storage, nodes=nodes, redistributes=redistributes, search=report, choices=choices
    )


def least_memory(
    graph: Graph, blocks: Representatives, draft: Plan, profile: Profile, storage_options: StorageOptions,
    constraints: Sequence[Constraint] = (), time_limit_s: float = 10.0, seed: int = 0,
) -> LeastMemory:  # fmt: skip
    """The least memory that any choice of placements needs, whatever its time, and what takes most of it there.

    Raises InfeasibleError when the constraints leave no strategy.
    """
    built = _build(graph, blocks, draft, _costs(graph, draft, profile), storage_options, constraints)
    choice = solve(_usage_alone(built.problem), time_limit_s, seed).choice
    used = [int(usage[option]) for usage, option in zip(built.problem.usages, choice, strict=True)]
    largest = sorted(zip(used, built.variables, strict=True), key=lambda pair: -pair[0])[:3]
    return LeastMemory(sum(used), tuple((v.name, v.kind, size) for size, v in largest if size))


def _costs(graph: Graph, draft: Plan, profile: Profile) -> ProfiledCosts:
    per_node = draft.mesh.devices_per_node
    return ProfiledCosts(graph, draft.axes, per_node, profile, draft.mode, draft.optimizer, draft.microbatches)


def _build(
    graph: Graph, blocks: Representatives, draft: Plan, costs: ProfiledCosts, storage_options: StorageOptions,
    constraints: Sequence[Constraint],
) -> Built:  # fmt: skip
    return build(graph, blocks, draft.axes, costs, storage_options, constraints, draft.memory_limit or None)


def _usage_alone(problem: Problem) -> Problem:
    """The problem with usage as its cost and no limit; what has no redistribution stays forbidden."""
    pairs = zip(problem.costs, problem.usages, strict=True)
    return replace(
        problem,
        costs=[np.where(cost >= NO_PATH_NS, INFINITE, usage) for cost, usage in pairs],
        edge_costs=[np.where(matrix >= NO_PATH_NS, INFINITE, 0) for matrix in problem.edge_costs],
        usage_limit=None,
    )


__all__ = ["LeastMemory", "least_memory", "plan_placements"]
