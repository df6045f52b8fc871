"""intraop: a graph on one logical mesh -> the placements of every tensor (Alpa's intra-operator pass)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.clock import Clock, worked
from autopar.cost import Profile
from autopar.intraop.alternatives import explain_choices
from autopar.intraop.builder import Built, ChoiceVariable, KeptParameter, Representatives, StorageOptions, build
from autopar.intraop.costs import ProfiledCosts, Sends
from autopar.intraop.extract import extract
from autopar.intraop.recomputed import RecomputedShares
from autopar.intraop.strategies import Strategy
from autopar.intraop.tradeoffs import TradeOffs
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph
from autopar.ir.plan import Choice, Plan, SearchReport
from autopar.selection.problem import INFINITE, NO_PATH_NS, Problem
from autopar.selection.solution import Solution
from autopar.selection.solver import solve
from autopar.tunables import BUILD_ENTRY_S, BUILD_NODE_S, BUILD_S


@dataclass(frozen=True)
class LeastMemory:
    """The least usage of any choice, in bytes a device; its largest parts as (tensor or node, kind, bytes).

    stored_bytes: of it, what parameters and buffers take, with gradients and optimizer state.
    """

    usage_bytes: int
    largest: tuple[tuple[str, str, int], ...]
    stored_bytes: int = 0


def prepare_placements(
    graph: Graph, blocks: Representatives, draft: Plan, profile: Profile, storage_options: StorageOptions,
    constraints: Sequence[Constraint] = (), whole: Graph | None = None, copies: Mapping[str, int] | None = None,
    sends: Sends | None = None, keep: Mapping[str, KeptParameter] | None = None, by_factors: bool = False,
    in_bits: frozenset[str] = frozenset(), in_eight_bits: frozenset[str] = frozenset(), strictly: bool = False,
) -> Placements:  # fmt: skip
    """The problem of choosing every placement for the draft (mesh, axes, microbatches, mode, optimizer).

    `whole`: the graph of the step, when `graph` is that of one of its microbatches. `copies`: how many equal nodes or
    stored tensors one stands for, by name, where not one. `sends`: what other stages are sent. `keep`: options of
    stored tensors that stay though others are better in every way. by_factors, strictly: as in `builder.build`.
    in_bits: nodes that keep bits for their backward pass; in_eight_bits: or 8 bits of each activation.
    Raises InfeasibleError when the constraints leave no strategy.
    """
    costs = costs_of(graph, draft, profile, sends, in_bits, in_eight_bits)
    axes = draft.stage.axes
    built = build(
        graph, blocks, axes, costs, storage_options, constraints, None, whole, copies, keep, by_factors, strictly
    )
    entries = sum(matrix.size for matrix in built.problem.edge_costs)
    worked(BUILD_S + BUILD_NODE_S * len(graph.nodes) + BUILD_ENTRY_S * entries)
    return Placements(graph, blocks, draft, costs, built)


def costs_of(
    graph: Graph, draft: Plan, profile: Profile, sends: Sends | None = None, in_bits: frozenset[str] = frozenset(),
    in_eight_bits: frozenset[str] = frozenset(),
) -> ProfiledCosts:  # fmt: skip
    """What placements of the draft's graph cost."""
    return ProfiledCosts(
        graph, draft.stage.axes, draft.mesh.devices_per_node, profile, draft.mode, draft.optimizer, draft.microbatches,
        RecomputedShares(draft.recompute, draft.blocks), sends, RecomputedShares(draft.copied_out, draft.blocks),
        in_bits, in_eight_bits,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Placements:
    """A built problem, to be solved under one memory limit or several."""

    graph: Graph
    blocks: Representatives
    draft: Plan
    costs: ProfiledCosts
    built: Built

    def plan(self, usage_limit: int, work_s: float = 10.0, seed: int = 0, gap_limit: float = 0.0) -> Plan:
        """The draft with every placement chosen so that usage is at most so many bytes, and the search's report.

        Raises InfeasibleError when no choice meets the limit, or none was found in so much work (s).
        """
        solution = self._unlimited_within(usage_limit, gap_limit)
        if solution is None:
            problem = replace(self.built.problem, usage_limit=usage_limit)
            solution = solve(problem, seed=seed, gap_limit=gap_limit, clock=Clock.of(work_s))
        report = SearchReport(
            method=f"intra-op ILP by {solution.method}",
            cost_ns=int(solution.cost),
            lower_bound_ns=int(solution.lower_bound),
            stop_reason=solution.stop_reason,
            seconds=round(solution.seconds, 3),
            seed=seed,
        )
        plan = self.placed(replace(self.draft, search=report), self.graph, solution.choice)
        return replace(plan, choices=self.explained(solution.choice))

    def explained(self, choice: Sequence[int]) -> tuple[Choice, ...]:
        """Each decision against its alternatives."""
        return explain_choices(self.built, choice)

    def chosen(self, choice: Sequence[int]) -> dict[tuple[str, str], Any]:
        """The option of each variable, by kind and name."""
        pairs = zip(self.built.variables, choice, strict=True)
        return {(variable.kind, variable.name): variable.options[option] for variable, option in pairs}

    def choosing(self, chosen: Mapping[tuple[str, str], Any]) -> tuple[int, ...]:
        """The choice of these options."""
        return tuple(v.options.index(chosen[v.kind, v.name]) for v in self.built.variables)

    def choice_of(self, plan: Plan) -> tuple[int, ...] | None:
        """The choice that makes a plan, as far as the first of equal blocks goes; None where an option is none of the
        problem's."""
        found = [_option_of(self.graph, plan, variable) for variable in self.built.variables]
        if any(option not in v.options for option, v in zip(found, self.built.variables, strict=True)):
            return None
        return tuple(v.options.index(option) for option, v in zip(found, self.built.variables, strict=True))

    def placed(self, draft: Plan, graph: Graph, choice: Sequence[int]) -> Plan:
        """The draft with these placements. `graph`: that of the problem, or a deeper one of the same blocks."""
        steps = self.costs.steps if graph is self.graph else self.costs.of(graph).steps
        inputs, storage, nodes, redistributes = extract(
            graph, self.blocks, self.built, choice, steps, self.draft.stage.axes
        )
        return draft.placed(inputs=inputs, storage=storage, nodes=nodes, redistributes=redistributes)

    def trade_offs(self, in_flight: int, work_s: float = 10.0, seed: int = 0) -> TradeOffs:
        """Time against memory, with the activations of so many microbatches; each solve may take so much work (s)."""
        return TradeOffs(self.built, in_flight, work_s, seed)

    def unlimited_cost_ns(self, work_s: float = 10.0, seed: int = 0, gap_limit: float = 0.0) -> int:
        """The cost of the best choice that is found where memory is no concern."""
        return int(self.unlimited(work_s, seed, gap_limit).cost)

    def unlimited(self, work_s: float = 10.0, seed: int = 0, gap_limit: float = 0.0) -> Solution:
        """The best choice that is found where memory is no concern; found once, as long as it is as near as asked."""
        known = self._unlimited_within(INFINITE, gap_limit)
        if known is None:
            problem = replace(self.built.problem, usage_limit=None)
            known = solve(problem, seed=seed, gap_limit=gap_limit, clock=Clock.of(work_s))
            self._unlimited.append(known)
        return known

    def least_step_ns(self, work_s: float = 10.0, seed: int = 0, gap_limit: float = 0.0) -> int:
        """What a step of the best choice without a limit takes at least: its operators and what is between them.

        What stored tensors are gathered and reduced for may hide behind that.
        """
        choice, problem = self.unlimited(work_s, seed, gap_limit).choice, self.built.problem
        is_stored = [variable.kind == "stored" for variable in self.built.variables]
        operators = sum(int(times[option]) for times, option in zip(self.built.compute_ns, choice, strict=True))
        between = (
            int(matrix[choice[left], choice[right]])
            for (left, right), matrix in zip(problem.edges, problem.edge_costs, strict=True)
            if not (is_stored[left] or is_stored[right])
        )
        return operators + sum(between)

    @cached_property
    def _unlimited(self) -> list[Solution]:
        """What was found where memory is no concern."""
        return []

    def _unlimited_within(self, usage_limit: int, gap_limit: float) -> Solution | None:
        """Such a solution that fits and is as good as asked for: no other that fits is better."""
        fitting = (s for s in self._unlimited if s.peak_usage <= usage_limit)
        return next((s for s in fitting if s.cost - s.lower_bound <= gap_limit * s.cost), None)

    def least_memory(self, work_s: float = 10.0, seed: int = 0) -> LeastMemory:
        """The least memory that any choice of placements needs, whatever its time, and what takes most of it there."""
        problem = self.built.problem
        choice = solve(_usage_alone(problem), seed=seed, clock=Clock.of(work_s)).choice
        used = self._used(choice)
        largest = sorted(zip(used, self.built.variables, strict=True), key=lambda pair: -pair[0])[:3]
        stored, saved = self.usage_of(choice)
        return LeastMemory(stored + saved, tuple((v.name, v.kind, size) for size, v in largest if size), stored)

    def usage_of(self, choice: Sequence[int]) -> tuple[int, int]:
        """Bytes a device of what is stored, with gradients and optimizer state, and of what is saved for backward."""
        used = self._used(choice)
        stored = sum(size for size, v in zip(used, self.built.variables, strict=True) if v.kind == "stored")
        return stored, sum(used) - stored

    def _used(self, choice: Sequence[int]) -> list[int]:
        return [int(usage[option]) for usage, option in zip(self.built.problem.usages, choice, strict=True)]


def _option_of(graph: Graph, plan: Plan, variable: ChoiceVariable) -> Any:
    """What a plan says of a decision."""
    name = variable.name
    if variable.kind == "node":
        return Strategy(plan.stage.nodes[name].operands, plan.stage.nodes[name].results)
    if variable.kind == "stored":
        return kept_in(graph, plan, name)
    return plan.stage.inputs[name] if variable.kind == "input" else variable.options[0]


def kept_in(graph: Graph, plan: Plan, tensor: str) -> KeptParameter:
    """How a plan keeps a stored tensor, and what its first reader uses it as."""
    storage, readers = plan.stage.storage[tensor], graph.consumers[tensor]
    if not readers:
        return KeptParameter(storage, storage.placement)
    node, position = readers[0]
    return KeptParameter(storage, plan.stage.nodes[node.name].operands[position])


def _usage_alone(problem: Problem) -> Problem:
    """The problem with usage as its cost and no limit; what has no redistribution stays forbidden."""
    pairs = zip(problem.costs, problem.usages, strict=True)
    return replace(
        problem,
        costs=[np.where(cost >= NO_PATH_NS, INFINITE, usage) for cost, usage in pairs],
        edge_costs=[np.where(matrix >= NO_PATH_NS, INFINITE, 0) for matrix in problem.edge_costs],
        usage_limit=None,
    )
