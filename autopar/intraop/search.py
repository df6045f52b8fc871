"""intraop: a graph on one logical mesh -> the placements of every tensor (Alpa's intra-operator pass)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.cost import Profile
from autopar.errors import InfeasibleError
from autopar.intraop.builder import Built, Representatives, StorageOptions, build
from autopar.intraop.costs import ProfiledCosts
from autopar.intraop.extract import extract
from autopar.intraop.problem import INFINITE, NO_PATH_NS
from autopar.intraop.solver import solve
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, SearchReport


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
    axes, per_node = draft.axes, draft.mesh.devices_per_node
    costs = ProfiledCosts(graph, axes, per_node, profile, draft.mode, draft.optimizer)
    built = build(graph, blocks, axes, costs, storage_options, constraints, draft.memory_limit or None)
    try:
        solution = solve(built.problem, time_limit_s, seed)
    except InfeasibleError as error:
        raise _explain(built, time_limit_s, seed) from error

    inputs, storage, nodes, redistributes = extract(graph, blocks, built, solution.choice, costs.steps)
    report = SearchReport(
        method=f"intra-op ILP by {solution.method}",
        cost_ns=int(solution.cost),
        lower_bound_ns=int(solution.lower_bound),
        stop_reason=solution.stop_reason,
        seconds=round(solution.seconds, 3),
        seed=seed,
    )
    return replace(draft, inputs=inputs, storage=storage, nodes=nodes, redistributes=redistributes, search=report)


def _explain(built: Built, time_limit_s: float, seed: int) -> InfeasibleError:
    """The smallest memory that some choice of placements needs, and what takes most of it there."""
    problem = built.problem
    free = replace(
        problem,
        costs=[
            np.where(cost >= NO_PATH_NS, INFINITE, usage)
            for cost, usage in zip(problem.costs, problem.usages, strict=True)
        ],
        edge_costs=[np.where(matrix >= NO_PATH_NS, INFINITE, 0) for matrix in problem.edge_costs],
        usage_limit=None,
    )
    choice = solve(free, time_limit_s, seed).choice
    used = [int(usage[option]) for usage, option in zip(problem.usages, choice, strict=True)]
    largest = sorted(zip(used, built.variables, strict=True), key=lambda pair: -pair[0])[:3]
    names = ", ".join(
        f"{v.name} ({'state' if v.kind == 'stored' else 'activations'}, {size:,} bytes)" for size, v in largest
    )
    return InfeasibleError(
        f"expected placements within the memory limit of {problem.usage_limit:,} bytes a device, found none on mesh "
        f"{problem.name.rpartition(' ')[2]}: the smallest that can be met is {sum(used):,} bytes, most of it {names}. "
        "Raise memory_limit, use more devices, or a smaller batch."
    )


__all__ = ["plan_placements"]
