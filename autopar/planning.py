"""The search over logical meshes and numbers of microbatches: each place gets its best plan, the simulator picks.

place = (graph of one microbatch, logical mesh)      intra-op placements with ZeRO storage → simulate → fits?
Where no place has a plan that fits, blocks are computed again (`zero.recomputation`), too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from autopar import interrupt
from autopar.branches import with_branches
from autopar.cost import Profile
from autopar.cost.collectives import LEVELS
from autopar.errors import InfeasibleError, PlanError
from autopar.intraop import (
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
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node, Tensor
from autopar.ir.mesh import LogicalMesh, Mesh, logical_meshes
from autopar.ir.plan import Plan, Stage, Storage
from autopar.microbatch import (
    Types,
    cut_constraints,
    divided_graph,
    divisible,
    microbatch_types,
    one_microbatch_plan,
    over_microbatches,
)
from autopar.ops import coverage
from autopar.ops.table import operator
from autopar.progress import Report, reporting
from autopar.refusal import fit_or_refuse
from autopar.simulate import predict, simulate, traffic_by_submesh, traffic_over_microbatches
from autopar.trace import Blocks
from autopar.zero import (
    Modules,
    Recomputable,
    fit_with_recomputation,
    joined,
    pinned_modules,
    recomputable,
    storage_options,
)


@dataclass(frozen=True)
class SearchBudget:
    """How long the search may take in seconds over all logical meshes, how near is near enough, and the seed.

    gap: the search of a mesh stops once (cost − lower bound) / cost is at most this; the plan states which.
    stages: plans of several pipeline stages are looked for, too; if not, only where constraints pin their number.
    substitutions: equal graphs are looked for and planned as well, near the plan of the model's own graph: on logical
    meshes and in numbers of stages and microbatches that were good there. The fastest plan of all wins.
    everywhere: equal graphs are looked for longer, and planned in all ways; this takes a multiple of the time.
    proposals: what the SOAP search by MCMC may try around the plan that was found, 0 for none; refine_seconds: its time
    at most, where the machine is so slow that this is less.
    """

    seconds: float = 20.0
    seed: int = 0
    gap: float = 0.002
    stages: bool = True
    substitutions: bool = True
    everywhere: bool = False
    proposals: int = 1_000
    refine_seconds: float = 4.0

    def __post_init__(self) -> None:
        for name in ("seconds", "gap", "proposals", "refine_seconds", "seed"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < 2**63:
                raise PlanError(f"expected SearchBudget({name}=…) as a number from 0 up, found {value!r}")


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    mesh: Mesh
    mode: str
    optimizer: str | None
    memory_limit: int | None
    constraints: tuple[Constraint, ...]
    budget: SearchBudget
    precision: str | None = None
    recompute: tuple[str, ...] = ()


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
    types: Types
    constraints: tuple[Constraint, ...] = ()
    cut: Callable[[Plan], Plan] | None = None
    num_submeshes: int = 1
    copies: Mapping[str, int] = field(default_factory=dict)

    def in_stages(self, plan: Plan) -> Plan:
        """A plan for one microbatch of the whole graph as one of several stages, stated on all axes."""
        if self.cut is None:
            return plan
        return self.cut(over_microbatches(self.whole, plan, self.types, self.microbatches) if self.types else plan)

    def on_all_axes(self, plan: Plan) -> Plan:
        """A plan of one stage for one microbatch as one for the step, with the exact bytes that it sends."""
        if len(plan.stages) > 1:
            return plan
        full = over_microbatches(self.whole, plan, self.types, self.microbatches) if self.types else plan
        sent = traffic_over_microbatches(self.whole, full.parts[0], self.graph, plan.parts[0])
        return replace(full, predicted=replace(full.predicted, comm_bytes=sent))


def divided(graph: Graph, blocks: Blocks, microbatches: int) -> DividedGraph:
    """The step in so many microbatches. Raises PlanError when it cannot be divided so."""
    if microbatches == 1:
        return DividedGraph(graph, graph, blocks, 1, {})
    types = microbatch_types(graph, microbatches)
    part = divided_graph(graph, microbatches)
    return DividedGraph(graph, part, blocks, microbatches, types, cut_constraints(graph, types))


Fit = Callable[["Place", float], Plan]
"""The best plan in a place that is found in so many seconds. Raises InfeasibleError."""
_HIDDEN = 1.25
"""A plan's step is at most so many times shorter than what it costs, by what the simulator finds hidden."""


def best_plan(graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None) -> Plan:
    """The fastest plan that fits, in as few microbatches as do, over all logical meshes.

    Where none fits, or memory keeps the fastest from being chosen, plans that compute blocks again compete, with those
    of twice the microbatches, too. Raises InfeasibleError naming the smallest memory limit that can be met.
    """
    search = _PlaceSearch(graph, blocks, request, profile, progress)
    found = search.run()
    return search.stated(found or [fit_or_refuse_over(search.smallest())])


def faster_plan(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None, than_ns: int
) -> Plan | None:
    """As `best_plan`, but only where more than `than_ns` a step is not certain; None where no plan fits there."""
    search = _PlaceSearch(graph, blocks, request, profile, progress, than_ns)
    found = search.run()
    return search.stated(found) if found else None


class _PlaceSearch:
    """Over places: logical meshes, in ever more microbatches until something fits."""

    def __init__(
        self, graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None,
        than_ns: int | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.blocks, self.profile, self.progress, self.than_ns = graph, blocks, profile, progress, than_ns
        self.deadline = time.monotonic() + request.budget.seconds
        self.again = _recomputable(graph, blocks, request)
        pinned = pinned_modules(recomputable(graph, _paths(blocks)), request.constraints)
        self.request = replace(request, recompute=pinned or ())
        self.tried: list[dict[str, Any]] = []
        self.places: list[Place] = []

    def run(self) -> list[tuple[Place, Plan]]:
        """Plans that fit."""
        found: list[tuple[Place, Plan]] = []
        for count in microbatch_counts(self.graph, self.request):
            part = divided(self.graph, self.blocks, count)
            meshes = logical_meshes(self.request.mesh)
            here = [Place(part, axes, self.request, self.profile) for axes in meshes]
            here = [place for place in here if self.than_ns is None or may_be_faster(place, self.than_ns)]
            self.places += here
            plans, is_second = self._candidates(here, Place.fit), bool(found)
            fits_at_once = bool(plans)
            if interrupt.ends(bool(found or plans)):
                return found + plans
            asked = _to_recompute(here, plans) if self.again.full else []
            plans += self._candidates(asked, partial(_fit_recomputed, self.again)) if asked else []
            found += plans
            if fits_at_once or is_second or not here:
                break
        return found

    def _candidates(self, places: Sequence[Place], fit: Fit) -> list[tuple[Place, Plan]]:
        """The plans of all places that have one."""
        found: list[tuple[Place, Plan]] = []
        with reporting(self.progress, len(places)) as report:
            for number, place in enumerate(places):
                if interrupt.is_asked() and found:
                    break
                seconds = _share(self.deadline, len(places) - number)
                plan = _candidate(place, fit, seconds, self.tried, report)
                found += [(place, plan)] if plan is not None else []
        return found

    def smallest(self) -> list[Place]:
        """All places, with all blocks computed again where the search may do so."""
        return [place.recomputing(joined(self.again.full)) for place in self.places] if self.again.full else self.places

    def stated(self, found: Sequence[tuple[Place, Plan]]) -> Plan:
        """The fastest, as one for the step."""
        place, best = _fastest(found)
        return place.part.on_all_axes(replace(best, search=replace(best.search, tried=tuple(self.tried))))


def may_be_faster(place: Place, than_ns: int) -> bool:
    """Whether not even placements without a limit of memory cost so much more that nothing could hide it."""
    budget = place.request.budget
    return place.placements.unlimited_cost_ns(_LEAST_S, budget.seed, budget.gap) <= than_ns * _HIDDEN


def branched(graph: Graph, blocks: Blocks, request: Request, profile: Profile, plan: Plan) -> Plan:
    """The plan with operators beside each other on parts of an axis, where that is faster; as it is with stages.

    Where branches are worth while, the other logical meshes are looked at once more: theirs may be worth more.
    """
    if len(plan.stages) > 1 or request.mesh.num_devices == 1 or interrupt.is_asked():
        return plan
    deadline = time.monotonic() + request.budget.seconds / 2
    part, inner = divided(graph, blocks, plan.microbatches), one_microbatch_plan(plan)
    request = replace(request, recompute=plan.recompute)
    best = _in_branches(Place(part, inner.stage.axes, request, profile), inner, deadline)
    if best is inner:
        return plan
    for axes in logical_meshes(request.mesh):
        if axes != inner.stage.axes and time.monotonic() < deadline and not interrupt.is_asked():
            place = Place(part, axes, request, profile)
            with contextlib.suppress(InfeasibleError):
                other = _in_branches(place, place.fit(_share(deadline, 2)), deadline)
                best = min(best, other, key=lambda one: one.predicted.step_time_ns)
    return part.on_all_axes(replace(best, search=replace(best.search, tried=plan.search.tried)))


def plan_in(place: Place, seconds: float) -> Plan:
    """The best plan of one place, stated for the step. Raises InfeasibleError."""
    return place.part.on_all_axes(place.fit(seconds))


def _in_branches(place: Place, plan: Plan, deadline: float) -> Plan:
    own, left = place.profile.shared_by(place.request.mesh.devices_per_node), deadline - time.monotonic()
    representative = place.part.blocks.representative_node
    graph, rules = place.part.graph, place.request.constraints
    return with_branches(graph, plan, own, place.scored, representative, left, pinned_nodes(graph, rules))


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


def _recomputable(graph: Graph, blocks: Blocks, request: Request) -> Recomputable:
    """What the search may compute again: nothing in inference, or where a constraint says what."""
    is_open = request.mode == "train" and all(rule.recompute is None for rule in request.constraints)
    return recomputable(graph, _paths(blocks) if is_open else ())


def _paths(blocks: Blocks) -> list[str]:
    return [path for paths in blocks.paths for path in paths]


def _fastest(found: Sequence[tuple[Place, Plan]]) -> tuple[Place, Plan]:
    return min(found, key=lambda item: item[1].predicted.step_time_ns)


def _to_recompute(places: list[Place], fitting: list[tuple[Place, Plan]]) -> list[Place]:
    """Where to compute blocks again: everywhere if nothing fits without; in the fastest place if memory limits that."""
    if not fitting:
        return places
    place, plan = _fastest(fitting)
    return [] if _is_unlimited(place, plan) else [place]


def _is_unlimited(place: Place, plan: Plan) -> bool:
    """Whether the place's plan would be no cheaper without a limit of memory, as far as the search can say."""
    budget = place.request.budget
    free_ns = place.placements.unlimited_cost_ns(_LEAST_S, budget.seed, budget.gap)
    return plan.search.cost_ns * (1 - budget.gap) <= free_ns


def _fit_recomputed(again: Recomputable, place: Place, seconds: float) -> Plan:
    """The best plan of a place that computes blocks again."""

    def fit(modules: Modules) -> Plan:
        return place.recomputing(modules).fit(seconds / 2)

    def rescore(plan: Plan, modules: Modules) -> Plan:
        return place.scored(replace(plan, recompute=modules))

    return place.scored(fit_with_recomputation(again, fit, rescore))


def _share(deadline: float, places_left: int) -> float:
    """Seconds for the next place: an equal share of what is left, but enough to find something."""
    return max(_LEAST_S, (deadline - time.monotonic()) / places_left)


_LEAST_S = 2.0
_TRIES = 6


def microbatch_counts(graph: Graph, request: Request) -> Iterator[int]:
    """The pinned number, or 1, 2, 4, … as long as the model's batch can be divided so."""
    pinned = {c.microbatches for c in request.constraints if c.microbatches is not None}
    if len(pinned) > 1:
        raise PlanError(f"expected constraints to agree on the number of microbatches, found {sorted(pinned)}")
    if pinned:
        yield from pinned
        return
    count = 1
    yield count
    while request.mode == "train" and divisible(graph, 2 * count):
        count *= 2
        yield count


def _candidate(place: Place, fit: Fit, seconds: float, tried: list[dict[str, Any]], report: Report) -> Plan | None:
    """The plan in one place, noted in `tried`; None when none was found that fits."""
    count = place.part.microbatches
    row: dict[str, Any] = {"mesh": sizes_text(place.axes), "microbatches": count}
    tried.append(row)
    started = time.monotonic()
    try:
        plan = fit(place, seconds)
    except InfeasibleError as error:
        row["infeasible"] = str(error)
        plan = None
    row["seconds"] = round(time.monotonic() - started, 3)
    if plan is not None:
        row |= {"step_time_ns": plan.predicted.step_time_ns, "peak_bytes": plan.predicted.peak_bytes,
                "solve_seconds": plan.search.seconds}  # fmt: skip
        row |= {"recompute": len(plan.recompute)} if plan.recompute else {}
    what = f"{plan.predicted.step_time_ns / 1e6:.3f} ms" if plan is not None else "no plan found that fits"
    what += f", {len(plan.recompute)} modules recomputed" if plan is not None and plan.recompute else ""
    report(f"mesh {row['mesh']}{f' in {count} microbatches' if count > 1 else ''}: {what} ({row['seconds']} s)")
    return plan


def sizes_text(axes: LogicalMesh) -> str:
    """ "2x4", or "1" without axes: how reports call a logical mesh."""
    return "x".join(str(axis.size) for axis in axes) or "1"


@dataclass(frozen=True, eq=False)
class Place:
    """A logical mesh for the graph of one microbatch. The problem is built once, whatever limits are asked for."""

    part: DividedGraph
    axes: LogicalMesh
    request: Request
    profile: Profile
    sends: Sends | None = None

    def fit(self, seconds: float, limit: int | None = None, floor: int = 0) -> Plan:
        """The best plan whose simulated peak fits; solved again under a tighter limit while it does not.

        floor: the least usage that a plan has, if that is known. Where a limit is too tight for any plan, and the floor
        is known or modules are recomputed, one in between is asked for. Raises InfeasibleError.
        """
        draft = self.placements.draft
        limit = asked = draft.memory_limit if limit is None else limit
        deadline = time.monotonic() + seconds
        too_low, too_high = max(0, floor - 1), 0  # usages that no plan has, and whose plan's peak does not fit
        between = bool(floor or self.request.recompute)
        tries = _TRIES if between else _TRIES - 2
        for _ in range(2 * tries if floor else tries):
            try:
                plan = self.within(asked, max(_LEAST_S, deadline - time.monotonic()))
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
        if self.part.cut is not None:
            return self.staged(self.part.in_stages(plan))
        return self.scored(plan)

    def scored(self, plan: Plan) -> Plan:
        """A plan of one stage with the simulator's prediction."""
        return replace(plan, predicted=predict(simulate(self.part.graph, plan, self.shared_profile)))

    def recomputing(self, modules: Modules) -> Place:
        """The place with these modules computed again."""
        return replace(self, request=replace(self.request, recompute=modules))

    def staged(self, plan: Plan) -> Plan:
        """A plan of several stages, with the simulator's prediction and the bytes of the submesh that sends most."""
        part = one_microbatch_plan(plan)
        timeline = simulate(self.part.graph, part, self.shared_profile)
        sent = traffic_by_submesh(self.part.whole, plan, self.part.graph, part, timeline)
        most = max(sent, key=lambda counts: sum(counts.values()))
        return replace(plan, predicted=replace(predict(timeline), comm_bytes=most))

    def least(self) -> tuple[Plan, LeastMemory]:
        """The plan of least usage, and what is largest in it. Raises InfeasibleError where there is no strategy."""
        budget = self.request.budget
        least = self.placements.least_memory(budget.seconds, budget.seed)
        return self.within(least.usage_bytes, _LEAST_S), least

    @cached_property
    def placements(self) -> Placements:
        """The intra-op problem."""
        return self.placements_with({})

    def placements_with(self, keep: Mapping[str, KeptParameter]) -> Placements:
        """The intra-op problem, in which these options of stored tensors stay though others are better in every way."""
        return prepare_placements(
            self.part.graph, self.part.blocks, self.draft(), self.shared_profile, self._storages,
            (*self.request.constraints, *self.part.constraints), self.part.whole, self.part.copies, self.sends, keep,
        )  # fmt: skip

    @cached_property
    def costs(self) -> ProfiledCosts:
        """What placements cost; nothing is priced before it is asked for."""
        return costs_of(self.part.graph, self.draft(), self.shared_profile, self.sends)

    @cached_property
    def options(self) -> Options:
        """All options of each decision. Raises InfeasibleError where the constraints leave none of one."""
        rules = (*self.request.constraints, *self.part.constraints)
        part = self.part
        return open_options(part.graph, part.blocks, self.axes, self.costs, self._storages, rules, part.whole)

    @property
    def shared_profile(self) -> Profile:
        return self.profile.shared_by(self.request.mesh.devices_per_node)

    @property
    def _storages(self) -> Callable[[Tensor, LogicalMesh], list[Storage]]:
        return partial(storage_options, microbatches=self.part.microbatches)

    def _sources(self, graph: Graph) -> dict[str, str]:
        """Where the profile's blocks come from that this graph and mesh make use of."""
        mesh = self.request.mesh
        levels = [level for level, count in zip(LEVELS, (mesh.devices_per_node, mesh.nodes), strict=True) if count > 1]
        trains = self.request.optimizer is not None and self.request.mode == "train"
        families = {operator(node.op).work.family for node in graph.nodes} | ({"optimizer"} if trains else set())
        return self.profile.sources(families, levels)

    def draft(self) -> Plan:
        """Everything of the plan that is known before the search."""
        graph, request = self.part.whole, self.request
        return Plan(
            fingerprint=graph.fingerprint,
            model=graph.model_name,
            mesh=request.mesh,
            stages=(Stage(0, self.axes),),
            microbatches=self.part.microbatches,
            recompute=request.recompute,
            mode=request.mode,
            training=graph.training,
            optimizer=request.optimizer or "none",
            precision=request.precision,
            memory_limit=request.memory_limit or self.shared_profile.usable_bytes,
            coverage=coverage(graph),
            sources=self._sources(graph),
            parameters={s.tensor: s.name for s in graph.stored},
            types={name: str(graph.kept(name)) for name in (*graph.inputs, *(s.tensor for s in graph.stored))},
            scopes={n.name: f"{n.scope.module}|{n.op}|{n.source.replace('|', '¦')}" for n in graph.nodes},
            blocks=self.part.blocks.paths,
        )


def fit_or_refuse_over(places: Sequence[Place]) -> tuple[Place, Plan]:
    """The last resort when the search found no plan that fits: the one of least memory, or the error that names it."""

    def below(place: Place, limit: int) -> Plan:
        return place.fit(_LEAST_S, limit)

    def at_last(place: Place, least: LeastMemory) -> Plan:
        limit, floor = place.placements.draft.memory_limit, -(-least.usage_bytes // place.part.num_submeshes)
        if floor > limit:
            raise InfeasibleError(f"no plan uses {limit:,} bytes a device or less")
        return place.fit(place.request.budget.seconds, floor=floor)

    return fit_or_refuse(places, Place.least, below, at_last)
