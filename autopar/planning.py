"""Places: a logical mesh for the graph of one microbatch, its intra-op problem, and the best plan that fits there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autopar.clock import Clock
from autopar.cost import Profile
from autopar.cost.profile import LEVELS
from autopar.errors import InfeasibleError
from autopar.intraop import (
    SOFT_PENALTY_NS,
    KeptParameter,
    LeastMemory,
    Options,
    Placements,
    ProfiledCosts,
    Sends,
    costs_of,
    open_options,
    prepare_placements,
)
from autopar.ir.constraint import Constraint, pinned
from autopar.ir.graph import Graph, Node, Tensor
from autopar.ir.mesh import LogicalMesh
from autopar.ir.offload import BOTH, OPTIMIZER
from autopar.ir.outline import Outline
from autopar.ir.plan import Plan, SimulatedLink, Stage, Storage
from autopar.ir.structure import batch_inputs
from autopar.microbatch import cut_constraints, divided_graph, divisible
from autopar.ops import coverage
from autopar.ops.table import operator
from autopar.refusal import fit_or_refuse
from autopar.request import Request
from autopar.simulate import (
    Incremental,
    Overlap,
    Timeline,
    predict,
    prices_of,
    simulate,
    traffic,
    traffic_by_submesh,
)
from autopar.simulate.overlap import AS_EMITTED
from autopar.trace import Blocks
from autopar.tunables import FIT_TRIES, LEAST_SOLVE_S, MOST_HIDDEN
from autopar.zero import (
    Modules,
    storage_options,
    with_in_bits,
)

_GOING_TOGETHER = (2.0, 0, 0.01)
"""Work, seed and gap of the solve that says whether options that break the fewest soft constraints go together."""


@dataclass(frozen=True)
class DividedGraph:
    """The graph of a step, and that of one of its microbatches, which is what is searched and simulated.

    cut: makes a plan of `num_submeshes` submeshes of one for the whole graph on one of these. copies: of a graph that
    was made short (`interop.fold`), how many nodes and stored tensors one stands for.
    """

    whole: Graph
    graph: Graph
    blocks: Blocks
    microbatches: int
    constraints: tuple[Constraint, ...] = ()
    cut: Callable[[Plan], Plan] | None = None
    num_submeshes: int = 1
    copies: Mapping[str, int] = field(default_factory=dict)

    def in_stages(self, plan: Plan) -> Plan:
        """A plan of the whole graph as one of several stages."""
        return plan if self.cut is None else self.cut(plan)

    def with_traffic(self, plan: Plan) -> Plan:
        """A plan of one stage with the exact bytes that it sends in a step."""
        if len(plan.stages) > 1:
            return plan
        return replace(plan, predicted=replace(plan.predicted, comm_bytes=traffic(self.whole, plan)))


def divided(graph: Graph, blocks: Blocks, microbatches: int) -> DividedGraph:
    """The step in so many microbatches. Raises PlanError when it cannot be divided so."""
    part = divided_graph(graph, microbatches)
    return DividedGraph(graph, part, blocks, microbatches, cut_constraints(graph, microbatches))


def pinned_nodes(graph: Graph, rules: Sequence[Constraint]) -> set[str]:
    """Nodes of which a constraint says how they, or what they read, are placed."""
    return {node.name for node in graph.nodes if _is_pinned(graph, node, rules)}


def _is_pinned(graph: Graph, node: Node, rules: Sequence[Constraint]) -> bool:
    """Whether a constraint says how the operator, or what it reads, is placed."""
    read = [graph.stored_by_tensor[name].name if name in graph.stored_by_tensor else name for name in node.operands]
    names = (node.scope.module, node.name, *node.results, *read)
    return any(rule.allow and not rule.soft and rule.matches(*names) for rule in rules)


def pinned_tensors(graph: Graph, rules: Sequence[Constraint]) -> set[str]:
    """Tensors whose placement some constraint speaks of, and what the operators read that it speaks of."""
    speaking = [rule for rule in rules if rule.allow or rule.zero is not None]
    found = {item.tensor for item in graph.stored if any(rule.matches(item.name) for rule in speaking)}
    for node in graph.nodes:
        if any(rule.matches(node.scope.module, node.name, *node.results) for rule in speaking):
            found.update((*node.results, *node.operands))
    return found


def microbatch_counts(graph: Graph, request: Request) -> Iterator[int]:
    """The pinned number, or 1, 2, 4, … as long as the model's batch can be divided so; then each the least that is
    twice as many or more."""
    count = pinned(request.constraints, "microbatches")
    if count is not None:
        yield count
        return
    count, names = 1, batch_inputs(graph)
    batch = graph.tensors[names[0]].shape[0] if names and request.mode == "train" else 1
    while count <= batch:
        yield count
        count = next((n for n in range(2 * count, batch + 1) if batch % n == 0 and divisible(graph, n)), batch + 1)


@dataclass(frozen=True, eq=False)
class Place:
    """A logical mesh for the graph of one microbatch. The problem is built once, whatever limits are asked for.

    by_factors: gradients of weights may meet as factors (`ops.factors`), where that sends less. overlap: what its plans
    send beside computation, as another software may (`simulate.Overlap`). strictly: no more soft constraints are broken
    than must be: the cheapest choice is the same, of a problem that on several axes is a hundredth of the size; where
    memory is tight, none is broken for it.
    """

    part: DividedGraph
    axes: LogicalMesh
    request: Request
    profile: Profile
    sends: Sends | None = None
    by_factors: bool = False
    overlap: Overlap = AS_EMITTED
    strictly: bool = False
    simulator: Incremental | None = field(default=None, kw_only=True)

    def fit(self, seconds: float, limit: int | None = None, floor: int = 0) -> Plan:
        """The best plan whose simulated peak fits; solved again under a tighter limit while it does not.

        floor: the least usage that a plan has, if that is known. Where a limit is too tight for any plan, and the floor
        is known or modules are recomputed, or copied out, one in between is asked for. Raises InfeasibleError.
        """
        draft = self.placements.draft
        limit = asked = draft.memory_limit if limit is None else limit
        clock = Clock.of(seconds)
        too_low, too_high = max(0, floor - 1), 0  # usages that no plan has, and whose plan's peak does not fit
        between = bool(floor or self.request.recompute or self.request.copied_out or self.request.is_compact)
        tries = FIT_TRIES if between else FIT_TRIES - 2
        for _ in range(2 * tries if floor else tries):
            try:
                plan = self.within(asked, max(LEAST_SOLVE_S, clock.left_s))
            except InfeasibleError:
                if not too_high or not between:
                    raise
                too_low, asked = asked, (asked + too_high) // 2
                continue
            peak = plan.predicted.peak_bytes
            if peak <= limit:
                return plan
            too_high = asked
            tighter = min(int(asked * 0.7), asked - (peak - limit))
            asked = (too_low + too_high) // 2 if too_low else tighter
            if asked <= 0:
                break
        raise InfeasibleError(f"found no plan within {limit:,} bytes a device")

    def within(self, usage_limit: int, seconds: float) -> Plan:
        """The intra-op plan of at most that usage in bytes, with the simulator's prediction.

        Of several stages, the whole model's usage is limited to what all submeshes together have.
        """
        budget = self.request.budget
        plan = self.placements.plan(usage_limit * self.part.num_submeshes, seconds, budget.seed, budget.gap)
        if self.request.is_compact:
            plan = with_in_bits(plan, self.request.in_bits, self.request.in_eight_bits)
        if self.part.cut is not None:
            return self.staged(self.part.in_stages(plan))
        return self.scored(plan)

    def scored(self, plan: Plan) -> Plan:
        """A plan of one stage with the simulator's prediction."""
        return replace(plan, predicted=predict(self.played(plan)))

    def played(self, plan: Plan) -> Timeline:
        """A step of a plan."""
        if self.simulator is not None:
            return self.simulator.timeline(plan)
        return simulate(self.part.graph, plan, self.shared_profile, self.overlap)

    def may_be_faster(self, than_ns: float) -> bool:
        """Whether a step could be shorter here if all that stored tensors are gathered and reduced for hid: the bound
        of the placements that cost least without a limit of memory."""
        if than_ns == math.inf:
            return True
        budget = self.request.budget
        return self.placements.least_step_ns(LEAST_SOLVE_S, budget.seed, budget.gap) <= than_ns * MOST_HIDDEN

    @property
    def limit_bytes(self) -> int:
        """What a device may hold."""
        return self.placements.draft.memory_limit

    def recomputing(self, modules: Modules) -> Place:
        """The place with these modules computed again."""
        return replace(self, request=self.request.recomputing(modules))

    @property
    def outline(self) -> Outline:
        """What is decided before its placements, of one stage."""
        return Outline((self.axes,), self.part.microbatches)

    def staged(self, plan: Plan) -> Plan:
        """A plan of several stages, with the simulator's prediction and the bytes of the submesh that sends most."""
        timeline = self.played(plan)
        sent = traffic_by_submesh(self.part.whole, plan, timeline)
        most = max(sent, key=lambda counts: sum(counts.values()))
        return replace(plan, predicted=replace(predict(timeline), comm_bytes=most))

    def least(self) -> tuple[Plan, LeastMemory]:
        """The plan of least usage, and what is largest in it. Raises InfeasibleError where there is no strategy."""
        budget = self.request.budget
        least = self.placements.least_memory(budget.seconds, budget.seed)
        return self.within(least.usage_bytes, LEAST_SOLVE_S), least

    @cached_property
    def placements(self) -> Placements:
        """The intra-op problem."""
        if self.strictly and any(rule.soft for rule in self._rules):
            with suppress(InfeasibleError):
                found = self.placements_with({}, strictly=True)
                if found.unlimited(*_GOING_TOGETHER).cost < SOFT_PENALTY_NS:
                    return found
        return self.placements_with({})

    def placements_with(self, keep: Mapping[str, KeptParameter], strictly: bool = False) -> Placements:
        """The intra-op problem, in which these options of stored tensors stay though others are better in every way.
        strictly: as in `intraop.builder.build`."""
        return prepare_placements(
            self.part.graph, self.part.blocks, self.draft(), self.shared_profile, self._storages,
            self._rules, self.part.whole, self.part.copies, self.sends, keep,
            self.by_factors and self.request.mode == "train", frozenset(self.request.in_bits),
            frozenset(self.request.in_eight_bits), strictly,
        )  # fmt: skip

    @cached_property
    def costs(self) -> ProfiledCosts:
        """What placements cost; nothing is priced before it is asked for."""
        return costs_of(self.part.graph, self.draft(), self.shared_profile, self.sends)

    @cached_property
    def options(self) -> Options:
        """All options of each decision. Raises InfeasibleError where the constraints leave none of one."""
        part = self.part
        return open_options(
            part.graph, part.blocks, self.axes, self.costs, self._storages, self._rules, part.whole, self.by_factors
        )

    def work_ns(self, profile: Profile) -> Mapping[str, int]:
        """By operator, what a device computes of it in a step at least: each in its fastest strategy, nothing sent."""
        graph, blocks, mesh = self.part.graph, self.part.blocks, self.request.mesh
        ranks = math.prod(axis.size for axis in self.axes)
        prices = prices_of(graph, self.draft(), profile, min(ranks, mesh.devices_per_node), is_staged=True)
        known: dict[str, int] = {}
        for node in graph.nodes:
            one = blocks.representative_node(node.name)
            if one not in known:
                known[one] = prices.least_ns(graph.node_by_name[one], self.options.strategies[one])
        count = self.part.microbatches
        return {node.name: count * known[blocks.representative_node(node.name)] for node in graph.nodes}

    @property
    def _rules(self) -> tuple[Constraint, ...]:
        return (*self.request.constraints, *self.part.constraints)

    @property
    def shared_profile(self) -> Profile:
        return self.profile.shared_by(self.request.mesh.devices_per_node)

    @property
    def _storages(self) -> Callable[[Tensor, LogicalMesh], list[Storage]]:
        microbatches, request = self.part.microbatches, self.request
        if request.mode != "train" or not request.may_offload_state or self.profile.beside is None:
            return partial(storage_options, microbatches=microbatches)
        must = request.offload in (OPTIMIZER, BOTH)
        return partial(storage_options, microbatches=microbatches, may_offload=True, must_offload=must)

    def _sources(self, graph: Graph) -> dict[str, str]:
        """Where the profile's blocks come from that this graph and mesh make use of."""
        mesh = self.request.mesh
        levels = [level for level, count in zip(LEVELS, (mesh.devices_per_node, mesh.nodes), strict=True) if count > 1]
        trains = self.request.optimizer is not None and self.request.mode == "train"
        families = {operator(node.op).work.family for node in graph.nodes} | ({"optimizer"} if trains else set())
        host = self.profile.beside if self.request.may_offload else None
        return self.profile.sources(families, levels) | ({"host_memory": str(host.provenance)} if host else {})

    @property
    def _simulated_link(self) -> SimulatedLink | None:
        """Where something may be on the host, and the link to that is simulated."""
        host = self.shared_profile.beside if self.request.may_offload else None
        if host is None or not host.is_simulated:
            return None
        return SimulatedLink(host.down_bandwidth, host.up_bandwidth, host.copy_ns)

    def draft(self) -> Plan:
        """Everything of the plan that is known before the search."""
        graph, request = self.part.whole, self.request
        return Plan(
            fingerprint=graph.fingerprint,
            model=graph.model_name,
            mesh=request.mesh,
            stages=(Stage(0, self.axes),),
            microbatches=self.part.microbatches,
            microbatch_inputs=batch_inputs(graph) if self.part.microbatches > 1 else (),
            recompute=request.recompute,
            allow=request.allow,
            copied_out=request.copied_out,
            mode=request.mode,
            training=graph.training,
            optimizer=request.optimizer or "none",
            precision=request.precision,
            memory_limit=request.memory_limit or self.shared_profile.usable_bytes,
            coverage=coverage(graph),
            sources=self._sources(graph),
            parameters={s.tensor: s.name for s in graph.stored},
            types={name: str(graph.kept(name)) for name in (*graph.inputs, *(s.tensor for s in graph.stored))},
            host_link=self._simulated_link,
            scopes={n.name: f"{n.scope.module}|{n.op}|{n.source.replace('|', '¦')}" for n in graph.nodes},
            blocks=self.part.blocks.paths,
        )


def fit_or_refuse_over(places: Sequence[Place]) -> tuple[Place, Plan]:
    """The last resort when the search found no plan that fits: the one of least memory, or the error that names it."""

    def below(place: Place, limit: int) -> Plan:
        return place.fit(LEAST_SOLVE_S, limit)

    def at_last(place: Place, least: LeastMemory) -> Plan:
        limit, floor = place.placements.draft.memory_limit, -(-least.usage_bytes // place.part.num_submeshes)
        if floor > limit:
            raise InfeasibleError(f"no plan uses {limit:,} bytes a device or less")
        return place.fit(place.request.budget.seconds, floor=floor)

    return fit_or_refuse(places, Place.least, below, at_last)
