"""The ordered pass list: trace → intra-op ILP with ZeRO storage → simulate → emit, the verifier between passes.

Each candidate (one for each logical shape of the mesh) is scored by the one simulator; the fastest that fits wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from autopar.cost import Profile, load_profile
from autopar.emit import emit
from autopar.errors import InfeasibleError, PlanError
from autopar.intraop import LeastMemory, least_memory, plan_placements
from autopar.ir import verifier
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Tensor
from autopar.ir.mesh import LogicalMesh, Mesh, logical_meshes
from autopar.ir.plan import Plan, Storage
from autopar.microbatch import (
    Types,
    cut_constraints,
    divisible,
    microbatch_types,
    one_microbatch,
    one_microbatch_plan,
    over_microbatches,
    types_of,
)
from autopar.ops import admits, coverage
from autopar.program import PlannedProgram, model_state
from autopar.progress import Report, reporting
from autopar.refusal import fit_or_refuse
from autopar.simulate import Timeline, predict, simulate, traffic
from autopar.template import template_axes, template_constraints
from autopar.trace import Blocks, find_blocks, trace
from autopar.zero import storage_options


@dataclass(frozen=True)
class SearchBudget:
    """How long the search may take, in seconds over all logical meshes, and its seed."""

    seconds: float = 30.0
    seed: int = 0


_BUDGETS = {"fast": SearchBudget(10.0), "default": SearchBudget(30.0), "thorough": SearchBudget(300.0)}


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
) -> PlannedProgram:
    """Turns a single-device model into the fastest sharded program for a mesh that the search finds.

    example_inputs: one global batch (real or meta tensors). memory_limit: bytes a device. plan: a saved plan, used
    after validation instead of a search. Raises AutoparError subclasses; InfeasibleError when nothing fits.
    """
    graph = _trace(model, example_inputs, loss_fn, mode)
    _check_precision(precision)
    if plan is None:
        plan = _search(
            graph,
            _Request(mesh, mode, optimizer, memory_limit, tuple(constraints), _budget(search)),
            progress,
        )
    elif str(plan.mesh) != str(mesh):
        raise PlanError(f"expected a plan for {mesh}, found one for {plan.mesh}; plan again for this mesh")
    verifier.verify(graph, plan, admits)
    return PlannedProgram(graph, _with_simulator(plan, graph), emit(graph, plan), model_state(model))


def template_plan(
    model: nn.Module, mesh: Mesh, example_inputs: Any, *, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1,
    schedule: str = "1f1b", sequence_parallel: bool = False, zero: int = 0, recompute: str = "none",
    loss_fn: Callable[..., Any] | None = None, mode: str = "train", optimizer: str | None = "adamw",
    memory_limit: int | None = None,
) -> Plan:  # fmt: skip
    """The plan that people write by hand for dp × tp devices, as constraints around which the rest is solved.

    Raises PlanError for what is not available yet: pp > 1, recompute other than "none".
    """
    if recompute != "none":
        raise PlanError(f'expected recompute="none", found {recompute!r}: it is not available yet')
    axes = template_axes(mesh, dp, tp, pp)
    graph = _trace(model, example_inputs, loss_fn, mode)
    part = _divided(graph, find_blocks(graph), microbatches)
    paths = tuple(path for group in part.blocks.paths for path in group)
    rules = template_constraints(axes, zero, sequence_parallel, paths)
    request = _Request(mesh, mode, optimizer, memory_limit, tuple(rules), _BUDGETS["fast"])
    profile = load_profile(mesh.profile)
    try:
        plan = _plan_on(part, axes, request, profile)
    except InfeasibleError:
        _, plan = _fit_or_refuse([part], [axes], request, profile)
    plan = _on_all_axes(part, plan)
    verifier.verify(graph, plan, admits)
    return _with_simulator(plan, graph)


def verify(plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None) -> None:
    """Type-checks a plan against a model. Raises PlanError or PlacementError with node and source line."""
    verifier.verify(_trace(model, example_inputs, loss_fn, plan.mode), plan, admits)


def _with_simulator(plan: Plan, graph: Graph) -> Plan:
    """The plan with what `plan.timeline()` calls."""
    return replace(plan, simulator=partial(_simulated, graph))


def _simulated(graph: Graph, plan: Plan) -> Timeline:
    """The timeline of a whole step; the simulator plays one microbatch's graph as often as there are microbatches."""
    part = graph if plan.microbatches == 1 else one_microbatch(graph, types_of(plan), plan.microbatches)
    return simulate(part, one_microbatch_plan(plan), load_profile(plan.mesh.profile))


@dataclass(frozen=True)
class _Request:
    mesh: Mesh
    mode: str
    optimizer: str | None
    memory_limit: int | None
    constraints: tuple[Constraint, ...]
    budget: SearchBudget


@dataclass(frozen=True)
class _Part:
    """The graph of a step, and that of one of its microbatches, which is what is searched and simulated."""

    whole: Graph
    graph: Graph
    blocks: Blocks
    microbatches: int
    types: Types
    constraints: tuple[Constraint, ...] = ()


def _divided(graph: Graph, blocks: Blocks, microbatches: int) -> _Part:
    if microbatches == 1:
        return _Part(graph, graph, blocks, 1, {})
    types = microbatch_types(graph, microbatches)
    part = one_microbatch(graph, types, microbatches)
    return _Part(graph, part, blocks, microbatches, types, cut_constraints(graph, types))


def _on_all_axes(part: _Part, plan: Plan) -> Plan:
    return over_microbatches(part.whole, plan, part.types, part.microbatches) if part.types else plan


def _trace(model: nn.Module, example_inputs: Any, loss_fn: Any, mode: str) -> Graph:
    if mode not in ("train", "inference"):
        raise PlanError(f'expected mode="train" or "inference", found {mode!r}')
    if example_inputs is None:
        raise PlanError("expected example_inputs (one global batch; meta tensors will do), found None")
    return trace(model, example_inputs, loss_fn=loss_fn, mode=mode)


def _check_precision(precision: str | None) -> None:
    if precision is not None:
        raise PlanError(f"expected precision=None, found {precision!r}: mixed precision is not available yet")


def _budget(search: str | SearchBudget) -> SearchBudget:
    if isinstance(search, SearchBudget):
        return search
    if search not in _BUDGETS:
        raise PlanError(f"expected search as one of {', '.join(_BUDGETS)} or a SearchBudget, found {search!r}")
    return _BUDGETS[search]


def _search(graph: Graph, request: _Request, progress: Report | None) -> Plan:
    """One candidate for each logical mesh, in as few microbatches as fit; the simulator picks."""
    profile, blocks, meshes = load_profile(request.mesh.profile), find_blocks(graph), logical_meshes(request.mesh)
    tried: list[dict[str, Any]] = []
    parts = [_divided(graph, blocks, count) for count in _microbatch_counts(graph, request)]
    for part in parts:
        with reporting(progress, len(meshes)) as report:
            candidates = [_candidate(part, axes, request, profile, tried, report) for axes in meshes]
        found = [plan for plan in candidates if plan is not None]
        if found:
            break
    else:
        part, plan = _fit_or_refuse(parts, meshes, request, profile)
        found = [plan]
    best = min(found, key=lambda plan: plan.predicted.step_time_ns)
    return _on_all_axes(part, replace(best, search=replace(best.search, tried=tuple(tried))))


def _microbatch_counts(graph: Graph, request: _Request) -> list[int]:
    """The pinned number, or 1, 2, 4, … as long as the model's batch can be divided so."""
    pinned = {c.microbatches for c in request.constraints if c.microbatches is not None}
    if len(pinned) > 1:
        raise PlanError(f"expected constraints to agree on the number of microbatches, found {sorted(pinned)}")
    if pinned:
        return [*pinned]
    counts = [1]
    while request.mode == "train" and divisible(graph, 2 * counts[-1]):
        counts.append(2 * counts[-1])
    return counts


def _candidate(
    part: _Part, axes: LogicalMesh, request: _Request, profile: Profile, tried: list[dict[str, Any]],
    report: Report,
) -> Plan | None:  # fmt: skip
    """The plan on one logical mesh, noted in `tried`; None when none was found that fits."""
    row: dict[str, Any] = {"mesh": "x".join(str(axis.size) for axis in axes) or "1", "microbatches": part.microbatches}
    tried.append(row)
    started = time.monotonic()
    try:
        plan = _plan_on(part, axes, request, profile)
    except InfeasibleError as error:
        row["infeasible"] = str(error)
        plan = None
    row["seconds"] = round(time.monotonic() - started, 3)
    if plan is not None:
        row |= {"step_time_ns": plan.predicted.step_time_ns, "peak_bytes": plan.predicted.peak_bytes,
                "solve_seconds": plan.search.seconds}  # fmt: skip
    what = f"{plan.predicted.step_time_ns / 1e6:.3f} ms" if plan is not None else "nothing fits"
    divided = f" in {part.microbatches} microbatches" if part.microbatches > 1 else ""
    report(f"mesh {row['mesh']}{divided}: {what} ({row['seconds']} s)")
    return plan


def _plan_on(part: _Part, axes: LogicalMesh, request: _Request, profile: Profile) -> Plan:
    """The best plan on one logical mesh; solved again under a tighter limit when the simulated peak does not fit."""
    draft = _draft(part, axes, request, profile)
    limit = asked = draft.memory_limit
    for _ in range(4):
        plan = _scored(part, draft, asked, request, profile)
        peak = plan.predicted.peak_bytes
        if peak <= limit:
            return plan
        asked = min(int(asked * 0.7), asked - (peak - limit))
        if asked <= 0:
            break
    raise InfeasibleError(f"found no plan within {limit:,} bytes a device")


def _draft(part: _Part, axes: LogicalMesh, request: _Request, profile: Profile) -> Plan:
    """Everything of the plan that is known before the search."""
    graph = part.whole
    return Plan(
        fingerprint=graph.fingerprint,
        model=graph.model_name,
        mesh=request.mesh,
        axes=axes,
        inputs={},
        storage={},
        nodes={},
        redistributes=(),
        microbatches=part.microbatches,
        mode=request.mode,
        optimizer=request.optimizer or "none",
        memory_limit=request.memory_limit or profile.shared_by(request.mesh.devices_per_node).usable_bytes,
        coverage=coverage(graph),
        parameters={s.tensor: s.name for s in graph.stored},
        types={name: str(graph.tensors[name]) for name in (*graph.inputs, *(s.tensor for s in graph.stored))},
        scopes={node.name: f"{node.scope.module}|{node.op}|{node.source}" for node in graph.nodes},
        blocks=part.blocks.paths,
    )


def _scored(part: _Part, draft: Plan, asked: int, request: _Request, profile: Profile) -> Plan:
    """The intra-op plan within `asked` bytes, with the simulator's prediction."""
    profile = profile.shared_by(request.mesh.devices_per_node)
    plan = plan_placements(
        part.graph, part.blocks, replace(draft, memory_limit=asked), profile, _storages(part),
        (*request.constraints, *part.constraints),
        request.budget.seconds, request.budget.seed,
    )  # fmt: skip
    plan = replace(plan, memory_limit=draft.memory_limit, predicted=predict(simulate(part.graph, plan, profile)))
    return replace(plan, predicted=replace(plan.predicted, comm_bytes=traffic(part.graph, plan)))


def _storages(part: _Part) -> Callable[[Tensor, LogicalMesh], list[Storage]]:
    return partial(storage_options, microbatches=part.microbatches)


def _fit_or_refuse(
    parts: Sequence[_Part], meshes: Sequence[LogicalMesh], request: _Request, profile: Profile
) -> tuple[_Part, Plan]:
    """The last resort when the search found no plan that fits."""

    def least_of(place: tuple[_Part, LogicalMesh]) -> tuple[Plan, LeastMemory]:
        part, axes = place
        draft = _draft(part, axes, request, profile)
        least = least_memory(
            part.graph, part.blocks, draft, profile.shared_by(request.mesh.devices_per_node), _storages(part),
            (*request.constraints, *part.constraints), request.budget.seconds, request.budget.seed,
        )  # fmt: skip
        return _scored(part, draft, least.usage_bytes, request, profile), least

    def plan_below(place: tuple[_Part, LogicalMesh], limit: int) -> Plan:
        return _plan_on(*place, replace(request, memory_limit=limit), profile)

    (part, _), plan = fit_or_refuse([(part, axes) for part in parts for axes in meshes], least_of, plan_below)
    return part, plan
