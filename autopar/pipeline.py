"""The ordered pass list: trace → `PASSES` (stages and placements, equal graphs, SOAP), verified after each → emit.

Each candidate (a graph, a logical mesh, stages) is scored by the one simulator; the fastest that fits wins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.arguments import check_arguments
from autopar.clock import interrupts_caught
from autopar.collector import without_collector
from autopar.cost.memory import optimizer_of
from autopar.driver import Context, search
from autopar.emit import emit
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.ir import verifier
from autopar.ir.constraint import Constraint, require_matches
from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh, checked
from autopar.ir.plan import Plan
from autopar.microbatch import batch_types, one_microbatch, one_microbatch_plan, types_of
from autopar.ops import admits
from autopar.passes.balance import balance
from autopar.passes.branch import branch
from autopar.passes.fit import fit
from autopar.passes.kinds import kinds
from autopar.passes.place import place
from autopar.passes.refine import refine
from autopar.passes.rewrite import graph_of, rewrite
from autopar.passes.stage import stage
from autopar.passes.template import template
from autopar.planning import Place, divided, fit_or_refuse_over
from autopar.profiler import load_profile, profiles_of
from autopar.program import PlannedProgram, model_state
from autopar.progress import Passes, Report
from autopar.request import Request, SearchBudget
from autopar.shares import SharedBatch
from autopar.simulate import Timeline, simulate
from autopar.staging import cut, equal_stages
from autopar.template import template_axes, template_constraints, template_ranks, template_recompute
from autopar.trace import find_blocks, held_against_eager, trace, with_loss
from autopar.unequal import UnequalStages

PASSES = (
    stage,  # a graph → plans of stages on equal submeshes: placements by ILP, layers by dynamic programming   Alpa
    place,  # a graph → plans of one stage on every logical mesh, ZeRO storage and recomputation among them    Alpa
    balance,  # a graph → on unequal devices, shares of each batch by speed
    kinds,  # a graph → on unequal devices, stages of one kind each
    fit,  # a graph of which nothing fits → the plan of least memory, or the limit that would do
    template,  # the best plan → templates that people run, where they are faster
    rewrite,  # the best plan → graphs equal to the model's, to be planned near it                       TASO, Unity
    branch,  # the best plan → operators side by side, where they are faster
    refine,  # the best plan → what MCMC finds around it                                                    FlexFlow
)
"""What finds plans: each takes the front and what was asked, and yields candidates (`autopar.driver`)."""

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
        request = Request(mesh, mode, optimizer, _limit(memory_limit), tuple(constraints), _budget(search), precision)
        with interrupts_caught():
            graph, plan = planned_jointly(graph, request, progress, passes)
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

    Raises like `parallelize`.
    """
    return search(PASSES, graph, Context(request, _expert_plans, progress, passes or Passes(progress)))


def planned(graph: Graph, request: Request, progress: Report | None = None) -> Plan:
    """The fastest plan that fits of a traced model as it is. Raises like `parallelize`."""
    budget = replace(request.budget, substitutions=False)
    return planned_jointly(graph, replace(request, budget=budget), progress)[1]


@without_collector()
def placed(graph: Graph, request: Request, progress: Report | None = None) -> Plan:
    """The fastest plan that fits of a traced model by placements and stages alone. Raises like `parallelize`."""
    return search((stage, place, balance, kinds, fit), graph, Context(request, _expert_plans, progress))[1]


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
