"""The ordered pass list: trace → substitute → intra-op ILP with ZeRO storage, stages → SOAP → emit, verified.

Each candidate (a graph, a logical mesh, stages) is scored by the one simulator; the fastest that fits wins.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from autopar import interrupt
from autopar.arguments import check_arguments
from autopar.collector import without_collector
from autopar.cost.memory import optimizer_of
from autopar.emit import emit
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.experts import with_templates
from autopar.ir import verifier
from autopar.ir.buffers import joins_modules
from autopar.ir.constraint import Constraint, require_matches
from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh, checked
from autopar.ir.plan import Plan, rule_counts
from autopar.jointly import (
    NEARBY_S,
    PlannedGraph,
    SearchSetting,
    entries_near,
    much_faster,
    planned_near,
    reported,
    setting_of,
    settings_near,
    taken,
)
from autopar.microbatch import batch_types, one_microbatch, one_microbatch_plan, types_of
from autopar.ops import admits
from autopar.planning import (
    Place,
    Request,
    SearchBudget,
    best_plan,
    branched,
    divided,
    fit_or_refuse_over,
)
from autopar.profiler import load_profile, profiles_of
from autopar.program import PlannedProgram, model_state
from autopar.progress import Passes, Report, reporting
from autopar.refinement import refined
from autopar.rewrites import graph_of, rewrites
from autopar.shares import SharedBatch, best_mixed_plan
from autopar.show.text import rules_text
from autopar.simulate import Timeline, simulate
from autopar.staged import best_staged_plan
from autopar.staging import cut, equal_stages
from autopar.substitute import GraphCandidate
from autopar.template import template_axes, template_constraints, template_ranks, template_recompute
from autopar.trace import find_blocks, held_against_eager, trace, with_loss
from autopar.unequal import UnequalStages

_SEVERAL_STARTS = 5_000
"""With so many proposals, refinement begins at expert plans and at a drawn one, too."""
_SECOND_SHARE = 0.5
"""Of the budget for planning an equal graph in all settings, where it is much faster than the model's own."""
_COMPUTE_DTYPES = {None: None, "bf16": torch.bfloat16}
_NOT_ASKED = "no, check=False was asked for"
_BUDGETS = {
    "fast": SearchBudget(10.0, gap=0.01, substitutions=False, proposals=0),
    "default": SearchBudget(20.0),
    "thorough": SearchBudget(300.0, gap=0.0, everywhere=True, proposals=50_000, refine_seconds=120.0),
}


@faults_told()
@without_collector()
def parallelize(
    model: nn.Module,
    mesh: Mesh,
    example_inputs: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    mode: str = "train",
    optimizer: str | None = "adamw",
    precision: str | None = None,
    memory_limit: int | None = None,
    constraints: Sequence[Constraint] = (),
    plan: Plan | None = None,
    search: str | SearchBudget = "default",
    progress: Report | None = None,
    check: bool = True,
) -> PlannedProgram:
    """Turns a single-device model into the fastest sharded program for a mesh that the search finds.

    example_inputs: one global batch (real or meta tensors). memory_limit: bytes a device. plan: a saved plan, used
    after validation instead of a search; its mode is taken too. check: whether the traced graph is run beside the model
    where it has real weights, once for each graph of a model; the plan says what came of it, and a difference is a
    TraceError. Ctrl-C ends a search with the best plan so far. Raises AutoparError subclasses; InfeasibleError when
    nothing fits.
    """
    check_arguments(
        model=model, loss_fn=loss_fn, optimizer=optimizer, precision=precision, constraints=constraints,
        progress=progress, **({} if plan is None else {"plan": plan}),
    )  # fmt: skip
    mesh, passes = checked(mesh), Passes(progress)
    _limit(memory_limit)  # refused before the model is traced
    optimizer_of(optimizer)
    given = model, example_inputs, loss_fn, mode if plan is None else plan.mode, _precision(precision, plan)
    graph = _trace(*given)
    against_eager = _checked_against_eager(graph, *given) if check else _NOT_ASKED
    passes.ended("trace", f"{len(graph.nodes):,} operators, checked against eager: {against_eager}")
    if plan is None:
        require_matches(constraints, graph)
        budget = _budget(search)
        if joins_modules(graph):  # stages could part what reads a buffer from what updates it
            budget = replace(budget, stages=False)
        request = Request(mesh, mode, optimizer, _limit(memory_limit), tuple(constraints), budget, precision)
        with interrupt.caught():
            graph, plan = planned_jointly(graph, request, progress, passes)
            plan = _said_if_interrupted(plan)
    elif str(plan.mesh) != str(mesh):
        raise PlanError(f"expected a plan for {mesh}, found one for {plan.mesh}; plan again for this mesh")
    else:
        graph = graph_of(plan, graph)
    verifier.verify(graph, plan, admits)
    source = emit(graph, plan)
    passes.ended("emit", f"{source.count(chr(10)):,} lines")
    plan = replace(_with_simulator(plan, graph), checked_against_eager=against_eager)
    return PlannedProgram(graph, plan, source, model_state(with_loss(model, loss_fn)))


@without_collector()
def planned_jointly(
    graph: Graph, request: Request, progress: Report | None = None, passes: Passes | None = None
) -> tuple[Graph, Plan]:
    """The fastest plan that fits over the graphs that substitutions make of a traced model, with the graph it is for.

    The graph as it is is planned first; the best of all is refined. Raises like `parallelize`.
    """
    passes = passes or Passes(progress)
    searched = placed(graph, request, progress)
    best = graph, with_templates(graph, searched, request)
    others = _others(graph, searched, best[1], request)
    passes.ended("place", _step_text(best[1]))
    if _looks_for_graphs(request):
        best = _best_graph(*best, request, progress)
        passes.ended("substitute", f"{_step_text(best[1])}, {_graphs_text(best[1])}")
    best = _refined_best(*best, request, progress, graph, others)
    if request.budget.proposals:
        passes.ended("refine", _step_text(best[1]))
    return best


def _others(graph: Graph, searched: Plan, best: Plan, request: Request) -> list[Plan]:
    """What refinement tries beside the best, for the graph as it is.

    What the search had found, where a template is faster, which leaves less to be changed. The plan with branches: they
    leave less to substitute, too, so that plans without may gain more by that.
    """
    few = request.budget.proposals < _SEVERAL_STARTS
    others = [searched] if best.stages is not searched.stages and few else []
    beside = _branched(graph, searched, request)
    return others if beside is searched else [*others, beside]


def _branched(graph: Graph, plan: Plan, request: Request) -> Plan:
    if not request.mesh.is_homogeneous:
        return plan
    return branched(graph, find_blocks(graph, request.constraints), request, load_profile(request.mesh.profile), plan)


def _refined_best(
    graph: Graph, plan: Plan, request: Request, progress: Report | None, own_graph: Graph, others: Sequence[Plan]
) -> tuple[Graph, Plan]:
    """The plan refined, or one of others for `own_graph`, where that gets faster."""
    best = graph, _refined(graph, plan, request, progress)
    for start in others:
        other = start if interrupt.is_asked() else _refined(own_graph, start, request, progress)
        if other.predicted.step_time_ns < best[1].predicted.step_time_ns:
            best = own_graph, replace(other, search=replace(other.search, tried=best[1].search.tried))
    return best


def _looks_for_graphs(request: Request) -> bool:
    """Whether equal graphs are looked for. On devices of several kinds there is no setting to plan them near."""
    budget = request.budget
    return budget.substitutions and (budget.everywhere or request.mesh.is_homogeneous) and not interrupt.is_asked()


def _best_graph(graph: Graph, plan: Plan, request: Request, progress: Report | None) -> tuple[Graph, Plan]:
    """The graph to take of the model's own, whose plan is given, and those that substitutions make; with its plan."""
    began = time.monotonic()
    found, settings = rewrites(graph, request), settings_near(plan)
    given = PlannedGraph(GraphCandidate(graph, (), found.before_ns), settings[0] if settings else None, plan)
    if request.budget.everywhere:
        wanted = takewhile(lambda _: not interrupt.is_asked(), found.candidates)
        entries = [given, *(_placed_anywhere(candidate, request, progress) for candidate in wanted)]
    else:
        with reporting(progress, len(found.candidates) + len(settings)) as report:
            near = partial(_planned_near, plan, request, report)
            entries = entries_near(given, found.candidates, settings, near, partial(_is_over, began + NEARBY_S))
        faster = much_faster(entries)
        if faster is not None and not interrupt.is_asked():
            less = replace(request.budget, seconds=request.budget.seconds * _SECOND_SHARE)
            entries.append(_placed_anywhere(faster, replace(request, budget=less), progress))
    best = taken(entries)
    return best.candidate.graph, reported(entries, best, found, time.monotonic() - began)


def _is_over(deadline: float) -> bool:
    return interrupt.is_asked() or time.monotonic() > deadline


def _planned_near(
    plan: Plan, request: Request, report: Report, candidate: GraphCandidate, setting: SearchSetting
) -> Plan | None:
    found = planned_near(candidate.graph, plan, setting, request, load_profile(request.mesh.profile))
    step = "no plan found that fits" if found is None else _step_text(found)
    report(f"{rules_text(rule_counts(candidate.steps))} on {setting}: {step}")
    return found


def _placed_anywhere(candidate: GraphCandidate, request: Request, progress: Report | None) -> PlannedGraph:
    try:
        plan = placed(candidate.graph, request, progress)
    except (InfeasibleError, interrupt.Interrupted):
        return PlannedGraph(candidate, None, None)
    return PlannedGraph(candidate, setting_of(plan), plan)


def _graphs_text(plan: Plan) -> str:
    assert plan.search.rewriting is not None
    return f"{len(plan.search.rewriting.graphs)} graphs planned"


def _said_if_interrupted(plan: Plan) -> Plan:
    if not interrupt.is_asked():
        return plan
    return replace(plan, search=replace(plan.search, stop_reason=f"interrupted, {plan.search.stop_reason}"))


def _step_text(plan: Plan) -> str:
    return f"{plan.predicted.step_time_ns / 1e6:.3f} ms a step"


def planned(graph: Graph, request: Request, progress: Report | None = None) -> Plan:
    """The fastest plan that fits of a traced model as it is. Raises like `parallelize`."""
    budget = replace(request.budget, substitutions=False)
    return planned_jointly(graph, replace(request, budget=budget), progress)[1]


def _refined(graph: Graph, plan: Plan, request: Request, progress: Report | None) -> Plan:
    if not request.mesh.is_homogeneous:
        return plan
    others = _expert_plans(graph, request) if request.budget.proposals >= _SEVERAL_STARTS else []
    blocks, profile = find_blocks(graph, request.constraints), load_profile(request.mesh.profile)
    return refined(graph, blocks, request, profile, plan, progress, others)


def _expert_plans(graph: Graph, request: Request) -> list[tuple[str, Plan]]:
    """Templates to begin with, too, as far as the model and constraints allow them: data parallel, whole and sharded,
    and beside tensor parallel inside a node."""
    devices, inner = request.mesh.num_devices, request.mesh.devices_per_node
    found = []
    choices: list[dict[str, int]] = [{"dp": devices}, {"dp": devices, "zero": 3}, {"dp": devices // inner, "tp": inner}]
    for choice in choices:
        with contextlib.suppress(AutoparError):
            plan = template_of_graph(
                graph, request.mesh, dp=choice["dp"], tp=choice.get("tp", 1), zero=choice.get("zero", 0),
                mode=request.mode, optimizer=request.optimizer, precision=request.precision,
                memory_limit=request.memory_limit, constraints=request.constraints,
            )  # fmt: skip
            found.append((f"template {', '.join(f'{key}={value}' for key, value in choice.items())}", plan))
    return found


def placed(graph: Graph, request: Request, progress: Report | None = None) -> Plan:
    """The fastest plan that fits of a traced model by placements and stages alone. Raises like `parallelize`."""
    blocks = find_blocks(graph, request.constraints)
    if not request.mesh.is_homogeneous:
        return best_mixed_plan(graph, blocks, request, profiles_of(request.mesh), progress)
    find = best_staged_plan if _looks_for_stages(request) else best_plan
    profile = load_profile(request.mesh.profile)
    return find(graph, blocks, request, profile, progress)


def _looks_for_stages(request: Request) -> bool:
    """Whether plans of several stages are looked for: where constraints ask for them, or may be and nothing forbids."""
    pinned = {constraint.stages for constraint in request.constraints} - {None}
    if pinned:
        return pinned != {1}
    return request.budget.stages and request.mode == "train" and request.mesh.num_devices > 1


@faults_told()
@without_collector()
def template_plan(
    model: nn.Module, mesh: Mesh, example_inputs: Any, *, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1,
    schedule: str = "1f1b", chunks: int = 2, sequence_parallel: bool = False, zero: int = 0, recompute: str = "none",
    split: str = "equal", loss_fn: Callable[..., Any] | None = None, mode: str = "train",
    optimizer: str | None = "adamw", precision: str | None = None, memory_limit: int | None = None, check: bool = True,
) -> Plan:  # fmt: skip
    """The plan that people write by hand for dp × tp × pp devices, as constraints around which the rest is solved.

    pp: stages of repeated blocks, the embedding with the first, head and loss with the last, each on neighbouring ranks
    of one kind. split: "equal" gives each as many blocks, "speed" as many as keep the slowest stage fast while all fit.
    Of pp=1 on devices of several kinds, split says in the same way how many rows of a batch each rank of dp gets.
    schedule: "gpipe" (all forward, then all backward), "1f1b" (as few microbatches in flight as
    keep the stages busy), "interleaved" (1f1b with `chunks` stages a submesh, in turn) or "zero_bubble" (1f1b whose
    gradients of parameters are made later than those that earlier stages wait for). microbatches: the global batch is
    cut into so many, each split over dp.
    recompute: "none" keeps what autograd saves; "full" keeps of each repeated block what enters it, and runs it again
    before its backward pass, collectives included (Megatron's full recomputation); "block" does so for the innermost
    modules around each block's attention operator alone (selective recomputation). check: as in `parallelize`.
    """
    check_arguments(
        model=model, loss_fn=loss_fn, optimizer=optimizer, precision=precision, dp=dp, tp=tp, pp=pp, zero=zero,
        microbatches=microbatches, chunks=chunks,
    )  # fmt: skip
    template_axes(checked(mesh), dp, tp, pp)  # refused before the model is traced
    template_ranks(mesh, pp, chunks, schedule)
    given = model, example_inputs, loss_fn, mode, _precision(precision)
    graph = _trace(*given)
    against_eager = _checked_against_eager(graph, *given) if check else _NOT_ASKED
    plan = template_of_graph(
        graph, mesh, dp=dp, tp=tp, pp=pp,
        microbatches=microbatches, schedule=schedule, chunks=chunks, sequence_parallel=sequence_parallel, zero=zero,
        recompute=recompute, split=split, mode=mode, optimizer=optimizer, precision=precision,
        memory_limit=memory_limit,
    )  # fmt: skip
    return replace(plan, checked_against_eager=against_eager)


def template_of_graph(
    graph: Graph, mesh: Mesh, *, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1, schedule: str = "1f1b",
    chunks: int = 2, sequence_parallel: bool = False, zero: int = 0, recompute: str = "none", split: str = "equal",
    mode: str = "train", optimizer: str | None = "adamw", precision: str | None = None, memory_limit: int | None = None,
    constraints: Sequence[Constraint] = (),
) -> Plan:  # fmt: skip
    """`template_plan` of a traced model, under further constraints."""
    axes = template_axes(mesh, dp, tp, pp)
    first_ranks = template_ranks(mesh, pp, chunks, schedule)
    part = divided(graph, find_blocks(graph), microbatches)
    paths = tuple(path for group in part.blocks.paths for path in group)
    by_speed = split != "equal" or not mesh.is_homogeneous
    if pp > 1 and not by_speed:
        members = equal_stages(graph, paths, len(first_ranks))
        part = replace(part, cut=lambda plan: cut(graph, plan, members, first_ranks, schedule), num_submeshes=pp)
    batch = {n: t for n, t in batch_types(part.graph).items() if part.blocks.representative_tensor(n) == n}
    rules = [*template_constraints(part.graph, axes, zero, sequence_parallel, paths, batch), *constraints]
    again = template_recompute(graph, paths, recompute)
    limit = _limit(memory_limit)
    request = Request(mesh, mode, optimizer, limit, tuple(rules), _BUDGETS["fast"], precision, again)
    if by_speed:
        kinds = {group.profile: axes for group in mesh.groups}
        if pp == 1 and not mesh.is_homogeneous:
            return _checked(SharedBatch(part, axes, request, profiles_of(mesh)).plan(split), graph)
        stages = UnequalStages(part, kinds, len(first_ranks) // pp, schedule, paths, request, profiles_of(mesh))
        plan = stages.plan(split)
    else:
        plan = _fitted(Place(part, axes, request, load_profile(mesh.profile)))
    return _checked(plan, graph)


def _checked(plan: Plan, graph: Graph) -> Plan:
    """The plan, verified, with what `plan.timeline()` calls."""
    verifier.verify(graph, plan, admits)
    return _with_simulator(plan, graph)


def _fitted(place: Place) -> Plan:
    try:
        plan = place.fit(place.request.budget.seconds)
    except InfeasibleError:
        _, plan = fit_or_refuse_over([place])
    return place.part.on_all_axes(plan)


@faults_told()
def verify(plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None) -> None:
    """Type-checks a plan against a model. Raises PlanError or PlacementError with node and source line."""
    _verified_graph(plan, model, example_inputs, loss_fn)


@faults_told()
def timeline_of(
    plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None
) -> Timeline:
    """The simulated step of a plan that was read from a file. Raises like `verify`."""
    return simulated_step(_verified_graph(plan, model, example_inputs, loss_fn), plan)


@faults_told()
def with_timeline(
    plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None
) -> Plan:
    """A plan that was read from a file, with what `plan.timeline()` needs of the model. Raises like `verify`."""
    return _with_simulator(plan, _verified_graph(plan, model, example_inputs, loss_fn))


def _verified_graph(plan: Plan, model: nn.Module, example_inputs: Any, loss_fn: Callable[..., Any] | None) -> Graph:
    """The graph that a plan is for, which it fits."""
    check_arguments(plan=plan, model=model, loss_fn=loss_fn)
    graph = graph_of(plan, _trace(model, example_inputs, loss_fn, plan.mode, _precision(plan.precision)))
    verifier.verify(graph, plan, admits)
    return graph


def _with_simulator(plan: Plan, graph: Graph) -> Plan:
    """The plan with what `plan.timeline()` calls."""
    return replace(plan, simulator=partial(simulated_step, graph))


@faults_told()
def simulated_step(graph: Graph, plan: Plan) -> Timeline:
    """The timeline of a whole step; the simulator plays one microbatch's graph as often as there are microbatches."""
    part = graph if plan.microbatches == 1 else one_microbatch(graph, types_of(plan), plan.microbatches)
    return simulate(part, one_microbatch_plan(plan), profiles_of(plan.mesh))


def _trace(model: nn.Module, example_inputs: Any, loss_fn: Any, mode: str, precision: str | None) -> Graph:
    if mode not in ("train", "inference"):
        raise PlanError(f'expected mode="train" or "inference", found {mode!r}')
    if example_inputs is None:
        raise PlanError("expected example_inputs (one global batch; meta tensors will do), found None")
    return trace(model, example_inputs, loss_fn=loss_fn, mode=mode, compute_dtype=_COMPUTE_DTYPES[precision])


def _checked_against_eager(
    graph: Graph, model: nn.Module, example_inputs: Any, loss_fn: Any, mode: str, precision: str | None
) -> str:
    """What a plan says of it. Raises TraceError where graph and model differ."""
    return held_against_eager(model, graph, example_inputs, loss_fn, _COMPUTE_DTYPES[precision])


def _precision(precision: str | None, plan: Plan | None = None) -> str | None:
    """The precision asked for, or that of a plan that is given."""
    if precision not in _COMPUTE_DTYPES:
        raise PlanError(f'expected precision=None (as the model is) or "bf16", found {precision!r}')
    if plan is None:
        return precision
    if precision is not None and precision != plan.precision:
        raise PlanError(
            f"expected precision={plan.precision!r}, which the plan is for, found {precision!r}; plan again"
        )
    return _precision(plan.precision)


def _limit(memory_limit: Any) -> int | None:
    """Bytes a device, where they were asked for; at least one, so that 0 is refused with what would do."""
    is_number = isinstance(memory_limit, (int, float)) and not isinstance(memory_limit, bool)
    if memory_limit is None:
        return None
    if not is_number or not 0 <= memory_limit < 2**63:
        raise PlanError(f"expected memory_limit in bytes a device, such as 16_000_000_000, found {memory_limit!r}")
    return max(1, int(memory_limit))


def _budget(search: str | SearchBudget) -> SearchBudget:
    if isinstance(search, SearchBudget):
        return search
    if not isinstance(search, str) or search not in _BUDGETS:
        raise PlanError(f"expected search as one of {', '.join(_BUDGETS)} or a SearchBudget, found {search!r}")
    return _BUDGETS[search]
